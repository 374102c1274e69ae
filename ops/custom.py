"""Operators of the native library as MindSpore primitives in graph mode on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, ops

from telechat_moe.ops import native
from telechat_moe.ops.native import Attribute

Tensors = tuple[Tensor, ...]


def custom_op(
    name: str,
    dtypes: Callable[..., Any],
    outputs: int = 1,
    in_place: bool = False,
    **attributes: Attribute,
) -> ops.Custom:
    """Return the primitive of the library's operator ``name``.

    Shapes come from the operator's ``InferShape``, so unknown dimensions work. A gradient is written as
    ``bprop`` of the cell around it; that ``bprop`` may not touch parameters of the cell.

    Args:
        name: C name.
        dtypes: Data types of the results from those of the inputs, for example ``lambda x, w: x``.
        in_place: The operator writes to one of its inputs (a parameter). It then returns a token of
            shape ``[1]``, and MindSpore neither removes, merges nor reorders it.
        **attributes: Read by the operator's Init; floats, ints, bools and lists of ints.

    Raises:
        NativeError: The library is missing.
    """
    op = ops.Custom(f"{native.path()}:{name}", None, dtypes, func_type="aot")
    native.load()  # brings oneDNN in before the first kernel runs
    op.add_prim_attr("reg_op_name", name)
    op.add_prim_attr("multi_output", outputs > 1)
    if in_place:
        op.add_prim_attr("side_effect_mem", True)
    for key, value in attributes.items():
        op.add_prim_attr(key, list(value) if isinstance(value, (list, tuple)) else value)
    return op


def reason(error: BaseException) -> str | None:
    """Return what the native operator said that made MindSpore raise ``error``; None if none did."""
    return native.last_error() if "CPU AOT kernel" in str(error) else None
