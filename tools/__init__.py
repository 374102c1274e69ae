"""Tools around a training run: accuracy alignment, planning, diagnosis."""
