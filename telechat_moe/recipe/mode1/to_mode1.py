"""Write a recipe of mode 0 as one of mode 1: the same training for MindFormers 2's dynamic graphs."""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from telechat_moe.recipe.check import section_keys
from telechat_moe.recipe.fields import Takes
from telechat_moe.recipe.mode1 import table
from telechat_moe.recipe.mode1.schema import section_of
from telechat_moe.recipe.mode1.table import Translation, translation
from telechat_moe.recipe.problems import RecipeError
from telechat_moe.recipe.rules.parallel import chunks, offset_rows
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.uses import WrittenKey, written

M = "model.model_config."
P = "parallelism."
_NETWORKS = {"telechat3_moe": "DeepseekV3", "deepseek_v3": "DeepseekV3", "qwen3": "Qwen3"}
_ELSEWHERE = (
    "batch_size", "input_sliced_sig", "qk_head_dim", "qk_pos_emb_head_dim", "pp_interleave_num", "offset",
    "moe_token_dispatcher_type", "npu_nums_per_device", "use_pad_tokens",
)  # fmt: skip
"""Model keys that repeat others, or that mode 1 has in `parallelism`."""
_REPEATED = (
    "use_parallel", "use_legacy", "run_mode", "trainer", "output_dir", "train_dataset_task", "load_ckpt_format",
    "parallel.parallel_mode", "parallel.gradients_mean", "parallel.full_batch", "parallel.dataset_strategy",
    "parallel.search_mode", "parallel.enable_alltoall", "train_dataset.construct_args_key",
    "train_dataset.data_loader.", "runner_wrapper.type", "runner_config.sink",
    "recompute_config.mp_comm_recompute", "optimizer.type", "context.mode", "model.", "lr_schedule",
)  # fmt: skip
"""Keys that say how a static graph runs, say again what others say, or are written below."""
_REASONS = {
    "telechat_moe.": "a setting of this package, without which MindFormers trains",
    "context.": "mode 1 makes no context of a recipe",
    "callbacks.": "mode 1 has its loss log, the update of the expert bias and checkpoints built in",
    "monitor_config.": "mode 1 has other monitors (monitor.train_state)",
    "parallel.": "how static graphs are split",
}


def to_mode1(r: Recipe) -> Translation:
    """Return a recipe of mode 0 in the words of mode 1.

    Raises:
        RecipeError: Mode 1 has no such network, or the recipe does not train.
    """
    config, notes = r.model.model_config, dict[str, str]()
    if config.model_type not in _NETWORKS or r.pretrained_model_dir:
        expected = "a network of mode 1: telechat3_moe or deepseek_v3 (written as deepseek_v3), or qwen3, with its widths"
        raise RecipeError([r.problem(M + "model_type", str(config.model_type), expected)])
    if not r.trains or not r.train_steps:
        problem = f"{r.run_mode}, with {r.train_steps} steps"
        expected = "train, and samples in train_dataset.data_loader.sizes"
        raise RecipeError([r.problem("run_mode", problem, expected)])
    values = {
        "run_mode": "train",
        **_checkpoint(r),
        **_training(r, notes),
        **_parallelism(r, notes),
        **_pipeline(r, notes),
        **_schedule(r, notes),
        **_data(r),
        **_model(r, notes),
        **_memory(r, notes),
    }
    for key, place in table.SAME.items():
        if r.use_parallel or not key.startswith("parallel_config."):
            value = table.value_at(r, key)
            values.setdefault(place, None if value == "" else value)
    entries = [e for e in written(r) if not _built_in(r, e) and not _is_neutral(e.field)]
    return translation(values, notes, entries, (*table.SAME, *table.CHANGED, *_REPEATED), _REASONS)


def _checkpoint(r: Recipe) -> dict[str, Any]:
    c, path = r.checkpoints, r.load_checkpoint
    if isinstance(r.resume_training, str):
        path = r.resume_training
    return {
        "checkpoint.enable_save": c is not None,
        "checkpoint.save_path": f"{r.output_dir.rstrip('/')}/checkpoint" if c else None,
        "checkpoint.save_max": c and c.keep_checkpoint_max,
        "checkpoint.save_interleaved_steps": c and c.save_checkpoint_steps,
        "checkpoint.async_save": c and c.async_save,
        "checkpoint.prefix": c and c.prefix,
        "checkpoint.load_path": path or None,
        "checkpoint.no_load_optim": not r.resume_training if path else None,
    }


def _training(r: Recipe, notes: dict[str, str]) -> dict[str, Any]:
    kind = getattr(r.optimizer, "type", "AdamW")
    if "Pma" in kind:
        notes["optimizer.type"] = f"{kind}; mode 1 trains with AdamW, without averages of models"
    return {
        "training.steps": r.train_steps,
        "training.global_batch_size": r.global_batch,
        "training.max_norm": r.runner_wrapper.max_grad_norm
        if r.runner_wrapper.use_clip_grad
        else 0.0,
        "training.use_skip_step_on_nan": True,
        "training.deterministic": bool(getattr(r, "train_precision_sync", None)),
        "optimizer.type": "AdamW",
        "optimizer.enable_fused_opt": True if kind == "FusedAdamW" else None,
    }


def _parallelism(r: Recipe, notes: dict[str, str]) -> dict[str, Any]:
    p, config = r.parallel_config, r.model.model_config
    tp, cp, experts, copies = (
        (p.model_parallel, p.context_parallel, p.expert_parallel, p.data_parallel)
        if r.use_parallel
        else (1, 1, 1, 1)
    )
    method = table.METHODS[getattr(p, "context_parallel_algo", "colossalai_cp")] if cp > 1 else None
    dispatcher = getattr(config, "moe_token_dispatcher_type", None) or "alltoall"
    hops = dispatcher if experts > 1 and dispatcher != "alltoall" else None
    if hops and hops not in table.DISPATCHERS:
        text = f"{hops}; mode 1 has alltoall instead, with more traffic between nodes and the same result"
        notes[M + "moe_token_dispatcher_type"] = text
        hops = None
    if tp > 1 and not p.use_seq_parallel:
        notes["parallel_config.use_seq_parallel"] = (
            "False; mode 1 needs True with tensor parallelism, the numbers are the same"
        )
    level = getattr(r.parallel.parallel_optimizer_config, "optimizer_level", None)
    return {
        P + "data_parallel_shard": _shard(r, copies, cp * tp, experts, notes),
        P + "reshard_after_forward_policy": "always" if level == "level3" else "never",
        P + "sequence_parallel": tp > 1,
        P + "context_parallel_method": method,
        P + "ulysses_degree_in_cp": getattr(p, "ulysses_degree_in_cp", 1)
        if method == "hybrid"
        else None,
        P + "moe_token_dispatcher_type": table.DISPATCHERS[hops] if hops else None,
        P + "npu_nums_per_device": config.npu_nums_per_device if hops else None,
        P + "expert_parallel_use_safe_tokens": False
        if getattr(config, "use_pad_tokens", None) is False
        else None,
    }


def _shard(r: Recipe, copies: int, others: int, experts: int, notes: dict[str, str]) -> int:
    """Return the data-parallel devices that share states, and in mode 1 gradients and experts."""
    detail, shard = r.parallel.parallel_optimizer_config, 1
    if r.parallel.enable_parallel_optimizer:
        size = detail.optimizer_weight_shard_size if detail else None
        shard = size if size and size > 1 else copies
    if shard * others % experts:
        text = (
            "mode 1 spreads experts over devices that share states, gradients and parameters, too"
        )
        notes["parallel.enable_parallel_optimizer"] = (
            f"{shard} devices share states; {text}: {copies} do"
        )
        return copies
    if shard * r.parallel_config.context_parallel > 1 and not (
        detail and detail.gradient_accumulation_shard
    ):
        text = "False; mode 1 shards gradients as it does states, which saves memory and changes no number"
        notes["parallel.parallel_optimizer_config.gradient_accumulation_shard"] = text
    return shard


def _pipeline(r: Recipe, notes: dict[str, str]) -> dict[str, Any]:
    """Return chunks, their layers and their order."""
    pp, vpp, pipeline = r.stages, chunks(r), r.parallel.pipeline_config
    if pp == 1:
        return {}
    order = pipeline.pipeline_scheduler if pipeline else "1f1b"
    if order not in ("1f1b", "gpipe"):
        text = f"{order}, which mode 1 does not have: it runs 1f1b, which waits longer and computes the same"
        notes["parallel.pipeline_config.pipeline_scheduler"] = text
        order = "1f1b"
    counts = _chunk_layers(r)
    if 0 in counts:
        base, remainder = divmod(sum(counts), pp * vpp)
        counts = [base + (index < remainder) for index in range(pp * vpp)]
        text = f"which leaves a chunk empty; mode 1 needs layers in each: {counts}"
        notes[M + "offset"] = f"{r.model.model_config.offset}, {text}"
    ends = [sum(counts[: index + 1]) for index in range(pp * vpp)]
    ranges = [f"{end - count}-{end - 1}" for end, count in zip(ends, counts, strict=True)]
    return {
        P + "pipeline_parallel_schedule": "interleaved_1f1b" if vpp > 1 else order,
        P + "pipeline_parallel_interleave_num": vpp,
        P + "pipeline_parallel_layers_per_stage": [
            ",".join(ranges[stage::pp]) for stage in range(pp)
        ],
    }


def _chunk_layers(r: Recipe) -> list[int]:
    """Return the layers of each chunk, first chunks of all stages first."""
    pp, vpp, config = r.stages, chunks(r), r.model.model_config
    rows = offset_rows(config.offset, pp, vpp) or [[0] * pp] * vpp
    return [int(config.num_hidden_layers) // (pp * vpp) + extra for row in rows for extra in row]


def _schedule(r: Recipe, notes: dict[str, str]) -> dict[str, Any]:
    """Return the schedule over training.steps; shares of another length become steps."""
    grouped = r.grouped_lr_schedule
    source = r.lr_schedule or (grouped.default if grouped else None)
    if source is None:
        raise RecipeError([r.problem("lr_schedule", "is missing", "a schedule")])
    section = {f.name: v for f in fields(source) if (v := getattr(source, f.name)) is not None}
    total, steps = section.pop("total_steps", -1), r.train_steps
    if "WarmUp" in section["type"] and "warmup_ratio" not in section:
        section.setdefault("warmup_steps", 0)
    if section.get("decay_steps") == -1:
        del section["decay_steps"]
    if total not in (-1, steps):
        for name in ("warmup", "decay", "decay_start"):
            if (ratio := section.pop(f"{name}_ratio", None)) is not None:
                section[f"{name}_steps"] = int(total * ratio)
        if section["type"] != "ConstantWarmUpLR":
            text = f"{total}; mode 1 ends the schedule at training.steps {steps}"
            notes["lr_schedule.total_steps"] = text
    return {f"lr_scheduler.{name}": value for name, value in section.items()}


def _data(r: Recipe) -> dict[str, Any]:
    d, source = r.train_dataset, _written(r.given["train_dataset"]["data_loader"])
    loader = {"type": d.data_loader.type, **source}
    loader["column_names"] = d.input_columns or d.construct_args_key
    if d.data_loader.config is not None:
        loader["config"] = {"create_compressed_eod_mask": False, **_written(source["config"])}
    return {f"train_dataset.dataloader.{name}": value for name, value in loader.items()}


def _written(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _model(r: Recipe, notes: dict[str, str]) -> dict[str, Any]:
    """Return the network: every width written out, because mode 1 fills in those of DeepSeek-V3."""
    config, name = r.model.model_config, _NETWORKS[r.model.model_config.model_type]
    plan, written_keys = section_keys(section_of(name)).fields, r.given["model"]["model_config"]
    kind = "deepseek_v3" if name == "DeepseekV3" else "qwen3"
    section: dict[str, Any] = {"model_type": kind, "architectures": f"{name}ForCausalLM"}
    for f in fields(config):
        key, value = table.RENAMED.get(f.name, f.name), getattr(config, f.name)
        if value is None or key in section or f.name in _ELSEWHERE:
            continue
        column = plan.get(key)
        takes: Takes | None = column.metadata.get("takes") if column else None
        if column is not None and takes is None:
            section[key] = value
        elif _is_neutral(f):
            continue
        elif column is not None and takes is not None and not takes.allows(value, column):
            text = f"{value}, which mode 1 never reads: {column.metadata['remedy']}"
            notes[M + f.name] = text
        elif column is None and f.name in written_keys and not Takes().allows(value, f):
            notes[M + f.name] = f"{value}, which mode 1 does not have"
    if section.get("hidden_act") == "swiglu" and not section.get("bias_swiglu_fusion"):
        section["hidden_act"] = "fusedswiglu"  # mode 1's name of the same function
    if name == "DeepseekV3":
        section.setdefault("num_key_value_heads", section["num_attention_heads"])
        _balance(section, notes)
    return {f"model.{key}": value for key, value in section.items()}


def _is_neutral(f: Field[Any]) -> bool:
    """Return whether a key of mode 0 changes no number, whatever it says."""
    takes: Takes | None = f.metadata.get("takes")
    return takes is not None and bool(takes.reason)


def _balance(section: dict[str, Any], notes: dict[str, str]) -> None:
    """Put in mode 1's name of the balance loss."""
    key = "moe_router_load_balancing_type"
    kind = section.pop(key)
    if kind == "none":
        section["moe_aux_loss_coeff"] = 0.0
        return
    section[key] = table.BALANCES.get(kind, "seq_aux_loss")
    if kind not in table.BALANCES and section["moe_aux_loss_coeff"]:
        notes[M + key] = f"{kind}; mode 1 counts load over whole sequences: seq_aux_loss"


def _memory(r: Recipe, notes: dict[str, str]) -> dict[str, Any]:
    """Return recomputation and swapping."""
    config, model, swap = r.recompute_config, r.model.model_config, r.swap_config
    last = int(model.num_hidden_layers) + (model.num_nextn_predict_layers or 0) - 1
    ranges = [f"0-{last}"] if config.recompute is True else _recomputed(r)
    if config.select_recompute:
        text = "operators, which mode 1 names otherwise (recompute.select_module): none is recomputed, which takes memory"
        notes["recompute_config.select_recompute"] = text
    values: dict[str, Any] = {}
    if ranges:
        values |= {"recompute.mode": "full", "recompute.full_recompute_layer": ranges}
    if swap.swap and (r.stages > 1 or swap.op_swap or not swap.layer_swap):
        text = "True, which mode 1 has for whole layers without pipeline stages: nothing is swapped, which takes memory"
        notes["swap_config.swap"] = text
    elif swap.swap:
        items = [item.layers for item in swap.layer_swap or ()]
        layers = [
            range(int(model.num_hidden_layers)) if item is True else item or [] for item in items
        ]
        numbers = sorted({n for item in layers for n in item})
        values |= {"swap.enable": True, "swap.layer_swap": [{"layers": [str(n) for n in numbers]}]}
        notes["swap_config.layer_swap.backward_prefetch"] = (
            "operators; mode 1 brings activations back a layer before"
        )
    return values


def _recomputed(r: Recipe) -> list[str]:
    """Return the layers that a list in `recompute_config.recompute` recomputes, as ranges."""
    value, counts, ranges = r.recompute_config.recompute, _chunk_layers(r), list[str]()
    if isinstance(value, bool):
        return []
    if r.swap_config.swap:
        return [str(n) for n in sorted(int(n) for n in value if isinstance(n, int))]
    flat = [n for row in value for n in (row if isinstance(row, list) else [row])]
    for index, (count, number) in enumerate(zip(counts, flat, strict=True)):
        begin, amount = sum(counts[:index]), count if number is True else int(number)
        ranges += [f"{begin}-{begin + amount - 1}"] if amount else []
    return ranges


def _built_in(r: Recipe, entry: WrittenKey) -> bool:
    """Return whether an item of `callbacks` is one that mode 1 has built in, or the checkpoints."""
    parts = entry.key.split(".")
    if parts[0] != "callbacks" or len(parts) < 2 or not parts[1].isdigit():
        return False
    name = r.callbacks[int(parts[1])].type
    return name in ("MFLossMonitor", "TopkBiasBalanceCallback", "CheckpointMonitor")
