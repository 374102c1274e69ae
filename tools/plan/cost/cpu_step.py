"""Predict the processor seconds of our own training step on one CPU thread.

The time is a sum, because one thread runs one operator after the other:

    t = a * products + b * elements + c * attention + d * parameters + e * layers

`products` are multiply-adds of all matrices, forward and backward, in FLOP; `elements` are what these products read
and write, and elementwise operators read and write too; `attention` is the FLOP of the causal half; `parameters` are
what the optimizer updates; `layers` counts layers, because each launches operators, whatever its size. The five
coefficients are seconds each, fitted to a few measured steps (`this_machine`).

The plain operators take the experts' rows in blocks (`DroplessDispatch`) and compute on padding, which is counted.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import Floats
from telechat_moe.tools.plan.cost.layout import Layout

TERMS = ("products", "elements", "attention", "parameters", "layers")


def _product(m: float, n: float, k: float) -> Floats:
    return np.array([2.0 * m * n * k, m * n + m * k + n * k])


def _experts(a: Architecture, x: Layout) -> tuple[float, float]:
    """Return the experts' matrix products in the forward pass, and the rows of each product."""
    pairs = x.micro_batch * a.seq * a.top_k
    if x.stack.fused:
        return a.experts, pairs / a.experts * x.imbalance
    rows = max(8, min(256, 3 * pairs // (8 * a.experts)) // 8 * 8)
    return (pairs + a.experts * (rows - 1)) // rows, rows


def terms(architecture: Architecture, layout: Layout) -> Floats:
    """Return the five terms of the forward and backward passes of a step's micro-batches and one update, on one device.

    Attention is MLA; the layout's `imbalance` says what fused experts compute over what is routed to them.
    """
    a, x, h = architecture, layout, architecture.hidden
    t = float(x.micro_batch * a.seq)
    layers, moe = len(a.layers) + a.mtp, a.moe_layers + a.mtp * (a.layers[-1] == "moe")
    attention = (
        _product(t, a.q_lora_rank, h)
        + _product(t, a.kv_lora_rank + a.qk_rope, h)
        + _product(t, a.heads * a.head_dim, a.q_lora_rank or h)
        + _product(t, a.heads * (a.qk_nope + a.value_dim), a.kv_lora_rank)
        + _product(t, h, a.heads * a.value_dim)
    )
    dense = _product(t, 2 * a.ffn, h) + _product(t, h, a.ffn)
    total = layers * attention + (layers - moe) * dense
    if moe:
        count, rows = _experts(a, x)
        experts = _product(rows, 2 * a.moe_ffn, h) + _product(rows, h, a.moe_ffn)
        shared = _product(t, 2 * a.shared_width, h) + _product(t, h, a.shared_width)
        total = total + moe * (count * experts + shared + _product(t, a.experts, h))
    total = total + (1 + a.mtp) * _product(t, a.vocab, h) + a.mtp * _product(t, h, 2 * h)
    scores = layers * t * a.seq * a.heads * (a.head_dim + a.value_dim)
    m = x.micro_batches
    return np.array([3 * m * total[0], m * total[1], 3 * m * scores, a.parameters, m * layers])


def fit(cases: Sequence[tuple[Architecture, Layout]], seconds: Sequence[float]) -> dict[str, float]:
    """Return the coefficients, none negative, with the least sum of squared relative errors."""
    from scipy.optimize import nnls

    measured = np.asarray(seconds, dtype=np.float64)
    matrix = np.array([terms(a, x) for a, x in cases]) / measured[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    coefficients, _ = nnls(matrix / scale, np.ones(len(measured)))
    return dict(zip(TERMS, (coefficients / scale).tolist(), strict=True))


def predict(architecture: Architecture, layout: Layout, coefficients: Mapping[str, float]) -> float:
    """Return the seconds of a step; a coefficient that was not fitted counts nothing."""
    weights = np.array([coefficients.get(name, 0.0) for name in TERMS])
    return float(terms(architecture, layout) @ weights)
