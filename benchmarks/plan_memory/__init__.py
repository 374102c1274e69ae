"""Memory of random layouts, predicted and compiled; README.md says how to run it."""
