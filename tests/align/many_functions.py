"""A script of torch that calls many functions, forward and backward: ``many_functions.py SEED SCALE``."""

import sys

import numpy as np
import torch
from torch.nn import functional as F

SEED, SCALE = int(sys.argv[1]), float(sys.argv[2])
random = np.random.default_rng(SEED)


def normal(*shape, scale=SCALE):
    return random.normal(0, scale, shape).astype(np.float32)


start = normal(64, 96)
x = torch.nn.Parameter(torch.tensor(start))
y = torch.nn.Parameter(torch.tensor(np.abs(start) + 0.1))
m = torch.nn.Parameter(torch.tensor(normal(96, 48)))
labels = torch.tensor(random.integers(0, 64, 64))
gradient = torch.tensor(normal(64, 96, scale=1.0))
FUNCTIONS = [
    *(lambda f=f: f(x) for f in (torch.tanh, torch.sin, torch.cos, torch.sigmoid, torch.erf)),
    *(lambda f=f: f(x) for f in (torch.abs, torch.square, torch.tril)),
    *(lambda f=f: f(x) for f in (F.silu, F.gelu, F.softplus, F.relu)),
    *(lambda f=f: f(y) for f in (torch.log, torch.sqrt, torch.rsqrt)),
    *(lambda f=f: f(x, -1) for f in (torch.softmax, torch.log_softmax, torch.cumsum)),
    *(lambda f=f: f(x, dim=-1) for f in (F.softmax, F.log_softmax)),
    lambda: torch.exp(x * 0.5),
    lambda: torch.pow(y, 1.5),
    lambda: F.gelu(x, approximate="tanh"),
    lambda: F.layer_norm(x, (96,)),
    lambda: F.rms_norm(x, (96,), y[0], 1e-6),
    lambda: x.mean(-1, keepdim=True) * gradient,
    lambda: x.var(-1, keepdim=True) * gradient,
    lambda: torch.logsumexp(x, -1, keepdim=True) * gradient,
    lambda: x.max(-1, keepdim=True)[0] * gradient,
    lambda: torch.topk(x, 5, -1)[0].sum(-1, keepdim=True) * gradient,
    lambda: x / y,
    lambda: 2 / y,
    lambda: 1 - x,
    lambda: torch.clamp(x, -0.5, 0.5),
    lambda: torch.where(x > 0, x, y),
    lambda: x.masked_fill(x > 0, -1.0),
    lambda: torch.gather(x, 1, labels[:, None].expand(64, 96)),
    lambda: x[labels] * 1.0,
    lambda: torch.cat([x[:, ::2], x[:, 1::2]], -1),
    lambda: torch.stack([x, y])[1],
    lambda: torch.roll(torch.flip(x, (1,)), 3, 1),
    lambda: x[:, :48].repeat(1, 2),
    lambda: torch.outer(x[:, 0], y[0]),
    lambda: torch.einsum("ij,jk->ik", x, m) @ m.T,
    lambda: torch.bmm(x[None], m[None])[0] @ m.T,
    lambda: torch.addmm(gradient, x, m @ m.T),
]

optimizer = torch.optim.AdamW([x, y, m], 1e-3)
for function in FUNCTIONS:
    (function() * gradient).sum().backward()
F.cross_entropy(x, labels).backward()
optimizer.step()
