"""Verdicts on loss curves.

May import of align the word of a verdict and the report for CI. Begin with `verdict.py`.
"""
