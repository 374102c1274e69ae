"""How much communication a list of kernels hides: `python -m benchmarks.overlap`."""
