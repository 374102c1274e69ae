"""Arguments that several verbs take."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from telechat_moe.errors import UsageError

if TYPE_CHECKING:
    from telechat_moe.sharding.mesh import Mesh


Add = Callable[[Any], object]
"""Adds arguments to a parser or to a group of one."""


def arg(words: str, says: str, default: Any = None, **options: Any) -> Add:
    """Return what adds an argument.

    Args:
        words: ``--top K``: an option with a value, which has the type of its default; ``--force``: one that is set or not;
            ``FILE`` or, where the attribute has another name, ``curves CURVE``: an argument by its place.
        options: Further ones of ``add_argument``.
    """
    *names, last = words.split()
    if not words.startswith("-"):
        names, options["metavar"] = names or [last.lower()], last
    elif names and not last.startswith("-"):
        options["metavar"] = last
    else:
        names.append(last)
        if default is None and "choices" not in options:
            options.setdefault("action", "store_true")
    if default is not None:
        options["default"] = default
    if isinstance(default, int | float):
        options.setdefault("type", type(default))
    return lambda parser: parser.add_argument(*names, help=says, **options)


def exclusive(*adds: Add) -> Add:
    """Return what adds options of which one may be set."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for add_one in adds:
            add_one(group)

    return add


def add_overrides(
    parser: argparse.ArgumentParser, says: str = "override a value of the recipe"
) -> None:
    """Let a verb take ``--set KEY=VALUE``, any number of times, as ``overrides``."""
    arg("--set KEY=VALUE", says, [], action="append", dest="overrides")(parser)


def add_start(parser: argparse.ArgumentParser) -> None:
    """Let a verb that trains take ``--resume`` or ``--overwrite``, and ``--allow-outside``."""
    resume = "resume from the newest valid checkpoint of output_dir; start as the recipe says if there is none"
    overwrite = "remove the checkpoints of output_dir and start from the beginning"
    exclusive(arg("--resume", resume), arg("--overwrite", overwrite))(parser)
    arg("--allow-outside", "the recipe may write outside of output_dir")(parser)


add_json = arg("--json FILE", "write the report as JSON ('-': standard output)")
add_trainer = arg(
    "--through",
    "whose trainer (default: own for trainer.type TelechatMoeTrainer, else mindformers)",
    choices=("own", "mindformers"),
)
LENGTHS = "attention stays in documents of these lengths: an .idx, or a number a line"
add_documents = arg("--documents FILE", LENGTHS)
add_device = arg("--device D", "shipped device (ascend-910b, h100 ...) or YAML", required=True)


def check_rank(option: str, rank: int, mesh: "Mesh", recipe: str) -> int:
    """Return a rank that an option names.

    Raises:
        UsageError: The recipe has no such rank.
    """
    if not 0 <= rank < mesh.devices:
        has = f"{mesh.devices} devices, ranks 0 to {mesh.devices - 1}"
        raise UsageError(f"{option} {rank}: {recipe} has {has}")
    return rank
