"""Matrix products."""

from itertools import pairwise
from typing import Any

import numpy as np

from telechat_moe.narrowing import is_list
from telechat_moe.numerics import FLOATS
from telechat_moe.tools.align.operators.approx import Approx, Parents, concatenate
from telechat_moe.tools.align.operators.elementwise import floating, plain
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, op, primitive
from telechat_moe.tools.align.operators.rounding_errors import ROUNDING


def product(x: Approx, y: Approx) -> Approx:
    """Return ``x @ y`` of matrices, stacks of them, or vectors."""
    rows, columns = len(x.shape) == 1, len(y.shape) == 1
    left = x.reshape(1, -1) if rows else x
    right = y.reshape(-1, 1) if columns else y
    if left.shape[-1] != right.shape[-2]:
        raise NotJudgedError(f"matrix product of shapes {x.shape} and {y.shape}")
    result = left.matmul(right)
    if columns:
        result = result.moved(lambda v: v.squeeze(-1))
    return result.moved(lambda v: v.squeeze(-1 if columns else -2)) if rows else result


@primitive(
    "MatMul BatchMatMul MatMulExt BatchMatMulExt",
    "input other transpose_a=False transpose_b=False | transpose_x1=False transpose_x2=False",
    transpose_a=lambda a: (False, True),
    transpose_b=lambda a: (False, True),
)
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


def _with_start(y: Approx, start: Any, terms: int) -> Approx:
    """Return a product of so many terms and what is added to it; programs may begin their sums with that."""
    total = y + start
    kind = FLOATS[total.accumulated]
    size = kind.unit * np.broadcast_to(np.abs(plain(start)), total.shape)
    sigma = np.hypot(total.sigma, ROUNDING * terms**0.5 * size)
    parents: Parents = [(total, lambda g: g)]
    return total.like(total.value, sigma, total.limit + terms * size, parents)


@op("linear dense Dense", "input weight bias=None")
def _linear(a: Arguments) -> Any:
    """Compute ``x @ weight.T + bias``."""
    y = product(floating(a.input), floating(a.weight).swap(-1, -2))
    return y if a.bias is None else _with_start(y, a.bias, plain(a.input).shape[-1])


@op("addmm baddbmm addbmm", "input mat1 mat2 | beta=1 alpha=1")
def _addmm(a: Arguments) -> Any:
    y = product(floating(a.mat1), floating(a.other if a.mat2 is None else a.mat2))
    y = y if a.alpha == 1 else y * a.alpha
    if a.beta == 0:  # then torch ignores what it would add, even NaN
        return y
    start = a.input if a.beta == 1 else floating(a.input) * a.beta
    return _with_start(y, start, plain(a.mat1).shape[-1])


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


_QUANTIZED = "scale=None offset=None antiquant_scale=None antiquant_offset=None"
_GROUPS = "split_item=0 group_type=None group_list_type=None"


def _take_groups(named: dict[str, Any]) -> None:
    """Take integers in the place of a bias as the groups, which follow the weight in functions that have no bias."""
    if isinstance(named.get("bias"), np.ndarray):
        named.update(group_list=named["bias"], bias=None)


def _grouped_matmul(a: Arguments) -> Any:
    """Multiply the rows of group e by matrix e, add bias e; or, with group type 2, the columns of group e by its rows.

    Source: Ascend/op-plugin, npu_grouped_matmul.
    """
    named = a.__dict__
    _take_groups(named)
    scales = (*_QUANTIZED.replace("=None", "").split(), "per_token_scale")
    if any(named.get(name) is not None for name in scales):
        raise NotJudgedError("quantized grouped matmul")
    if named.get("act_type") or named.get("transpose_a"):
        raise NotJudgedError("grouped matmul with an activation, or with a transposed input")
    x, w = ([floating(v) for v in (v if is_list(v) else [v])] for v in (a.input, a.weight))
    bias = None if a.bias is None else a.bias if is_list(a.bias) else [a.bias]
    if named.get("transpose_b"):
        w = [v.swap(-1, -2) for v in w]
    groups = a.group_list if named.get("offs") is None else a.offs
    if len(x) == 1 and groups is None and len(w[0].shape) == 3:
        raise NotJudgedError("grouped matmul without a list of groups in the dump")
    if len(x) == 1 and groups is not None:
        inner = a.group_type == 2
        ends = _ends(groups, x[0].shape[1 if inner else 0], named.get("group_list_type"))
        if inner:
            pairs = [(x[0][:, b:e], w[0][b:e]) for b, e in pairwise([0, *ends])]
            return concatenate([(y.matmul(z)).reshape(1, y.shape[0], -1) for y, z in pairs], 0)
        if len(w) == 1:
            w = [w[0][i] for i in range(w[0].shape[0])]
        if len(ends) != len(w):
            raise NotJudgedError(f"grouped matmul: {len(ends)} groups, {len(w)} matrices")
        if bias is not None and len(bias) == 1 and len(w) > 1:
            bias = [bias[0][i] for i in range(len(w))]
        tokens, x = x[0], [x[0][b:e] for b, e in pairwise([0, *ends])]
        if ends[-1] < tokens.shape[0]:  # padding rows
            x, w = [*x, tokens[ends[-1] :].times(np.zeros(()))], [*w, w[0]]
    parts = [product(y, z) for y, z in zip(x, w, strict=True)]
    if bias is not None:
        parts = [y + b for y, b in zip(parts, bias, strict=True)]
    many = len(parts) > 1 and len(a.made or ()) == len(parts)
    return parts if many or len({y.shape[-1] for y in parts}) > 1 else concatenate(parts, 0)


def _ends(groups: Any, count: int, kind: Any) -> list[int]:
    """Return where groups end, from their ends (kind 0), sizes (1) or pairs of number and size (2)."""
    numbers = plain(groups).astype(np.int64)
    if numbers.ndim == 2:
        return numbers[np.argsort(numbers[:, 0], kind="stable"), 1].cumsum().tolist()
    is_sizes = numbers.sum() == count and numbers[-1] != count
    if kind == 1 or (
        kind is None and (np.any(np.diff(numbers) < 0) or numbers[-1] > count or is_sizes)
    ):
        numbers = numbers.cumsum()
    return numbers.tolist()


for _names, _signature in {
    "grouped_mm _grouped_mm": "input weight offs=None | bias=None out_dtype=None group_list=None group_type=None",
    "npu_grouped_matmul": f"input weight | bias=None {_QUANTIZED} per_token_scale=None group_list=None {_GROUPS} "
    "activation_input=None activation_quant_scale=None activation_quant_offset=None act_type=0 output_dtype=None "
    "tuning_config=None",
    "grouped_matmul GroupedMatmul grouped_matmul_v2 GroupedMatmulV2": f"input weight bias=None {_QUANTIZED} "
    "group_list=None split_item=0 group_type=None transpose_a=False transpose_b=False | group_list_type=None",
    "grouped_matmul_v4 GroupedMatmulV4 grouped_matmul_v5 GroupedMatmulV5": f"input weight bias=None {_QUANTIZED} "
    "per_token_scale=None group_list=None activation_input=None activation_quant_scale=None "
    f"activation_quant_offset=None {_GROUPS} act_type=0 output_dtype=None tuning_config=None",
    "gmm npu_gmm Gmm gmm_v2 npu_gmm_v2 GmmV2": "input weight bias=None group_list=None group_type=0 "
    "group_list_type=None",
}.items():
    op(_names, _signature)(_grouped_matmul)
