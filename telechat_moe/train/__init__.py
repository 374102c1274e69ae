"""Training: the loop, the optimizer, checkpoints, and what the user sees meanwhile."""
