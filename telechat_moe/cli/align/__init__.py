"""`telechat-moe align <sub-verb>`: numerical verification across platforms and layouts.

Each sub-verb is a module here with `register(subparsers)`; heavy imports stand inside its run function.
"""

import argparse
from importlib import import_module
from typing import Any

SUBVERBS = {
    "capture": "capture",
    "inspect": "show",
    "map": "map",
    "merge": "merge",
    "compare": "compare",
    "replay": "replay",
    "bisect": "bisect",
    "loss": "loss",
    "ckpt": "ckpt",
    "convert": "convert",
    "report": "report",
    "phases": "phases",
}
"""Name of each sub-verb and the module that has it."""

EPILOG = """\
example:
  telechat-moe align inspect dump
  telechat-moe align bisect golden_dump dump

exit codes: 0 pass, 1 diverged, 2 usage, 3 bad input, 4 not comparable
"""


def register(subparsers: Any) -> None:
    """Add the verb with its sub-verbs."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "align",
        help="name the operator that diverged between two platforms or layouts",
        description="Compare runs operator by operator, on any platform and layout.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="SUBVERB")
    for module in SUBVERBS.values():
        import_module(f"{__name__}.{module}").register(actions)
