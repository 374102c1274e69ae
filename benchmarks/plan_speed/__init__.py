"""How fast the planner evaluates layouts and places layers: `python -m benchmarks.plan_speed`."""
