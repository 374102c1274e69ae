"""Write a recipe of mode 1 as one of mode 0: the same training for static graphs, here or in MindFormers."""

from dataclasses import fields
from typing import Any, cast

from telechat_moe.recipe.check import section_keys
from telechat_moe.recipe.fields import Takes
from telechat_moe.recipe.mode1 import table
from telechat_moe.recipe.mode1.rules import layers_of
from telechat_moe.recipe.mode1.schema import DynamicRecipe
from telechat_moe.recipe.mode1.table import Translation, translation
from telechat_moe.recipe.problems import RecipeError
from telechat_moe.recipe.schema.model import DEEPSEEK_V3, ModelConfig, OtherModelConfig
from telechat_moe.recipe.uses import decides, written_keys

P = "parallelism."
_REPEATED = (
    "run_mode", "training.use_skip_step_on_nan", "parallelism.disable_gradient_division",
    "parallelism.context_parallel_mask_type", "context.mode", "model.", "train_dataset.dataloader.",
    "lr_scheduler.", "recompute.mode", "optimizer.type", "checkpoint.enable_save", "checkpoint.save_path",
    "checkpoint.save_max", "checkpoint.prefix", "checkpoint.save_interleaved_steps", "checkpoint.async_save",
)  # fmt: skip
"""Keys that say what mode 0 always does, or are written below."""
_REASONS = {
    "lora_config": "adapters, which mode 0 does not train: all weights are trained",
    "inference": "mode 0 predicts with recipes of its own",
    "training.rampup_batch_size": "mode 0 takes global_batch_size from the first step",
    "training.max_consecutive_skipped_steps": "mode 0 has telechat_moe.max_skipped_steps (with our trainer)",
    "parallelism.enable_mc2": "mode 0 does not fuse products and communication; the numbers are the same",
    "parallelism.enable_loss_parallel": "mode 0 always computes the loss so",
    "parallelism.cpu_offload": "mode 0 keeps shards on the device, which takes memory",
    "parallelism.dense_fsdp_shard_size": "mode 0 has one width of sharding for all weights",
    "train_dataset.balance_enabled": "mode 0 does not balance attention; telechat_moe.data deals samples (with our trainer)",
    "monitor.": "mode 0 has other monitors (monitor_config)",
    "profiler.": "mode 0 profiles with ProfileMonitor",
    "recompute_comm": "mode 0 repeats the communication of what it recomputes",
}


def to_mode0(r: DynamicRecipe) -> Translation:
    """Return a recipe of mode 1 in the words of mode 0.

    Raises:
        RecipeError: Mode 0 has no such network, the recipe does not train, or does not say on how many devices.
    """
    c, notes = r.config, dict[str, str]()
    if c.model.model_type == "deepseek_v4":
        expected = "deepseek_v3 or qwen3: mode 0 has no network of DeepSeek-V4"
        raise RecipeError([r.problem("model.model_type", c.model.model_type, expected)])
    if c.run_mode != "train":
        raise RecipeError([r.problem("run_mode", c.run_mode, "train: only training is translated")])
    if r.devices is None:
        problem = f"{c.parallelism.data_parallel_shard}, which does not say on how many devices"
        expected = "--devices N, or the number of data-parallel devices"
        raise RecipeError([r.problem(P + "data_parallel_shard", problem, expected)])
    values = {
        **_places(r, notes),
        **_training(r, notes),
        **_data(r, notes),
        **_parallel(r, notes),
        **_memory(r, notes),
        **{f"model.model_config.{key}": value for key, value in _model(r, notes).items()},
        "callbacks": _callbacks(r),
    }
    for key, place in table.SAME.items():
        values.setdefault(key, table.value_at(c, place))
    values["train_dataset_task.type"] = "CausalLanguageModelDataset"
    places = (place.partition(":")[0] for place in table.CHANGED.values())
    entries = written_keys("", r.config, r.written)
    translated = (*table.SAME.values(), *places, *_REPEATED)
    result = translation(values, notes, entries, translated, _REASONS)
    result.sections["train_dataset_task"]["dataset_config"] = result.sections["train_dataset"]
    return result


def network(r: DynamicRecipe) -> ModelConfig | None:
    """Return the network as this package computes with it; None: one that it has not."""
    if r.config.model.model_type != "deepseek_v3":
        return None
    names, values = section_keys(ModelConfig).names, dict(DEEPSEEK_V3)
    values |= {names[key]: value for key, value in _model(r, {}).items()}
    return ModelConfig(**cast("Any", values))


def _places(r: DynamicRecipe, notes: dict[str, str]) -> dict[str, Any]:
    """Return folders, trainer, what to start from, and what every recipe of static graphs says."""
    c, model = r.config.checkpoint, network(r)
    keys = written_keys("model.model_config.", model, _model(r, {})) if model else ()
    lacking = [e for e in keys if decides("mindformers", e.key) and not e.is_neutral()]
    is_trained = model is not None and not lacking
    if lacking:
        text = f"{lacking[0].plain()}, which the network of this package lacks: MindFormers' own is trained"
        notes[f"model.{lacking[0].key.rpartition('.')[2]}"] = text
    return {
        "output_dir": c.save_path.rstrip("/").removesuffix("/checkpoint") or "./output",
        "run_mode": "train",
        "use_legacy": False,
        "use_parallel": r.devices != 1,
        "resume_training": bool(c.load_path) and not c.no_load_optim,
        "trainer.type": "TelechatMoeTrainer" if is_trained else "CausalLanguageModelingTrainer",
        "trainer.auto_register": "telechat_moe_plugin.TelechatMoeTrainer" if is_trained else None,
        "trainer.model_name": r.config.model.model_type,
        "context.mode": 0,
        "context.device_target": "Ascend",
        "micro_batch_interleave_num": 1,
    }


def _training(r: DynamicRecipe, notes: dict[str, str]) -> dict[str, Any]:
    t, s, o = r.config.training, r.config.lr_scheduler, r.config.optimizer
    if not t.use_skip_step_on_nan:
        text = "False; mode 0 always skips steps that are not finite"
        notes["training.use_skip_step_on_nan"] = text
    values: dict[str, Any] = {
        "train_precision_sync": t.deterministic,
        "runner_config.epochs": _epochs(r)[0],
        "runner_config.sink_mode": True,
        "runner_config.sink_size": 1,
        **{f"runner_config.{key}": value for key, value in _accumulation(r).items()},
        "optimizer.type": "AdamW",
        "runner_wrapper.type": "MFTrainOneStepCell",
        "runner_wrapper.scale_sense": 1.0,
        "runner_wrapper.use_clip_grad": t.max_norm > 0,
        "runner_wrapper.max_grad_norm": t.max_norm or None,
        **{f"lr_schedule.{f.name}": getattr(s, f.name) for f in fields(s)},
        "lr_schedule.total_steps": t.steps,
    }
    if s.type == "ConstantWarmUpLR":  # which has no end, and may still be rising at the last step
        values["lr_schedule.total_steps"] = max(t.steps, s.warmup_steps or 0)
    if o.type == "Muon":
        text = (
            "Muon; mode 0 updates all weights with AdamW (adamw_betas, adamw_eps), another training"
        )
        notes["optimizer.type"] = text
        values |= {"optimizer.betas": o.adamw_betas, "optimizer.eps": o.adamw_eps}
    return values


def _accumulation(r: DynamicRecipe) -> dict[str, Any]:
    """Return the micro-batches of a step where no pipeline counts them."""
    staged = r.config.parallelism.pipeline_parallel > 1
    return {} if staged else {"gradient_accumulation_steps": r.micro_batches}


def _epochs(r: DynamicRecipe) -> tuple[int, list[int] | None]:
    """Return passes over the data and sizes with which mode 0 trains training.steps steps."""
    t, sizes = r.config.training, getattr(r.config.train_dataset.dataloader, "sizes", None)
    per_pass = sizes[0] // t.global_batch_size if sizes else 0
    if per_pass and t.steps % per_pass == 0:
        return t.steps // per_pass, sizes
    return 1, [t.steps * t.global_batch_size, 0, 0]


def _data(r: DynamicRecipe, notes: dict[str, str]) -> dict[str, Any]:
    loader, sizes = dict(r.written["train_dataset"]["dataloader"]), _epochs(r)[1]
    if loader.get("sizes") != sizes:
        text = f"mode 0 has no training.steps, so {sizes}: the order of samples may be another"
        notes["train_dataset.dataloader.sizes"] = f"{loader.get('sizes')}; {text}"
    copied = {
        key: value
        for key, value in loader.items()
        if f"train_dataset.dataloader.{key}" not in table.SAME.values()
    }
    columns = r.config.train_dataset.dataloader.column_names
    values = {f"train_dataset.data_loader.{key}": value for key, value in copied.items()}
    return values | {
        "train_dataset.data_loader.sizes": sizes,
        "train_dataset.construct_args_key": columns,
    }


def _parallel(r: DynamicRecipe, notes: dict[str, str]) -> dict[str, Any]:
    p, copies, staged = (
        r.config.parallelism,
        r.data_parallel or 1,
        r.config.parallelism.pipeline_parallel > 1,
    )
    columns = r.config.train_dataset.dataloader.column_names
    values = {
        "parallel_config.data_parallel": copies,
        "parallel_config.micro_batch_num": r.micro_batches if staged else 1,
        "parallel_config.use_seq_parallel": p.sequence_parallel,
        "parallel_config.vocab_emb_dp": False,
        "parallel.parallel_mode": 1 if r.devices != 1 else 0,
        "parallel.gradients_mean": False,
        "parallel.enable_alltoall": p.expert_parallel > 1,
        "parallel.full_batch": False,
        "parallel.dataset_strategy": [
            [copies, 1, *[1, 1] * (name == "attention_mask")] for name in columns
        ],
        "parallel.enable_parallel_optimizer": (r.domain or 1) > 1,
        "parallel.parallel_optimizer_config": _states(r, notes),
    }
    if p.context_parallel_method != "colossal":
        notes[P + "context_parallel_method"] = (
            f"{p.context_parallel_method}; static graphs gather keys and values (colossal) instead of splitting heads: "
            "other communication, the numbers are the same"
        )
    if staged and (
        p.pipeline_parallel_interleave_num > 1 or p.pipeline_parallel_schedule == "gpipe"
    ):
        order = "gpipe" if p.pipeline_parallel_schedule == "gpipe" else "1f1b"
        section = {"pipeline_interleave": True, "pipeline_scheduler": order}
        values["parallel.pipeline_config"] = section
    return values


def _states(r: DynamicRecipe, notes: dict[str, str]) -> dict[str, Any] | None:
    """Return how states are sharded; parameters only where the forward pass frees them."""
    p, config = r.config.parallelism, dict[str, Any]()
    if (r.domain or 1) == 1:
        return None
    if r.sharded != r.data_parallel:
        config["optimizer_weight_shard_size"] = r.sharded
    policy = p.reshard_after_forward_policy
    if policy == "always" or (policy == "default" and p.pipeline_parallel == 1):
        config["optimizer_level"] = "level3"
        notes[P + "reshard_after_forward_policy"] = (
            f"{policy}; mode 0 frees parameters with optimizer_level: level3, which MindFormers' graphs have and our trainer "
            "lacks: remove it there, which takes memory"
        )
    return {"gradient_accumulation_shard": True, "parallel_optimizer_threshold": 0, **config}


def _memory(r: DynamicRecipe, notes: dict[str, str]) -> dict[str, Any]:
    """Return recomputation and swapping."""
    c, swap, layers = r.config.recompute, r.config.swap, r.config.model.num_hidden_layers or 61
    numbers = {n for n in layers_of(c.full_recompute_layer) if n < layers}
    if c.mode == "select":
        text = (
            "parts of layers, which mode 0 names otherwise: none is recomputed, which takes memory"
        )
        notes["recompute.select_module"] = text
    if c.exclude_op:
        text = "parts, which mode 0 cannot leave out: whole layers are recomputed, which takes time"
        notes["recompute.exclude_op"] = text
    if not swap.enable:
        return {"recompute_config.recompute": _counts(r, numbers, layers, notes)}
    text = f"{swap.default_prefetch} layers; mode 0 counts operators: backward_prefetch 1"
    notes["swap.default_prefetch"] = text
    if swap.op_swap:
        text = "operators, which mode 0 names otherwise: they are not swapped, which takes memory"
        notes["swap.op_swap"] = text
    items = [sorted(layers_of(item.layers)) for item in swap.layer_swap or ()]
    return {
        "recompute_config.recompute": sorted(numbers) or False,  # with swapping a list names layers
        "swap_config.swap": True,
        "swap_config.layer_swap": [{"layers": item, "backward_prefetch": 1} for item in items],
    }


def _counts(
    r: DynamicRecipe, numbers: set[int], layers: int, notes: dict[str, str]
) -> bool | list[int] | list[list[int]]:
    """Return how many layers each stage recomputes: the first ones of every chunk."""
    if not numbers:
        return False
    if len(numbers) == layers:
        return True
    counts, begin, amounts, exact = _chunk_layers(r, layers), 0, list[int](), True
    for count in counts:
        recomputed = {n for n in numbers if begin <= n < begin + count}
        first = set(range(begin, begin + len(recomputed)))
        exact = exact and recomputed == first
        amounts.append(len(recomputed))
        begin += count
    if not exact:
        notes["recompute.full_recompute_layer"] = (
            f"these layers; mode 0 recomputes the first of each stage: {amounts}"
        )
    return _by_stage(r, amounts)


def _chunk_layers(r: DynamicRecipe, layers: int) -> list[int]:
    """Return the layers of each chunk, first chunks of all stages first."""
    p = r.config.parallelism
    pp, vpp = p.pipeline_parallel, p.pipeline_parallel_interleave_num
    ranges: list[str] | str | None = p.pipeline_parallel_layers_per_stage
    if pp == 1 or not isinstance(ranges, list):
        return [layers // (pp * vpp)] * (pp * vpp) if pp > 1 else [layers]
    parts = [text.split(",") for text in ranges]
    return [len(layers_of([parts[stage][chunk]])) for chunk in range(vpp) for stage in range(pp)]


def _by_stage(r: DynamicRecipe, numbers: list[int]) -> list[int] | list[list[int]]:
    """Return a number for each chunk as mode 0 has it: a list of stages, with several chunks a list of these."""
    pp = r.config.parallelism.pipeline_parallel
    rows = [numbers[index : index + pp] for index in range(0, len(numbers), pp)]
    return rows[0] if len(rows) == 1 else rows


def _model(r: DynamicRecipe, notes: dict[str, str]) -> dict[str, Any]:
    m, p, mapping = r.config.model, r.config.parallelism, r.written["model"]
    names = section_keys(ModelConfig if m.model_type == "deepseek_v3" else OtherModelConfig).names
    section: dict[str, Any] = {"model_type": m.model_type, "architectures": [m.architectures]}
    plan = section_keys(cast("type[Any]", type(m)))
    for key, value in mapping.items():
        column = plan.fields[plan.names[key]]
        if value is None or key in section or column.metadata.get("takes") is not None:
            continue
        if key in names:
            section[key] = value
        elif not Takes().allows(value, column):
            notes[f"model.{key}"] = f"{value}, which mode 0 does not have"
    if kind := section.get("moe_router_load_balancing_type"):
        section["moe_router_load_balancing_type"] = table.inverse(table.BALANCES)[kind]
    if not p.expert_parallel_use_safe_tokens:
        section["use_pad_tokens"] = False
    if p.moe_token_dispatcher_type != "alltoall":
        section["moe_token_dispatcher_type"] = table.inverse(table.DISPATCHERS)[
            p.moe_token_dispatcher_type
        ]
        section["npu_nums_per_device"] = p.npu_nums_per_device
    if p.pipeline_parallel > 1:
        layers = m.num_hidden_layers or 61
        counts = _chunk_layers(r, layers)
        base = layers // len(counts)
        if any(count != base for count in counts):
            section["offset"] = _by_stage(r, [count - base for count in counts])
        section["pp_interleave_num"] = p.pipeline_parallel_interleave_num
    return section


def _callbacks(r: DynamicRecipe) -> list[dict[str, Any]]:
    c, m, steps = r.config.checkpoint, r.config.model, _accumulation(r)
    items: list[dict[str, Any]] = [{"type": "MFLossMonitor", **steps}]
    if hasattr(m, "n_routed_experts") and m.moe_router_enable_expert_bias is not False:
        items.append({"type": "TopkBiasBalanceCallback", **steps})
    if c.enable_save and c.save_path:
        item = {
            "type": "CheckpointMonitor",
            "prefix": c.prefix or "checkpoint",
            "async_save": c.async_save,
        }
        item |= {
            "save_checkpoint_steps": c.save_interleaved_steps,
            "keep_checkpoint_max": c.save_max,
        }
        items.append(item | {"checkpoint_format": "safetensors", "integrated_save": False})
    return items
