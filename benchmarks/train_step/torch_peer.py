"""transformers' DeepseekV3 in torch, with the settings that make it fast on CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import DeepseekV3ForCausalLM

from benchmarks.train_step.rates import best_gflops


class GroupedExperts(nn.Module):
    """The routed experts of transformers' DeepseekV3MoE as two grouped products instead of a loop."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        mlps: list[Any] = list(experts)
        up = [torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).T for mlp in mlps]
        self.up = nn.Parameter(torch.stack(up).detach().contiguous())  # [E, H, 2F]
        down = [mlp.down_proj.weight.T for mlp in mlps]
        self.down = nn.Parameter(torch.stack(down).detach().contiguous())  # [E, F, H]

    def forward(
        self, x_TH: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs."""
        flat = index_TK.reshape(-1)
        order = torch.argsort(flat, stable=True)
        end = torch.cumsum(torch.bincount(flat, minlength=self.up.shape[0]), 0).to(torch.int32)
        token = order // index_TK.shape[1]
        narrow = torch.is_autocast_enabled("cpu")  # autocast does not know grouped products
        dtype = torch.bfloat16 if narrow else x_TH.dtype
        rows = torch._grouped_mm(x_TH.to(dtype)[token], self.up.to(dtype), end)
        gate, up = rows.chunk(2, -1)
        rows = torch._grouped_mm((silu(gate) * up).contiguous(), self.down.to(dtype), end)
        rows = rows * weight_TK.reshape(-1)[order].unsqueeze(-1).to(dtype)
        return torch.zeros_like(x_TH).index_add_(0, token, rows.to(x_TH.dtype))


class Torch:
    """transformers' DeepseekV3ForCausalLM with sdpa attention.

    Options: ``grouped`` experts, ``fused`` AdamW, ``compile``, ``autocast`` to bfloat16.
    """

    def __init__(self, folder: Path, recipe: Any, options: list[str]) -> None:
        torch.set_num_threads(2)
        self.model = DeepseekV3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        self.model.train()
        if "grouped" in options:
            for layer in self.model.model.layers:
                if hasattr(layer.mlp, "experts"):
                    layer.mlp.experts = GroupedExperts(layer.mlp.experts)
                    moe = layer.mlp.experts
                    if "compile" in options and "autocast" not in options:
                        moe = torch.compiler.disable(
                            moe
                        )  # compiled, grouped products take bfloat16 only
                    layer.mlp.__dict__["moe"] = moe  # before the class's method
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), 3e-4, (0.9, 0.95), 1e-8, 0.1, fused="fused" in options or None
        )
        self.forward = torch.compile(self.model) if "compile" in options else self.model
        self.autocast = "autocast" in options

    def step(self, window: Any) -> float:
        """Train on one window; return the loss."""
        ids = torch.from_numpy(window[:, :-1].astype("int64"))
        labels = torch.from_numpy(window[:, 1:].astype("int64"))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = self.forward(
                input_ids=ids, labels=labels, shift_labels=labels, use_cache=False
            )
        loss = output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def matmul_gflops(self) -> float:
        """Return the speed of a chain of fp32 products, 1024 cubed."""
        x = torch.randn(1024, 1024) / 32

        def chain() -> None:
            y = x
            for _ in range(8):
                y = y @ x

        return best_gflops(chain)
