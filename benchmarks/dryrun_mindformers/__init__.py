"""`python -m benchmarks.dryrun_mindformers`."""
