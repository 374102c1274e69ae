"""The parallelism planner: what a step costs in time and memory, which layout is best, in which order a pipeline runs.

NumPy only; solvers are imported where they are needed.
"""
