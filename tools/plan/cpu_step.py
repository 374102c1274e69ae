"""Processor seconds of our own training step on one CPU thread: a sum, because operators follow each other there.

    t = a * products + b * elements + c * attention + d * parameters

`products` are multiply-adds of all matrices, forward and backward, in FLOP; `elements` what these products read and write,
which elementwise operators read and write again; `attention` FLOP of the causal half; `parameters` what the optimizer updates.
The four coefficients are seconds each, fitted to a few measured steps (`this_machine`).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from telechat_moe.tools.plan.architecture import Architecture
from telechat_moe.tools.plan.layout import Layout

TERMS = ("products", "elements", "attention", "parameters")


def _product(m: float, n: float, k: float) -> np.ndarray:
    return np.array([2.0 * m * n * k, m * n + m * k + n * k])


def terms(architecture: Architecture, layout: Layout) -> np.ndarray:
    """Return the four terms for one micro-batch's forward and backward and one update.

    Args:
        architecture: The model; attention is MLA.
        layout: Gives the micro-batch and, as `imbalance`, what experts compute over what is routed to them.
    """
    a, h = architecture, architecture.hidden
    t = float(layout.micro_batch * a.seq)
    layers, moe = len(a.layers) + a.mtp, a.moe_layers + a.mtp * (a.layers[-1] == "moe")
    dense = layers - moe
    attention = (
        _product(t, a.q_lora_rank, h)
        + _product(t, a.kv_lora_rank + a.qk_rope, h)
        + _product(t, a.heads * a.head_dim, a.q_lora_rank or h)
        + _product(t, a.heads * (a.qk_nope + a.value_dim), a.kv_lora_rank)
        + _product(t, h, a.heads * a.value_dim)
    )
    total = layers * attention + dense * (_product(t, 2 * a.ffn, h) + _product(t, h, a.ffn))
    if moe:
        rows = t * a.top_k / a.experts * layout.imbalance
        experts = _product(rows, 2 * a.moe_ffn, h) + _product(rows, h, a.moe_ffn)
        shared = _product(t, 2 * a.shared_width, h) + _product(t, h, a.shared_width)
        total = total + moe * (a.experts * experts + shared + _product(t, a.experts, h))
    total = total + (1 + a.mtp) * _product(t, a.vocab, h) + a.mtp * _product(t, h, 2 * h)
    scores = layers * t * a.seq * a.heads * (a.head_dim + a.value_dim)
    m = layout.micro_batches
    return np.array([3 * m * total[0], m * total[1], 3 * m * scores, float(a.parameters)])


def fit(cases: Sequence[tuple[Architecture, Layout]], seconds: Sequence[float]) -> dict[str, float]:
    """Return the coefficients, none negative, with the least sum of squared relative errors."""
    from scipy.optimize import nnls

    measured = np.asarray(seconds, dtype=np.float64)
    matrix = np.array([terms(a, x) for a, x in cases]) / measured[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    found, _ = nnls(matrix / scale, np.ones(len(measured)))
    return dict(zip(TERMS, (found / scale).tolist(), strict=True))


def predict(architecture: Architecture, layout: Layout, coefficients: Mapping[str, float]) -> float:
    """Return the seconds of a step."""
    weights = np.array([coefficients[name] for name in TERMS])
    return float(terms(architecture, layout) @ weights)
