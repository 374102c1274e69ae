"""Verdicts on calls and tensors: the evidence (replay, data flow, collectives, the other run), its order and coverage.

May import compare, dump, maps and operators, never explain. Begin with `comparison.py`.
"""
