"""`python -m benchmarks.plan_placement`."""
