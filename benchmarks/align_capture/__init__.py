"""`python -m benchmarks.align_capture`."""
