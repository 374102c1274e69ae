"""Recording of runs: MindSpore graphs by taps, torch by its function mode.

May import dump, graph, launch and train. Begin with `mindspore.py`.
"""
