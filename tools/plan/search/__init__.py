"""Which layout is best, with a proof.

May import cost and schedules. Begin with `planner.py`.
"""
