"""`python -m benchmarks.plan_this_machine`."""
