"""Tools around a training run: alignment of operators, loss curves, phases before a run, planning, diagnosis, sweeps."""
