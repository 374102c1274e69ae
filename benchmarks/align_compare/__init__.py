"""`python -m benchmarks.align_compare`."""
