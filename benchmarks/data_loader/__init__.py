"""`python -m benchmarks.data_loader`."""
