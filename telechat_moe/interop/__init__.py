"""Weights in and out: checkpoints of other programs. Imports no mindspore and no torch."""
