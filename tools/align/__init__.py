"""Accuracy alignment: which operator diverged, on any platform and layout. NumPy and SciPy only; nothing here imports MindSpore."""
