"""Predict the processor seconds of our own training step on one CPU thread.

The time is a sum, because one thread runs one operator after the other:

    t = a * products + b * elements + c * attention + d * parameters + e * layers (+ AllReduces between processes)

`products` are multiply-adds of all matrices, forward and backward, in FLOP; `elements` are what these products read
and write, and elementwise operators read and write too; `attention` is the FLOP of the causal half; `parameters` are
what the optimizer updates; `layers` counts layers, because each launches operators, whatever its size. The five
coefficients are seconds each, fitted to a few measured steps (`this_machine`).

With several processes (`run-sharded`) the terms are those of one rank, and every collective is an AllReduce, which
`AllReduces` counts. There, experts take a device's tokens in buffers that no routing can overflow
(`CapacityExchange`); in one process the plain operators take blocks of rows (`DroplessDispatch`). Both compute on
padding, which is counted.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import Array
from telechat_moe.tools.plan.cost.expected_calls import Calls
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.weights import stage_elements

TERMS = ("products", "elements", "attention", "parameters", "layers")


class AllReduces(NamedTuple):
    """The AllReduces that one process executes in a step."""

    calls: int
    bytes: int


def _product(m: float, n: float, k: float) -> Array:
    return np.array([2.0 * m * n * k, m * n + m * k + n * k])


def _device_tokens(a: Architecture, x: Layout) -> float:
    """Return the tokens that a device sends to experts."""
    return x.micro_batch * a.seq / (x.cp * (x.tp if x.etp == 1 else 1))


def _experts(a: Architecture, x: Layout) -> tuple[float, float]:
    """Return the experts' matrix products on a device in the forward pass, and the rows of each product."""
    tokens = _device_tokens(a, x)
    if x.devices > 1:
        return a.experts / x.ep, x.ep * tokens
    pairs = int(tokens) * a.top_k
    if x.stack.fused:
        return a.experts, pairs / a.experts * x.imbalance
    rows = max(8, min(256, 3 * pairs // (8 * a.experts)) // 8 * 8)
    return (pairs + a.experts * (rows - 1)) // rows, rows


def terms(architecture: Architecture, layout: Layout) -> Array:
    """Return the five terms for one micro-batch's forward and backward and one update, in one process.

    Attention is MLA; the layout has one stage, and its `imbalance` says what fused experts compute over what is routed
    to them.
    """
    a, x, h = architecture, layout, architecture.hidden
    t = float(x.micro_batch * a.seq / x.cp)
    own = t / x.tp if x.sequence_parallel else t
    layers, moe = len(a.layers) + a.mtp, a.moe_layers + a.mtp * (a.layers[-1] == "moe")
    dense, heads = layers - moe, a.heads / x.tp
    attention = (
        _product(own, a.q_lora_rank, h)
        + _product(own, a.kv_lora_rank + a.qk_rope, h)
        + _product(t, heads * a.head_dim, a.q_lora_rank or h)
        + _product(t, heads * (a.qk_nope + a.value_dim), a.kv_lora_rank)
        + _product(t, h, heads * a.value_dim)
    )
    ffn = a.ffn / x.tp
    total = layers * attention + dense * (_product(t, 2 * ffn, h) + _product(t, h, ffn))
    if moe:
        count, rows = _experts(a, x)
        inner, shared = a.moe_ffn / x.etp, a.shared_width * own / t
        experts = _product(rows, 2 * inner, h) + _product(rows, h, inner)
        beside = _product(t, 2 * shared, h) + _product(t, h, shared)
        total = total + moe * (count * experts + beside + _product(own, a.experts, h))
    total = total + (1 + a.mtp) * _product(t, a.vocab / x.tp, h) + a.mtp * _product(own, h, 2 * h)
    scores = layers * t * a.seq * heads * (a.head_dim + a.value_dim)
    m, held = x.micro_batches, a.parameters if x.devices == 1 else stage_elements(a, x)[0]
    return np.array([3 * m * total[0], m * total[1], 3 * m * scores, float(held), m * layers])


def all_reduces(architecture: Architecture, layout: Layout) -> AllReduces:
    """Return what a process exchanges in a step, where the CPU executes every collective as an AllReduce.

    An all-to-all of the experts becomes one AllReduce of the buffers of all its devices. Source: `telechat_moe.graph.rewrite`.
    """
    a, x = architecture, layout
    if x.devices == 1:
        return AllReduces(0, 0)
    width = 4 if x.compute == "fp32" else 2
    buffers = round(width * a.experts * _device_tokens(a, x) * a.hidden) * x.ep
    calls = size = 0
    for call, times in Calls(a, x, None, width).of(0).items():
        calls += times
        size += times * (buffers if call.kind == "AlltoAllV" else call.bytes)
    return AllReduces(calls, size)


def fit(cases: Sequence[tuple[Architecture, Layout]], seconds: Sequence[float]) -> dict[str, float]:
    """Return the coefficients, none negative, with the least sum of squared relative errors."""
    from scipy.optimize import nnls

    measured = np.asarray(seconds, dtype=np.float64)
    matrix = np.array([terms(a, x) for a, x in cases]) / measured[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    found, _ = nnls(matrix / scale, np.ones(len(measured)))
    return dict(zip(TERMS, (found / scale).tolist(), strict=True))


def predict(
    architecture: Architecture,
    layout: Layout,
    coefficients: Mapping[str, float],
    start_s: float = 0.0,
    bandwidth: float = np.inf,
) -> float:
    """Return the seconds of a step in one process; a coefficient that was not fitted counts nothing.

    An AllReduce takes `start_s` seconds and moves `bandwidth` bytes a second.
    """
    weights = np.array([coefficients.get(name, 0.0) for name in TERMS])
    calls, size = all_reduces(architecture, layout)
    return float(terms(architecture, layout) @ weights) + calls * start_s + size / bandwidth
