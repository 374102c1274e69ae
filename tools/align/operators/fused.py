"""Losses and the fused operators of mixture-of-experts models: of torch, Ascend (torch_npu, MindSpore) and NVIDIA.

Sources: Ascend/op-plugin, docs/zh/custom_APIs; mindspore.ops; NVIDIA/TransformerEngine; NVIDIA/apex.
"""

from typing import Any

import numpy as np

from telechat_moe.tools.align.operators.approx import Approx, Array, concatenate, where
from telechat_moe.tools.align.operators.elementwise import floating, integers, plain
from telechat_moe.tools.align.operators.reductions import log_softmax, softmax
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, op
from telechat_moe.tools.align.operators.shapes import cut


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


@op("swiglu npu_swiglu Swiglu", "input dim=-1")
def _swiglu(a: Arguments) -> Any:
    """Compute ``silu(first half) * second half``."""
    x, dim = floating(a.input), int(a.dim)
    gate, up = cut(x, [x.shape[dim] // 2] * 2, dim)
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


def highest(x: Array, count: int) -> Array:
    """Return the indices of the highest values of each row, of equal ones the first."""
    return np.argsort(-x, 1, kind="stable")[:, :count]


def open_groups(choice: Array, groups: int, count: int, of_group: int) -> Array:
    """Return which experts are in the groups whose ``of_group`` best experts have the highest sums; ``[T, E]``."""
    inside = np.sort(choice.reshape(len(choice), groups, -1), -1)
    best = highest(inside[..., ::-1][..., :of_group].sum(-1, dtype=choice.dtype), count)
    mask = np.zeros((len(choice), groups), bool)
    np.put_along_axis(mask, best, True, 1)
    return np.repeat(mask, choice.shape[1] // groups, 1)


@op("scaled_upper_triang_masked_softmax", "input scale=1.0", stores=True)
def _causal_softmax(a: Arguments) -> Any:
    """Megatron's and apex's ``softmax(scale x)`` below the diagonal."""
    x = floating(a.input) * float(plain(a.scale))
    visible = np.broadcast_to(np.tri(*x.shape[-2:], dtype=bool), x.shape)
    return softmax(where(visible, x, -np.inf), -1)


@op("scaled_masked_softmax scaled_softmax", "input mask=None scale=1.0", stores=True)
def _masked_softmax(a: Arguments) -> Any:
    """Megatron's and apex's ``softmax(scale x)``, -10,000 where the mask is true."""
    mask, scale = (a.mask, a.scale) if np.ndim(plain(a.mask)) else (None, a.mask)
    x = floating(a.input) * float(plain(a.scale if scale is None else scale))
    return softmax(x if mask is None else where(plain(mask).astype(bool), x.constant(-1e4), x), -1)


@op("npu_add_rms_norm AddRmsNorm add_rms_norm", "x1 x2 gamma epsilon=1e-06", stores=True)
def _add_rms_norm(a: Arguments) -> Any:
    """Return the norm of ``x1 + x2``, the reciprocal root, and the sum."""
    total = floating(a.x1) + a.x2
    dims = tuple(range(-len(floating(a.gamma).shape), 0))
    inverse = ((total * total).mean(dims, True) + float(plain(a.epsilon))).rsqrt()
    return [total * inverse * a.gamma, inverse, total]


@op(
    "npu_apply_rotary_pos_emb apply_rotary_pos_emb",
    "query key cos sin position_ids=None unsqueeze_dim=1 | layout='BSND' rotary_mode='half'",
)
def _rotary_pair(a: Arguments) -> Any:
    """Rotate queries and keys; transformers gives cosines without the dimension of heads."""
    if a.rotary_mode not in ("half", "interleave"):
        raise NotJudgedError(f"rotary positions with mode {a.rotary_mode!r}")
    cos, sin = floating(a.cos), floating(a.sin)
    if len(cos.shape) == len(floating(a.query).shape) - 1:
        dim = int(a.unsqueeze_dim)
        cos, sin = (x.moved(lambda v: np.expand_dims(v, dim)) for x in (cos, sin))
    pairs = a.rotary_mode == "interleave"
    return [rotate(floating(x), cos, sin, pairs) for x in (a.query, a.key)]


@op(
    "fused_apply_rotary_pos_emb FusedRoPEFunc",
    "input freqs tensor_format='sbhd' interleaved=False | cu_seqlens=None",
)
def _rotary_of_angles(a: Arguments) -> Any:
    """Transformer Engine's and apex's: angles ``[S, 1, 1, R]`` for the first R elements of ``[S, B, N, D]``."""
    if a.tensor_format != "sbhd" or a.cu_seqlens is not None:
        raise NotJudgedError(f"fused rotary positions with format {a.tensor_format!r}")
    x, angle = floating(a.input), floating(a.freqs)
    cos, sin, n = angle.cos(), angle.sin(), angle.shape[-1]
    turned = rotate(x[..., :n], cos, sin, bool(a.interleaved))
    return turned if n == x.shape[-1] else concatenate([turned, x[..., n:]], -1)


def _legal_choice(score: Approx, best: Array, record: Any) -> Array:
    """Return the program's choice ``[T, K]`` where the errors of the scores ``[T, E]`` allow it, else the best."""
    if record is None:
        return best
    choice = record.load().astype(np.int64)
    if choice.shape != best.shape or choice.min() < 0 or choice.max() >= score.shape[1]:
        return best
    # Kernels sort scores that they rounded to float32.
    value, slack = score.value, score.bound("float32")
    kth, around = (np.take_along_axis(x, best[:, -1:], 1) for x in (value, slack))
    picked, loose = (np.take_along_axis(x, choice, 1) for x in (value, slack))
    once = np.array([len(set(row)) == len(row) for row in choice.tolist()])
    legal = (picked + loose >= kth - around).all(1) & once
    return np.where(legal[:, None], choice, best)


@op(
    "npu_moe_gating_top_k moe_gating_top_k MoeGatingTopK",
    "x k | bias=None input_ids=None tid2eid=None k_group=1 group_count=1 group_select_mode=0 renorm=0 norm_type=0 "
    "out_flag=False routed_scaling_factor=1.0 eps=1e-20",
    stores=True,
)
def _gating(a: Arguments) -> Any:
    """Return the weights and indices of the chosen experts, and the scores."""
    if a.tid2eid is not None or a.renorm:
        raise NotJudgedError("gating by a table of tokens, or renormalized")
    x = floating(a.x)
    score = x.sigmoid() if int(a.norm_type) == 1 else softmax(x, 1)
    biased = score.stop() if a.bias is None else score.stop() + a.bias
    of_group = 2 if int(a.group_select_mode) == 1 else 1
    open_experts = open_groups(biased.value, int(a.group_count), int(a.k_group), of_group)
    biased = where(open_experts, biased, -np.inf)
    best = highest(biased.value, int(a.k))
    index = _legal_choice(biased, best, a.made[1] if a.made and len(a.made) > 1 else None)
    weight = score.moved(lambda v: np.take_along_axis(v, index, 1), True)
    if int(a.norm_type) == 1:
        weight = weight / (weight.sum(1, True) + float(a.eps))
    return [weight * float(a.routed_scaling_factor), index, score]


@op(
    "npu_moe_gating_top_k_softmax moe_gating_top_k_softmax MoeGatingTopKSoftmax",
    "x finished=None k=1",
    stores=True,
)
def _gating_softmax(a: Arguments) -> Any:
    """Return the highest probabilities, their experts, and the number of each pair, counted token by token."""
    if a.finished is not None or len(floating(a.x).shape) != 2:
        raise NotJudgedError("gating of finished rows, or of three dimensions")
    score, k = softmax(floating(a.x), 1), int(a.k)
    index = _legal_choice(score.stop(), highest(score.value, k), a.made[1] if a.made else None)
    pair = np.arange(index.size).reshape(k, -1).T
    return [score.moved(lambda v: np.take_along_axis(v, index, 1), True), index, pair]


@op(
    "npu_moe_init_routing moe_init_routing MoeInitRouting",
    "x row_idx expert_idx active_num",
    exact=True,
)
def _init_routing(a: Arguments) -> Any:
    """Return the tokens sorted by expert, the new row of each pair, and the sorted experts."""
    x, row, expert = floating(a.x), integers(a.row_idx).reshape(-1), integers(a.expert_idx)
    order = np.argsort(expert.reshape(-1), kind="stable")
    pair = row[order]
    went = np.empty_like(pair)
    went[pair] = np.arange(len(pair))
    tokens, count = x.shape[0], min(int(plain(a.active_num)), x.shape[0]) * expert.shape[-1]
    return [x[pair[:count] % tokens], went, expert.reshape(-1)[order]]


_ROUTING = "x expert_idx active_num=-1 expert_capacity=-1 expert_num=-1 drop_pad_mode=0"


@op(
    "moe_init_routing_v2 MoeInitRoutingV2",
    f"{_ROUTING} expert_tokens_num_type=0 expert_tokens_num_flag=False",
    exact=True,
)
def _mindspore_routing(a: Arguments) -> Any:
    """``mindspore.ops.moe_init_routing_v2``: its flag 1 asks for running sums, 2 for counts."""
    flag = int(a.expert_tokens_num_type)
    settings: dict[str, Any] = {"row_idx_type": 0, "quant_mode": -1, "active_expert_range": []}
    return _routing(Arguments({**a.__dict__, **settings, "expert_tokens_num_type": int(flag != 1)}))


@op(
    "npu_moe_init_routing_v2",
    "x expert_idx | scale=None offset=None active_num=-1 expert_capacity=-1 expert_num=-1 drop_pad_mode=0 "
    "expert_tokens_num_type=0 expert_tokens_num_flag=False quant_mode=-1 active_expert_range=[] row_idx_type=0",
    exact=True,
)
def _routing(a: Arguments) -> Any:
    """Return the tokens sorted by expert, the row of each pair or the pair of each row, and the experts' tokens."""
    some = list(a.active_expert_range or ()) not in ([], [0, int(a.expert_num)])
    if int(a.quant_mode) != -1 or some:
        raise NotJudgedError("quantized routing, or to some of the experts")
    x, expert = floating(a.x), integers(a.expert_idx)
    K, flat, E = expert.shape[1], expert.reshape(-1), int(a.expert_num)
    pair = np.argsort(flat, kind="stable")
    if int(a.drop_pad_mode):
        return _with_capacity(x, flat, pair, K, E, int(a.expert_capacity))
    row_count = int(plain(a.active_num)) if int(plain(a.active_num)) > 0 else len(flat)
    went = pair if int(a.row_idx_type) == 1 else np.argsort(pair, kind="stable")
    count = np.bincount(flat, minlength=max(E, 0))
    tokens = count if int(a.expert_tokens_num_type) else count.cumsum()
    return [x[pair[:row_count] // K], went, tokens]


def _with_capacity(x: Approx, flat: Array, pair: Array, K: int, E: int, capacity: int) -> list[Any]:
    """Return ``[E, capacity, H]`` with zeros where an expert has fewer tokens; -1 for pairs that are dropped."""
    expert = flat[pair]
    number = np.arange(len(pair)) - np.searchsorted(expert, expert)  # among those of its expert
    fits = number < capacity
    went = np.full(len(flat), -1)
    went[pair[fits]] = (expert * capacity + number)[fits]
    source = np.full(E * capacity, -1)
    source[went[went >= 0]] = np.flatnonzero(went >= 0)
    rows = x[np.maximum(source, 0) // K].times((source >= 0).astype(np.float64)[:, None])
    return [rows.reshape(E, capacity, -1), went]


@op(
    "npu_moe_finalize_routing moe_finalize_routing MoeFinalizeRouting",
    "rows skip1=None skip2=None bias=None scales=None row=None expert=None drop_pad_mode=0 k=1",
)
def _finalize(a: Arguments) -> Any:
    """Return ``skip1 + skip2 + sum over k of scale (row + bias)`` for each token."""
    rows, rows_of_token = floating(a.rows), integers(a.row).reshape(-1)
    K = int(a.k) if a.scales is None else floating(a.scales).shape[1]
    by_slot = int(a.drop_pad_mode) < 2
    rows_of_token = rows_of_token.reshape(K, -1).T if by_slot else rows_of_token.reshape(-1, K)
    bias = None if a.bias is None else floating(a.bias)[integers(a.expert)]
    scales = None if a.scales is None else floating(a.scales)
    total = combine_rows(rows.reshape(-1, rows.shape[-1]), rows_of_token, scales, bias)
    for skip in (a.skip1, a.skip2):
        total = total if skip is None else total + skip
    return total


@op(
    "npu_moe_compute_expert_tokens moe_compute_expert_tokens MoeComputeExpertTokens",
    "experts num_expert",
    exact=True,
)
def _expert_tokens(a: Arguments) -> Any:
    """Return how many rows belong to the experts up to each one."""
    return np.bincount(integers(a.experts), minlength=int(plain(a.num_expert))).cumsum()


@op(
    "npu_cross_entropy_loss CrossEntropyLoss",
    "input target weight=None reduction='mean' ignore_index=-100 label_smoothing=0.0 lse_square_scale_for_zloss=0.0 "
    "return_zloss=False",
    stores=True,
)
def _cross_entropy(a: Arguments) -> Any:
    """Return the loss and the logarithms of the probabilities."""
    if a.lse_square_scale_for_zloss:
        raise NotJudgedError("cross entropy with a z-loss")
    log_p, loss = log_probabilities_and_loss(a)
    return [loss, log_p]
