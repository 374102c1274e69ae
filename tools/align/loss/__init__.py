"""Verdicts on loss curves.

May import report. Begin with `verdict.py`.
"""
