"""Do the fast tests see a small mistake in the code? Draws mutants of a room, runs tests on each, and counts the killed."""
