"""What a step costs in time and memory.

May import schedules and the recipe. Begin with `step.py`.
"""
