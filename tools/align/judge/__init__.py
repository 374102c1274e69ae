"""Verdicts about calls: isolated replay, data flow, bisection, kinds of faults.

May import dump and operators. Begin with `bisect.py`.
"""
