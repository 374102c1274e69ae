"""Quality and speed of the planner of expert placement; README.md says how to run it."""
