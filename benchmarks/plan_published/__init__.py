"""The step model against published measurements: `python -m benchmarks.plan_published TABLE... --device D`."""
