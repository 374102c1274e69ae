"""`python -m benchmarks.plan_speed`."""
