"""Three checks before a production run: operators alone, one step, the loss curve.

May import every other room of align. Begin with `workflow.py`.
"""
