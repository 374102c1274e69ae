"""A rank's real graph: compiled for Ascend on this machine, read, rewritten for CPU, and run."""
