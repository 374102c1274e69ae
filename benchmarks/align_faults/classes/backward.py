"""Faults of the backward pass."""

from typing import Any

import numpy as np

from benchmarks.align_faults.classes.common import (
    BACK,
    GEMM,
    add,
)
from benchmarks.align_faults.faults import (
    argument,
    at_one,
    backward,
    both,
    other,
    result,
    roll,
    setting,
    typed,
    wide,
    zero_rows,
)
from benchmarks.align_faults.kernels import (
    Array,
    rounded,
)

add("gradient doubled", "backward", "scale", "result", BACK, typed(lambda y, r: 2 * y))
add(
    "gradient of a weight doubled",
    "backward",
    "scale",
    "result",
    backward(GEMM),
    typed(lambda y, r: 2 * y, 1),
)
add("gradient's sign", "backward", "sign", "result", BACK, typed(lambda y, r: -y))
add("gradient zero", "backward", "zero", "result", BACK, result(lambda y, r: np.zeros_like(y)))
add("gradient's rows rolled", "backward", "permutation", "result", both(BACK, wide), result(roll))
add("gradient's rows lost", "backward", "dropped", "result", both(BACK, wide), result(zero_rows))
add(
    "gradient of a weight transposed",
    "backward",
    "transpose",
    "result",
    lambda s: backward({"linear"})(s) and s.shape[-1] == 16 and s.shapes[0][-1] == 16,
    result(lambda y, r: np.ascontiguousarray(np.swapaxes(y, -1, -2)), 1),
)
add(
    "gradient not finite",
    "backward",
    "not finite",
    "result",
    BACK,
    result(lambda y, r: at_one(y, r, lambda v: float("nan"))),
)
add(
    "one element of a gradient",
    "backward",
    "single element",
    "result",
    BACK,
    typed(lambda y, r: at_one(y, r, lambda v: 2 * v)),
)
add(
    "backward with another activation",
    "backward",
    "wrong tensor | permutation",
    "hidden",
    backward({"linear", "rms_norm", "npu_swiglu", "silu"}),
    argument(0, other),
)
add(
    "backward with another scale",
    "backward",
    "wrong setting",
    "hidden settings",
    backward({"scaled_dot_product_attention"}),
    setting(scale=lambda v: v * v),
)
add(
    "handed a doubled gradient",
    "backward",
    "scale",
    "given",
    BACK,
    lambda r: lambda g, *_: [2 * x for x in g],
)
add(
    "handed another gradient",
    "backward",
    "wrong tensor | permutation",
    "given",
    backward({"linear"}),
    argument(0, other),
)
add(
    "handed no gradient",
    "backward",
    "zero",
    "given",
    BACK,
    lambda r: lambda g, *_: [np.zeros_like(x) for x in g],
)
add(
    "gradient without a normalising term",
    "backward",
    "unknown | part",
    "result",
    backward({"softmax"}),
    lambda r: lambda outs, g, e, k: [_no_term(outs, g, e)],
)


def _no_term(outs: list[Array], grads: list[Array], engine: Any) -> Array:
    y = engine.planted.done["outs_forward"][0]
    return rounded(grads[0] * y, engine.planted.site.dtype)
