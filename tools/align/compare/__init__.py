"""Two tensors by a published standard, and two checkpoints.

May import dump. Begin with `tensors.py`.
"""
