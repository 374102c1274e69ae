"""A small MLA and MoE model in plain torch, for any program that offers torch's functions: three AdamW steps.

``plain_torch.py WEIGHTS [--plant FAULT]``: the first run writes the weights and tokens to a file of NumPy, later ones
read it, so that all compute the same.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, NOPE, ROPE, LATENT, EXPERTS, CHOSEN, HIDDEN = 64, 32, 4, 8, 4, 12, 4, 2, 24
ROWS, LENGTH, STEPS = 2, 8, 3


class Norm(nn.Module):
    """RMS norm."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        """Return x over its root mean square, times the weight."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Multi-head latent attention with rotary positions on the last ROPE values of each head."""

    def __init__(self, plant):
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.kv_down = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.kv_norm = Norm(LATENT)
        self.kv_up = nn.Linear(LATENT, HEADS * 2 * NOPE, bias=False)
        self.out = nn.Linear(HEADS * NOPE, WIDTH, bias=False)
        self.axis = -2 if plant == "axis" else -1
        self.sign = -1.0 if plant == "rotation" else 1.0

    def rotate(self, x, cos, sin):
        """Turn the two halves of x by the angle of their position."""
        a, b = torch.chunk(x, 2, -1)
        return x * cos + self.sign * torch.cat([-b, a], -1) * sin

    def forward(self, x, cos, sin, mask):
        """Return the attention of ``[rows, length, WIDTH]``."""
        rows, length, _ = x.shape
        q = self.q(x).reshape(rows, length, HEADS, NOPE + ROPE).transpose(1, 2)
        q_nope, q_rope = torch.split(q, [NOPE, ROPE], -1)
        latent, k_rope = torch.split(self.kv_down(x), [LATENT, ROPE], -1)
        kv = self.kv_up(self.kv_norm(latent)).reshape(rows, length, HEADS, 2 * NOPE)
        k, v = torch.split(kv.transpose(1, 2), [NOPE, NOPE], -1)
        scores = torch.matmul(q_nope, k.transpose(-1, -2))
        rotated = self.rotate(k_rope.unsqueeze(1), cos, sin).expand(rows, HEADS, length, ROPE)
        scores = scores + torch.matmul(self.rotate(q_rope, cos, sin), rotated.transpose(-1, -2))
        scores = scores / math.sqrt(NOPE + ROPE) + mask
        mixed = torch.matmul(torch.softmax(scores, self.axis), v)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, HEADS * NOPE))


class Experts(nn.Module):
    """Sigmoid router, CHOSEN of EXPERTS SwiGLU experts for each token, and a shared one."""

    def __init__(self, plant):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.ModuleList(
            nn.Linear(WIDTH, 2 * HIDDEN, bias=False) for _ in range(EXPERTS + 1)
        )
        self.down = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(EXPERTS + 1))
        self.normalise = plant != "scale"

    def expert(self, e, x):
        """Return what expert e makes of all rows."""
        gate, up = torch.chunk(self.up[e](x), 2, -1)
        return self.down[e](F.silu(gate) * up)

    def forward(self, x):
        """Return the sum of the shared and the chosen experts."""
        rows = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(torch.sigmoid(self.gate(rows)), CHOSEN, -1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        combined = self.expert(EXPERTS, rows)
        for e in range(EXPERTS):
            share = (weights * (chosen == e).to(weights.dtype)).sum(-1, keepdim=True)
            combined = combined + share * self.expert(e, rows)
        return combined.reshape(x.shape)


class Model(nn.Module):
    """Two blocks, whose weights a table in NumPy gives."""

    def __init__(self, plant):
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(Norm(WIDTH) for _ in range(5))
        self.attention = nn.ModuleList(Attention(plant) for _ in range(2))
        self.experts = nn.ModuleList(Experts(plant) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, cos, sin, mask):
        """Return the logits of ``[rows, length]`` tokens."""
        x = self.table(ids)
        for i in range(2):
            x = x + self.attention[i](self.norms[2 * i](x), cos, sin, mask)
            x = x + self.experts[i](self.norms[2 * i + 1](x))
        return self.head(self.norms[4](x))


def tables():
    """Return the cosines, sines and causal mask of all positions."""
    angles = np.outer(np.arange(LENGTH), 1e4 ** (-np.arange(0, ROPE, 2) / ROPE))
    angles = np.concatenate([angles, angles], -1)
    mask = np.triu(np.full((LENGTH, LENGTH), -1e9), 1)
    return (torch.tensor(t.astype(np.float32)) for t in (np.cos(angles), np.sin(angles), mask))


def prepare(model, path):
    """Write the tokens of all steps and random weights to a file, unless it exists."""
    if not path.exists():
        random = np.random.default_rng(0)
        made = {"ids": random.integers(0, VOCAB, (STEPS, ROWS, LENGTH + 1))}
        for name, p in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            made[name] = random.normal(mean, 0.1, tuple(p.shape)).astype(np.float32)
        np.savez(path, **made)


def main():
    """Train, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--plant", choices=["axis", "rotation", "scale", "decay"])
    args = parser.parse_args()
    model = Model(args.plant)
    prepare(model, args.weights)
    inputs = np.load(args.weights)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.tensor(inputs[name]))
    decay = 0.01 if args.plant == "decay" else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=decay)
    cos, sin, mask = tables()
    for ids in inputs["ids"]:
        optimizer.zero_grad()
        logits = model(torch.tensor(ids[:, :-1]), cos, sin, mask)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), torch.tensor(ids[:, 1:].reshape(-1)))
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.7f}", flush=True)


if __name__ == "__main__":
    main()
