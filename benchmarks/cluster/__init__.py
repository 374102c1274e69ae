"""`python -m benchmarks.cluster`."""
