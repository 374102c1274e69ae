"""Split the model over devices: mesh, one layout table, its application to a built model, recomputation, stages.

Mesh, layouts, stages, shards and recipe need no MindSpore; apply, placement, recompute and cells do. May import
model and what is below it. Begin with ``layouts.py``, then ``apply.py``.
"""
