"""Fused operators of Ascend and NVIDIA, replayed: torch functions written from their documentation stand for the kernels."""

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from recorded import calls, rank_dump, run_case
from replayed import replay

from telechat_moe.tools.align.dump.records import Phase
from telechat_moe.tools.align.judge.replay import replay_call

pytestmark = pytest.mark.torch

G = torch.Generator().manual_seed(5)


def x(*shape, grad=True):
    return torch.randn(shape, generator=G).requires_grad_(grad)


def ids(high, *shape):
    return torch.randint(0, high, shape, generator=G)


LIKE = torch.triu(
    torch.ones(64, 64, dtype=torch.bool), 1
)  # in place of the compressed mask, 2,048 wide


def npu_fusion_attention(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0,
    pre_tockens=2147483647, next_tockens=2147483647, prefix=None, sparse_mode=0,
):  # fmt: skip
    """torch_npu's formula in fp32: ``softmax(mask(scale (pse + q k^T))) v`` with what each sparse mode hides."""
    views = {
        "BNSD": lambda t, n: t,
        "BSND": lambda t, n: t.transpose(1, 2),
        "BSH": lambda t, n: t.unflatten(-1, (n, -1)).transpose(1, 2),
        "SBH": lambda t, n: t.unflatten(-1, (n, -1)).permute(1, 2, 0, 3),
    }
    width = query.shape[-1] // head_num if input_layout in ("BSH", "SBH") else query.shape[-1]
    of_keys = key.shape[-1] // width
    q, k, v = (
        views[input_layout](t, n) for t, n in ((query, head_num), (key, of_keys), (value, of_keys))
    )
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q.float() @ k.float().transpose(-1, -2)
    s = (s if pse is None else s + pse) * scale
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    off = k.shape[2] - q.shape[2]
    if atten_mask is not None:
        hidden = {
            0: lambda: atten_mask.bool(),
            2: lambda: j > i,
            3: lambda: j > i + off,
            4: lambda: (j > i + off + next_tockens) | (j < i + off - pre_tockens),
            6: lambda: (j > i + off) & (j >= torch.tensor(prefix or [0]).view(-1, 1, 1, 1)),
        }[sparse_mode]()
        s = s.masked_fill(hidden, float("-inf"))
    p = s.softmax(-1)
    if atten_mask is not None:
        p = p.nan_to_num()
    y = (p @ v.float()).to(query.dtype)
    back = {
        "BNSD": lambda t: t,
        "BSND": lambda t: t.transpose(1, 2),
        "BSH": lambda t: t.transpose(1, 2).flatten(-2),
        "SBH": lambda t: t.permute(2, 0, 1, 3).flatten(-2),
    }[input_layout]
    top = s.max(-1, keepdim=True)[0].detach()
    total = (s.detach() - top).exp().sum(-1, keepdim=True)
    eight = [t.expand(*t.shape[:-1], 8).clone() for t in (top, total)]
    return back(y), *eight, torch.empty(0)


def packed(query, key, value, head_num, input_layout, *, actual_seq_qlen, actual_seq_kvlen, **rest):
    """The layout TND: each sequence by itself."""
    ends = [[0, *e] for e in (actual_seq_qlen, actual_seq_kvlen)]
    parts = []
    for n in range(1, len(ends[0])):
        sides = ((query, ends[0]), (key, ends[1]), (value, ends[1]))
        q, k, v = (t[e[n - 1] : e[n]][None] for t, e in sides)
        parts.append(npu_fusion_attention(q, k, v, head_num, "BSND", **rest)[0][0])
    return torch.cat(parts)


def flash_attention_score(
    query, key, value, head_num, *, scalar_value, input_layout, attn_mask, sparse_mode
):
    return npu_fusion_attention(
        query, key, value, head_num, input_layout, None, None, attn_mask, scalar_value, sparse_mode=sparse_mode
    )[0]  # fmt: skip


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
    band = window_size[0] if window_size[0] >= 0 else 10**6
    return npu_fusion_attention(
        q, k, v, q.shape[2], "BSND", atten_mask=LIKE, scale=q.shape[-1] ** -0.5, sparse_mode=4, pre_tockens=band,
        next_tockens=0 if causal else 10**6,
    )[0]  # fmt: skip


def npu_add_rms_norm(x1, x2, gamma, epsilon):
    total = x1 + x2
    inverse = (total.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (total.float() * inverse).to(x1.dtype) * gamma, inverse.detach(), total


def turned(t, cos, sin):
    a, b = t.float().chunk(2, -1)
    return (t * cos.float() + torch.cat((-b, a), -1) * sin.float()).to(t.dtype)


def fused_apply_rotary_pos_emb(t, freqs):
    n = freqs.shape[-1]
    angle = freqs.float()
    return torch.cat((turned(t[..., :n], angle.cos(), angle.sin()), t[..., n:]), -1)


def npu_grouped_matmul(
    inputs, weight, *, bias=None, group_list=None, split_item=0, group_type=-1, group_list_type=0
):
    """The formula ``y_i = x_i @ weight_i + bias_i``, groups by rows or by the inner dimension."""
    if group_list is None:
        return [
            (a.float() @ w.float() + b.float()).to(a.dtype)
            for a, w, b in zip(inputs, weight, bias or (), strict=True)
        ]
    size = (
        group_list
        if group_list_type == 1
        else torch.diff(group_list, prepend=torch.zeros(1, dtype=torch.int64))
    )
    w = list(weight[0]) if len(weight) == 1 and group_type == 0 else weight
    if group_type == 2:
        pairs = zip(inputs[0].split(size.tolist(), 1), weight[0].split(size.tolist()), strict=True)
        return [torch.stack([a @ b for a, b in pairs])]
    parts = [a @ b for a, b in zip(inputs[0].split(size.tolist()), w, strict=True)]
    return [torch.cat(parts)] if split_item >= 2 else parts


def gmm(a, b, bias=None, group_list=None, group_type=0):
    return npu_grouped_matmul([a], [b], group_list=group_list, group_type=group_type, split_item=3)[
        0
    ]


def npu_moe_gating_top_k(
    scores, k, *, bias, k_group, group_count, group_select_mode, norm_type, routed_scaling_factor
):
    s = scores.float().sigmoid() if norm_type == 1 else scores.float().softmax(-1)
    b = (s.detach() + bias).unflatten(1, (group_count, -1))
    best = b.topk(2, -1)[0].sum(-1) if group_select_mode == 1 else b.amax(-1)
    keep = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(k_group)[1], True)
    index = b.masked_fill(~keep[..., None], float("-inf")).flatten(1).topk(k)[1]
    y = s.gather(1, index)
    y = y / (y.sum(-1, keepdim=True) + 1e-20) if norm_type == 1 else y
    return (y * routed_scaling_factor).to(scores.dtype), index.int()


def npu_moe_gating_top_k_softmax(scores, finished=None, k=1):
    y, index = scores.float().softmax(-1).topk(k)
    return y.to(scores.dtype), index.int(), torch.arange(index.numel()).view(k, -1).T.int()


def npu_moe_init_routing(tokens, row_idx, expert_idx, active_num):
    order = expert_idx.flatten().argsort(stable=True)
    pair = row_idx.flatten()[order]
    went = torch.empty_like(pair)
    went[pair] = torch.arange(len(pair))
    return (
        tokens[pair[: active_num * expert_idx.shape[1]] % len(tokens)],
        went.int(),
        expert_idx.flatten()[order],
    )


def npu_moe_init_routing_v2(
    tokens, expert_idx, *, expert_num, drop_pad_mode=0, expert_capacity=-1, expert_tokens_num_type=0
):
    K = expert_idx.shape[1]
    if drop_pad_mode:
        rows = torch.zeros(expert_num, expert_capacity, tokens.shape[1], dtype=tokens.dtype)
        used, went = [0] * expert_num, []
        for n, e in enumerate(expert_idx.flatten().tolist()):
            went.append(e * expert_capacity + used[e] if used[e] < expert_capacity else -1)
            if went[-1] >= 0:
                rows = rows.index_put((torch.tensor(e), torch.tensor(used[e])), tokens[n // K])
            used[e] += 1
        return rows, torch.tensor(went).int()
    order = expert_idx.flatten().argsort(stable=True)
    count = torch.bincount(expert_idx.flatten(), minlength=expert_num)
    return (
        tokens[order // K],
        order.argsort().int(),
        count if expert_tokens_num_type else count.cumsum(0),
    )


def npu_moe_finalize_routing(rows, skip1, skip2, bias, scales, row, expert, drop_pad_mode=0):
    out = skip1.float() + skip2
    T, K = scales.shape
    for k in range(K):
        at = row.view(K, T)[k] if drop_pad_mode < 2 else row.view(T, K)[:, k]
        out = out + scales[:, k, None].float() * (rows[at].float() + bias[expert[:, k]])
    return out.to(rows.dtype)


def npu_cross_entropy_loss(logits, target):
    log_p = logits.float().log_softmax(-1)
    return torch.nn.functional.nll_loss(log_p, target).to(logits.dtype), log_p.detach().to(
        logits.dtype
    )


EXPERT = torch.stack([torch.randperm(8, generator=G)[:3] for _ in range(16)])
ROWS = torch.tensor([5, 5, 9, 12])
CASES = {
    "NPU.npu_fusion_attention BNSD": (npu_fusion_attention, x(2, 4, 9, 16), x(2, 2, 12, 16), x(2, 2, 12, 16), 4, "BNSD", {"scale": 0.25}),
    "NPU.npu_fusion_attention SBH, mask": (npu_fusion_attention, x(9, 2, 64), x(9, 2, 32), x(9, 2, 32), 4, "SBH", None, None, ids(2, 2, 1, 9, 9).bool(), 0.2),
    "NPU.npu_fusion_attention BSH, left": (npu_fusion_attention, x(2, 9, 64), x(2, 12, 64), x(2, 12, 64), 4, "BSH", {"scale": 0.25, "atten_mask": LIKE, "sparse_mode": 2}),
    "NPU.npu_fusion_attention BSND, right": (npu_fusion_attention, x(2, 9, 4, 16), x(2, 12, 4, 16), x(2, 12, 4, 8), 4, "BSND", {"scale": 0.25, "atten_mask": LIKE, "sparse_mode": 3}),
    "NPU.npu_fusion_attention unseen rows": (npu_fusion_attention, x(1, 2, 12, 16), x(1, 2, 9, 16), x(1, 2, 9, 16), 2, "BNSD", {"scale": 0.25, "atten_mask": LIKE, "sparse_mode": 3}),
    "NPU.npu_fusion_attention band": (npu_fusion_attention, x(1, 2, 12, 16), x(1, 2, 12, 16), x(1, 2, 12, 16), 2, "BNSD", {"scale": 0.25, "atten_mask": LIKE, "sparse_mode": 4, "pre_tockens": 3, "next_tockens": 1}),
    "NPU.npu_fusion_attention prefix": (npu_fusion_attention, x(2, 2, 9, 16), x(2, 2, 9, 16), x(2, 2, 9, 16), 2, "BNSD", {"scale": 0.25, "atten_mask": LIKE, "sparse_mode": 6, "prefix": [4, 2]}),
    "NPU.npu_fusion_attention pse": (npu_fusion_attention, x(2, 2, 9, 16), x(2, 2, 9, 16), x(2, 2, 9, 16), 2, "BNSD", x(1, 2, 9, 9, grad=False), {"scale": 0.25}),
    "NPU.npu_fusion_attention TND": (packed, x(14, 4, 16), x(14, 2, 16), x(14, 2, 16), 4, "TND", {"scale": 0.25, "atten_mask": LIKE, "sparse_mode": 3, "actual_seq_qlen": [5, 14], "actual_seq_kvlen": [5, 14]}),
    "Functional.flash_attention_score": (flash_attention_score, x(2, 9, 64), x(2, 9, 64), x(2, 9, 64), 4, {"scalar_value": 0.25, "input_layout": "BSH", "attn_mask": LIKE, "sparse_mode": 2}),
    "Torch.flash_attn_func": (flash_attn_func, x(2, 9, 4, 16), x(2, 12, 2, 16), x(2, 12, 2, 16), {"causal": True}),
    "Torch.flash_attn_func window": (flash_attn_func, x(2, 9, 4, 16), x(2, 9, 2, 16), x(2, 9, 2, 16), {"causal": True, "window_size": (3, 0)}),
    "NPU.npu_add_rms_norm": (npu_add_rms_norm, x(6, 64), x(6, 64), x(64), 1e-5),
    "NPU.npu_apply_rotary_pos_emb": (lambda q, k, c, s: (turned(q, c, s), turned(k, c, s)), x(2, 7, 4, 16), x(2, 7, 1, 16), x(2, 7, 1, 16, grad=False), x(2, 7, 1, 16, grad=False)),
    "Torch.fused_apply_rotary_pos_emb": (fused_apply_rotary_pos_emb, x(7, 2, 4, 16), x(7, 1, 1, 8, grad=False)),
    "NPU.npu_grouped_matmul single": (npu_grouped_matmul, [x(12, 32)], [x(4, 32, 24)], {"group_list": ROWS, "split_item": 3, "group_type": 0}),
    "NPU.npu_grouped_matmul sizes": (npu_grouped_matmul, [x(12, 32)], [x(4, 32, 24)], {"group_list": torch.tensor([3, 4, 0, 5]), "group_list_type": 1, "split_item": 3, "group_type": 0}),
    "NPU.npu_grouped_matmul many": (npu_grouped_matmul, [x(5, 32), x(7, 16)], [x(32, 24), x(16, 8)], {"bias": [x(24), x(8)]}),
    "NPU.npu_grouped_matmul one to many": (npu_grouped_matmul, [x(12, 32)], [x(32, 24), x(32, 24)], {"group_list": torch.tensor([5, 12]), "group_type": 0}),
    "NPU.npu_grouped_matmul inner": (npu_grouped_matmul, [x(32, 12)], [x(12, 24)], {"group_list": ROWS, "split_item": 3, "group_type": 2}),
    "Mint.grouped_matmul positional": (lambda a, b, ends: gmm(a, b, group_list=ends), x(12, 32), x(4, 32, 24), ROWS),
    "Functional.gmm": (gmm, x(12, 32), x(4, 32, 24), {"group_list": ROWS}),
    "Functional.gmm_v2 inner": (gmm, x(32, 12), x(12, 24), {"group_list": ROWS, "group_type": 2}),
    "NPU.npu_moe_gating_top_k sigmoid": (npu_moe_gating_top_k, x(16, 32), 6, {"bias": x(32, grad=False), "k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1, "routed_scaling_factor": 2.5}),
    "NPU.npu_moe_gating_top_k softmax": (npu_moe_gating_top_k, x(16, 32), 6, {"bias": torch.zeros(32), "k_group": 2, "group_count": 4, "group_select_mode": 0, "norm_type": 0, "routed_scaling_factor": 1.0}),
    "NPU.npu_moe_gating_top_k_softmax": (npu_moe_gating_top_k_softmax, x(16, 32), None, 6),
    "NPU.npu_moe_init_routing": (npu_moe_init_routing, x(16, 24), torch.arange(48).view(3, 16).T, EXPERT, 16),
    "NPU.npu_moe_init_routing_v2": (npu_moe_init_routing_v2, x(16, 24), EXPERT, {"expert_num": 8, "expert_tokens_num_type": 1}),
    "NPU.npu_moe_init_routing_v2 sums": (npu_moe_init_routing_v2, x(16, 24), EXPERT, {"expert_num": 8}),
    "NPU.npu_moe_init_routing_v2 capacity": (npu_moe_init_routing_v2, x(16, 24), EXPERT, {"expert_num": 8, "drop_pad_mode": 1, "expert_capacity": 5}),
    "NPU.npu_moe_finalize_routing": (npu_moe_finalize_routing, x(48, 24), x(16, 24), x(16, 24), x(8, 24), x(16, 3), torch.randperm(48, generator=G), EXPERT),
    "NPU.npu_moe_finalize_routing rows": (npu_moe_finalize_routing, x(48, 24), x(16, 24), x(16, 24), x(8, 24), x(16, 3), torch.randperm(48, generator=G), EXPERT, 2),
    "NPU.npu_cross_entropy_loss": (npu_cross_entropy_loss, x(16, 50), ids(50, 16)),
}  # fmt: skip


def run(name: str, dtype: Any) -> dict[str, Any]:
    return run_case(name.split()[0], CASES[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_right_kernels_pass(name, dtype):
    recorded = run(name, dtype)
    verdicts = [v for call_verdicts in replay(rank_dump(recorded)) for v in call_verdicts]
    assert [v for v in verdicts if v.status != "pass"] == []
    assert {v.key for v in verdicts} == set(recorded)


@pytest.mark.parametrize("name", CASES)
def test_one_wrong_element_is_found(name):
    for key in run(name, torch.float32):
        recorded = run(name, torch.float32)
        call = recorded[key]
        value = np.array(call.outputs[0].load())
        place = np.unravel_index(np.argmax(np.abs(value)), value.shape)
        value[place] *= 1.001
        wrong = dataclasses.replace(call.outputs[0], read=lambda w=value: w)
        recorded[key] = dataclasses.replace(call, outputs=[wrong, *call.outputs[1:]])
        verdicts = [v for call_verdicts in replay(rank_dump(recorded)) for v in call_verdicts]
        assert any(v.status == "diverged" and v.key == key for v in verdicts), key


def test_an_expert_that_is_not_among_the_best_is_found():
    for name in ("NPU.npu_moe_gating_top_k sigmoid", "NPU.npu_moe_gating_top_k_softmax"):
        recorded = run(name, torch.float32)
        (key,) = [k for k, c in recorded.items() if c.phase is Phase.FORWARD]
        index = np.array(recorded[key].outputs[1].load())
        index[3, 0] = next(e for e in range(32) if e not in index[3])
        wrong = dataclasses.replace(recorded[key].outputs[1], read=lambda w=index: w)
        outputs = [recorded[key].outputs[0], wrong, *recorded[key].outputs[2:]]
        recorded = {key: dataclasses.replace(recorded[key], outputs=outputs)}
        (verdicts,) = replay(rank_dump(recorded))
        assert [v.status for v in verdicts][1] == "diverged"


def test_what_is_not_defined_is_not_judged():
    name = "NPU.npu_fusion_attention BNSD"
    CASES["dropout"] = (
        lambda *a, keep_prob, scale: npu_fusion_attention(*a, scale=scale),
        *CASES[name][1:-1],
        {"scale": 0.25, "keep_prob": 0.9},
    )
    recorded = calls("NPU.npu_fusion_attention", *CASES["dropout"][:-1], **CASES.pop("dropout")[-1])
    verdicts = [v for call_verdicts in replay(rank_dump(recorded)) for v in call_verdicts]
    assert {v.status for v in verdicts} == {"not judged"}
    assert "dropout" in verdicts[0].reason


def without(recorded, *names):
    """Return calls whose record lacks settings, as msprobe's of MindSpore's primitives."""
    return {
        key: dataclasses.replace(
            call, kwargs={k: v for k, v in call.kwargs.items() if k not in names}
        )
        for key, call in recorded.items()
    }


def rms(t, gamma, eps):
    y = t.float() * (t.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return y.to(t.dtype) * gamma


def primitive_attention(*args, **kwargs):
    """MindSpore's primitive, whose last output is the result."""
    y, *others = npu_fusion_attention(*args, **kwargs)
    return [*others, y]


LACKING = {
    "eps": ("Primitive.norm.RmsNorm", rms, [x(8, 64), x(64)], {"eps": 1e-6}),
    "axis": ("Primitive.p.Softmax", lambda t, dim: t.softmax(dim), [x(8, 8, 8)], {"dim": -2}),
    "transposition": ("Primitive.m.MatMul", lambda a, b, transpose_b: a @ b.T, [x(16, 16), x(16, 16)], {"transpose_b": True}),
    "heads": (
        "Primitive.a.FlashAttentionScore",
        primitive_attention,
        [x(2, 9, 128), x(2, 9, 128), x(2, 9, 128)],
        {"head_num": 8, "input_layout": "BSH", "scale": 0.25},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LACKING)
def test_settings_that_the_dump_lacks_are_inferred(name):
    operator, function, args, kwargs = LACKING[name]
    recorded = without(calls(operator, function, *args, **kwargs), *kwargs)
    verdicts = [v for call_verdicts in replay(rank_dump(recorded)) for v in call_verdicts]
    assert {v.status for v in verdicts} == {"pass"}
    for setting in (f"{k} {v}" for k, v in kwargs.items()):
        assert all(setting in v.reason.split("inferred: ")[1] for v in verdicts), verdicts


def test_a_setting_of_the_target_that_differs_from_the_reference_is_found():
    small = 0.01 * x(8, 64, grad=False)
    first, other = (
        without(calls("Primitive.norm.RmsNorm", rms, small, torch.ones(64), eps=eps), "eps")
        for eps in (1e-6, 1e-5)
    )
    (key,) = first
    (verdict,) = replay_call(other[key], other[key], first[key])
    assert verdict.status == "diverged"
    odd = without(calls("Primitive.norm.RmsNorm", rms, small, torch.ones(64), eps=3e-5), "eps")
    (verdict,) = replay_call(odd[key], odd[key])
    assert verdict.status == "not judged"
    assert "no usual value fits: eps" in verdict.reason
