"""Compute the benchmark's operators forward and backward, in emulated types and orders of summation.

Arrays are float32 (or float64 for the oracle); a result is rounded to the program's type when an operator ends. Nothing
here is shared with the formulas that judge.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = list[Array]
Gradients = list[Any]
Settings = dict[str, Any]

BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


@dataclass(frozen=True)
class Numerics:
    """How a program computes.

    Attributes:
        dtype: What results are rounded to: ``float32``, ``bfloat16``, ``float16``; ``float64``: not at all.
        order: Of summation: ``blas``, ``split``, ``reversed``, ``wide`` (float64) or ``serial``.
        accumulator: Type that partial sums of products are rounded to; empty: that of the arrays.
    """

    dtype: str = "float32"
    order: str = "blas"
    accumulator: str = ""

    def matmul(self, a: Array, b: Array) -> Array:
        """Return ``a @ b``, added up in the program's order."""
        if self.accumulator:
            total = np.zeros((), a.dtype)
            for i in range(a.shape[-1]):
                total = rounded(total + a[..., i : i + 1] * b[..., i : i + 1, :], self.accumulator)
            return np.asarray(total)
        if self.order == "wide":
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(a.dtype)
        if self.order == "reversed":
            return a[..., ::-1] @ b[..., ::-1, :]
        n = a.shape[-1]
        if self.order in ("split", "serial") and n >= 4:
            step = max(1, n // 4) if self.order == "split" else max(1, n // 8)
            parts = [a[..., i : i + step] @ b[..., i : i + step, :] for i in range(0, n, step)]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total
        return a @ b

    def sum(self, x: Array, axis: int) -> Array:
        """Return the sum along a dimension, kept."""
        if self.order == "wide":
            return x.astype(np.float64).sum(axis, keepdims=True).astype(x.dtype)
        if self.order == "reversed":
            return np.flip(x, axis).sum(axis, keepdims=True)
        if self.order in ("split", "serial"):
            moved = np.moveaxis(x, axis, 0)
            total = np.zeros_like(moved[0])
            for row in moved:
                total = total + row
            return np.expand_dims(total, axis)
        return x.sum(axis, keepdims=True)


def rounded(x: Array, dtype: str) -> Array:
    """Return floating-point values rounded to nearest even of a type; bfloat16 and float16 widened again."""
    if x.dtype.kind != "f" or dtype == "float64":
        return x
    x = np.asarray(x, np.float32)
    if dtype == "float32":
        return x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32) if x.flags.c_contiguous else x.copy().view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    near = (bits + (np.uint32(0x7FFF) + even)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, near.view(np.float32)).reshape(x.shape)


Forward = Callable[[Arrays, Settings, Numerics], Arrays]
Backward = Callable[[Arrays, Settings, Arrays, Arrays, Numerics], Gradients]


@dataclass(frozen=True)
class Kernel:
    """An operator.

    Attributes:
        forward: From inputs and settings to outputs.
        backward: From inputs, settings, outputs and their gradients to the gradients of the inputs (None: none).
    """

    forward: Forward
    backward: Backward | None = None


def _t(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _linear_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    return [n.matmul(g[0], ins[1]), n.matmul(_t(_rows(g[0])), _rows(ins[0]))]


def _matmul_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    return [n.matmul(g[0], _t(ins[1])), n.matmul(_t(ins[0]), g[0])]


def _fit(g: Array, like: Array, n: Numerics) -> Array:
    while g.ndim > like.ndim:
        g = n.sum(g, 0)[0]
    for axis, size in enumerate(like.shape):
        if size != g.shape[axis]:
            g = n.sum(g, axis)
    return g


def _mul_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    if len(ins) == 1:
        return [g[0] * g[0].dtype.type(s["other"])]
    return [_fit(g[0] * ins[1], ins[0], n), _fit(g[0] * ins[0], ins[1], n)]


def _mul(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    return [ins[0] * (ins[1] if len(ins) > 1 else ins[0].dtype.type(s["other"]))]


def _div_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    return [_fit(g[0] / ins[1], ins[0], n), _fit(-g[0] * ins[0] / (ins[1] * ins[1]), ins[1], n)]


def _sigmoid(x: Array) -> Array:
    one = x.dtype.type(1)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, one / (one + e), e / (one + e))


def _silu_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    y = _sigmoid(ins[0])
    return [g[0] * (y + ins[0] * y * (1 - y))]


def _swiglu(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    gate, up = np.split(ins[0], 2, -1)
    return [gate * _sigmoid(gate) * up]


def _swiglu_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    gate, up = np.split(ins[0], 2, -1)
    y = _sigmoid(gate)
    return [np.concatenate([g[0] * up * (y + gate * y * (1 - y)), g[0] * gate * y], -1)]


def _rms(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    x, w = ins
    mean = n.sum(x * x, -1) / x.dtype.type(x.shape[-1])
    return [x * (1 / np.sqrt(mean + x.dtype.type(s["eps"]))) * w]


def _rms_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    x, w = ins
    r = 1 / np.sqrt(n.sum(x * x, -1) / x.dtype.type(x.shape[-1]) + x.dtype.type(s["eps"]))
    gw = g[0] * w
    inner = n.sum(gw * x, -1) / x.dtype.type(x.shape[-1])
    dw = n.sum(_rows(g[0] * x * r), 0)[0]
    return [gw * r - x * (r * r * r * inner), dw]


def _softmax(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    e = np.exp(ins[0] - ins[0].max(-1, keepdims=True))
    return [e / n.sum(e, -1)]


def _softmax_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    y = outs[0]
    return [y * (g[0] - n.sum(g[0] * y, -1))]


def _masked(score: Array, mask: Array) -> Array:
    return np.where(mask, score, score.dtype.type(-np.inf))


def _sdpa(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    q, k, v = ins[:3]
    score = n.matmul(q, _t(k)) * q.dtype.type(s["scale"])
    return [n.matmul(_softmax([_masked(score, ins[3])], {}, n)[0], v)]


def _sdpa_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    q, k, v = ins[:3]
    scale = q.dtype.type(s["scale"])
    p = _softmax([_masked(n.matmul(q, _t(k)) * scale, ins[3])], {}, n)[0]
    dp = n.matmul(g[0], _t(v))
    ds = p * (dp - n.sum(dp * p, -1)) * scale
    return [n.matmul(ds, k), n.matmul(_t(ds), q), n.matmul(_t(p), g[0]), None]


def _rotate(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], -1)


def _rotary(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    return [ins[0] * ins[1] + _rotate(ins[0]) * ins[2]]


def _rotary_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    return [g[0] * ins[1] - _rotate(g[0] * ins[2]), None, None]


def _add_rows(shape: tuple[int, ...], index: Array, rows: Array) -> Array:
    out = np.zeros(shape, rows.dtype)
    np.add.at(out, index, rows)
    return out


def _topk(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    order = np.argsort(-ins[0], -1, kind="stable")[..., : s["k"]]
    return [np.take_along_axis(ins[0], order, -1), order]


def _gather_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    out = np.zeros_like(ins[0])
    np.put_along_axis(out, ins[1], g[0], s["dim"])  # choices of top-k are distinct
    return [out, None]


def _sum(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    x = ins[0]
    y = x.sum(s["dim"], keepdims=True) if x.dtype.kind != "f" else n.sum(x, s["dim"])
    return [y if s.get("keepdim") else y.squeeze(s["dim"])]


def _sum_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    grad = g[0] if s.get("keepdim") else np.expand_dims(g[0], s["dim"])
    return [np.broadcast_to(grad, ins[0].shape).copy()]


def _permute(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    flat = ins[1].reshape(-1)
    order = np.argsort(flat, kind="stable")
    return [ins[0][order // ins[1].shape[1]], np.argsort(order, kind="stable")]


def _permute_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    parts = g[0][outs[1]].reshape(len(ins[0]), -1, g[0].shape[-1])
    return [n.sum(parts, 1)[:, 0], None]


def _unpermute(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    rows, went, probs = ins
    parts = rows[went].reshape(*probs.shape, -1) * probs[..., None]
    return [n.sum(parts, 1)[:, 0]]


def _unpermute_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    rows, went, probs = ins
    parts = rows[went].reshape(*probs.shape, -1)
    dp = n.sum(parts * g[0][:, None], -1)[..., 0]
    drows = np.zeros_like(rows)
    drows[went] = (g[0][:, None] * probs[..., None]).reshape(-1, rows.shape[-1])
    return [drows, None, dp]


def _ends(group_list: Array) -> list[tuple[int, int]]:
    ends = np.cumsum(group_list)
    return [(int(e - c), int(e)) for c, e in zip(group_list, ends, strict=True)]


def _grouped(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    x, w, groups = ins
    parts = [n.matmul(x[a:b], w[i]) for i, (a, b) in enumerate(_ends(groups))]
    return [np.concatenate(parts, 0)]


def _grouped_back(ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics) -> Gradients:
    x, w, groups = ins
    cut = _ends(groups)
    dx = [n.matmul(g[0][a:b], _t(w[i])) for i, (a, b) in enumerate(cut)]
    dw = [n.matmul(_t(x[a:b]), g[0][a:b]) for a, b in cut]
    return [np.concatenate(dx, 0), np.stack(dw), None]


def _cross_entropy(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    x, label = ins
    top = x - x.max(-1, keepdims=True)
    log = np.log(n.sum(np.exp(top), -1))
    picked = np.take_along_axis(top - log, label[:, None], 1)
    return [-n.sum(picked, 0)[0, 0]]


def _cross_entropy_back(
    ins: Arrays, s: Settings, outs: Arrays, g: Arrays, n: Numerics
) -> Gradients:
    p = _softmax([ins[0]], {}, n)[0]
    p[np.arange(len(p)), ins[1]] -= 1
    return [p * g[0], None]


def _transpose(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    return [np.ascontiguousarray(np.swapaxes(ins[0], s["dim0"], s["dim1"]))]


def _adamw(ins: Arrays, s: Settings, n: Numerics) -> Arrays:
    w, g, m, v = ins
    kind = w.dtype.type
    b1, b2 = (kind(b) for b in s["betas"])
    w = w * kind(1 - s["lr"] * s["weight_decay"])
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    mhat = m / kind(1 - float(s["betas"][0]) ** s["step"])
    vhat = v / kind(1 - float(s["betas"][1]) ** s["step"])
    return [w - kind(s["lr"]) * mhat / (np.sqrt(vhat) + kind(s["eps"])), m, v]


KERNELS: dict[str, Kernel] = {
    "Functional.linear": Kernel(lambda i, s, n: [n.matmul(i[0], _t(i[1]))], _linear_back),
    "Torch.matmul": Kernel(lambda i, s, n: [n.matmul(i[0], i[1])], _matmul_back),
    "Torch.mul": Kernel(_mul, _mul_back),
    "Torch.add": Kernel(
        lambda i, s, n: [i[0] + i[1]], lambda i, s, o, g, n: [_fit(g[0], x, n) for x in i]
    ),
    "Torch.div": Kernel(lambda i, s, n: [i[0] / i[1]], _div_back),
    "Torch.sigmoid": Kernel(
        lambda i, s, n: [_sigmoid(i[0])], lambda i, s, o, g, n: [g[0] * o[0] * (1 - o[0])]
    ),
    "Functional.silu": Kernel(lambda i, s, n: [i[0] * _sigmoid(i[0])], _silu_back),
    "NPU.npu_swiglu": Kernel(_swiglu, _swiglu_back),
    "Functional.rms_norm": Kernel(_rms, _rms_back),
    "Functional.softmax": Kernel(_softmax, _softmax_back),
    "Functional.scaled_dot_product_attention": Kernel(_sdpa, _sdpa_back),
    "NPU.npu_rotary_mul": Kernel(_rotary, _rotary_back),
    "Functional.embedding": Kernel(
        lambda i, s, n: [i[1][i[0]]],
        lambda i, s, o, g, n: [None, _add_rows(i[1].shape, i[0].reshape(-1), _rows(g[0]))],
    ),
    "Torch.topk": Kernel(_topk),
    "Torch.gather": Kernel(
        lambda i, s, n: [np.take_along_axis(i[0], i[1], s["dim"])], _gather_back
    ),
    "Torch.sum": Kernel(_sum, _sum_back),
    "NPU.npu_moe_token_permute": Kernel(_permute, _permute_back),
    "NPU.npu_moe_token_unpermute": Kernel(_unpermute, _unpermute_back),
    "NPU.grouped_matmul": Kernel(_grouped, _grouped_back),
    "Torch.index_select": Kernel(
        lambda i, s, n: [i[0][i[1]]],
        lambda i, s, o, g, n: [_add_rows(i[0].shape, i[1], g[0]), None],
    ),
    "Functional.cross_entropy": Kernel(_cross_entropy, _cross_entropy_back),
    "Tensor.reshape": Kernel(
        lambda i, s, n: [i[0].reshape(s["shape"])], lambda i, s, o, g, n: [g[0].reshape(i[0].shape)]
    ),
    "Tensor.transpose": Kernel(_transpose, lambda i, s, o, g, n: _transpose(g, s, n)),
    "Tensor.masked_fill": Kernel(
        lambda i, s, n: [np.where(i[1], i[0].dtype.type(s["value"]), i[0])],
        lambda i, s, o, g, n: [np.where(i[1], g[0].dtype.type(0), g[0]), None],
    ),
    "Torch.cat": Kernel(
        lambda i, s, n: [np.concatenate(i, s["dim"])],
        lambda i, s, o, g, n: np.split(
            g[0], np.cumsum([x.shape[s["dim"]] for x in i])[:-1], s["dim"]
        ),
    ),
    "Torch.neg": Kernel(lambda i, s, n: [-i[0]], lambda i, s, o, g, n: [-g[0]]),
    "Torch.chunk": Kernel(
        lambda i, s, n: [np.ascontiguousarray(p) for p in np.split(i[0], s["chunks"], s["dim"])],
        lambda i, s, o, g, n: [np.concatenate(g, s["dim"])],
    ),
    "Torch.bincount": Kernel(
        lambda i, s, n: [np.bincount(i[0].reshape(-1), minlength=s["minlength"])]
    ),
    "Torch.argsort": Kernel(lambda i, s, n: [np.argsort(i[0], -1, kind="stable")]),
    "Torch.repeat_interleave": Kernel(lambda i, s, n: [np.repeat(i[0], i[1])]),
    "Tensor.to": Kernel(lambda i, s, n: [i[0].copy()], lambda i, s, o, g, n: [g[0]]),
    "Torch.norm": Kernel(lambda i, s, n: [np.sqrt(n.sum(np.square(i[0]).reshape(-1), 0))[0]]),
    "Torch.square": Kernel(lambda i, s, n: [i[0] * i[0]]),
    "Torch.sqrt": Kernel(lambda i, s, n: [np.sqrt(i[0])]),
    "Torch.clamp": Kernel(lambda i, s, n: [np.minimum(i[0], i[0].dtype.type(s["max"]))]),
    "Torch.stack": Kernel(lambda i, s, n: [np.stack(i)]),
    "Torch.reciprocal": Kernel(lambda i, s, n: [1 / i[0]]),
    "Optimizer.AdamW": Kernel(_adamw),
}
"""Operators by the name that a dump of torch would give them."""
