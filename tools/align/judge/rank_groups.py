"""Ranks of collectives whose groups a dump knows by name only, by the degrees of its layout: ``with_degrees(dump, degrees)``."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from telechat_moe.errors import UsageError
from telechat_moe.tools.align.dump.records import Call, Dump, Scalar
from telechat_moe.tools.align.judge.collectives import group_name, group_of, kind_of

DENSE = ("pp", "dp", "cp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")
"""Megatron's order of ranks, the last dimension the fastest; expert layers divide the same ranks otherwise."""

_WORDS = {
    "etp": "etp|expert_?tensor|expert_?model",
    "edp": "edp|expert_?data",
    "ep": "ep|expert",
    "tp": "tp|mp|tensor|model",
    "cp": "cp|context",
    "dp": "dp|data",
    "pp": "pp|pipeline|stage",
}
"""What names of groups are called by their dimension; the first that fits."""


def parsed(text: str) -> dict[str, int]:
    """Return degrees by dimension, of a text such as ``tp=2,ep=2``.

    Raises:
        UsageError: A dimension is unknown or named twice, or a degree is no positive number.
    """
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in _WORDS or name in degrees or not number.isdigit() or int(number) < 1:
            names = ", ".join(_WORDS)
            raise UsageError(
                f"--layout {text}: found {part!r}; expected NAME=DEGREE, each once, of {names}"
            )
        degrees[name] = int(number)
    return degrees


def with_degrees(dump: Dump, degrees: Mapping[str, int]) -> tuple[Dump, int]:
    """Return a dump whose collectives name the ranks of their groups, and how many were given some.

    Raises:
        UsageError: The degrees do not divide the ranks of a step.
    """
    ranks, count = dict(dump.ranks), 0
    for (step, number), rank in dump.ranks.items():
        everybody = sorted(r for s, r in dump.ranks if s == step)
        calls = dict(rank.calls)
        for key, call in rank.calls.items():
            dimension = _dimension(call)
            if dimension is None or len(everybody) == 1:
                continue
            group = group_in(dimension, everybody, number, degrees)
            value = Scalar("ProcessGroup", {"group_ranks": group, "group_id": group_name(call)})
            calls[key] = replace(call, kwargs={**call.kwargs, "group": value})
            count += 1
        ranks[step, number] = replace(rank, calls=calls)
    return Dump(dump.root, ranks), count


def group_in(dimension: str, ranks: list[int], rank: int, degrees: Mapping[str, int]) -> list[int]:
    """Return the ranks of a rank's group in a dimension; what remains of the ranks is data parallelism.

    Raises:
        UsageError: The degrees do not divide the ranks.
    """
    names = DENSE if dimension in DENSE else EXPERT
    sizes = {name: degrees.get(name, 1) for name in names}
    sizes["etp"] = degrees.get("etp", degrees.get("tp", 1))
    rest = names[1]
    sizes[rest] = 1
    others = math.prod(sizes[name] for name in names)
    named = degrees.get(rest, len(ranks) // others)
    if others * named != len(ranks):
        text = ", ".join(f"{name} {sizes[name]}" for name in names if name != rest)
        raise UsageError(
            f"--layout: {text} and {rest} {named} make {others * named} ranks, the dump has {len(ranks)}; "
            "expected degrees whose product is the number of ranks"
        )
    sizes[rest] = named
    mesh = np.array(ranks).reshape([sizes[name] for name in names])
    place = [int(i[0]) for i in np.nonzero(mesh == rank)]
    return mesh[
        tuple(slice(None) if n == dimension else i for n, i in zip(names, place, strict=True))
    ].tolist()


def _dimension(call: Call) -> str | None:
    """Return the dimension that the name of a collective's group says, where the dump does not name its ranks."""
    name = group_name(call).lower()
    if kind_of(call) is None or group_of(call) or not name:
        return None
    return next(
        (d for d, words in _WORDS.items() if re.search(rf"(?<![a-z])({words})(?![a-z])", name)),
        None,
    )
