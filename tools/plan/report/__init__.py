"""Results of the planner as tables, pages and traces.

May import cost, schedules and search. Begin with `layouts.py`.
"""
