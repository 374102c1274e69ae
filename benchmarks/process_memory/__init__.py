"""Measure the memory of a rank: while it begins with its shards, and at its peak in a run."""
