"""Matrix products."""

from itertools import pairwise
from typing import Any

import numpy as np

from telechat_moe.tools.align.narrowing import is_list
from telechat_moe.tools.align.operators.approx import Approx
from telechat_moe.tools.align.operators.elementwise import floating, plain
from telechat_moe.tools.align.operators.joining import concatenate
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, op


def product(x: Approx, y: Approx) -> Approx:
    """Return ``x @ y``, vectors included."""
    rows, columns = len(x.shape) == 1, len(y.shape) == 1
    left = x.reshape(1, -1) if rows else x
    right = y.reshape(-1, 1) if columns else y
    if left.shape[-1] != right.shape[-2]:
        raise NotJudgedError(f"matrix product of shapes {x.shape} and {y.shape}")
    result = left.matmul(right)
    if columns:
        result = result.moved(lambda v: v.squeeze(-1))
    return result.moved(lambda v: v.squeeze(-1 if columns else -2)) if rows else result


@op(
    "matmul mm bmm MatMul BatchMatMul MatMulV2 dot mv",
    "input other | transpose_a=False transpose_b=False",
)
def _matmul(a: Arguments) -> Any:
    x, y = floating(a.input), floating(a.other)
    x = x.swap(-1, -2) if a.transpose_a else x
    y = y.swap(-1, -2) if a.transpose_b else y
    return product(x, y)


op("rmatmul", "input other")(lambda a: product(floating(a.other), floating(a.input)))


@op("linear dense Dense", "input weight bias=None")
def _linear(a: Arguments) -> Any:
    """Compute ``x @ weight.T + bias``."""
    y = product(floating(a.input), floating(a.weight).swap(-1, -2))
    return y if a.bias is None else y + a.bias


@op("addmm baddbmm addbmm", "input mat1 mat2 | beta=1 alpha=1")
def _addmm(a: Arguments) -> Any:
    y = product(floating(a.mat1), floating(a.other if a.mat2 is None else a.mat2))
    y = y if a.alpha == 1 else y * a.alpha
    return y + (a.input if a.beta == 1 else floating(a.input) * a.beta)


@op("outer ger", "input vec2 | other=None")
def _outer(a: Arguments) -> Any:
    return floating(a.input).reshape(-1, 1) * floating(a.vec2).reshape(1, -1)


@op("einsum", "equation *operands")
def _einsum(a: Arguments) -> Any:
    """Compute an einsum of two operands; letters may be of the result, of both operands, or of one alone."""
    operands = a.operands[0] if a.operands and is_list(a.operands[0]) else a.operands
    if len(operands) != 2 or "." in a.equation or "->" not in a.equation:
        raise NotJudgedError(f"einsum {a.equation!r} with {len(operands)} operands")
    inputs, result = a.equation.replace(" ", "").split("->")
    left, right = inputs.split(",")
    if any(len(set(s)) != len(s) for s in (left, right, result)):
        raise NotJudgedError(f"einsum {a.equation!r} has a letter twice in one tensor")
    x, y = floating(operands[0]), floating(operands[1])
    for name in set(left) - set(right) - set(result):
        x, left = x.sum(left.index(name)), left.replace(name, "")
    for name in set(right) - set(left) - set(result):
        y, right = y.sum(right.index(name)), right.replace(name, "")
    batch = [c for c in result if c in left and c in right]
    rows = [c for c in result if c in left and c not in right]
    columns = [c for c in result if c in right and c not in left]
    inner = [c for c in left if c in right and c not in result]
    size = {**dict(zip(left, x.shape, strict=True)), **dict(zip(right, y.shape, strict=True))}

    def count(names: list[str]) -> int:
        return int(np.prod([size[c] for c in names], dtype=np.int64))

    x = x.transpose(*(left.index(c) for c in batch + rows + inner))
    y = y.transpose(*(right.index(c) for c in batch + inner + columns))
    z = x.reshape(count(batch), count(rows), count(inner)).matmul(
        y.reshape(count(batch), count(inner), count(columns))
    )
    order = batch + rows + columns
    z = z.reshape(*(size[c] for c in order))
    return z.transpose(*(order.index(c) for c in result)) if order else z.reshape()


@op(
    "grouped_matmul GroupedMatmul grouped_mm _grouped_mm",
    "input weight *rest | group_list=None offs=None",
)
def _grouped_matmul(a: Arguments) -> Any:
    """Multiply the rows of group e by matrix e; ``group_list`` holds the ends of the groups, or their sizes."""
    x, w = floating(_only(a.input)), floating(_only(a.weight))
    given: Any = a.group_list if a.group_list is not None else a.offs
    if given is None:
        lists: list[Any] = [r for r in a.rest if isinstance(r, np.ndarray) and r.ndim == 1]
        if len(lists) != 1:
            raise NotJudgedError("grouped matmul without a list of groups in the dump")
        given = lists[0]
    ends = np.asarray(plain(given)).astype(np.int64)
    rows = x.shape[0]
    if len(ends) != w.shape[0]:
        raise NotJudgedError(f"grouped matmul: {len(ends)} groups, {w.shape[0]} matrices")
    if np.any(np.diff(ends) < 0) or ends[-1] > rows or (ends.sum() == rows and ends[-1] != rows):
        ends = ends.cumsum()
    parts = [x[b:e].matmul(w[i]) for i, (b, e) in enumerate(pairwise([0, *ends.tolist()]))]
    if ends[-1] < rows:
        parts.append(x[ends[-1] :].matmul(w[0]).times(np.zeros(())))  # padding rows
    return concatenate(parts, 0)


def _only(x: Any) -> Any:
    tensors: list[Any] = x if is_list(x) else [x]
    if len(tensors) != 1:
        raise NotJudgedError(f"grouped matmul over a list of {len(tensors)} tensors")
    return tensors[0]
