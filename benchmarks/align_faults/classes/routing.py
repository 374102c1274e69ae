"""Faults of routing."""

from typing import Any

import numpy as np

from benchmarks.align_faults.classes.common import (
    add,
)
from benchmarks.align_faults.faults import (
    MOVES,
    argument,
    both,
    copy_row,
    forward,
    result,
    roll,
    wide,
    zero_rows,
)
from benchmarks.align_faults.kernels import (
    Array,
)

TOPK = lambda s: s.op == "topk" and not s.is_backward  # noqa: E731


def _chosen(function: Any) -> Any:
    def draw(r: Any) -> Any:
        def change(outs: list[Array], ins: list[Array], *_: Any) -> list[Array]:
            index = function(outs[1].copy(), ins[0], r)
            return [np.take_along_axis(ins[0], index, -1), index]

        return change

    return draw


def _worst(index: Array, score: Array, r: Any) -> Array:
    order = np.argsort(score, -1)
    index[:, 0] = order[:, 0]
    return index


def _one_token(index: Array, score: Array, r: Any) -> Array:
    i = int(r.integers(len(index)))
    unused = [e for e in range(score.shape[1]) if e not in index[i]]
    index[i, -1] = unused[0]
    return index


add("least likely expert chosen", "routing", "wrong index", "result", TOPK, _chosen(_worst))
add(
    "one token to another expert",
    "routing",
    "wrong index | single element",
    "result",
    TOPK,
    _chosen(_one_token),
)
add(
    "experts numbered from one",
    "routing",
    "wrong index",
    "result",
    TOPK,
    lambda r: lambda outs, ins, *_: [outs[0], (outs[1] + 1) % ins[0].shape[-1]],
)
add(
    "experts exchanged",
    "routing",
    "expert swap",
    "hidden",
    lambda s: forward(EXPERT_OPS)(s) and s.shapes[1][0] > 1,
    argument(1, lambda w, ins, e, k, r: np.roll(w, 1, 0)),
)
EXPERT_OPS = {"grouped_matmul"}
add(
    "token lost",
    "routing",
    "dropped",
    "result",
    both(forward(MOVES - {"embedding"}), wide),
    result(zero_rows),
)
add(
    "tokens exchanged",
    "routing",
    "permutation",
    "result",
    both(forward(MOVES - {"embedding"}), wide),
    result(lambda y, r: roll(y, r)),
)
add(
    "token twice",
    "routing",
    "duplicated",
    "result",
    both(forward(MOVES - {"embedding"}), wide),
    result(copy_row),
)
add(
    "weights of experts not normalised",
    "routing",
    "skipped",
    "result",
    lambda s: forward({"div"}, 8)(s) and s.tag == "router",
    lambda r: lambda outs, ins, *_: [ins[0].copy()],
)
add(
    "routed scaling left out",
    "routing",
    "skipped",
    "result",
    lambda s: forward({"mul"}, 8)(s) and s.tag == "router",
    lambda r: lambda outs, ins, *_: [ins[0].copy()],
)
add(
    "a group too long",
    "routing",
    "part | wrong index | wrong setting",
    "hidden",
    lambda s: forward(EXPERT_OPS)(s) and s.shapes[2][0] > 1 and s.shape[0] > 1,
    argument(2, lambda c, ins, e, k, r: _moved_end(c)),
)
add(
    "count of an expert",
    "routing",
    "single element | permutation | wrong index",
    "result",
    lambda s: s.op == "bincount",
    result(lambda y, r: y + (np.arange(len(y)) == 0)),
)
add(
    "weights of another token",
    "routing",
    "permutation | wrong tensor | wrong argument order",
    "hidden",
    lambda s: forward({"npu_moe_token_unpermute"})(s) and s.shapes[2][0] > 1,
    argument(2, lambda p, ins, e, k, r: np.roll(p, 1, 0)),
)


def _moved_end(counts: Array) -> Array:
    c = counts.copy()
    i = int(np.argmax(c))
    j = (i + 1) % len(c)
    c[i] -= 1
    c[j] += 1
    return c
