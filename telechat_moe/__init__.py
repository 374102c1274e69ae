"""telechat-moe: training recipes for TeleChat3-MoE-class models on MindSpore.

Importing this package is cheap: nothing here imports mindspore. Imports between folders go one way: errors, files,
recipe, ops, model, sharding, graph and data, pipeline and checkpoint, train, interop, launch, cli; each may import
those before it. Begin with ``train/trainer.py``, or with ``recipe`` for what a run is made of.
"""

__version__ = "0.2.0"
