"""Rules about activations and optimizer states in the host's memory (`swap_config`, `optimizer.swap`)."""

import re
from collections.abc import Iterator, Sequence

from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.parallel import LayerSwap, OpSwap
from telechat_moe.recipe.swap import patterns_of, recomputes_layer

AT = "swap_config."


def swapped_states(r: Recipe) -> Iterator[Broken]:
    """MindSpore keeps parameters of the host on the device with `memory_optimize_level` O1."""
    level = getattr(r.context, "memory_optimize_level", None)  # a key of the table
    if r.optimizer.swap and level == "O1":
        problem = (
            "True with context.memory_optimize_level O1, where MindSpore takes no notice of it"
        )
        yield "optimizer.swap", problem, "False, or memory_optimize_level O0"


def swap_off(r: Recipe) -> Iterator[Broken]:
    """Settings of a section that is off, and a default that nothing takes, have no effect."""
    c = r.swap_config
    lists = {"layer_swap": c.layer_swap, "op_swap": c.op_swap}
    for name, value in lists.items():
        if value is not None and not c.swap:
            problem = f"{len(value)} items with swap False, where they have no effect"
            yield AT + name, problem, "remove it, or swap True"
        elif value is not None and not value:
            yield AT + name, "an empty list, which swaps nothing", "remove it, or name layers"
    if c.default_prefetch != 1 and not (c.swap and c.layer_swap is None and c.op_swap is None):
        context = "beside layer_swap or op_swap" if c.swap else "with swap False"
        problem = f"{c.default_prefetch} {context}, where it has no effect"
        yield AT + "default_prefetch", problem, "remove it; each item has its backward_prefetch"


def swapped_layers(r: Recipe) -> Iterator[Broken]:
    """MindFormers takes layers that the model does not have, and of two items for a layer drops the second, silently."""
    c = r.swap_config
    if not c.swap:
        return
    yield from _layers(r, AT + "layer_swap", c.layer_swap or ())
    for index, item in enumerate(c.op_swap or ()):
        yield from _layers(r, f"{AT}op_swap", [item], index)


def _layers(
    r: Recipe, key: str, items: Sequence[LayerSwap | OpSwap], first: int = 0
) -> Iterator[Broken]:
    layers = r.model.model_config.num_hidden_layers
    owners: dict[int | str, int] = {}
    for index, item in enumerate(items, first):
        item_key = f"{key}.{index}.layers"
        if not item.layers:
            problem = f"{item.layers}, which is no layer"
            yield item_key, problem, "True, a list of layers, or no such item"
            continue
        named = item.layers if isinstance(item.layers, list) else ["all"]
        for layer in named:
            if isinstance(layer, int) and layers is not None and layer >= layers:
                problem = f"{layer}, and num_hidden_layers is {layers}"
                yield item_key, problem, f"layers from 0 to {layers - 1}"
            before = owners.setdefault(layer, index)
            before = owners.get("all", before)
            if before != index:
                problem = f"{layer}, which item {before} names already, so that this has no effect"
                yield item_key, problem, "each layer in one item"


def swap_or_recompute(r: Recipe) -> Iterator[Broken]:
    """MindFormers warns that what is recomputed is not swapped, and trains on."""
    c, recomputed = r.swap_config, r.recompute_config.recompute
    if not c.swap or recomputed is False:
        return
    if recomputed is True:
        problem = "True with recompute_config.recompute True, which keeps nothing to swap"
        expected = "False, or the numbers of the recomputed layers in recompute_config.recompute"
        yield AT + "swap", problem, expected
        return
    for name, items in (("layer_swap", c.layer_swap), ("op_swap", c.op_swap)):
        for index, item in enumerate(items or ()):
            layers = r.model.model_config.num_hidden_layers or 0
            named = range(layers) if item.layers is True else item.layers or ()
            both = [layer for layer in named if recomputes_layer(r, layer)]
            if both and (item.layers is not True or len(both) == layers or name == "layer_swap"):
                problem = f"{both[0]}, which recompute_config.recompute computes again"
                yield f"{AT}{name}.{index}.layers", problem, "each layer swapped or recomputed"


def swapped_operators(r: Recipe) -> Iterator[Broken]:
    """A pattern is a regular expression."""
    for index, item in enumerate(r.swap_config.op_swap or ()):
        for name in patterns_of(item):
            for part in name.split(r"\."):
                try:
                    re.compile(part)
                except re.error as error:
                    yield f"{AT}op_swap.{index}.op_name", f"{name}: {error}", "a regular expression"
