"""Which backend of an operator serves: our CPU kernel, MindSpore's primitives, or the Ascend primitive.

    python -m telechat_moe.ops.select [RECIPE]

A cell of ``telechat_moe.ops`` asks :func:`backend` once, while it is built. ``fused`` is the native CPU kernel,
``plain`` the same arithmetic in MindSpore's elementary primitives, ``ascend`` the primitive that Ascend has for it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.ops import native

if TYPE_CHECKING:
    from mindspore import ops

BACKENDS = ("fused", "plain", "ascend")

# Operator -> {backend: what it is}. "plain" is MindSpore's elementary primitives.
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
    "swiglu": {"fused": "DVM program", "plain": "elementary", "ascend": "Swiglu"},
}


class BackendChoice(NamedTuple):
    """The backend of an operator and the reason."""

    operator: str
    backend: str
    reason: str


class _Selection(NamedTuple):
    target: str
    default: str
    operators: Mapping[str, str]
    host: Collection[str] = ()


_AUTOMATIC = _Selection("CPU", "auto", {})
_selection: ContextVar[_Selection] = ContextVar("backends", default=_AUTOMATIC)


@contextlib.contextmanager
def using(
    default: str = "auto",
    operators: Mapping[str, str] | None = None,
    target: str = "CPU",
    host: Collection[str] = (),
) -> Iterator[None]:
    """Build the cells inside with these backends.

    Args:
        default: ``auto`` or one of :data:`BACKENDS`, for operators that ``operators`` does not name.
        operators: Operator to backend.
        target: ``CPU`` or ``Ascend``.
        host: Parts that the host computes, see :func:`host_computes`.

    Raises:
        BadInputError: No such operator or backend.
    """
    operators = dict(operators or {})
    for operator in operators:
        if operator not in OPERATORS:
            raise BadInputError(
                f"no operator {operator!r}; there are {', '.join(sorted(OPERATORS))}"
            )
    for name in (default, *operators.values()):
        if name != "auto" and name not in BACKENDS:
            raise BadInputError(f"no backend {name!r}; there are auto, {', '.join(BACKENDS)}")
    token = _selection.set(_Selection(target, default, operators, host))
    try:
        yield
    finally:
        _selection.reset(token)


def choose(operator: str) -> BackendChoice:
    """Return the backend that serves ``operator`` now, and why.

    Raises:
        BadInputError: The backend asked for is not there.
    """
    selection = _selection.get()
    backends = OPERATORS[operator]
    name = selection.operators.get(operator, selection.default)
    if name == "auto":
        return _automatic(operator, backends, selection.target)
    if name not in backends:
        raise BadInputError(f"{operator} has no backend {name!r}, only {', '.join(backends)}")
    if name == "fused":
        try:
            native.load()
        except native.NativeError as error:
            raise BadInputError(f"{operator} was asked to be fused, but {error}") from error
    return BackendChoice(operator, name, "asked for")


def _automatic(operator: str, backends: Mapping[str, str], target: str) -> BackendChoice:
    if target == "Ascend":
        if "ascend" in backends:
            return BackendChoice(operator, "ascend", "target Ascend")
        return BackendChoice(operator, "plain", "MindSpore's primitives serve Ascend too")
    if "fused" not in backends:
        return BackendChoice(operator, "plain", "no CPU kernel for it")
    try:
        native.load()
    except native.NativeError as error:
        return BackendChoice(operator, "plain", str(error))
    return BackendChoice(operator, "fused", f"target CPU ({native.isa()}, {native.gemm_backend()})")


def target() -> str:
    """Return the target for which cells are built now: ``CPU`` or ``Ascend``."""
    return _selection.get().target


def host_computes(part: str, *primitives: ops.Primitive) -> None:
    """Mark primitives for the host (``primitive_target``), if it is to compute their part (``telechat_moe.operators.host``).

    The primitives of a part have only each other between them, so that their inputs go to the host once.
    """
    if part in _selection.get().host:
        for primitive in primitives:
            primitive.set_device("CPU")


def backend(operator: str) -> str:
    """Return the backend that serves ``operator`` now."""
    return choose(operator).backend


def table() -> list[BackendChoice]:
    """Return the backend that serves each operator now, and why."""
    return [choose(operator) for operator in sorted(OPERATORS)]


def summary() -> str:
    """Return the backends in use in a few words: the most common one, then the others with reasons."""
    rows = table()
    backends = [row.backend for row in rows]
    usual = max(BACKENDS, key=backends.count)
    others = [
        f"{row.operator} {row.backend} ({row.reason})" for row in rows if row.backend != usual
    ]
    reasons = {row.reason for row in rows if row.backend == usual}
    return ", ".join([f"{usual} ({'; '.join(sorted(reasons))})", *others])


def main() -> None:
    """Print which backend serves each operator and why, for a recipe if one is named."""
    from rich.console import Console
    from rich.table import Table

    from telechat_moe.recipe import load

    parser = argparse.ArgumentParser(description="Which backend serves each operator, and why.")
    parser.add_argument(
        "recipe", nargs="?", help="a recipe (default: backends chosen for this CPU)"
    )
    args = parser.parse_args()
    try:
        choices = contextlib.nullcontext()
        if args.recipe:
            recipe = load(args.recipe)
            operators = recipe.telechat_moe.operators
            choices = using(operators.default, operators.backends(), recipe.context.device_target)
        with choices:
            grid = Table(box=None)
            for name in ("operator", "backend", "what it is", "why"):
                grid.add_column(name)
            for row in table():
                grid.add_row(
                    row.operator, row.backend, OPERATORS[row.operator][row.backend], row.reason
                )
            Console().print(grid)
    except TelechatMoeError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
