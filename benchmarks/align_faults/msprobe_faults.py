"""Faults of programs in torch that are planted before msprobe dumps them; see msprobe_runs.py.

Many are silent faults that users of training programs reported in 2026; their numbers stand beside them. A fault of a
kernel is planted below msprobe's hooks, so that the dump holds what a faulty kernel would have made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

Batches = list[dict[str, Any]]
Plant = Callable[[Any, Any, Batches], None]
"""Plants a fault in a model, its optimizer and its batches."""


@dataclass(frozen=True)
class Fault:
    """A fault and the runs that show it."""

    plant: Plant
    models: tuple[str, ...]  # how the names of models begin that have what is wrong
    upstream: str = ""  # where it was reported
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])  # settings that it needs


# ---------------------------------------------------------------------------------------- how they are planted


def _wrong(name: str, number: int, change: Callable[[Any], Any]) -> Plant:
    """Return a fault that changes what the call of this number of a function of torch returns."""

    def plant(*_: Any) -> None:
        *path, last = name.split(".")
        holder: Any = torch
        for word in path:
            holder = getattr(holder, word)
        right, count = getattr(holder, last), [0]

        def wrong(*args: Any, **kwargs: Any) -> Any:
            result = right(*args, **kwargs)
            count[0] += 1
            return change(result) if count[0] == number + 1 else result

        setattr(holder, last, wrong)

    return plant


def _program(place: str, change: Callable[..., Any], number: int | None = None) -> Plant:
    """Return a fault in a function of the program, ``module:name``, in all its calls or one: ``change(right, *args)``."""

    def plant(*_: Any) -> None:
        module, _, path = place.partition(":")
        holder: Any = import_module(module)
        *owners, name = path.split(".")
        for owner in owners:
            holder = getattr(holder, owner)
        right, count = getattr(holder, name), [0]

        def wrong(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if number is not None and count[0] != number + 1:
                return right(*args, **kwargs)
            return change(right, *args, **kwargs)

        setattr(holder, name, staticmethod(wrong) if owners else wrong)

    return plant


def _setting(name: str, change: Callable[[Any], Any]) -> Plant:
    """Return a fault in a setting of the last module that has it."""

    def plant(model: Any, *_: Any) -> None:
        holders = [m for m in model.modules() if name in vars(m) or name in dict(m.named_buffers())]
        for holder in holders[-1:]:
            setattr(holder, name, change(getattr(holder, name)))

    return plant


def _config(name: str, value: Any) -> Plant:
    """Return a fault in a setting that all modules of Megatron share."""

    def plant(model: Any, *_: Any) -> None:
        setattr(model.model.config, name, value)

    return plant


def _weights(words: str, change: Callable[[Any], Any], last: bool = True) -> Plant:
    """Return a fault that changes the last weight, or all, with one of these words in its name."""

    def plant(model: Any, *_: Any) -> None:
        chosen = _named(model, words)
        for weight in chosen[-1:] if last else chosen:
            weight.data.copy_(change(weight.data))

    return plant


def _gradients(words: str, change: Callable[[Any], Any], last: bool = True) -> Plant:
    """Return a fault that changes the gradient of the last weight, or all, with one of these words in its name."""

    def plant(model: Any, *_: Any) -> None:
        chosen = _named(model, words)
        for weight in chosen[-1:] if last else chosen:
            weight.register_hook(change)

    return plant


def _update(change: Callable[[Any], Any], after: bool = False) -> Plant:
    """Return a fault that happens before or after each update: ``change(optimizer)``."""

    def plant(_model: Any, optimizer: Any, *_: Any) -> None:
        register = optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook
        register(lambda *_: change(optimizer))

    return plant


def _group(name: str, value: Any) -> Plant:
    """Return a fault in a setting of the optimizer's first group."""
    return lambda _model, optimizer, _batches: optimizer.param_groups[0].update({name: value})


def _named(model: Any, words: str) -> list[Any]:
    """Return the matrices with one of these words in their names."""
    named = model.named_parameters()
    return [p for n, p in named if p.ndim > 1 and any(word in n for word in words.split())]


def _in_memory(change: Callable[[Any], None]) -> Callable[..., Any]:
    """Return a change of a result that no hook sees, as of memory that another stream overwrites."""

    def wrong(right: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        change(first.detach().numpy())
        return result

    return wrong


# ---------------------------------------------------------------------------------------- what is wrong


def _spot(y: Any) -> Any:
    """Return zeros and one element in the middle, three times as large as the largest."""
    spot = torch.zeros_like(y)
    spot.view(-1)[y.numel() // 2] = 3 * y.detach().abs().max()
    return spot


def _zero_rows(x: Any) -> None:
    x[-2:] = 0


def _turn_rows(x: Any) -> None:
    x[:] = x[[*range(1, len(x)), 0]]


def _hooked(y: Any) -> Any:
    if y.requires_grad:
        y.register_hook(lambda g: 1.05 * g)
    return y


def _no_tile(g: Any) -> Any:
    """Return a gradient without one tile, as of a block that wrote too early."""
    g = g.clone()
    g[: len(g) // 4, : g.shape[1] // 2] = 0
    return g


def _halves_exchanged(w: Any) -> Any:
    return w.roll(w.shape[-2] // 2, -2)


def _drawn(w: Any) -> Any:
    """Return other values of the same size, as before a checkpoint is read."""
    return 0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(11)).to(w.dtype)


def _one_step_less(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"] -= 1


def _norm_too_small(optimizer: Any) -> None:
    """Leave the gradients larger than clipping by the right norm would."""
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad.detach().float().numpy()
            parameter.grad.data = parameter.grad.data * 1.4


def _skipped(_model: Any, optimizer: Any, _batches: Batches) -> None:
    optimizer.param_groups[0]["params"].pop(3)


def _stale(_model: Any, optimizer: Any, _batches: Batches) -> None:
    """Leave half of a weight as it was before each update, as an all-gather that comes too late."""
    weight = next(p for p in optimizer.param_groups[0]["params"] if p.ndim > 1)
    old: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: old.append(weight.detach().clone()))

    def put_back(*_: Any) -> None:
        half = len(weight) // 2
        weight.data[:half] = old[-1][:half]

    optimizer.register_step_post_hook(put_back)


def _token(_model: Any, _optimizer: Any, batches: Batches) -> None:
    tokens = batches[0].get("input_ids", batches[0].get("tokens"))
    tokens[0, 5] = (tokens[0, 5] + 7) % 50


def _labels(_model: Any, _optimizer: Any, batches: Batches) -> None:
    batches[0]["labels"] = batches[0]["labels"].roll(1, 1)


def _not_averaged(model: Any, *_: Any) -> None:
    """Count the last micro-batch fully, in place of its share."""
    right, count = model.forward, [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = right(*args, **kwargs)
        count[0] += 1
        if count[0] == 4:
            output.loss = output.loss * 4
        return output

    model.forward = forward


def _own_sum(number: int, change: Callable[[Any, Any], Any]) -> Plant:
    """Return a fault in the sum over ranks of this number: ``change(the right sum's function, what a rank sends)``."""
    return _program("benchmarks.align_faults.tensor_parallel:_sum", change, number)


def _slice(model: Any, *_: Any) -> None:
    """Give the last rank the slice of the first."""
    weight = _named(model, "layers.1.linear_fc1 layers.0.mlp.linear_fc1")[-1].data
    first = weight.clone()
    torch.distributed.broadcast(first, 0)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        weight.copy_(first)


def _no_sum_of_gradients(right: Any, ctx: Any, *gradients: Any) -> Any:
    ctx.allreduce_dgrad = False
    return right(ctx, *gradients)


def _rotated_indices(right: Any, tokens: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
    return right(tokens, indices.roll(1), *args, **kwargs)


def _narrow(y: Any) -> Any:
    return y.bfloat16().to(y.dtype)


def _auxiliary_scale(*_: Any) -> None:
    utilities: Any = import_module("megatron.core.transformer.moe.moe_utils")
    utilities.MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(2.0)


def _counted_twice(right: Any, **kwargs: Any) -> Any:
    return right(**kwargs | {"tokens_per_expert": 2 * kwargs["tokens_per_expert"]})


def _no_division(model: Any, *_: Any) -> None:
    model.expert_scale = 1.0


_HF = ("deepseek", "qwen3_moe", "glm4_moe", "gpt_oss")
_SIGMOID = ("deepseek", "glm4_moe")
_MEGATRON = ("megatron",)
_ANY = (*_HF, *_MEGATRON)
_DOWN = "o_proj linear_proj"
_ADAMW = {"optimizer": "adamw"}
_TWO_STEPS = {"optimizer": "adamw", "steps": 2, "dumped": (0, 1)}
_MOE = "megatron.core.transformer.moe"
_MAPPINGS = "megatron.core.tensor_parallel.mappings"

FAULTS: dict[str, Fault] = {
    # kernels
    "silu scaled": Fault(_wrong("nn.functional.silu", 1, lambda y: y * 1.02), _HF[:3]),
    "linear rows moved": Fault(_wrong("nn.functional.linear", 9, lambda y: y.roll(1, 0)), _HF),
    "linear element": Fault(_wrong("nn.functional.linear", 6, lambda y: y + _spot(y)), _HF),
    "softmax narrow": Fault(_wrong("nn.functional.softmax", 1, _narrow), _HF),
    "sum scaled": Fault(_wrong("Tensor.index_add_", 2, lambda y: y.mul_(0.97)), _HF),
    "matmul scaled": Fault(_wrong("matmul", 3, lambda y: y * 0.96), _HF),
    "rotation moved": Fault(_wrong("cat", 3, lambda y: y.roll(1, -2)), _HF),
    "mean of other rows": Fault(_wrong("Tensor.mean", 1, lambda y: y.roll(1, 0)), _HF),
    "gradient scaled on the way": Fault(
        _wrong("nn.functional.linear", 8, _hooked), _HF, "Megatron-LM #5047"
    ),
    # settings
    "epsilon": Fault(_setting("variance_epsilon", lambda _: 1e-3), _HF),
    "attention's scale": Fault(_setting("scaling", lambda x: 1.2 * x), _HF),
    "router's factor": Fault(_setting("routed_scaling_factor", lambda x: 1.25 * x), _SIGMOID),
    "router's normalisation": Fault(_setting("norm_topk_prob", lambda x: not x), _HF[:3]),
    "expert bias": Fault(
        _setting("e_score_correction_bias", lambda x: x + 0.2 * torch.arange(len(x))),
        _SIGMOID,
        "torchtitan #4245",
    ),
    "rotation's base": Fault(_setting("inv_freq", lambda x: 0.8 * x), _HF),
    # data and weights
    "token": Fault(_token, _ANY),
    "labels": Fault(_labels, _HF),
    "weight scaled": Fault(_weights(_DOWN, lambda w: 1.05 * w), _ANY),
    "experts not loaded": Fault(
        _weights("experts", _drawn, last=False), _ANY, "Megatron-LM #5844, #5845"
    ),
    "gate and up exchanged": Fault(
        _weights("gate_proj gate_up_proj linear_fc1", _halves_exchanged), _ANY, "Megatron-LM #5442"
    ),
    "weight of another layer": Fault(_weights("v_proj kv_b_proj qkv", _drawn), _ANY),
    # gradients and updates
    "experts' gradients doubled": Fault(
        _gradients("experts", lambda g: 2 * g, last=False), _ANY, "PyTorch #160285", _ADAMW
    ),
    "experts' gradients halved": Fault(
        _gradients("experts", lambda g: g / 2, last=False), _HF, "Megatron-LM #5956", _ADAMW
    ),
    "tile of a gradient lost": Fault(
        _gradients(_DOWN, _no_tile), _ANY, "Megatron-LM #5222", _ADAMW
    ),
    "norm too small": Fault(_update(_norm_too_small), _ANY, "Megatron-LM #5916", _ADAMW),
    "step counter": Fault(_update(_one_step_less), _ANY, "Megatron-LM #5976", _TWO_STEPS),
    "learning rate": Fault(_group("lr", 3e-4), _ANY, "Megatron-LM #4705", _ADAMW),
    "weight decay": Fault(_group("weight_decay", 0.3), _HF, "", _ADAMW),
    "beta": Fault(_group("betas", (0.9, 0.95)), _HF, "", _ADAMW),
    "weight skipped": Fault(_skipped, _HF, "", _ADAMW),
    "stale weight": Fault(_stale, _ANY, "Megatron-LM #4609", _TWO_STEPS),
    "micro-batch not averaged": Fault(
        _not_averaged, _HF, "Megatron-LM #4070, #5244", {"micro_batches": 4}
    ),
    # split over ranks
    "sum over ranks missing": Fault(_own_sum(1, lambda _, x: x.contiguous()), ("tensor_parallel",)),
    "sum over ranks twice": Fault(
        _own_sum(0, lambda right, x: right(right(x))), ("tensor_parallel",)
    ),
    "sum of gradients missing": Fault(
        _own_sum(3, lambda _, x: x.contiguous()), ("tensor_parallel",), "torchtitan, 2026-08-05"
    ),
    "mean over ranks": Fault(_own_sum(1, lambda right, x: right(x) / 2), ("tensor_parallel",)),
    "slice of another rank": Fault(_slice, ("tensor_parallel", "megatron_tp"), "Megatron-LM #5383"),
    "halves of a slice exchanged": Fault(
        _weights("layers.0.linear_fc1", lambda w: w.roll(len(w) // 2, 0)), ("tensor_parallel",)
    ),
    "row-parallel sum missing": Fault(
        _program(f"{_MAPPINGS}:_reduce", lambda _, x, group: x, 1), ("megatron_tp",)
    ),
    "column-parallel sum of gradients missing": Fault(
        _program(
            "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
            _no_sum_of_gradients,
            1,
        ),
        ("megatron_tp",),
        "torchtitan, 2026-08-05",
    ),
    # Megatron-Core's experts
    "router narrow": Fault(
        _program(f"{_MOE}.router:router_gating_linear", lambda f, *a: _narrow(f(*a))), _MEGATRON
    ),
    "top-k factor": Fault(_config("moe_router_topk_scaling_factor", 1.5), _MEGATRON),
    "softmax before the choice": Fault(_config("moe_router_pre_softmax", True), _MEGATRON),
    "rows lost on the way": Fault(
        _program(f"{_MOE}.token_dispatcher:all_to_all", _in_memory(_zero_rows), 0),
        ("megatron_a2a",),
    ),
    "rows permuted": Fault(
        _program(f"{_MOE}.token_dispatcher:permute", _in_memory(_turn_rows), 0), _MEGATRON
    ),
    "combine indices": Fault(
        _program(f"{_MOE}.token_dispatcher:unpermute", _rotated_indices, 0),
        _MEGATRON,
        "torchtitan #3604",
    ),
    "experts' gradients not divided": Fault(
        _no_division, ("megatron_ep", "megatron_a2a"), "Megatron-LM #5956", _ADAMW
    ),
    "auxiliary loss twice": Fault(
        _config("moe_aux_loss_coeff", [0.2, 0.1]), ("megatron_a2a",), "Megatron-LM #6748"
    ),
    "auxiliary loss lost": Fault(
        _config("moe_aux_loss_coeff", [0.1, 0.0]), ("megatron_a2a",), "Megatron-Bridge #5165"
    ),
    "auxiliary gradient's scale": Fault(_auxiliary_scale, ("megatron_a2a",), "Megatron-LM #5047"),
    "tokens counted twice": Fault(
        _program(f"{_MOE}.router:switch_load_balancing_loss_func", _counted_twice, 0),
        ("megatron_a2a",),
        "Megatron-LM #6099",
    ),
    "sequence balance by the batch": Fault(
        _program(
            f"{_MOE}.router:switch_load_balancing_loss_func",
            lambda right, **kwargs: right(**kwargs) / 2,
            1,
        ),
        ("megatron_a2a",),
        "Megatron-LM #5798",
    ),
}
