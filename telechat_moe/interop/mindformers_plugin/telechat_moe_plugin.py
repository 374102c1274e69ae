"""Register our trainer, data loader and schedule with MindFormers, and the callback that needs no model of ours.

Recipes name this module: ``trainer.auto_register: telechat_moe_plugin.TelechatMoeTrainer``. With MindFormers' own trainer they
name a class in its section.

MindFormers copies this one file and imports the copy, so everything else is in the installed package.
"""

from telechat_moe.versions import require_mindformers

require_mindformers()

from telechat_moe.interop.mindformers_callbacks import TelechatMoeMonitor  # noqa: E402
from telechat_moe.interop.mindformers_loader import (  # noqa: E402
    TelechatDataLoader,
    TelechatDecayLR,
)
from telechat_moe.interop.mindformers_model import TelechatMoeTrainer  # noqa: E402

__all__ = ["TelechatDataLoader", "TelechatDecayLR", "TelechatMoeMonitor", "TelechatMoeTrainer"]
