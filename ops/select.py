"""Which face of an operator serves: our CPU kernel, MindSpore's primitives, or the Ascend primitive.

    python -m telechat_moe.ops.select

A cell of ``telechat_moe.ops`` asks :func:`face` once, while it is built. ``fused`` is the native CPU kernel, ``plain``
the same arithmetic in MindSpore's elementary primitives, ``ascend`` the primitive that Ascend has for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple

from telechat_moe.ops import native

from telechat_moe.errors import BadInputError

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
    "rope": {"fused": "C++", "plain": "elementary", "ascend": "RotaryPositionEmbedding"},
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


_selection: ContextVar[_Selection] = ContextVar("faces", default=_Selection("CPU", "auto", {}))


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
    selection = _selection.get()
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
        return Choice(operator, "plain", "Ascend has no primitive for it")
    if "fused" not in faces:
        return Choice(operator, "plain", "no CPU kernel for it")
    try:
        native.load()
    except native.NativeError as error:
        return Choice(operator, "plain", str(error))
    return Choice(operator, "fused", f"target CPU ({native.isa()}, {native.gemm_backend()})")


def face(operator: str) -> str:
    """Return the face that serves ``operator`` now."""
    return choose(operator).face


def table() -> list[Choice]:
    """Return the choice for every operator."""
    return [choose(operator) for operator in sorted(OPERATORS)]
