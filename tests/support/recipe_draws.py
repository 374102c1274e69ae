"""Recipes drawn at random: settings of all sections on layouts and devices, and what starting them says before compiling."""

import copy
import random
from typing import Any

from key_values import KEYS, SETTINGS, in_setting, shut, tried, value_of, with_value, within

from telechat_moe.interop import hf
from telechat_moe.ops import select
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.uses import Use
from telechat_moe.sharding import recipe as sharded
from telechat_moe.tools.plan.schedules.ranks import rank_orders
from telechat_moe.train import rank_graph, schedule
from telechat_moe.train.engine import build_model
from telechat_moe.train.optimizer import from_recipe
from telechat_moe.train.trainer import Trainer

M, OPERATORS, SHARDING = "model.model_config.", "telechat_moe.operators.", "telechat_moe.sharding."
DATA = "train_dataset.data_loader.config."
_SPREAD = {"use_parallel": True, "parallel.parallel_mode": 1, "parallel.full_batch": True}
_STAGES = {
    "parallel_config.pipeline_stage": 2,
    "parallel_config.micro_batch_num": 4,
    "callbacks.1.micro_batch_num": 4,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {**_SPREAD, "parallel_config.data_parallel": 2},
    "tp2": {**_SPREAD, "parallel_config.model_parallel": 2},
    "ep2": {
        **_SPREAD,
        "parallel_config.data_parallel": 2,
        "parallel_config.expert_parallel": 2,
    },
    "pp2": {**_SPREAD, **_STAGES},
    "cp2": {
        **_SPREAD,
        "parallel_config.context_parallel": 2,
        "runner_config.batch_size": 1,
        f"{M}use_flash_attention": True,
    },
    "pp2-vpp2": {
        **_SPREAD,
        **_STAGES,
        f"{M}num_hidden_layers": 4,
        f"{M}pp_interleave_num": 2,
        "parallel.pipeline_config.pipeline_interleave": True,
    },
}
DEVICES: dict[str, tuple[Use, dict[str, Any]]] = {
    **{f"CPU {name}": ("train", layout) for name, layout in LAYOUTS.items()},
    **{
        f"Ascend {name}": ("dryrun", {**layout, "context.device_target": "Ascend"})
        for name, layout in LAYOUTS.items()
        if name in ("one", "dp2", "tp2", "ep2")
    },
}
"""What a recipe is started for, by device and layout, and the settings of these."""
_CAPACITY = {f"{M}moe_token_drop_policy": "probs", f"{M}moe_expert_capacity_factor": 1.5}
_MASK = {
    "train_dataset.input_columns": None,
    "train_dataset.construct_args_key": None,
    f"{DATA}create_attention_mask": True,
}
_ZERO = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
_ACCUMULATION = {
    "runner_config.gradient_accumulation_steps": 2,
    "callbacks.1.gradient_accumulation_steps": 2,
}
FEATURES: list[dict[str, Any]] = [
    _CAPACITY,
    {**_CAPACITY, "telechat_moe.moe_capacity_tokens": 16},
    {**_CAPACITY, "telechat_moe.moe_block_rows": 8},
    {f"{M}moe_token_drop_policy": "position", f"{M}moe_expert_capacity_factor": 1.0},
    *({f"{M}compute_dtype": dtype} for dtype in ("bfloat16", "bf16", "float16")),
    *({f"{OPERATORS}default": backend} for backend in ("plain", "fused")),
    {f"{OPERATORS}permute": "plain", f"{OPERATORS}grouped_matmul": "plain"},
    *({f"{OPERATORS}matmul": backend} for backend in ("plain", "fused")),
    {f"{OPERATORS}attention": "fused"},
    {f"{OPERATORS}fuse_plain": True, f"{OPERATORS}default": "plain"},
    {f"{OPERATORS}host": ["top_k"]},
    {f"{M}use_flash_attention": False},
    {"parallel.enable_parallel_optimizer": True},
    *({"parallel.enable_parallel_optimizer": True, _ZERO: size} for size in (-1, 2, 3)),
    _ACCUMULATION,
    *(
        {f"{M}moe_router_load_balancing_type": kind}
        for kind in ("none", "aux_loss", "gbs_aux_loss")
    ),
    {f"{M}calculate_per_token_loss": True},
    {f"{M}tie_word_embeddings": True},
    *({f"{M}first_k_dense_replace": dense} for dense in (0, 2)),
    {f"{M}n_shared_experts": 0},
    *({f"{M}num_nextn_predict_layers": depth} for depth in (0, 2)),
    {f"{M}q_lora_rank": None},
    *({f"{SHARDING}dispatcher": way} for way in ("alltoallv", "allgather", "alltoall")),
    {f"{SHARDING}expert_tensor_parallel": True},
    {f"{M}moe_token_dispatcher_type": "alltoall_zero_redundancy", f"{M}npu_nums_per_device": 1},
    {f"{SHARDING}recompute": ["moe", "norms"]},
    *({f"{SHARDING}pipeline_schedule": name} for name in ("1f1b", "zb-h1", "synthesised")),
    {"recompute_config.recompute": True},
    {"swap_config.swap": True},
    {"optimizer.swap": True},
    {"telechat_moe.moe.placement": {}},
    {"telechat_moe.step_batch_size_schedule": "0:4 64:8", **_ACCUMULATION},
    {"telechat_moe.sample": {}},
    _MASK,
    {"telechat_moe.balance_attention": True, **_MASK, f"{DATA}reset_attention_mask": True},
    *({"runner_config.batch_size": rows} for rows in (1, 2)),
    {"parallel_config.use_seq_parallel": True},
    {"parallel.parallel_mode": 0},
    {"lr_schedule.type": "LinearWithWarmUpLR"},
    {f"{M}n_routed_experts": 6},
    {f"{M}vocab_size": 65},
    {f"{M}moe_intermediate_size": 17},
    {f"{M}num_hidden_layers": 3, f"{M}offset": [1, 0]},
]
"""Settings that a recipe needs together."""


def with_settings(given: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return plain data with settings put in."""
    made = copy.deepcopy(given)
    for key, value in settings.items():
        at, last = within(made, key)
        at[last] = value
    return made


def draw(base: dict[str, Any], seed: int) -> tuple[str, dict[str, Any], list[str]]:
    """Return a device, a recipe that pairs settings on it, and these settings in words."""
    chance = random.Random(seed)
    device = chance.choice(list(DEVICES))
    given, words = with_settings(base, DEVICES[device][1]), [device]
    for settings in chance.sample(FEATURES, chance.choice([1, 1, 2])):
        given = with_settings(given, settings)
        words.append(str(settings))
    keys = [key for key in KEYS if not shut(key)]
    often = [0.1 if "takes" in key.field.metadata else 1.0 for key in keys]
    for key in chance.choices(keys, often, k=chance.choice([0, 1, 1])):
        setting, values = key.acts
        if setting in SETTINGS:
            given = in_setting(given, setting)
        if values := [*values, *tried(key.field, value_of(given, key))]:
            value = chance.choice(values)
            given = with_value(given, key, value)
            words.append(f"{setting} {key.place}={value!r}")
    return device, given, words


def start(recipe: Recipe, use: Use) -> None:
    """Do what starting a recipe does before anything is compiled, but for the rules of `check`.

    Raises:
        Exception: What it refuses.
    """
    ends = sorted({0, recipe.devices - 1})
    if use == "dryrun":
        settings = sharded.parallel_context(recipe)
        rank_graph.example_batch(recipe, settings.get("full_batch", False))
        for rank in ends:
            rank_graph.build_step(recipe, rank, target="Ascend")
    elif recipe.devices == 1:
        Trainer(recipe, overwrite=True, plain=True, weights=hf.weights)
    else:
        rank_orders(recipe)
        schedule.from_recipe(recipe)
        for step in (recipe, *sharded.smaller_steps(recipe).values()):
            for rank in ends:
                rank_graph.build_step(step, rank, target="CPU")
        build_model(recipe)
        with select.using("plain"):
            from_recipe(recipe, [])
