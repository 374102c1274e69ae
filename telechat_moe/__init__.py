"""telechat-moe: training recipes for TeleChat3-MoE-class models on MindSpore.

Importing this package is cheap: nothing here imports mindspore.
"""

__version__ = "0.1.0"
