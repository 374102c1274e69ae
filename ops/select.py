"""Which face of an operator serves: our CPU kernel, MindSpore's primitives, or the Ascend primitive.

    python -m telechat_moe.ops.select [RECIPE]

A cell of ``telechat_moe.ops`` asks :func:`face` once, while it is built. ``fused`` is the native CPU kernel, ``plain``
the same arithmetic in MindSpore's elementary primitives, ``ascend`` the primitive that Ascend has for it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.ops import native

FACES = ("fused", "plain", "ascend")

# Operator -> {face: what it is}. "plain" is MindSpore's elementary primitives.
OPERATORS: dict[str, dict[str, str]] = {
    "adamw": {"fused": "multi-tensor C++", "plain": "AdamWeightDecay"},
    "attention": {
        "fused": "flash attention, C++",
        "plain": "elementary",
        "ascend": "FlashAttentionScore",
    },
    "cross_entropy": {"fused": "online log-sum-exp, C++", "plain": "elementary"},
    "grouped_matmul": {
        "fused": "experts x row blocks, C++",
        "plain": "Gather + BatchMatMul",
        "ascend": "GroupedMatmul",
    },
    "matmul": {"fused": "row x column blocks, C++", "plain": "MatMul"},
    "permute": {"fused": "counting sort, C++", "plain": "elementary", "ascend": "MoeTokenPermute"},
    "rms_norm": {"fused": "DVM program", "plain": "elementary", "ascend": "RmsNorm"},
    "rope": {"fused": "C++", "plain": "elementary"},
    "routing": {"fused": "C++", "plain": "elementary"},
    "softmax": {"fused": "DVM program", "plain": "Softmax"},
    "swiglu": {"fused": "DVM program", "plain": "elementary", "ascend": "Swiglu"},
}


class Choice(NamedTuple):
    """The face of an operator and the reason."""

    operator: str
    face: str
    reason: str


class _Selection(NamedTuple):
    target: str
    default: str
    each: Mapping[str, str]


_selection: ContextVar[_Selection | None] = ContextVar("faces", default=None)


@contextlib.contextmanager
def using(
    default: str = "auto", each: Mapping[str, str] | None = None, target: str = "CPU"
) -> Iterator[None]:
    """Build the cells inside with these faces.

    Args:
        default: ``auto`` or one of :data:`FACES`, for operators that ``each`` does not name.
        each: Operator to face.
        target: ``CPU`` or ``Ascend``.

    Raises:
        BadInputError: No such operator or face.
    """
    each = dict(each or {})
    for operator in each:
        if operator not in OPERATORS:
            raise BadInputError(
                f"no operator {operator!r}; there are {', '.join(sorted(OPERATORS))}"
            )
    for wanted in (default, *each.values()):
        if wanted != "auto" and wanted not in FACES:
            raise BadInputError(f"no face {wanted!r}; there are auto, {', '.join(FACES)}")
    token = _selection.set(_Selection(target, default, each))
    try:
        yield
    finally:
        _selection.reset(token)


def choose(operator: str) -> Choice:
    """Return the face that serves ``operator`` now, and why.

    Raises:
        BadInputError: The face asked for is not there.
    """
    selection = _selection.get() or _Selection("CPU", "auto", {})
    faces = OPERATORS[operator]
    wanted = selection.each.get(operator, selection.default)
    if wanted == "auto":
        return _automatic(operator, faces, selection.target)
    if wanted not in faces:
        raise BadInputError(f"{operator} has no face {wanted!r}, only {', '.join(faces)}")
    if wanted == "fused":
        try:
            native.load()
        except native.NativeError as error:
            raise BadInputError(f"{operator} was asked to be fused, but {error}") from error
    return Choice(operator, wanted, "asked for")


def _automatic(operator: str, faces: Mapping[str, str], target: str) -> Choice:
    if target == "Ascend":
        if "ascend" in faces:
            return Choice(operator, "ascend", "target Ascend")
        return Choice(operator, "plain", "MindSpore's primitives serve Ascend too")
    if "fused" not in faces:
        return Choice(operator, "plain", "no CPU kernel for it")
    try:
        native.load()
    except native.NativeError as error:
        return Choice(operator, "plain", str(error))
    return Choice(operator, "fused", f"target CPU ({native.isa()}, {native.gemm_backend()})")


def target() -> str:
    """Return the target for which cells are built now: ``CPU`` or ``Ascend``."""
    selection = _selection.get()
    return selection.target if selection is not None else "CPU"


def face(operator: str) -> str:
    """Return the face that serves ``operator`` now."""
    return choose(operator).face


def table() -> list[Choice]:
    """Return the choice for every operator."""
    return [choose(operator) for operator in sorted(OPERATORS)]


def summary() -> str:
    """Return the faces in use in a few words: the most common one, then the others with reasons."""
    rows = table()
    faces = [row.face for row in rows]
    usual = max(FACES, key=faces.count)
    others = [f"{row.operator} {row.face} ({row.reason})" for row in rows if row.face != usual]
    reasons = {row.reason for row in rows if row.face == usual}
    return ", ".join([f"{usual} ({'; '.join(sorted(reasons))})", *others])


def main() -> None:
    """Print which face serves each operator and why, for a recipe if one is named."""
    from rich.console import Console
    from rich.table import Table

    from telechat_moe.recipe import load

    parser = argparse.ArgumentParser(description="Which face serves each operator, and why.")
    parser.add_argument("recipe", nargs="?", help="a recipe (default: faces chosen for this CPU)")
    args = parser.parse_args()
    try:
        choices = contextlib.nullcontext()
        if args.recipe:
            recipe = load(args.recipe)
            own = recipe.telechat_moe.operators
            choices = using(own.default, own.faces(), recipe.context.device_target)
        with choices:
            grid = Table(box=None)
            for name in ("operator", "face", "what it is", "why"):
                grid.add_column(name)
            for row in table():
                grid.add_row(row.operator, row.face, OPERATORS[row.operator][row.face], row.reason)
            Console().print(grid)
    except TelechatMoeError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
