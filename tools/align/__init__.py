"""Accuracy alignment: which operator diverged, on any platform and layout. NumPy only; nothing here imports MindSpore."""
