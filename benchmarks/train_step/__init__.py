"""Our training step beside torch: `python -m benchmarks.train_step`."""
