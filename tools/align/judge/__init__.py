"""Verdicts about calls: isolated replay, data flow, bisection, kinds of faults.

May import dump, operators and, in `across_layouts.py`, maps. Begin with `bisect.py`.
"""
