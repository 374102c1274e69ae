"""Bugs that people make in a port of a model, planted in transformers' DeepseekV3: ``hf_twin.py train --plant NAME``.

Each names the modules of transformers where a reader of the code would look for it; ``align bisect`` must name one of
them. :data:`UNSEEN` were written after the tool, and run once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as code

ATTENTION = r"model\.layers\.0\.self_attn"
ROUTER = r"model\.layers\.1\.mlp\.gate"


@dataclass
class Run:
    """A training run, as a bug sees it.

    Attributes:
        groups: The optimizer's groups of weights.
        before: Called before each step, with its number.
        graded: Called after each backward pass, with the number of the step.
        labels: Changes the labels of the loss.
    """

    model: Any
    groups: list[dict[str, Any]]
    before: list[Callable[[int], None]] = field(default_factory=list)
    graded: list[Callable[[int], None]] = field(default_factory=list)
    labels: Callable[[torch.Tensor], torch.Tensor] = lambda labels: labels

    def layer(self, number: int) -> Any:
        """Return a decoder layer."""
        return self.model.model.layers[number]


@dataclass(frozen=True)
class Bug:
    """A bug, and the answer that is right: module of transformers (a pattern), words in the evidence, and step."""

    plant: Callable[[Run], None]
    where: str
    says: str = ""
    step: int = 0


def _set(path: str, name: str, value: Any) -> Callable[[Run], None]:
    """Return a bug that sets an attribute of a module."""
    return lambda run: setattr(run.model.get_submodule(path), name, value)


def _replace(name: str, other: Callable[..., Any], layer: int = 0) -> Callable[[Run], None]:
    """Return a bug that calls another function of the modelling code in the attention of one layer."""

    def plant(run: Run) -> None:
        attention, right = run.layer(layer).self_attn, getattr(code, name)
        forward = attention.forward

        def changed(*args: Any, **kwargs: Any) -> Any:
            setattr(code, name, lambda *a, **k: other(right, *a, **k))
            try:
                return forward(*args, **kwargs)
            finally:
                setattr(code, name, right)

        attention.forward = changed

    return plant


def _wrap(path: str, other: Callable[..., Any]) -> Callable[[Run], None]:
    """Return a bug in the forward method of a module: ``other(forward, *arguments)``."""

    def plant(run: Run) -> None:
        module = run.model.get_submodule(path)
        forward = module.forward
        module.forward = lambda *a, **k: other(forward, *a, **k)

    return plant


def _mask_off_by_one(forward: Any, *args: Any, **kwargs: Any) -> Any:
    shifted = kwargs["attention_mask"].roll(-1, -2)
    kwargs["attention_mask"] = torch.cat([shifted[..., :-1, :], torch.zeros_like(shifted[..., -1:, :])], -2)  # fmt: skip
    return forward(*args, **kwargs)


def _narrow_softmax(
    right: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any
) -> Any:
    scores = torch.matmul(q, k.transpose(2, 3)) * kwargs["scaling"] + mask
    shares = functional.softmax(scores, -1, dtype=torch.bfloat16).to(q.dtype)
    return torch.matmul(shares, v).transpose(1, 2).contiguous(), shares


def _no_residual(forward: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return forward(x, **kwargs) - x


def _centred(forward: Any, x: torch.Tensor) -> torch.Tensor:
    return forward(x - x.mean(-1, keepdim=True))


def _load(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Run], None]:
    """Return a bug in the loading of one weight."""

    def plant(run: Run) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            weight = run.model.get_parameter(path)
            weight.copy_(change(weight.detach().clone()))

    return plant


def _swapped(run: Run) -> None:
    experts = run.layer(1).mlp.experts
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for a, b in zip(experts[2].parameters(), experts[3].parameters(), strict=True):
            kept = a.detach().clone()
            a.copy_(b)
            b.copy_(kept)


def _stale(run: Run) -> None:
    weight = run.layer(1).self_attn.q_b_proj.weight
    kept = weight.detach().clone()

    def before(step: int) -> None:
        if step == 1:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                weight.copy_(kept)

    run.before.append(before)


def _no_bias(run: Run) -> None:
    with torch._C.DisableTorchFunction():
        run.layer(1).mlp.gate.e_score_correction_bias.zero_()


def _decayed(run: Run) -> None:
    for group in run.groups:
        group["weight_decay"] = 0.1


def _momentum(run: Run) -> None:
    for group in run.groups:
        group["betas"] = (group["betas"][0], 0.99)


def _limited(run: Run) -> None:
    run.layer(1).mlp.gate.n_group, run.layer(1).mlp.gate.topk_group = 4, 1


def _doubled_gradient(run: Run) -> None:
    def graded(step: int) -> None:
        with torch._C.DisableTorchFunction():
            run.layer(0).mlp.up_proj.weight.grad.mul_(2.0)

    run.graded.append(graded)


def _shifted_labels(run: Run) -> None:
    run.labels = lambda labels: labels.roll(1)


BUGS: dict[str, Bug] = {
    "eps of a latent norm": Bug(
        _set("model.layers.0.self_attn.q_a_layernorm", "variance_epsilon", 1e-2),
        rf"{ATTENTION}\.q_a_layernorm",
    ),
    "eps of a layer's norm": Bug(
        _set("model.layers.1.post_attention_layernorm", "variance_epsilon", 1e-2),
        r"model\.layers\.1\.post_attention_layernorm",
    ),
    "no scale of routed experts": Bug(
        _set("model.layers.1.mlp.gate", "routed_scaling_factor", 1.0), ROUTER
    ),
    "rotary halves, not pairs": Bug(
        _replace(
            "apply_rotary_pos_emb_interleave",
            lambda right, *a, **k: code.apply_rotary_pos_emb(*a, **k),
        ),
        ATTENTION,
    ),
    "mask off by one": Bug(_wrap("model.layers.0.self_attn", _mask_off_by_one), ATTENTION),
    "softmax in bfloat16": Bug(_replace("eager_attention_forward", _narrow_softmax), ATTENTION),
    "shared expert doubled": Bug(
        _wrap("model.layers.1.mlp.shared_experts", lambda f, x: f(x) * 2),
        r"model\.layers\.1\.mlp(\.shared_experts)?",
    ),
    "selection without bias": Bug(_no_bias, ROUTER),
    "chosen weights not normalised": Bug(
        _set("model.layers.1.mlp.gate", "norm_topk_prob", False), ROUTER
    ),
    "latent norm subtracts the mean": Bug(
        _wrap("model.layers.1.self_attn.kv_a_layernorm", _centred),
        r"model\.layers\.1\.self_attn\.kv_a_layernorm",
    ),
    "residual lost": Bug(_wrap("model.layers.0", _no_residual), r"model\.layers\.0"),
    "scores scaled twice": Bug(
        lambda run: setattr(run.layer(0).self_attn, "scaling", run.layer(0).self_attn.scaling ** 2),
        ATTENTION,
    ),
    "latent detached": Bug(
        _wrap("model.layers.1.self_attn.kv_a_layernorm", lambda f, x: f(x.detach())),
        r"model\.layers\.1\.self_attn\.kv_a_(layernorm|proj_with_mqa)",
    ),
    "dropout left on": Bug(
        lambda run: setattr(run.layer(0).self_attn, "attention_dropout", 0.1), ATTENTION
    ),
    "weight loaded transposed": Bug(
        _load("model.layers.0.self_attn.o_proj.weight", lambda w: w.T.reshape(w.shape)),
        rf"{ATTENTION}\.o_proj",
    ),
    "weight not updated": Bug(_stale, r"model\.layers\.1\.self_attn\.q_b_proj", step=1),
    "norms decayed": Bug(_decayed, r"model\.norm|.*layernorm", "weight_decay"),
    "wrong beta2": Bug(_momentum, r".*", "beta2 0.99"),
    "groups of experts limited": Bug(_limited, ROUTER),
    "experts exchanged": Bug(_swapped, r"model\.layers\.1\.mlp\.experts(\.[23].*)?"),
    "hidden states shifted": Bug(_wrap("lm_head", lambda f, x: f(x.roll(1, 1))), r"lm_head"),
    "labels shifted": Bug(_shifted_labels, r"", "Functional.cross_entropy"),
    "embedding scaled": Bug(
        _wrap("model.embed_tokens", lambda f, x: f(x) * 32**0.5), r"model\.embed_tokens"
    ),
    "gelu for silu": Bug(
        lambda run: setattr(run.layer(0).mlp, "act_fn", torch.nn.GELU()),
        r"model\.layers\.0\.mlp(\.act_fn)?",
    ),
    "gradient doubled": Bug(_doubled_gradient, r"model\.layers\.0\.mlp\.up_proj"),
}


def _late_keys(run: Run) -> None:
    """The key that rotates takes the position after its own; queries take theirs."""

    def moved(right: Any, q: Any, k: Any, cos: Any, sin: Any, **kwargs: Any) -> Any:
        late = torch.cat([cos[:, 1:], cos[:, -1:]], 1), torch.cat([sin[:, 1:], sin[:, -1:]], 1)
        return right(q, k, cos, sin)[0], right(q, k, *late)[1]

    _replace("apply_rotary_pos_emb_interleave", moved, 1)(run)


def _crossed(run: Run) -> None:
    expert = run.layer(1).mlp.experts[5]
    expert.forward = lambda x: expert.down_proj(
        expert.act_fn(expert.up_proj(x)) * expert.gate_proj(x)
    )


def _wrong_eps(run: Run) -> None:
    for group in run.groups:
        group["eps"] = 1e-4


def _weights_exchanged(forward: Any, x: torch.Tensor) -> Any:
    index, weight = forward(x)
    return index, weight.flip(-1)


UNSEEN: dict[str, Bug] = {
    "keys one position late": Bug(_late_keys, r"model\.layers\.1\.self_attn"),
    "gate and up exchanged in an expert": Bug(_crossed, r"model\.layers\.1\.mlp\.experts(\.5.*)?"),
    "eps of the optimizer": Bug(_wrong_eps, r".*", "eps"),
    "weights of chosen experts exchanged": Bug(
        _wrap("model.layers.1.mlp.gate", _weights_exchanged), r"model\.layers\.1\.mlp(\.gate)?"
    ),
    "final norm left out": Bug(_wrap("model.norm", lambda f, x: x), r"model\.norm"),
    "values of heads exchanged": Bug(
        _replace(
            "eager_attention_forward",
            lambda right, m, q, k, v, mask, **kw: right(m, q, k, v.roll(1, 1), mask, **kw),
            1,
        ),
        r"model\.layers\.1\.self_attn",
    ),
}
