"""Faults of what operators compute: forward, backward, precision, flipped bits."""

from typing import Any

import numpy as np

from benchmarks.align_faults.faults import (
    BACK,
    COMPUTES,
    EVERY,
    F32,
    GEMM,
    LEFT_OUT,
    PLAIN,
    SUMS,
    TOPK,
    Draw,
    adding,
    always,
    at_one,
    backward,
    both,
    collective,
    copy_row,
    exchange,
    first_only,
    flip_bit,
    forward,
    given,
    hidden,
    optimizer,
    other,
    result,
    rms,
    roll,
    setting,
    square,
    stated,
    summed_in,
    swap,
    typed,
    wide,
    zero_rows,
)
from benchmarks.align_faults.kernels import Array, rounded

# ------------------------------------------------------------------ forward

add = adding("forward")
NOT_A_NUMBER = result(lambda y, r: at_one(y, r, lambda v: float("nan")))
ATTENTION = {"scaled_dot_product_attention"}
TAKES_ACTIVATION = {"linear", "rms_norm", "npu_swiglu", "silu"}
for _k, _word in ((2.0, "doubled"), (0.5, "halved"), (1.125, "an eighth too large")):
    add(_word, "scale", PLAIN, typed(lambda y, r, k=_k: y * k))
add("one percent", "scale", PLAIN, typed(lambda y, r: y * 1.01), **F32)
add("sign", "sign", PLAIN, typed(lambda y, r: -y))
add("offset", "offset", PLAIN, typed(lambda y, r: y + 0.5 * rms(y)))
add("rows rolled", "permutation", both(PLAIN, wide), result(roll))
add("columns rolled", "permutation", both(PLAIN, wide), result(lambda y, r: roll(y, r, y.ndim - 1)))
add(
    "heads exchanged",
    "permutation | transpose",
    forward({"scaled_dot_product_attention", "npu_rotary_mul"}, dims=3),
    result(lambda y, r: swap(y, r, 0) if len(y) > 1 else swap(y, r, 1)),
)
add(
    "transposed",
    "transpose",
    square(PLAIN),
    result(lambda y, r: np.ascontiguousarray(np.swapaxes(y, -1, -2))),
)
add("rows lost", "dropped", both(PLAIN, wide), result(zero_rows))
add("row repeated", "duplicated", both(PLAIN, wide), result(copy_row))
add("all zero", "zero", PLAIN, result(lambda y, r: np.zeros_like(y)))
add("not a number", "not finite", PLAIN, NOT_A_NUMBER)
add("overflow", "not finite", PLAIN, result(lambda y, r: at_one(y, r, lambda v: float("inf"))))


def _one_row(y: Array, r: Any) -> Array:
    z = y.copy()
    i = int(r.integers(len(y)))
    z[i] += r.normal(size=z[i].shape).astype(np.float32) * rms(y)
    return z


add("a row wrong", "part", both(PLAIN, wide), typed(_one_row))
add("activation left out", "skipped | missing call", forward({"silu", "sigmoid"}), LEFT_OUT)
add(
    "residual left out",
    "skipped",
    forward({"add"}),
    Draw("result", lambda r: lambda outs, ins, *_: [ins[int(r.integers(2))].copy()]),
)
add("call left out", "missing call", forward({"rms_norm", "silu"}), always("skip", lambda *_: None))
add("eps of a norm", "wrong setting", forward({"rms_norm"}), setting(eps=0.1))
add("eps of a norm, said", "wrong setting", forward({"rms_norm"}), stated(eps=0.1))
add("eps forgotten decimal", "wrong setting", forward({"rms_norm"}), setting(eps=0.001), **F32)
add("scale of attention", "wrong setting", forward(ATTENTION), setting(scale=lambda v: v * v))
add(
    "scale of attention forgotten",
    "wrong setting | skipped | scale",
    lambda s: (
        forward({"scaled_dot_product_attention", "mul"})(s)
        and s.tag == "attention"
        and (len(s.shapes) != 2)
    ),
    setting(scale=1.0, other=1.0),
)
add(
    "mask shifted",
    "mask shift",
    forward({"scaled_dot_product_attention", "masked_fill"}),
    hidden(-1, lambda x, *_: np.concatenate([x[:, 1:], x[:, :1]], 1)),
)
add(
    "mask forgotten",
    "mask ignored",
    forward({"scaled_dot_product_attention", "masked_fill"}),
    always("hidden", lambda ins, *_: [*ins[:-1], np.full_like(ins[-1], len(ins) > 2)]),
)
add(
    "softmax over the other dimension",
    "wrong setting | transpose",
    forward({"softmax"}),
    always("hidden", lambda ins, *_: [np.swapaxes(ins[0], -1, -2)]),
)
add(
    "weight read in the other order",
    "transpose",
    lambda s: forward({"linear"})(s) and s.shapes[1][0] > 1,
    hidden(1, lambda w, *_: w.reshape(w.shape[::-1]).T),
)
add(
    "another activation's tensor",
    "wrong tensor | permutation",
    forward(TAKES_ACTIVATION),
    hidden(0, other),
)
add(
    "positions off by one",
    "wrong argument order | permutation | wrong tensor",
    forward({"npu_rotary_mul"}),
    always("hidden", lambda ins, *_: [ins[0], np.roll(ins[1], 1, 0), np.roll(ins[2], 1, 0)]),
)
add(
    "sine and cosine exchanged",
    "wrong argument order | wrong tensor",
    forward({"npu_rotary_mul"}),
    always("hidden", lambda ins, *_: [ins[0], ins[2], ins[1]]),
)
add(
    "rotation backwards",
    "sign",
    forward({"npu_rotary_mul"}),
    always("hidden", lambda ins, *_: [ins[0], ins[1], -ins[2]]),
)
add(
    "gate and up exchanged",
    "permutation | wrong argument order",
    forward({"npu_swiglu"}),
    hidden(0, lambda x, *_: np.roll(x, x.shape[-1] // 2, -1)),
)
add(
    "norm without its weight",
    "wrong tensor",
    forward({"rms_norm"}),
    hidden(1, lambda w, *_: np.ones_like(w)),
)
add(
    "ReLU for SiLU",
    "wrong operator",
    forward({"silu"}),
    always("result", lambda outs, ins, *_: [np.maximum(ins[0], 0)]),
)
add(
    "handed another tensor",
    "wrong tensor | permutation",
    forward({"linear", "rms_norm", "npu_swiglu", "silu", "sigmoid"}),
    given(0, other),
)
add(
    "handed a rolled tensor",
    "permutation",
    lambda s: forward({"linear", "rms_norm", "npu_swiglu"})(s) and s.shapes[0][0] > 1,
    given(0, lambda x, r, *_: roll(x, r)),
)
add(
    "handed a scaled tensor",
    "scale",
    forward({"linear", "rms_norm", "npu_swiglu"}),
    given(0, lambda x, *_: 2 * x),
)

# ------------------------------------------------------------------ backward


def _no_term(outs: list[Array], grads: list[Array], engine: Any, rank: int) -> list[Array]:
    y = engine.planted.done["outs_forward"][0]
    return [rounded(grads[0] * y, engine.planted.site.dtype)]


add = adding("backward")
add("gradient doubled", "scale", BACK, typed(lambda y, r: 2 * y))
add("gradient of a weight doubled", "scale", backward(GEMM), typed(lambda y, r: 2 * y, 1))
add("gradient's sign", "sign", BACK, typed(lambda y, r: -y))
add("gradient zero", "zero", BACK, result(lambda y, r: np.zeros_like(y)))
add("gradient's rows rolled", "permutation", both(BACK, wide), result(roll))
add("gradient's rows lost", "dropped", both(BACK, wide), result(zero_rows))
add(
    "gradient of a weight transposed",
    "transpose",
    lambda s: backward({"linear"})(s) and s.shape[-1] == 16 and (s.shapes[0][-1] == 16),
    result(lambda y, r: np.ascontiguousarray(np.swapaxes(y, -1, -2)), 1),
)
add("gradient not finite", "not finite", BACK, NOT_A_NUMBER)
add(
    "one element of a gradient",
    "single element",
    BACK,
    typed(lambda y, r: at_one(y, r, lambda v: 2 * v)),
)
add(
    "backward with another activation",
    "wrong tensor | permutation",
    backward(TAKES_ACTIVATION),
    hidden(0, other),
)
add(
    "backward with another scale",
    "wrong setting",
    backward(ATTENTION),
    setting(scale=lambda v: v * v),
)
add("handed a doubled gradient", "scale", BACK, always("given", lambda g, *_: [2 * x for x in g]))
add("handed another gradient", "wrong tensor | permutation", backward({"linear"}), given(0, other))
add(
    "handed no gradient", "zero", BACK, always("given", lambda g, *_: [np.zeros_like(x) for x in g])
)
add(
    "gradient without a normalising term",
    "missing row sum",
    backward({"softmax"}),
    always("result", _no_term),
)

# ------------------------------------------------------------------ precision

add = adding("precision")
IN_BFLOAT16 = result(lambda y, r: rounded(y, "bfloat16"))
add("rounded to bfloat16", "wrong dtype", PLAIN, IN_BFLOAT16, **F32)
add("rounded to float16", "wrong dtype", PLAIN, result(lambda y, r: rounded(y, "float16")), **F32)
add("gradient rounded to bfloat16", "wrong dtype", BACK, IN_BFLOAT16, **F32)
add("added up in bfloat16", "accumulator", forward(GEMM), summed_in("bfloat16"), **F32)
add("added up in float16", "accumulator", forward(GEMM), summed_in("float16"), **F32)
add("gradient added up in bfloat16", "accumulator", backward(GEMM), summed_in("bfloat16"), **F32)
add(
    "reduced in bfloat16",
    "wrong dtype | accumulator",
    collective(SUMS),
    exchange(lambda got, *_: [rounded(g, "bfloat16") for g in got]),
    **F32,
)
add(
    "loss in bfloat16",
    "wrong dtype",
    lambda s: s.op == "cross_entropy" and (not s.is_backward),
    IN_BFLOAT16,
    **F32,
)
add("update in bfloat16", "wrong dtype", optimizer(), IN_BFLOAT16)
add(
    "cast in passing",
    "wrong dtype",
    forward({"linear", "rms_norm"}),
    given(0, lambda x, *_: rounded(x, "bfloat16")),
    **F32,
)

# ------------------------------------------------------------------ bit flips

add = adding("bit flips")
HIGH, MIDDLE = range(23, 30), range(19, 23)
ANY_HIGH = [31, 22, 23, 24]
BIG = forward(COMPUTES, 32)
add("exponent bit", "single element | not finite", BIG, typed(lambda y, r: flip_bit(y, r, HIGH)))
add("sign bit", "single element", BIG, typed(lambda y, r: flip_bit(y, r, [31])))
add("significand bit", "single element", BIG, typed(lambda y, r: flip_bit(y, r, MIDDLE)))
add(
    "low significand bit",
    "single element",
    BIG,
    typed(lambda y, r: flip_bit(y, r, range(12, 16))),
    **F32,
)
add(
    "bit of a gradient",
    "single element | not finite",
    BACK,
    typed(lambda y, r: flip_bit(y, r, HIGH)),
)
add(
    "bit of a weight",
    "single element",
    forward({"linear", "grouped_matmul"}),
    given(1, lambda w, r, e, k: rounded(flip_bit(w, r, ANY_HIGH), e.numerics.dtype)),
)
add(
    "bit of an activation",
    "single element",
    forward({"linear", "rms_norm", "npu_swiglu"}),
    given(0, lambda x, r, e, k: rounded(flip_bit(x, r, ANY_HIGH), e.numerics.dtype)),
)
add(
    "bit of a message",
    "single element | not finite",
    collective(EVERY),
    exchange(first_only(lambda g, r: flip_bit(g, r, ANY_HIGH))),
)
add(
    "bit of a moment",
    "single element | not finite",
    optimizer(),
    typed(lambda y, r: flip_bit(y, r, HIGH), 1),
)
add(
    "bit of an index",
    "wrong index | single element",
    TOPK,
    always(
        "result",
        lambda outs, ins, *_: [
            outs[0],
            np.where(np.arange(outs[1].size).reshape(outs[1].shape) == 0, outs[1] ^ 1, outs[1]),
        ],
    ),
)
