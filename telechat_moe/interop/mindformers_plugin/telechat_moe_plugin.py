"""Register our trainer with MindFormers.

Recipes name this module: ``trainer.auto_register: telechat_moe_plugin.TelechatMoeTrainer``.

MindFormers copies this one file and imports the copy, so everything else is in the installed package.
"""

from telechat_moe.versions import require_mindformers

require_mindformers()

from telechat_moe.interop.mindformers_model import TelechatMoeTrainer  # noqa: E402

__all__ = ["TelechatMoeTrainer"]
