"""Flipped bits."""

import numpy as np

from benchmarks.align_faults.classes.collectives import (
    EVERY,
)
from benchmarks.align_faults.classes.common import (
    BACK,
    F32,
    add,
)
from benchmarks.align_faults.classes.routing import (
    TOPK,
)
from benchmarks.align_faults.faults import (
    COMPUTES,
    argument,
    collective,
    exchange,
    flip_bit,
    forward,
    optimizer,
    typed,
)
from benchmarks.align_faults.kernels import (
    rounded,
)

HIGH = range(23, 30)
MIDDLE = range(19, 23)
BIG = forward(COMPUTES, 32)
add(
    "exponent bit",
    "bit flips",
    "single element | not finite",
    "result",
    BIG,
    typed(lambda y, r: flip_bit(y, r, HIGH)),
)
add(
    "sign bit",
    "bit flips",
    "single element",
    "result",
    BIG,
    typed(lambda y, r: flip_bit(y, r, [31])),
)
add(
    "significand bit",
    "bit flips",
    "single element",
    "result",
    BIG,
    typed(lambda y, r: flip_bit(y, r, MIDDLE)),
)
add(
    "low significand bit",
    "bit flips",
    "single element",
    "result",
    BIG,
    typed(lambda y, r: flip_bit(y, r, range(12, 16))),
    **F32,
)
add(
    "bit of a gradient",
    "bit flips",
    "single element | not finite",
    "result",
    BACK,
    typed(lambda y, r: flip_bit(y, r, HIGH)),
)
add(
    "bit of a weight",
    "bit flips",
    "single element",
    "given",
    lambda s: forward({"linear", "grouped_matmul"})(s),
    argument(
        1, lambda w, ins, e, k, r: rounded(flip_bit(w, r, [31, 22, 23, 24]), e.numerics.dtype)
    ),
)
add(
    "bit of an activation",
    "bit flips",
    "single element",
    "given",
    forward({"linear", "rms_norm", "npu_swiglu"}),
    argument(
        0, lambda x, ins, e, k, r: rounded(flip_bit(x, r, [31, 22, 23, 24]), e.numerics.dtype)
    ),
)
add(
    "bit of a message",
    "bit flips",
    "single element | not finite",
    "exchange",
    collective(EVERY),
    exchange(
        lambda got, p, r, i: [
            flip_bit(g, r, [31, 22, 23, 24]) if j == 0 else g for j, g in enumerate(got)
        ]
    ),
)
add(
    "bit of a moment",
    "bit flips",
    "single element | not finite",
    "result",
    optimizer(),
    typed(lambda y, r: flip_bit(y, r, HIGH), 1),
)
add(
    "bit of an index",
    "bit flips",
    "wrong index | single element",
    "result",
    TOPK,
    lambda r: (
        lambda outs, ins, *_: [
            outs[0],
            np.where(np.arange(outs[1].size).reshape(outs[1].shape) == 0, outs[1] ^ 1, outs[1]),
        ]
    ),
)
