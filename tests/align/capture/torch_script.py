"""A small training script of torch as people write them: operators in place, accumulation, clipping, checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from telechat_moe.tools.align.capture.torch_functions import capture
from telechat_moe.tools.align.capture.torch_records import StepRecorder
from telechat_moe.tools.align.dump.records import Dump, RankDump

Hook = Callable[[str, int, "Net"], None]


class Net(torch.nn.Module):
    """Attention with a mask written in place, and experts whose tokens are added in place."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(32, 16)
        self.qkv = torch.nn.Linear(16, 48, bias=False)
        self.gate = torch.nn.Linear(16, 4, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.way, self.later = way, 1

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.way == "fused":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
        mask[torch.ones_like(mask, dtype=torch.bool).triu(self.later)] = -1e30
        scores = q @ k.transpose(-1, -2) * 0.25
        scores += mask
        return torch.softmax(scores, -1) @ v

    def moe(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 16)
        weights, chosen = self.gate(rows).sigmoid().topk(2, -1)
        weights /= weights.sum(-1, keepdim=True)
        combined = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(chosen == e)
            combined.index_add_(0, token, F.silu(expert(rows[token])) * weights[token, place, None])
        return combined.view_as(x)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.moe(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        if self.way.startswith("checkpoint"):
            x = checkpoint(self.block, x, use_reentrant=self.way == "checkpoint again")
        else:
            x = self.block(x)
        return F.cross_entropy(self.head(x)[:, :-1].reshape(-1, 32), ids[:, 1:].reshape(-1))


def train(
    net: Net, hook: Hook = lambda *_: None, most: float = 0.1, dtype: Any = torch.float32
) -> Net:
    """Train two steps of two micro-batches."""
    rows = torch.randint(0, 32, (4, 2, 8), generator=torch.Generator().manual_seed(1))
    net = net.to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            loss = net(rows[2 * step + part])
            hook("forward", step, net)
            (loss / 2).backward()
            hook("backward", step, net)
        torch.nn.utils.clip_grad_norm_(net.parameters(), most)
        hook("clipped", step, net)
        optimizer.step()
        hook("updated", step, net)
    return net


def recorded(run: Callable[[], Any]) -> Dump:
    """Return what a run does, as `align capture --torch` records it."""
    with capture() as calls:
        cut = StepRecorder(calls, range(2))
        hook = register_optimizer_step_post_hook(cut.end)
        try:
            run()
        finally:
            hook.remove()
    ranks = {
        (step, 0): RankDump(step, 0, "pytorch", "tensor", "L1", found)
        for step, found in cut.calls_of_steps.items()
    }
    return Dump(Path("run"), ranks)
