"""Which keys of mode 0 and mode 1 say the same: the table of both translations, and what they share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from telechat_moe.recipe.fields import Takes
from telechat_moe.recipe.uses import WrittenKey

SAME = {
    "seed": "training.seed",
    "runner_config.batch_size": "training.local_batch_size",
    "parallel_config.model_parallel": "parallelism.tensor_parallel",
    "parallel_config.context_parallel": "parallelism.context_parallel",
    "parallel_config.pipeline_stage": "parallelism.pipeline_parallel",
    "parallel_config.expert_parallel": "parallelism.expert_parallel",
    "optimizer.betas": "optimizer.betas",
    "optimizer.eps": "optimizer.eps",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "train_dataset.drop_remainder": "train_dataset.drop_remainder",
    "train_dataset.num_parallel_workers": "train_dataset.num_parallel_workers",
    "train_dataset.prefetch_size": "train_dataset.prefetch_size",
    "train_dataset.numa_enable": "train_dataset.numa_enable",
    "train_dataset.python_multiprocessing": "train_dataset.dataloader.python_multiprocessing",
    "train_dataset.input_columns": "train_dataset.dataloader.column_names",
    "load_checkpoint": "checkpoint.load_path",
}
"""Keys with the same values: both translations copy them."""
CHANGED = {
    "runner_config.epochs": "training.steps",
    "runner_config.gradient_accumulation_steps": "training.global_batch_size",
    "parallel_config.micro_batch_num": "training.global_batch_size",
    "runner_wrapper.max_grad_norm": "training.max_norm",
    "runner_wrapper.use_clip_grad": "training.max_norm: 0.0",
    "train_precision_sync": "training.deterministic",
    "parallel_config.data_parallel": "parallelism.data_parallel_shard",
    "parallel.enable_parallel_optimizer": "parallelism.data_parallel_shard",
    "parallel.parallel_optimizer_config": "parallelism.reshard_after_forward_policy",
    "parallel_config.use_seq_parallel": "parallelism.sequence_parallel",
    "parallel_config.context_parallel_algo": "parallelism.context_parallel_method",
    "parallel_config.ulysses_degree_in_cp": "parallelism.ulysses_degree_in_cp",
    "parallel.pipeline_config": "parallelism.pipeline_parallel_schedule",
    "model.model_config.pp_interleave_num": "parallelism.pipeline_parallel_interleave_num",
    "model.model_config.offset": "parallelism.pipeline_parallel_layers_per_stage",
    "model.model_config.moe_token_dispatcher_type": "parallelism.moe_token_dispatcher_type",
    "model.model_config.npu_nums_per_device": "parallelism.npu_nums_per_device",
    "model.model_config.use_pad_tokens": "parallelism.expert_parallel_use_safe_tokens",
    "model.model_config.router_dense_type": "model.moe_router_dtype",
    "model.model_config.scoring_func": "model.moe_router_score_function",
    "train_dataset.data_loader": "train_dataset.dataloader",
    "resume_training": "checkpoint.no_load_optim",
    "recompute_config": "recompute",
    "swap_config": "swap",
}
"""Keys with other values, or of which several say the same: code says how they translate."""
_SECTIONS = {
    "runner_config": "training",
    "runner_wrapper": "training.max_norm",
    "parallel_config": "parallelism",
    "parallel": "parallelism",
    "lr_schedule": "lr_scheduler",
    "train_dataset_task": "train_dataset",
    "monitor_config": "monitor",
    "output_dir": "checkpoint.save_path",
}
MOVED = {key.rpartition(".")[2]: place for key, place in {**SAME, **CHANGED}.items()} | _SECTIONS
"""Where mode 1 has what a key or section of mode 0 says, by its last name."""

METHODS = {"colossalai_cp": "colossal", "ulysses_cp": "ulysses", "hybrid_cp": "hybrid"}
DISPATCHERS = {"alltoall": "alltoall", "alltoall_deredundency": "alltoall_deredundancy"}
BALANCES = {"seq_aux_loss": "seq_aux_loss", "aux_loss": "aux_loss", "gbs_aux_loss": "global_aux_loss"}  # fmt: skip
RENAMED = {"router_dense_type": "moe_router_dtype", "scoring_func": "moe_router_score_function"}


def inverse(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table from mode 1 to mode 0."""
    return {place: key for key, place in table.items()}


@dataclass(frozen=True)
class Translation:
    """A recipe in the words of the other mode.

    Attributes:
        sections: What it says.
        notes: What has no counterpart or means something else, and what that changes.
    """

    sections: dict[str, Any]
    notes: tuple[str, ...]


def translation(
    values: Mapping[str, Any],
    notes: dict[str, str],
    entries: Iterable[WrittenKey],
    translated: tuple[str, ...],
    reasons: Mapping[str, str],
) -> Translation:
    """Return a translation, in whose notes are the written settings that ask for something and are not translated, too.

    Args:
        values: What it says, by dotted keys; None is left out.
        translated: Beginnings of the keys that are in the values.
        reasons: What becomes of other keys, by their beginnings.
    """
    for entry in entries:
        if not entry.key.startswith(translated) and not Takes().allows(entry.value, entry.field):
            matches = (text for start, text in reasons.items() if entry.key.startswith(start))
            meaning = entry.field.metadata.get("doc")
            text = next(matches, f"no counterpart: {meaning}" if meaning else "no counterpart")
            notes.setdefault(entry.key, f"{entry.plain()}; {text}")
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        section = sections
        for part in path:
            section = section.setdefault(part, {})
        if value is not None:
            section[name] = value
    lines = (" ".join(f"{key}: {text}".split()) for key, text in notes.items())
    return Translation(sections, tuple(line.rstrip(".") for line in lines))


def value_at(section: Any, key: str) -> Any:
    """Return the value of a dotted key of checked sections; None where it has none."""
    for name in key.split("."):
        section = getattr(section, name, None)
    return section
