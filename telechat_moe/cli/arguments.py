"""Arguments that several verbs take."""

import argparse
from typing import TYPE_CHECKING

from telechat_moe.errors import UsageError

if TYPE_CHECKING:
    from telechat_moe.sharding.mesh import Mesh


def add_overrides(
    parser: argparse.ArgumentParser, help_text: str = "override a value of the recipe"
) -> None:
    """Let a verb take ``--set KEY=VALUE``, any number of times, as ``overrides``."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=help_text
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Let a verb take ``--json FILE``, for `output.write_json`."""
    says = "write the report as JSON ('-': standard output)"
    parser.add_argument("--json", metavar="FILE", help=says)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Let a verb take the dumps of two runs."""
    parser.add_argument("reference", metavar="REFERENCE", help="dump of the run that is trusted")
    parser.add_argument("target", metavar="TARGET", help="dump of the run to judge")


def add_start(parser: argparse.ArgumentParser) -> None:
    """Let a verb that trains take ``--resume`` or ``--overwrite``, and ``--allow-outside``."""
    start = parser.add_mutually_exclusive_group()
    start.add_argument(
        "--resume",
        action="store_true",
        help="resume from the newest valid checkpoint of output_dir; start as the recipe says if there is none",
    )
    start.add_argument(
        "--overwrite",
        action="store_true",
        help="remove the checkpoints of output_dir and start from the beginning",
    )
    parser.add_argument(
        "--allow-outside", action="store_true", help="the recipe may write outside of output_dir"
    )


def add_trainer(parser: argparse.ArgumentParser) -> None:
    """Let a verb that trains take ``--through``, whose trainer."""
    parser.add_argument(
        "--through",
        choices=("own", "mindformers"),
        help="whose trainer (default: own for trainer.type TelechatMoeTrainer on CPU, else mindformers)",
    )


def add_documents(parser: argparse.ArgumentParser) -> None:
    """Let a verb take ``--documents FILE``, the lengths of documents that attention stays in."""
    parser.add_argument(
        "--documents",
        metavar="FILE",
        help="attention stays in documents of these lengths: an .idx, or a number a line",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Let a verb of the planner demand ``--device D``, the description of what a recipe runs on."""
    says = "shipped device (ascend-910b, h100 ...) or YAML"
    parser.add_argument("--device", required=True, metavar="D", help=says)


def check_rank(option: str, rank: int, mesh: "Mesh", recipe: str) -> int:
    """Return a rank that an option names.

    Raises:
        UsageError: The recipe has no such rank.
    """
    if not 0 <= rank < mesh.devices:
        has = f"{mesh.devices} devices, ranks 0 to {mesh.devices - 1}"
        raise UsageError(f"{option} {rank}: {recipe} has {has}")
    return rank
