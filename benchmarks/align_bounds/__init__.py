"""Derived bounds against correct programs: `python -m benchmarks.align_bounds`."""
