"""Losses, attention, and the fused operators of mixture-of-experts models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from telechat_moe.tools.align.operators.approx import Approx, Array
from telechat_moe.tools.align.operators.elementwise import floating, integers, plain
from telechat_moe.tools.align.operators.joining import where
from telechat_moe.tools.align.operators.reductions import log_softmax, softmax, softmax_gradient
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, op


def _picked(log_p: Approx, target: Any, ignored: int, weight: Any, reduction: str) -> Approx:
    classes = log_p.moved(lambda x: np.moveaxis(x, 1, -1)) if len(log_p.shape) > 2 else log_p
    rows = classes.reshape(-1, classes.shape[-1])
    label = integers(target).reshape(-1)
    keep = label != ignored
    place = np.arange(len(label)), np.where(keep, label, 0)
    loss: Approx = -rows[place].times(keep.astype(np.float64))
    factor = keep.astype(np.float64)
    if weight is not None:
        factor = factor * plain(weight)[place[1]]
        loss = loss * factor
    if reduction == "none":
        return loss.reshape(*np.shape(plain(target)))
    loss = loss.moved(lambda x: x)
    loss.accumulated = loss.stored  # torch's CPU kernel accumulates in the narrow type
    return loss.sum() if reduction == "sum" else loss.sum() / factor.sum()


def log_probabilities_and_loss(a: Arguments) -> tuple[Approx, Approx]:
    """Return the logarithms of the probabilities, and their cross entropy with the labels."""
    x = floating(a.input)
    if a.label_smoothing or plain(a.target).dtype.kind == "f":
        raise NotJudgedError("cross entropy with smoothed or soft labels")
    log_p = log_softmax(x, 1 if len(x.shape) > 1 else 0)
    return log_p, _picked(log_p, a.target, int(a.ignore_index), a.weight, a.reduction)


_LABELS = "ignore_index=-100 reduction='mean'"
_OLD = "label_smoothing=0.0 size_average=None reduce=None"
op("cross_entropy", f"input target | weight=None {_LABELS} {_OLD}", stores=True)(
    lambda a: log_probabilities_and_loss(a)[1]
)
op("nll_loss", f"input target weight=None | {_LABELS}", stores=True)(
    lambda a: _picked(floating(a.input), a.target, int(a.ignore_index), a.weight, a.reduction)
)


@op("mse_loss", "input target | reduction='mean'", stores=True)
def _mse(a: Arguments) -> Any:
    d = floating(a.input) - a.target
    square = d * d
    return {"none": square, "sum": square.sum(), "mean": square.mean()}[a.reduction]


@op(
    "scaled_dot_product_attention",
    "query key value attn_mask=None dropout_p=0.0 is_causal=False | scale=None enable_gqa=False",
    stores=True,
)
def _attention(a: Arguments) -> Any:
    """Compute ``softmax(q k^T scale + mask) v``; heads of keys are repeated if there are fewer."""
    if a.dropout_p:
        raise NotJudgedError("attention with dropout")
    qkv = floating(a.query), floating(a.key), floating(a.value)
    scale = qkv[0].shape[-1] ** -0.5 if a.scale is None else float(plain(a.scale))
    if a.is_causal or a.attn_mask is None:
        return attend(qkv, scale, Mask(2 if a.is_causal else 0))[0]
    if isinstance(a.attn_mask, Approx):
        return attend(qkv, scale, Mask(), a.attn_mask, inside=False)[0]
    return attend(qkv, scale, Mask(given=~plain(a.attn_mask).astype(bool)))[0]


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees."""

    # Ascend's `sparse_mode`: 0, 1 and 5 take the mask as it is; 2 and 3 are causal from the upper left and the lower
    # right; 4 is a band from the lower right; 6 is 3 and a prefix
    mode: int = 0
    before: int = -1  # keys of the band before the query's own; negative: all
    after: int = -1  # keys of the band after it; negative: all
    # True or 1 where a key is hidden; `[S, S]` or with dimensions before
    given: Array | None = None
    prefix: Sequence[int] = ()  # keys of each batch that all queries see

    def seen(self, queries: int, keys: int) -> Array | None:
        """Return ``[..., queries, keys]``; None: all keys are seen."""
        row, column = np.arange(queries)[:, None], np.arange(keys)
        if self.mode in (0, 1, 5):
            return None if self.given is None else ~self.given[..., :queries, :keys].astype(bool)
        if self.mode == 2:
            return column <= row
        row = row + keys - queries
        if self.mode == 3:
            return column <= row
        if self.mode == 4:
            before = column >= row - self.before if self.before >= 0 else True
            return np.broadcast_to(
                before & (column <= row + self.after if self.after >= 0 else True), (queries, keys)
            )
        if self.mode == 6 and len(self.prefix):
            early = column < np.asarray(self.prefix).reshape(-1, 1, 1, 1)
            return (column <= row) | early
        raise NotJudgedError(f"attention with sparse_mode {self.mode}")


def attend(
    qkv: tuple[Approx, Approx, Approx],
    scale: float,
    mask: Mask,
    bias: Any = None,
    inside: bool = True,
) -> tuple[Approx, Approx, Array | None]:
    """Return ``softmax(scale q k^T) v``, the scores, and which queries see nothing; all ``[..., N, S, D]``.

    Args:
        bias: Added to the scores, before they are scaled if ``inside``.
    """
    q, k, v = qkv
    if k.shape[-3] != q.shape[-3]:
        times = q.shape[-3] // k.shape[-3]
        k, v = (x.moved(lambda y: np.repeat(y, times, -3), True) for x in (k, v))
    score = q.matmul(k.swap(-1, -2))
    if bias is not None and inside:
        score = score + bias
    score = score * scale
    if bias is not None and not inside:
        score = score + bias
    visible = mask.seen(q.shape[-2], k.shape[-2])
    if visible is None:
        return weighted(score, v), score, None
    alone = ~visible.any(-1, keepdims=True)
    score = where(np.broadcast_to(visible | alone, score.shape), score, -np.inf)
    y = weighted(score, v)
    if alone.any():  # what sees nothing gets nothing
        y = y.times(np.broadcast_to(~alone, (*score.shape[:-1], 1)).astype(np.float64))
    return y, score, alone


def weighted(score: Approx, v: Approx) -> Approx:
    """Return ``softmax(score) v``; its gradient uses row sums of scores, or of the output like FlashAttention."""
    p = softmax(score, -1)
    result = p.matmul(v)
    p, y, values = p.stop(), result.stop(), v.stop()

    def back(g: Approx) -> Approx:
        coming = g.matmul(values.swap(-1, -2))
        plain, flash = (coming * p).sum(-1, True), (g * y).sum(-1, True)
        errors = np.hypot(plain.sigma, flash.sigma), plain.limit + flash.limit
        total = plain.like(plain.value, *errors)
        return softmax_gradient(p, coming, total)

    result.parents = ((score, back), result.parents[1])
    return result


@op("swiglu npu_swiglu Swiglu", "input dim=-1")
def _swiglu(a: Arguments) -> Any:
    """Compute ``silu(first half) * second half``."""
    x = floating(a.input)
    half = x.shape[int(a.dim)] // 2
    gate, up = (
        x.moved(lambda v, b=b: v.take(np.arange(b, b + half), int(a.dim)), True) for b in (0, half)
    )
    return gate * gate.sigmoid() * up


@op(
    "rotary_mul npu_rotary_mul RotaryPositionEmbedding apply_rotary_pos_emb_one",
    "input cos sin mode='half' | rotary_mode=None",
)
def _rotary(a: Arguments) -> Any:
    """Compute ``x cos + rotate(x) sin``, with halves or pairs."""
    pairs = a.mode in ("interleave", 1) or a.rotary_mode == "interleave"
    return rotate(floating(a.input), a.cos, a.sin, pairs)


def rotate(x: Approx, cos: Any, sin: Any, pairs: bool) -> Approx:
    """Turn neighbours (``pairs``), or the elements of both halves, by angles: ``x cos + y sin``, where y holds the other of each pair."""
    n = x.shape[-1]
    even = np.arange(0, n, 2) if pairs else np.arange(n // 2)
    odd = even + 1 if pairs else even + n // 2
    order, sign = np.empty(n, np.int64), np.empty(n)
    order[even], order[odd], sign[even], sign[odd] = odd, even, -1.0, 1.0
    rotated = x.moved(lambda v: v[..., order]).times(sign)
    return x * cos + rotated * sin


@op(
    "moe_token_permute npu_moe_token_permute MoeTokenPermute",
    "tokens index num_out_tokens=None padded_mode=False",
)
def _permute(a: Arguments) -> Any:
    """Return the rows sorted by expert, and the new row of each."""
    x, index = floating(a.tokens), integers(a.index)
    top_k = 1 if index.ndim == 1 else index.shape[1]
    order = np.argsort(index.reshape(-1), kind="stable")
    went = np.argsort(order, kind="stable")
    count = int(plain(a.num_out_tokens)) if a.num_out_tokens else len(order)
    pairs = order[:count] if count > 0 else order[: len(order) + count]
    return [x[pairs // top_k], went]


@op(
    "moe_token_unpermute npu_moe_token_unpermute MoeTokenUnpermute",
    "permuted_tokens sorted_indices probs=None | padded_mode=False restore_shape=None",
)
def _unpermute(a: Arguments) -> Any:
    """Return the weighted sum of each token's rows."""
    x, went = floating(a.permuted_tokens), integers(a.sorted_indices)
    top_k = 1 if a.probs is None else plain(a.probs).shape[-1]
    row = np.where(went < x.shape[0], went, -1).reshape(-1, top_k)
    return combine_rows(x, row, None if a.probs is None else floating(a.probs))


def combine_rows(y: Approx, row: Any, weight: Approx | None, bias: Approx | None = None) -> Approx:
    """Return the weighted sum of each token's rows; ``row`` is ``[T, K]``, a bias ``[T, K, H]``."""
    parts = y[np.maximum(row, 0).reshape(-1)].reshape(*row.shape, y.shape[-1])
    parts = parts.times((row >= 0).astype(np.float64)[..., None])
    parts = parts if bias is None else parts + bias
    return (parts if weight is None else parts * weight.reshape(*row.shape, 1)).sum(1)
