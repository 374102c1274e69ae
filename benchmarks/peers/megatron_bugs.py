"""Bugs that people make in a port of a model, planted in Megatron-Core's: ``megatron_twin.py twin --plant NAME``.

As in hf_bugs.py, each names the modules of Megatron-Core where a reader of the code would look for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional


@dataclass
class Run:
    """A training run, as a bug sees it.

    Attributes:
        mask: Which positions are hidden, ``[1, 1, S, S]``.
        groups: The optimizer's groups of weights.
    """

    model: Any
    mask: torch.Tensor
    groups: list[dict[str, Any]]


Plant = Callable[[Run], None]


def _set(path: str, name: str, value: Any) -> Plant:
    """Return a bug that sets an attribute of a module."""
    return lambda run: setattr(run.model.get_submodule(path), name, value)


def _wrap(path: str, other: Callable[..., Any]) -> Plant:
    """Return a bug in the forward method of a module: ``other(forward, *arguments)``."""

    def plant(run: Run) -> None:
        module = run.model.get_submodule(path)
        forward = module.forward
        module.forward = lambda *a, **k: other(forward, *a, **k)

    return plant


def _load(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Return a bug in the loading of one weight."""

    def plant(run: Run) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            tensors = dict(run.model.named_parameters()) | dict(run.model.named_buffers())
            tensors[path].copy_(change(tensors[path].detach().clone()))

    return plant


def _optimizer(**settings: Any) -> Plant:
    """Return a bug in the optimizer's settings."""

    def plant(run: Run) -> None:
        for group in run.groups:
            group |= settings

    return plant


def _swapped(run: Run) -> None:
    experts = run.model.get_submodule(f"{MOE}.experts.local_experts")
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for a, b in zip(experts[2].parameters(), experts[3].parameters(), strict=True):
            kept = a.detach().clone()
            a.copy_(b)
            b.copy_(kept)


def _halves(run: Run) -> None:
    """Rotate the halves of a head, not its pairs."""
    from megatron.core.transformer import multi_latent_attention

    right = multi_latent_attention.apply_rotary_pos_emb
    config = replace(run.model.config, multi_latent_attention=False)
    multi_latent_attention.apply_rotary_pos_emb = lambda *a, **k: right(
        *a, **k | {"config": config}
    )


def _ones(forward: Any, *args: Any, **kwargs: Any) -> Any:
    probs, chosen = forward(*args, **kwargs)
    return probs.detach() * 0 + chosen, chosen


def _none(forward: Any, *args: Any, **kwargs: Any) -> Any:
    out, bias = forward(*args, **kwargs)
    return out * 0, bias


FIRST, MOE = "decoder.layers.0", "decoder.layers.1.mlp"
BUGS: dict[str, tuple[Plant, str]] = {
    "scores scaled twice": (_set(f"{FIRST}.self_attention.core_attention", "softmax_scale", 1 / 16),
                            rf"{FIRST}.self_attention(.core_attention)?"),
    "eps of a latent norm": (_set(f"{FIRST}.self_attention.kv_layernorm", "eps", 1e-2),
                             rf"{FIRST}.self_attention.kv_layernorm"),
    "selection without bias": (_load(f"{MOE}.router.expert_bias", torch.zeros_like), rf"{MOE}.router"),
    "no scale of routed experts": (
        lambda run: setattr(run.model.config, "moe_router_topk_scaling_factor", 1.0), rf"{MOE}.router"),
    "rotary halves, not pairs": (_halves, rf"{FIRST}.self_attention(.core_attention)?"),
    "mask off by one": (lambda run: run.mask.copy_(run.mask.roll(-1, -2).tril(1)),
                        rf"{FIRST}.self_attention(.core_attention)?.*"),
    "gate and up exchanged": (_load(f"{MOE}.shared_experts.linear_fc1.weight", lambda w: w.roll(len(w) // 2, 0)),
                              rf"{MOE}.shared_experts(.*)?"),
    "experts exchanged": (_swapped, rf"{MOE}.experts.local_experts.[23](.*)?"),
    "residual lost": (_wrap(f"{FIRST}.mlp", lambda f, x, **k: (f(x, **k)[0] - x, None)), rf"{FIRST}(.mlp)?"),
    "chosen weights are 1": (_wrap(f"{MOE}.router", _ones), rf"{MOE}(.router)?"),
    "gelu for silu": (
        lambda run: setattr(run.model.get_submodule(f"{FIRST}.mlp"), "config",
                            replace(run.model.config, activation_func=functional.gelu)), rf"{FIRST}.mlp"),
    "final norm left out": (_wrap("decoder.final_layernorm", lambda f, x: x), r"decoder.final_layernorm"),
    "latent detached": (_wrap("decoder.layers.1.self_attention.kv_layernorm", lambda f, x: f(x.detach())),
                        r"decoder.layers.1.self_attention.(kv_layernorm|linear_kv_down_proj)"),
    "weight loaded transposed": (
        _load(f"{FIRST}.self_attention.linear_proj.weight", lambda w: w.T.reshape(w.shape)),
        rf"{FIRST}.self_attention.linear_proj"),
    "an expert drops its tokens": (_wrap(f"{MOE}.experts.local_experts.1", _none),
                                   rf"{MOE}(.experts(.local_experts.1)?)?"),
    "shared expert missing": (_wrap(f"{MOE}.shared_experts", lambda f, x: f(x) * 0),
                              rf"{MOE}(.shared_experts(.linear_fc2)?)?"),
    "router's input detached": (_wrap(f"{MOE}.router", lambda f, x, *a: f(x.detach(), *a)),
                                rf"{MOE}.router|decoder.layers.1.pre_mlp_layernorm"),
    "one expert more for each token": (_set(f"{MOE}.router", "topk", 3), rf"{MOE}.router"),
    "wrong beta2": (_optimizer(betas=(0.9, 0.99)), r".*"),
    "eps of the optimizer": (_optimizer(eps=1e-4), r".*"),
    "norms decayed": (_optimizer(weight_decay=0.1), r"decoder.*norm"),
}  # fmt: skip
"""Bugs, and the modules in which a reader of the code would look for each (a pattern)."""
