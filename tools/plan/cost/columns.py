"""Architectures and layouts as arrays, one entry a configuration: what the cost model computes on."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.layout import STACK, Layout, TokenExchange
from telechat_moe.tools.plan.schedules.program import loop_route, v_route

Floats = NDArray[np.float64]
"""An array of float64, any shape."""

_ARCHITECTURE = (
    "hidden", "heads", "kv_heads", "head_dim", "value_dim", "mla", "q_lora_rank", "kv_lora_rank", "qk_nope",
    "qk_rope", "ffn", "matrices", "experts", "top_k", "moe_ffn", "shared_width", "mtp", "vocab", "tied", "seq", "positions",
    "attention_weights", "dense_weights", "expert_weights", "shared_weights", "small_weights", "mtp_weights",
    "dense_layers", "moe_layers", "window", "pair_share", "expert_groups", "kept_groups",
)  # fmt: skip
_LAYOUT = (
    "dp", "tp", "sequence_parallel", "cp", "pp", "vpp", "ep", "etp", "zero", "opt_shards", "fsdp", "micro_batch",
    "micro_batches", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "host_bytes", "residual_bytes", "own_graph", "skips", "imbalance",
    "devices",
)  # fmt: skip
STAGE_COLUMNS = ("stage_dense", "stage_moe", "stage_dense_recomputed", "stage_moe_recomputed")
"""Layers of each stage, [n, P]: dense and MoE, and those of them that are recomputed."""

PARTLY = {
    # full, attention, core, mlp, norm, activation; the backward pass does not need the last product
    "save_qkv": (0.0, 0.45, 1.0, 0.67, 1.0, 1.0),
    "save_half": (0.0, 0.5, 0.0, 0.5, 1.0, 1.0),  # every other product is kept
}
"""Share of each module of a layer that a compiler's policy recomputes."""

_SMALL = ("full", "attention", "core", "mlp", "norm", "activation", "early", "swap")


class Columns:
    """Arrays by field name; a field of the architecture may be a single number for all configurations."""

    def __init__(self, values: dict[str, Floats]) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Floats:  # reached only for names that are missing
        raise AttributeError(f"columns: no field {name}")

    def __len__(self) -> int:
        return len(self.dp)


def _arrays(items: Sequence[object], names: Sequence[str]) -> dict[str, Floats]:
    get = attrgetter(*names)
    table = np.array([get(item) for item in items], dtype=np.float64)
    return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(names)}


def _recomputed(policies: Sequence[str]) -> dict[str, Floats]:
    """Return which modules of a layer the backward pass recomputes, and whether layers are swapped instead."""
    cache: dict[str, tuple[float, ...]] = {}
    for policy in set(policies):
        words = set(policy.split("+"))
        full = "full" in words
        attention = full or "attention" in words
        core = attention or bool(words & {"selective", "core_attention"})
        mlp = full or bool(words & {"mlp", "experts"})
        norm = full or "norm" in words
        activation = mlp or "activation" in words
        early = "early_stop" in words
        parts = (full, attention, core, mlp, norm, activation, early, "swap" in words)
        cache[policy] = tuple(float(x) for x in parts)
        for word, shares in PARTLY.items():
            if word in words:
                cache[policy] = (*shares, 0.0, 0.0)
    table = np.array([cache[policy] for policy in policies])
    return {f"re_{name}": np.ascontiguousarray(table[:, i]) for i, name in enumerate(_SMALL)}


def _stages(pairs: Sequence[tuple[Architecture, Layout]]) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the dense, MoE, recomputed dense and recomputed MoE layers of each pipeline stage, [n, largest pp]."""
    width = max(layout.pp for _, layout in pairs)
    out = np.zeros((4, len(pairs), width))
    cache: dict[object, Floats] = {}
    for row, (a, x) in enumerate(pairs):
        key = (a.layers, x.pp, x.vpp, x.chunks, x.recompute_layers, x.recomputed, x.schedule)
        if key not in cache:
            cache[key] = _layers_of_stages(a, x)
        out[:, row, : x.pp] = cache[key]
    return tuple(out)


def stage_of_chunk(layout: Layout) -> tuple[int, ...]:
    """Return the stage of each global chunk: 0 to P - 1 in every round; V schedules turn back at the last stage."""
    v_shape = layout.schedule in ("zb-v", "dualpipev") and layout.vpp == 2
    return (v_route if v_shape else loop_route)(layout.pp, layout.vpp)


def _layers_of_stages(a: Architecture, x: Layout) -> Floats:
    table = np.zeros((4, x.pp))
    for stage, layers in zip(stage_of_chunk(x), x.chunk_kinds(a.layers), strict=True):
        for kind, recomputed in layers:
            row = int(kind == "moe")
            table[row, stage] += 1
            table[row + 2, stage] += recomputed
    return table


_ORDER = {"gpipe": 0, "1f1b": 0, "interleaved": 1, "zb-h1": 2, "zb-h2": 3}
_DERIVED: dict[str, Callable[[Layout], float]] = {
    "fp8": lambda x: x.compute in ("fp8", "fp4"),
    "fp4": lambda x: x.compute == "fp4",
    "fp32": lambda x: x.compute == "fp32",
    "order": lambda x: _ORDER.get(x.schedule, 4),
    "gpipe": lambda x: x.schedule == "gpipe",
    # a step of one micro-batch has no accumulators: it is one graph
    "one_graph": lambda x: x.micro_batches == 1,
    "last_stage": lambda x: stage_of_chunk(x)[-1],
    "mtp_apart": lambda x: x.ends != "last",
    "exchange": lambda x: get_args(TokenExchange).index(x.exchange),
    "mtp_stage": lambda x: stage_of_chunk(x)[-1 - (x.ends != "last")],
    # recipes that count recomputed layers leave MTP out; it is never swapped
    "mtp_recomputed": lambda x: (
        x.recompute_layers is x.recomputed is None and x.recompute != "swap"
    ),
}
"""Columns that follow from other fields of a layout."""


def columns(pairs: Sequence[tuple[Architecture, Layout]]) -> Columns:
    """Return the arrays of configurations, each an architecture and a layout."""
    architectures = [a for a, _ in pairs]
    layouts = [x for _, x in pairs]
    alike = all(a is architectures[0] for a in architectures)  # then one row, broadcast
    values = _arrays(architectures[:1] if alike else architectures, _ARCHITECTURE)
    values |= _arrays(layouts, _LAYOUT)
    values |= _arrays([x.stack for x in layouts], STACK)
    values |= _recomputed([x.recompute for x in layouts])
    values |= {name: np.array([float(of(x)) for x in layouts]) for name, of in _DERIVED.items()}
    values |= dict(zip(STAGE_COLUMNS, _stages(pairs), strict=True))
    values["expert_copies"] = (
        values["dp"] * values["cp"] * values["tp"] / (values["ep"] * values["etp"])
    )
    values["mtp_moe"] = np.array([float(a.layers[-1] == "moe") for a in architectures])
    return Columns(values)
