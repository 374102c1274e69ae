"""`python -m benchmarks.checkpoint`."""
