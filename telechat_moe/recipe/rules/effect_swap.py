"""Rules for our own trainer about what is in the host's memory, beside those of `effect.py`."""

from collections.abc import Iterator

from telechat_moe.recipe.schema import Broken, Recipe
from telechat_moe.recipe.schema.model import ModelConfig
from telechat_moe.recipe.swap import RECOMPUTED, matched, names_layer, parts, patterns_of


def swapped(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """MindSpore swaps in the graph that several micro-batches share; a pattern must name operators of ours."""
    c, m, p = r.swap_config, r.model.model_config, r.parallel_config
    if not c.swap or not isinstance(m, ModelConfig):
        return
    key = "swap_config.swap"
    if not compiled and r.devices == 1:
        yield key, "True on one device, where `telechat-moe train` keeps all activations", "False"
    elif r.micro_batches == 1:
        problem = (
            "True with one micro-batch a step: MindSpore swaps in the graph that several share"
        )
        count_key = "gradient_accumulation_steps" if p.pipeline_stage == 1 else "micro_batch_num"
        yield key, problem, f"False, or {count_key} > 1"
    sharding = r.telechat_moe.sharding
    if not compiled and (sharding.pipeline_schedule is not None or sharding.overlap_exchange):
        problem = (
            "True with an order of passes of our own, in which nothing is swapped on CPU processes"
        )
        expected = "False, or no telechat_moe.sharding.pipeline_schedule or overlap_exchange"
        yield key, problem, expected
    yield from _swapped_parts(r, m)


def states(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """The graphs of CPU processes swap the moments, and one process beside the fused operator."""
    if not r.optimizer.swap or compiled:
        return
    if r.devices > 1:
        target = r.context.device_target
        if target != "CPU":
            problem = f"True on {target}, where this trainer keeps the moments on the device"
            yield "optimizer.swap", problem, "False, or --through mindformers"
        return
    operators = r.telechat_moe.operators
    chosen = operators.backends().get("adamw", operators.default)
    if r.context.device_target != "CPU" or chosen not in ("auto", "fused"):
        problem = f"True on one device with the {chosen} AdamW on {r.context.device_target}"
        expected = "False, telechat_moe.operators.adamw fused on CPU, or more devices"
        yield "optimizer.swap", problem, expected


def pool(r: Recipe, compiled: bool) -> Iterator[Broken]:
    """Where swapped tensors wait matters where there are some."""
    chosen = r.telechat_moe.swap
    if chosen is None:
        return
    if not r.swap_config.swap and not r.optimizer.swap:
        problem = "a section with swap_config.swap and optimizer.swap False, where it has no effect"
        yield "telechat_moe.swap", problem, "remove it, or one of these True"
    elif not compiled and r.context.device_target != "CPU":
        problem = (
            "a section with device_target Ascend, which swaps into its host's memory, of any amount"
        )
        yield "telechat_moe.swap", problem, "remove it; swap_config says what is swapped"
    elif chosen.pool_folder is None and chosen.pool_mib is None:
        problem = "a section that says nothing"
        yield "telechat_moe.swap", problem, "pool_folder or pool_mib, or no such section"


def _swapped_parts(r: Recipe, m: ModelConfig) -> Iterator[Broken]:
    words, config = r.telechat_moe.sharding.recompute, r.swap_config
    recomputed_parts = {part for word in words for part in RECOMPUTED.get(word, ())}
    for index, item in enumerate(config.op_swap or ()):
        layers = [i for i in range(m.num_hidden_layers) if names_layer(item, i)]
        layer_items = [x for x in config.layer_swap or () if any(names_layer(x, i) for i in layers)]
        key = f"swap_config.op_swap.{index}.op_name"
        if layer_items and all(any(names_layer(x, i) for x in layer_items) for i in layers):
            others = "layers that layer_swap swaps as a whole, where it has no effect"
            yield key, f"{item.op_name} in {others}", "other layers, or no such item"
        part_names = list(dict.fromkeys(name for i in layers for name in parts(m, i)))
        for name in patterns_of(item):
            operators = matched(name, part_names)
            if not operators and layers:
                problem = f"{name}, which matches no operator of these layers"
                yield key, problem, f"one of {', '.join(part_names)}"
            elif operators and recomputed_parts.issuperset(operators):
                problem = f"{name}, which telechat_moe.sharding.recompute computes again"
                yield key, problem, "swapped or recomputed, not both"
