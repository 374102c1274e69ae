"""Faults of the forward pass."""

from typing import Any

import numpy as np

from benchmarks.align_faults.classes.common import (
    F32,
    PLAIN,
    add,
)
from benchmarks.align_faults.faults import (
    argument,
    at_one,
    both,
    copy_row,
    forward,
    other,
    result,
    rms,
    roll,
    setting,
    square,
    swap,
    typed,
    wide,
    zero_rows,
)
from benchmarks.align_faults.kernels import (
    Array,
)

for _k, _word in ((2.0, "doubled"), (0.5, "halved"), (1.125, "an eighth too large")):
    add(_word, "forward", "scale", "result", PLAIN, typed(lambda y, r, k=_k: y * k))
add("one percent", "forward", "scale", "result", PLAIN, typed(lambda y, r: y * 1.01), **F32)
add("sign", "forward", "sign", "result", PLAIN, typed(lambda y, r: -y))
add("offset", "forward", "offset", "result", PLAIN, typed(lambda y, r: y + 0.5 * rms(y)))
add("rows rolled", "forward", "permutation", "result", both(PLAIN, wide), result(roll))
add(
    "columns rolled",
    "forward",
    "permutation",
    "result",
    both(PLAIN, wide),
    result(lambda y, r: roll(y, r, y.ndim - 1)),
)
add(
    "heads exchanged",
    "forward",
    "permutation | transpose",
    "result",
    forward({"scaled_dot_product_attention", "npu_rotary_mul"}, dims=3),
    result(lambda y, r: swap(y, r, 0) if len(y) > 1 else swap(y, r, 1)),
)
add(
    "transposed",
    "forward",
    "transpose",
    "result",
    square(PLAIN),
    result(lambda y, r: np.ascontiguousarray(np.swapaxes(y, -1, -2))),
)
add("rows lost", "forward", "dropped", "result", both(PLAIN, wide), result(zero_rows))
add("row repeated", "forward", "duplicated", "result", both(PLAIN, wide), result(copy_row))
add("all zero", "forward", "zero", "result", PLAIN, result(lambda y, r: np.zeros_like(y)))
add(
    "not a number",
    "forward",
    "not finite",
    "result",
    PLAIN,
    result(lambda y, r: at_one(y, r, lambda v: float("nan"))),
)
add(
    "overflow",
    "forward",
    "not finite",
    "result",
    PLAIN,
    result(lambda y, r: at_one(y, r, lambda v: float("inf"))),
)


def _one_row(y: Array, r: Any) -> Array:
    z = y.copy()
    i = int(r.integers(len(y)))
    z[i] += r.normal(size=z[i].shape).astype(np.float32) * rms(y)
    return z


add("a row wrong", "forward", "part", "result", both(PLAIN, wide), typed(_one_row))
add(
    "activation left out",
    "forward",
    "skipped | missing call",
    "result",
    forward({"silu", "sigmoid"}),
    lambda r: lambda outs, ins, *_: [ins[0].copy()],
)
add(
    "residual left out",
    "forward",
    "skipped",
    "result",
    forward({"add"}),
    lambda r: lambda outs, ins, *_: [ins[int(r.integers(2))].copy()],
)
add(
    "call left out",
    "forward",
    "missing call",
    "skip",
    forward({"rms_norm", "silu"}),
    lambda r: lambda *_: None,
)
add(
    "eps of a norm",
    "forward",
    "wrong setting",
    "hidden settings",
    forward({"rms_norm"}),
    setting(eps=0.1),
)
add(
    "eps of a norm, said",
    "forward",
    "wrong setting",
    "settings",
    forward({"rms_norm"}),
    setting(eps=1e-1),
)
add(
    "eps forgotten decimal",
    "forward",
    "wrong setting",
    "hidden settings",
    forward({"rms_norm"}),
    setting(eps=1e-3),
    **F32,
)
add(
    "scale of attention",
    "forward",
    "wrong setting",
    "hidden settings",
    forward({"scaled_dot_product_attention"}),
    setting(scale=lambda v: v * v),
)
add(
    "scale of attention forgotten",
    "forward",
    "wrong setting | skipped | scale",
    "hidden settings",
    lambda s: (
        forward({"scaled_dot_product_attention", "mul"})(s)
        and s.tag == "attention"
        and len(s.shapes) != 2
    ),
    setting(scale=1.0, other=1.0),
)
add(
    "mask shifted",
    "forward",
    "mask shift",
    "hidden",
    forward({"scaled_dot_product_attention", "masked_fill"}),
    argument(-1, lambda x, ins, e, k, r: np.concatenate([x[:, 1:], x[:, :1]], 1)),
)
add(
    "mask forgotten",
    "forward",
    "mask ignored",
    "hidden",
    forward({"scaled_dot_product_attention", "masked_fill"}),
    lambda r: lambda ins, *_: [*ins[:-1], np.full_like(ins[-1], len(ins) > 2)],
)
add(
    "softmax over the other dimension",
    "forward",
    "wrong setting | transpose",
    "hidden",
    forward({"softmax"}),
    lambda r: lambda ins, *_: [np.swapaxes(ins[0], -1, -2)],
)
add(
    "weight read in the other order",
    "forward",
    "transpose",
    "hidden",
    lambda s: forward({"linear"})(s) and s.shapes[1][0] > 1,
    argument(1, lambda w, ins, e, k, r: w.reshape(w.shape[::-1]).T),
)
add(
    "another activation's tensor",
    "forward",
    "wrong tensor | permutation",
    "hidden",
    forward({"linear", "rms_norm", "npu_swiglu", "silu"}),
    argument(0, other),
)
add(
    "positions off by one",
    "forward",
    "wrong argument order | permutation | wrong tensor",
    "hidden",
    forward({"npu_rotary_mul"}),
    lambda r: lambda ins, *_: [ins[0], np.roll(ins[1], 1, 0), np.roll(ins[2], 1, 0)],
)
add(
    "sine and cosine exchanged",
    "forward",
    "wrong argument order | wrong tensor",
    "hidden",
    forward({"npu_rotary_mul"}),
    lambda r: lambda ins, *_: [ins[0], ins[2], ins[1]],
)
add(
    "rotation backwards",
    "forward",
    "sign",
    "hidden",
    forward({"npu_rotary_mul"}),
    lambda r: lambda ins, *_: [ins[0], ins[1], -ins[2]],
)
add(
    "gate and up exchanged",
    "forward",
    "permutation | wrong argument order",
    "hidden",
    forward({"npu_swiglu"}),
    argument(0, lambda x, ins, e, k, r: np.roll(x, x.shape[-1] // 2, -1)),
)
add(
    "norm without its weight",
    "forward",
    "wrong tensor",
    "hidden",
    forward({"rms_norm"}),
    argument(1, lambda w, ins, e, k, r: np.ones_like(w)),
)
add(
    "ReLU for SiLU",
    "forward",
    "wrong operator",
    "result",
    forward({"silu"}),
    lambda r: lambda outs, ins, *_: [np.maximum(ins[0], 0)],
)
add(
    "handed another tensor",
    "forward",
    "wrong tensor | permutation",
    "given",
    forward({"linear", "rms_norm", "npu_swiglu", "silu", "sigmoid"}),
    argument(0, other),
)
add(
    "handed a rolled tensor",
    "forward",
    "permutation",
    "given",
    lambda s: forward({"linear", "rms_norm", "npu_swiglu"})(s) and s.shapes[0][0] > 1,
    argument(0, lambda x, ins, e, k, r: roll(x, r)),
)
add(
    "handed a scaled tensor",
    "forward",
    "scale",
    "given",
    forward({"linear", "rms_norm", "npu_swiglu"}),
    argument(0, lambda x, ins, e, k, r: 2 * x),
)
