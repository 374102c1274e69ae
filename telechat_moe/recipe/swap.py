"""Which parts of which layers wait in the host's memory between forward and backward pass (`swap_config`).

The spelling is MindFormers'. Of our layers those parts can be named whose results the backward pass reads and MindSpore
moves ([plan_memory.md](../../docs/plan_memory.md)).
"""

import re
from collections.abc import Sequence

from telechat_moe.recipe.problems import RecipeError
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.schema.parallel import LayerSwap, OpSwap, SwapConfig
from telechat_moe.units import size_text

DEFAULT = r"attention\.core"
"""The operators where neither layers nor operators are named."""

RECOMPUTED = {"swiglu": ("ffn.act", "moe.shared.act"), "moe": ("moe.router", "moe.dispatch", "moe.experts")}  # fmt: skip
"""Parts that `telechat_moe.sharding.recompute` computes again, of those that can be swapped."""


def require_pool(recipe: Recipe, size: int, who: str) -> None:
    """Require that what a process swaps is no more than the recipe allows.

    Args:
        size: Bytes of its pool.

    Raises:
        RecipeError: It is.
    """
    pool = recipe.telechat_moe.swap
    if pool is not None and pool.pool_mib is not None and size > pool.pool_mib << 20:
        problem = f"{pool.pool_mib}, and {who} swaps {size_text(size)} at once"
        expected = f"{-(-size >> 20)} at least, or swap less"
        raise RecipeError([recipe.problem("telechat_moe.swap.pool_mib", problem, expected)])


def parts(config: ModelConfig, layer: int) -> list[str]:
    """Return the parts of a decoder layer that can be swapped, by their dotted names."""
    names = ["attention", "attention.core", "add_attention", "add_ffn"]
    if config.q_lora_rank:
        names.append("attention.q_down")
    if layer < config.first_k_dense_replace or not config.n_routed_experts:
        return [*names, "ffn", "ffn.act"]
    names += ["moe", "moe.router", "moe.dispatch", "moe.experts"]
    return [*names, "moe.shared", "moe.shared.act"] if config.shared_width else names


def matched(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that a pattern matches, part by part; none if it is no regular expression, as a rule says."""
    try:
        expressions = [re.compile(part) for part in pattern.split(r"\.")]
    except re.error:
        return []
    split = ((name, name.split(".")) for name in names)
    return [
        name
        for name, words in split
        if len(words) == len(expressions)
        and all(w.fullmatch(part) for w, part in zip(expressions, words, strict=True))
    ]


def patterns_of(item: OpSwap) -> list[str]:
    """Return the patterns of an item, which may be one or a list."""
    return [item.op_name] if isinstance(item.op_name, str) else item.op_name


def patterns(config: SwapConfig) -> list[tuple[str, LayerSwap]]:
    """Return the patterns of operators, each with its layers and how early they come back."""
    if config.layer_swap is None and config.op_swap is None:
        return [(DEFAULT, LayerSwap(layers=True, backward_prefetch=config.default_prefetch))]
    pairs: list[tuple[str, LayerSwap]] = []
    for item in config.op_swap or ():
        layer_swap = LayerSwap(layers=item.layers, backward_prefetch=item.backward_prefetch)
        pairs += [(name, layer_swap) for name in patterns_of(item)]
    return pairs


def names_layer(item: LayerSwap | OpSwap, layer: int) -> bool:
    """Tell whether an item is about a layer."""
    return item.layers if isinstance(item.layers, bool) else layer in item.layers


def recomputes_layer(r: Recipe, layer: int) -> bool:
    """Tell whether a list of layers, which `recompute` is beside `swap_config.swap`, names one."""
    value = r.recompute_config.recompute
    return value is True or (isinstance(value, list) and layer in value)


def swapped(recipe: Recipe) -> dict[int, dict[str, int]]:
    """Return the parts of each layer that are swapped, and their prefetch, in operators; `""` is the whole layer.

    A recipe that `check` accepts; a part that several items name has the prefetch of the first.
    """
    chosen, config = recipe.swap_config, recipe.model_config
    by_layer: dict[int, dict[str, int]] = {}
    if not chosen.swap:
        return by_layer
    for layer in range(config.num_hidden_layers):
        if recomputes_layer(recipe, layer):
            continue
        prefetches: dict[str, int] = {}
        for item in chosen.layer_swap or ():
            if names_layer(item, layer):
                prefetches.setdefault("", item.backward_prefetch)
        for pattern, item in patterns(chosen):
            if names_layer(item, layer):
                for name in matched(pattern, parts(config, layer)):
                    prefetches.setdefault(name, item.backward_prefetch)
        if prefetches:
            by_layer[layer] = prefetches
    return by_layer
