"""Pipeline schedules: programs, exact simulation, lower bounds, synthesis.

May import native only. Begin with `program.py`, then `simulate.py`.
"""
