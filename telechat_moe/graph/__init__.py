"""A rank's real graph: compiled for Ascend on this machine, read, rewritten for CPU, and run.

Knows no mesh and no recipe: callers hand in what a graph is about. Begin with ``compile.py``, then ``read.py``.
"""
