"""A public benchmark of alignment tools: faults planted in small sharded models, and right runs that differ.

The models here share no code with what judges them: ``kernels.py`` computes, ``engine.py`` records, and
``telechat_moe.tools.align.operators`` is not imported.
"""
