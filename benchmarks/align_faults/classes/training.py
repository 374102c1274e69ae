"""Faults of routing, of the optimizer and of data."""

from typing import Any

import numpy as np

from benchmarks.align_faults.faults import (
    LEFT_OUT,
    MOVES,
    TOPK,
    Draw,
    adding,
    always,
    both,
    copy_row,
    forward,
    given,
    hidden,
    optimizer,
    result,
    rms,
    roll,
    setting,
    stated,
    wide,
    zero_rows,
)
from benchmarks.align_faults.kernels import Array, rounded

# ------------------------------------------------------------------ routing

add = adding("routing")
MOVED = both(forward(MOVES - {"embedding"}), wide)


def _chosen(function: Any) -> Any:
    def draw(r: Any) -> Any:
        def change(outs: list[Array], ins: list[Array], *_: Any) -> list[Array]:
            index = function(outs[1].copy(), ins[0], r)
            return [np.take_along_axis(ins[0], index, -1), index]

        return change

    return Draw("result", draw)


def _worst(index: Array, score: Array, r: Any) -> Array:
    order = np.argsort(score, -1)
    index[:, 0] = order[:, 0]
    return index


def _one_token(index: Array, score: Array, r: Any) -> Array:
    i = int(r.integers(len(index)))
    unused = [e for e in range(score.shape[1]) if e not in index[i]]
    index[i, -1] = unused[0]
    return index


def _moved_end(counts: Array, *_: Any) -> Array:
    c = counts.copy()
    i = int(np.argmax(c))
    j = (i + 1) % len(c)
    c[i] -= 1
    c[j] += 1
    return c


add("least likely expert chosen", "wrong index", TOPK, _chosen(_worst))
add("one token to another expert", "wrong index | single element", TOPK, _chosen(_one_token))
add(
    "experts numbered from one",
    "wrong index",
    TOPK,
    always("result", lambda outs, ins, *_: [outs[0], (outs[1] + 1) % ins[0].shape[-1]]),
)
add(
    "experts exchanged",
    "expert swap",
    lambda s: forward({"grouped_matmul"})(s) and s.shapes[1][0] > 1,
    hidden(1, lambda w, *_: np.roll(w, 1, 0)),
)
add("token lost", "dropped", MOVED, result(zero_rows))
add("tokens exchanged", "permutation", MOVED, result(roll))
add("token twice", "duplicated", MOVED, result(copy_row))
add("weights of experts not normalised", "skipped", forward({"div"}, 8, tag="router"), LEFT_OUT)
add("routed scaling left out", "skipped", forward({"mul"}, 8, tag="router"), LEFT_OUT)
add(
    "a group too long",
    "part | wrong index | wrong setting",
    lambda s: forward({"grouped_matmul"})(s) and s.shapes[2][0] > 1 and (s.shape[0] > 1),
    hidden(2, _moved_end),
)
add(
    "count of an expert",
    "single element | permutation | wrong index",
    lambda s: s.op == "bincount",
    result(lambda y, r: y + (np.arange(len(y)) == 0)),
)
add(
    "weights of another token",
    "permutation | wrong tensor | wrong argument order",
    lambda s: forward({"npu_moe_token_unpermute"})(s) and s.shapes[2][0] > 1,
    hidden(2, lambda p, *_: np.roll(p, 1, 0)),
)

# ------------------------------------------------------------------ optimizer

add = adding("optimizer")
add("no correction of bias", "wrong setting", optimizer(), setting(step=1000000.0))
add("weight decay forgotten", "wrong setting", optimizer(dims=2), setting(weight_decay=0.0))
add(
    "weight decay doubled",
    "wrong setting",
    optimizer(dims=2),
    setting(weight_decay=lambda v: 2 * v),
)
add("rate doubled", "wrong setting", optimizer(), setting(lr=lambda v: 2 * v))
add("rate of another step, said", "wrong setting", optimizer(), stated(lr=lambda v: v * 0.9))
add("betas exchanged", "wrong setting", optimizer(), setting(betas=(0.95, 0.9)))
add("eps of Adam", "wrong setting", optimizer(), setting(eps=0.001))
add(
    "weight not updated",
    "skipped",
    optimizer(),
    always("result", lambda outs, ins, *_: [ins[0].copy(), *outs[1:]]),
)
add(
    "first moment not updated",
    "skipped",
    optimizer(step=1),
    always("result", lambda outs, ins, *_: [outs[0], ins[2].copy(), outs[2]]),
    steps=2,
)
add(
    "second moment of the gradient, not its square",
    "unknown",
    optimizer(),
    always(
        "result",
        lambda outs, ins, *_: [
            outs[0],
            outs[1],
            (0.95 * ins[3] + 0.05 * np.abs(ins[1])).astype(np.float32),
        ],
    ),
)
add("update in the wrong direction", "wrong setting | sign", optimizer(), setting(lr=lambda v: -v))
add(
    "clipping left out",
    "skipped",
    lambda s: (
        s.phase == "optimizer"
        and s.op == "mul"
        and (s.tag == "clip")
        and (int(np.prod(s.shape)) >= 16)
    ),
    LEFT_OUT,
)
add(
    "stale moments",
    "stale | zero | wrong tensor",
    optimizer(step=1),
    given(2, lambda x, *_: np.zeros_like(x)),
    steps=2,
)
add("norm squared", "skipped", lambda s: s.phase == "optimizer" and s.op == "sqrt", LEFT_OUT)
add(
    "handed the gradient before clipping",
    "scale | wrong tensor",
    optimizer(),
    given(1, lambda x, *_: x * np.float32(3.0)),
)

# ------------------------------------------------------------------ data

add = adding("data")
IDS = lambda s: s.op == "embedding" and not s.is_backward  # noqa: E731
LOSS = lambda s: s.op == "cross_entropy" and not s.is_backward  # noqa: E731
add(
    "another batch",
    "wrong index",
    IDS,
    given(0, lambda x, r, *_: (x + r.integers(1, 30, x.shape)) % 32),
)
add(
    "tokens shifted by one", "permutation | wrong index", IDS, given(0, lambda x, *_: np.roll(x, 1))
)
add(
    "labels shifted by one",
    "permutation | wrong index",
    LOSS,
    given(1, lambda x, *_: np.roll(x, 1)),
)
add(
    "labels of another batch",
    "wrong index | permutation",
    LOSS,
    given(1, lambda x, r, *_: (x + r.integers(1, 30, x.shape)) % 32),
)
add(
    "weights of another seed",
    "wrong tensor | unknown",
    forward({"linear", "grouped_matmul", "embedding"}, step=0),
    given(
        1, lambda w, r, *_: rounded(r.normal(size=w.shape).astype(np.float32) * rms(w), "bfloat16")
    ),
)
add(
    "one label wrong",
    "single element | wrong index",
    LOSS,
    given(1, lambda x, *_: np.where(np.arange(len(x)) == 0, (x + 1) % 32, x)),
)
add(
    "weight of the step before",
    "stale weight",
    forward({"linear", "rms_norm", "grouped_matmul"}, step=1),
    given(1, lambda w, r, e, k: e.before(w, k)),
    steps=2,
)
