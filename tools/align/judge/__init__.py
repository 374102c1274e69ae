"""Verdicts about calls: isolated replay, data flow, standards, kinds of faults.

May import dump, operators, compare and, in `across_layouts.py`, maps. Begin with `bisect.py`.
"""
