"""`telechat-moe plan <sub-verb>`: predict the step, choose the layout.

Each sub-verb is a module here with `register(subparsers)`; heavy imports stand inside its run function.
"""

import argparse
from importlib import import_module
from typing import Any

SUBVERBS: dict[str, str] = {
    "layout": "layout",
    "search": "search",
    "score": "score",
    "simulate": "simulate",
    "calibrate": "calibrate",
    "schedule": "schedule",
    "run-schedule": "run_schedule",
}
"""Name of each sub-verb and the module that has it."""

EPILOG = """\
example:
  telechat-moe plan simulate telechat3_moe/pretrain_105b_a4b_4k.yaml --device ascend-910b

exit codes: 0 ok, 1 a check failed, 2 usage, 3 bad input
"""


def register(subparsers: Any) -> None:
    """Add the verb with its sub-verbs."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="predict a training step and choose its layout",
        description="Predict time and memory of a training step from a recipe and a device description, and "
        "find the best layout.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="SUBVERB")
    for module in SUBVERBS.values():
        import_module(f"{__name__}.{module}").register(actions)
