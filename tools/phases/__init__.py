"""Three checks before a production run: operators alone, one step, the loss curve.

May import align and loss. Begin with `workflow.py`.
"""
