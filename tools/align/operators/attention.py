"""Attention as one operator: torch's, torch_npu's, MindSpore's and flash-attn's, by their documentation.

Sources: Ascend/op-plugin, npu_fusion_attention; mindspore.ops.flash_attention_score; Dao-AILab/flash-attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from telechat_moe.tools.align.operators.approx import Approx, Array, concatenate, where
from telechat_moe.tools.align.operators.elementwise import floating, integers, plain
from telechat_moe.tools.align.operators.reductions import softmax, softmax_gradient
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, op, primitive


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
    return attend(qkv, scale, Mask(hidden=~plain(a.attn_mask).astype(bool)))[0]


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees."""

    # Ascend's `sparse_mode`: 0, 1 and 5 take the mask as it is; 2 and 3 are causal from the upper left and the lower
    # right; 4 is a band from the lower right; 6 is 3 and a prefix
    mode: int = 0
    before: int = -1  # keys of the band before the query's own; negative: all
    after: int = -1  # keys of the band after it; negative: all
    # True or 1 where a key is hidden; `[S, S]` or with dimensions before
    hidden: Array | None = None
    prefix: Sequence[int] = ()  # keys of each batch that all queries see

    def seen(self, queries: int, keys: int) -> Array | None:
        """Return ``[..., queries, keys]``; None: all keys are seen."""
        row, column = np.arange(queries)[:, None], np.arange(keys)
        if self.mode in (0, 1, 5):
            return None if self.hidden is None else ~self.hidden[..., :queries, :keys].astype(bool)
        if self.mode == 2:
            return column <= row
        row = row + keys - queries
        if self.mode == 3:
            return column <= row
        if self.mode == 4:
            before = column >= row - self.before if self.before >= 0 else True
            after = column <= row + self.after if self.after >= 0 else True
            return np.broadcast_to(before & after, (queries, keys))
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

    A bias is added to the scores, before they are scaled if ``inside``.
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


def _heads(x: Approx, layout: str, heads: int) -> Approx:
    """Return a tensor as ``[B, N, S, D]``."""
    if layout in ("BSH", "SBH"):
        x, layout = x.reshape(*x.shape[:2], heads, -1), f"{layout[:2]}ND"
    if sorted(layout) != ["B", "D", "N", "S"] or len(x.shape) != 4:
        raise NotJudgedError(f"attention with layout {layout} and shape {list(x.shape)}")
    return x.transpose(*(layout.index(c) for c in "BNSD"))


def _laid_out(y: Approx, layout: str) -> Approx:
    """Return ``[B, N, S, D]`` in a layout."""
    order = f"{layout[:2]}ND" if layout in ("BSH", "SBH") else layout
    y = y.transpose(*("BNSD".index(c) for c in order))
    return y.reshape(*y.shape[:2], -1) if order != layout else y


def _packed(
    q: Approx, k: Approx, v: Approx, scale: float, mask: Mask, ends: tuple[Any, Any]
) -> Approx:
    """Return attention within sequences that lie one after the other, ``[T, N, D]``; ``ends`` of queries and of keys."""
    parts: list[Approx] = []
    borders = [pairwise([0, *integers(e).reshape(-1).tolist()]) for e in ends]
    for (b, e), (c, f) in zip(*borders, strict=True):
        if e > b:
            q1, k1, v1 = (_heads(x[None], "BSND", 0) for x in (q[b:e], k[c:f], v[c:f]))
            y = attend((q1, k1, v1), scale, mask)[0]
            parts.append(y.reshape(y.shape[1], y.shape[2], -1).transpose(1, 0, 2))
    return concatenate(parts, 0)


def _sums(score: Approx, alone: Array | None) -> list[Approx]:
    """Return each row's maximum and sum of exponentials, which are not defined where nothing is seen."""
    argmax: Array = score.value.argmax(-1)[..., None]
    top = score.stop().moved(partial(np.take_along_axis, indices=argmax, axis=-1), True)
    sums = [top, (score.stop() - top).exp().sum(-1, True)]
    if alone is not None and alone.any():
        unknown = [np.where(np.broadcast_to(alone, x.shape), np.inf, 0.0) for x in sums]
        sums = [x.plus(error) for x, error in zip(sums, unknown, strict=True)]
    return sums


def _ascend_attention(a: Arguments) -> list[Any]:
    """Return the result, the rows' maxima and sums, and what is reserved."""
    if a.keep_prob != 1 or a.padding_mask is not None or a.__dict__.get("sink") is not None:
        raise NotJudgedError("attention with dropout, a padding mask or sinks")
    q, k, v = floating(a.query), floating(a.key), floating(a.value)
    layout, count = str(a.input_layout), int(a.head_num)
    hidden = None if a.atten_mask is None else plain(a.atten_mask)
    prefixes = () if a.prefix is None else integers(a.prefix).reshape(-1).tolist()
    mode = int(a.sparse_mode) if hidden is not None else 0  # without a mask everything is seen
    mask = Mask(mode, int(a.pre_tokens), int(a.next_tokens), hidden, prefixes)
    scale = float(plain(a.scale))
    if layout == "TND":
        if a.pse is not None or a.actual_seq_qlen is None:
            raise NotJudgedError("attention in the layout TND with positions, or without lengths")
        return [_packed(q, k, v, scale, mask, (a.actual_seq_qlen, a.actual_seq_kvlen))]
    width = q.shape[-1] // count  # of a head, in the layouts without heads
    of_keys = k.shape[-1] // width if layout in ("BSH", "SBH") else 0
    q, k, v = (_heads(x, layout, n) for x, n in ((q, count), (k, of_keys), (v, of_keys)))
    if int(a.pse_type) > 1:
        raise NotJudgedError(f"attention with pse_type {a.pse_type}")
    y, score, alone = attend((q, k, v), scale, mask, a.pse, bool(a.pse_type))
    top, total = _sums(score, alone)
    eight = [x.moved(lambda z: np.repeat(z, 8, -1), True) for x in (top, total)]
    return [_laid_out(y, layout), *eight, np.zeros(0)]


_LIMITS = "pre_tokens=2147483647 next_tokens=2147483647 inner_precise=0"

op(
    "npu_fusion_attention npu_fusion_attention_v2 speed_fusion_attention",
    "query key value head_num input_layout pse=None padding_mask=None atten_mask=None scale=1.0 keep_prob=1.0 "
    f"{_LIMITS} prefix=None actual_seq_qlen=None actual_seq_kvlen=None sparse_mode=0 gen_mask_parallel=True "
    "sync=False | softmax_layout='' sink=None dropout_mask=None seed=0 offset=0 pse_type=1 q_start_idx=None "
    "kv_start_idx=None",
    stores=True,
)(_ascend_attention)


@op(
    "flash_attention_score",
    "query key value head_num pse=None drop_mask=None padding_mask=None atten_mask=None prefix=None "
    f"actual_seq_qlen=None actual_seq_kvlen=None keep_prob=1.0 scale=1.0 {_LIMITS} input_layout='BSH' sparse_mode=0 | "
    "pse_type=1",
    stores=True,
)
def _flash_attention_score(a: Arguments) -> Any:
    """``mindspore.ops.flash_attention_score``, which returns the result alone."""
    return _ascend_attention(a)[0]


@primitive(
    "FlashAttentionScore",
    "query key value pse=None drop_mask=None padding_mask=None atten_mask=None prefix=None actual_seq_qlen=None "
    f"actual_seq_kvlen=None | keep_prob=1.0 sparse_mode=0 pse_type=1 {_LIMITS}",
    stores=True,
    input_layout=lambda a: ("BNSD", "BSND") if len(a.query.shape) == 4 else ("BSH", "SBH", "TND"),
    head_num=lambda a: sorted(
        {*a.query.shape[1:-1], *(n for n in (8, 16, 32, 64, 128) if not a.query.shape[-1] % n)}
    ),
    sparse_mode=lambda a: (0,) if a.atten_mask is None else (0, 2, 3, 4),
    scale=lambda a: [w**-0.5 for w in (16, 32, 64, 96, 128, 192, 256)] + [1.0],
)
def _primitive_attention(a: Arguments) -> Any:
    y, *others = _ascend_attention(a)
    return [*others, y]


@op(
    "flash_attn_func _flash_attn_forward",
    "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False",
    stores=True,
)
def _flash_attn(a: Arguments) -> Any:
    """flash-attn's ``[B, S, N, D]``; causal from the lower right."""
    q, k, v = (_heads(floating(x), "BSND", 0) for x in (a.q, a.k, a.v))
    return _laid_out(attend((q, k, v), *_of_flash_attn(a, q))[0], "BSND")


@op(
    "flash_attn_varlen_func",
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 softmax_scale=None causal=False "
    "window_size=(-1,-1) softcap=0.0 alibi_slopes=None deterministic=False return_attn_probs=False block_table=None",
    stores=True,
)
def _flash_attn_packed(a: Arguments) -> Any:
    ends = integers(a.cu_seqlens_q)[1:], integers(a.cu_seqlens_k)[1:]
    q = floating(a.q)
    return _packed(q, floating(a.k), floating(a.v), *_of_flash_attn(a, q), ends)


def _of_flash_attn(a: Arguments, q: Approx) -> tuple[float, Mask]:
    if a.dropout_p or a.softcap or a.alibi_slopes is not None:
        raise NotJudgedError("attention with dropout, a soft cap or ALiBi")
    scale = q.shape[-1] ** -0.5 if a.softmax_scale is None else float(plain(a.softmax_scale))
    before, after = (int(x) for x in a.window_size)
    return scale, Mask(4, before, 0 if a.causal else after)
