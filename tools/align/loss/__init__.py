"""Verdicts on loss curves.

May import judge (for the word of a verdict) and report. Begin with `verdict.py`.
"""
