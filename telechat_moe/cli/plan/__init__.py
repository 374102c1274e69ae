"""`telechat-moe plan <sub-verb>`: predict the step, choose the layout.

Each sub-verb is a module here with a `VERB`; heavy imports stand inside its run function.
"""

from telechat_moe.cli.plan import (
    calibrate,
    device,
    layout,
    memory,
    schedule,
    score,
    search,
    simulate,
    what_if,
)
from telechat_moe.cli.verb import Verb

MODULES = (layout, memory, search, score, simulate, what_if, device, calibrate, schedule)

VERB = Verb(
    name="plan",
    help="predict a training step and choose its layout",
    description="Predict time and memory of a training step from a recipe and a device description, and "
    "find the best layout.",
    examples="telechat-moe plan simulate telechat3_moe/pretrain_105b_a4b_4k.yaml --device ascend-910b",
    exits={1: "a check failed"},
    subverbs=[module.VERB for module in MODULES],
)
