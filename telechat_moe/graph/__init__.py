"""A rank's real graph: compiled for Ascend on this machine, read, rewritten for CPU, tapped; jobs of such graphs.

May import ops, errors, files, numerics, units, html and processes; knows no mesh and no recipe: callers say what a graph is about.
Begin with ``compile.py``, then ``read.py``; ``cache.py`` keeps the graphs of a training step for later starts.
"""
