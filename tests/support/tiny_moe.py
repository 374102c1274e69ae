"""A small model with attention, routed experts and a loss, in plain torch; the ground that faults are planted in."""

import torch
from torch.nn import functional as F

TOKENS, HIDDEN, HEADS, EXPERTS, TOP, WIDTH, VOCABULARY = 32, 32, 4, 8, 2, 24, 64


def weights(layers=2, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def w(*shape):
        return (torch.randn(shape, generator=g) * shape[-1] ** -0.5).to(dtype).requires_grad_()

    return {
        "table": w(VOCABULARY, HIDDEN),
        "head": w(VOCABULARY, HIDDEN),
        "norm": (1 + 0.1 * torch.randn(HIDDEN, generator=g)).to(dtype).requires_grad_(),
        "layers": [
            {
                "norm1": (1 + 0.1 * torch.randn(HIDDEN, generator=g)).to(dtype).requires_grad_(),
                "norm2": (1 + 0.1 * torch.randn(HIDDEN, generator=g)).to(dtype).requires_grad_(),
                "qkv": w(3 * HIDDEN, HIDDEN),
                "out": w(HIDDEN, HIDDEN),
                "router": w(EXPERTS, HIDDEN),
                "gate": [w(WIDTH, HIDDEN) for _ in range(EXPERTS)],
                "up": [w(WIDTH, HIDDEN) for _ in range(EXPERTS)],
                "down": [w(HIDDEN, WIDTH) for _ in range(EXPERTS)],
            }
            for _ in range(layers)
        ],
    }


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (TOKENS,), generator=g), torch.randint(
        0, VOCABULARY, (TOKENS,), generator=g
    )


def attention(x, p):
    q, k, v = torch.chunk(F.linear(x, p["qkv"]), 3, dim=-1)
    q, k, v = (torch.transpose(t.reshape(1, TOKENS, HEADS, -1), 1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(torch.transpose(y, 1, 2).reshape(TOKENS, HIDDEN), p["out"])


def experts(x, p):
    score = torch.sigmoid(F.linear(x.float(), p["router"].float()))
    weight, index = torch.topk(score, TOP, dim=-1)
    weight = torch.div(weight, torch.sum(weight, dim=-1, keepdim=True))
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(torch.eq(index, e))
        rows = torch.index_select(x, 0, token)
        h = torch.mul(F.silu(F.linear(rows, p["gate"][e])), F.linear(rows, p["up"][e]))
        h = F.linear(h, p["down"][e])
        h = torch.mul(h, weight[token, slot].unsqueeze(-1).to(h.dtype))
        y = torch.index_add(y, 0, token, h)
    return y


def model(w, ids, labels):
    x = F.embedding(ids, w["table"])
    for p in w["layers"]:
        x = torch.add(x, attention(F.rms_norm(x, (HIDDEN,), p["norm1"], 1e-5), p))
        x = torch.add(x, experts(F.rms_norm(x, (HIDDEN,), p["norm2"], 1e-5), p))
    logits = F.linear(F.rms_norm(x, (HIDDEN,), w["norm"], 1e-5), w["head"])
    return F.cross_entropy(logits.float(), labels)
