"""Specify losses, attention, and the operators of experts."""

from typing import Any

import numpy as np

from benchmarks.align_bounds.inputs import Machine, Sample, Source, narrow
from benchmarks.align_bounds.specs.elementwise import sigmoid
from benchmarks.align_bounds.specs.reductions import log_softmax, softmax
from benchmarks.align_bounds.specs.table import spec


def _loss_sample(s: Source) -> Sample:
    n = s.length(16, 128)
    target = s.ids(n, max(8, s.size // 16))
    target[0] = -100
    return Sample(
        [s.x(len(target), n), target], {"reduction": str(s.rng.choice(["none", "mean", "sum"]))}
    )


def _nll(m: Machine, log_p: Any, target: Any, reduction: str) -> Any:
    keep = target != -100
    loss = np.where(keep, -log_p[np.arange(len(target)), np.where(keep, target, 0)], 0).astype(
        m.work
    )
    if reduction == "none":
        return loss
    total = m.r(m.sum(m.r(loss)))
    return total if reduction == "sum" else total / m.work(keep.sum())


def _nll_in_type(m: Machine, log_p: Any, target: Any, reduction: str) -> Any:
    """Return the loss summed in the tensors' type, as torch's CPU kernel does: each partial sum is rounded."""
    loss = _nll(m, log_p, target, "none")
    if reduction == "none":
        return loss
    total = m.work(0)
    for term in narrow(loss, m.dtype):
        total = narrow(total + term, m.dtype)
    return total if reduction == "sum" else total / m.work((target != -100).sum())


def _attention_sample(s: Source) -> Sample:
    n, d = s.length(16, 64), s.length(16, 64)
    heads = max(1, s.size // (n * d))
    top = 8.0 if s.kind != "subnormal" else None
    q, k, v = (s.x(1, heads, n, d, within=top) for _ in range(3))
    return Sample([q, k, v], {"is_causal": bool(s.rng.random() < 0.5)})


def _attention(m: Machine, q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    score = m.r(m.r(m.matmul(q, k.swapaxes(-1, -2))) * m.work(q.shape[-1] ** -0.5))
    if is_causal:
        score = np.where(np.tril(np.ones(score.shape[-2:], bool)), score, m.work(-np.inf))
    return m.matmul(m.r(softmax(m, score)), v)


def _flash(m: Machine, q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    """Return attention by tiles of keys, normalised by the running sum at the end (Dao et al. 2022)."""
    n = k.shape[-2]
    keep = (
        np.tril(np.ones((q.shape[-2], n), bool)) if is_causal else np.ones((q.shape[-2], n), bool)
    )
    top = np.full((*q.shape[:-1], 1), -1e30, m.work)
    total, out = np.zeros_like(top), np.zeros((*q.shape[:-1], v.shape[-1]), m.work)
    for i in range(0, n, 16):
        score = m.matmul(q, k[..., i : i + 16, :].swapaxes(-1, -2)) * m.work(q.shape[-1] ** -0.5)
        score = np.where(keep[:, i : i + 16], score, m.work(-np.inf))
        new = np.maximum(top, score.max(-1, keepdims=True))
        p, old = np.exp(score - new), np.exp(top - new)
        total = total * old + m.sum(p, -1, True)
        out = out * old + m.matmul(narrow_p(m, p), v[..., i : i + 16, :])
        top = new
    return out / total


def narrow_p(m: Machine, p: Any) -> Any:
    """Return probabilities rounded to the tensors' type, as a matrix unit reads them."""
    return m.r(p)


def _rotary(m: Machine, x: Any, cos: Any, sin: Any) -> Any:
    a, b = np.split(x, 2, -1)
    return x * cos + np.concatenate([-b, a], -1) * sin


def _permute_sample(s: Source) -> Sample:
    return Sample([s.x(s.rows(32), 32), s.ids(8, s.rows(32), 2)])


def _permute(m: Machine, x: Any, index: Any) -> Any:
    order = np.concatenate([np.flatnonzero(index.reshape(-1) == e) for e in range(8)])
    went = np.empty_like(order)
    went[order] = np.arange(len(order))
    return [x[order // 2], went]


def _unpermute_sample(s: Source) -> Sample:
    rows = s.rows(32)
    return Sample(
        [s.x(2 * rows, 32), s.rng.permutation(2 * rows)], {"probs": s.x(rows, 2, within=1.0)}
    )


def _unpermute(m: Machine, x: Any, went: Any, probs: Any) -> Any:
    rows = x[went].reshape(-1, 2, x.shape[-1]) * probs[..., None]
    return rows[:, 1] + rows[:, 0] if m.order == "backward" else rows[:, 0] + rows[:, 1]


spec(
    "cross_entropy",
    _loss_sample,
    lambda m, x, t, reduction: _nll(m, m.r(log_softmax(m, x)), t, reduction),
    lambda m, x, t, reduction: _nll_in_type(m, m.r(log_softmax(m, x)), t, reduction),
    torch="cross_entropy",
)
spec("nll_loss", _loss_sample, _nll, _nll_in_type, torch="nll_loss")


def _mse(m: Machine, x: Any, y: Any, reduction: str) -> Any:
    d = m.r(m.r(x - y) ** 2)
    total = d if reduction == "none" else m.r(m.sum(d.reshape(-1)))
    return total / m.work(x.size) if reduction == "mean" else total


spec(
    "mse_loss",
    lambda s: Sample(
        [s.x(s.rows(64), 64, within=50.0), s.x(s.rows(64), 64, within=50.0)],
        {"reduction": str(s.rng.choice(["none", "mean"]))},
    ),
    _mse,
    torch="mse_loss",
)
spec(
    "scaled_dot_product_attention",
    _attention_sample,
    _attention,
    _flash,
    torch="scaled_dot_product_attention",
)
spec(
    "swiglu",
    lambda s: Sample([s.x(s.rows(64), 128, within=100.0)]),
    lambda m, x: x[:, :64] * sigmoid(x[:, :64]) * x[:, 64:],
    lambda m, x: x[:, :64] / (1 + np.exp(-x[:, :64])) * x[:, 64:],
)
spec(
    "rotary_mul",
    lambda s: Sample([s.x(s.rows(64), 64), s.x(64, within=1.0), s.x(64, within=1.0)]),
    _rotary,
)
spec("moe_token_permute", _permute_sample, _permute)
spec("moe_token_unpermute", _unpermute_sample, _unpermute)
