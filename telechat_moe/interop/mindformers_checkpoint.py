"""Convert training checkpoints between MindFormers' trainer and ours, bit for bit.

Our model keeps its parameter names in MindFormers' trainer, and MindFormers' AdamW calls its moments ``adam_m`` and
``adam_v`` as ours does, so tensors keep their names. What differs are the files around them:

===================  ==========================================================================================
MindFormers          layout of files
===================  ==========================================================================================
one process          ``iteration_00000006/``: ``*-model-*.safetensors``, ``*-opt-*.safetensors``, ``common.json``
                     (``use_legacy_format: False``; the only one it can resume from)
data parallel        ``rank_0/PREFIX_rank_0-EPOCH_STEP.safetensors`` with everything, one whole file a process
                     (``use_legacy_format: True``; it cannot save the other one)
===================  ==========================================================================================

The recipe's ``trainer.type`` says whose model MindFormers trains. Its own class has other names and layouts of weights
(:mod:`telechat_moe.interop.upstream_names`), by which a checkpoint of it is recognised.

Its files also hold counters and the terms of the last loss (:data:`STATE`, and ``expert_load``); they are no weights.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe import files
from telechat_moe.checkpoint import checkpoint as checkpoints
from telechat_moe.checkpoint.rank_shards import grouped
from telechat_moe.checkpoint.weights import is_transient
from telechat_moe.data.epochs import Epochs
from telechat_moe.errors import BadInputError, CheckFailedError, UsageError
from telechat_moe.interop import upstream_names
from telechat_moe.interop.mindformers_config import DEGREES, TRAINER
from telechat_moe.narrowing import short
from telechat_moe.reading import MALFORMED, parse_json, read_text
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.batch_schedule import BatchSchedule
from telechat_moe.tensor_files import Array, file_of, parse

MOMENTS = ("adam_m", "adam_v")
LOSSES = ("lm_loss", "mtp_loss", "aux_loss", "indexer_loss")
STATE = (
    *("epoch_num", "step_num", "global_step", "global_batch_size", "loss_scale", "scale_sense"),
    *LOSSES,
)
UPSTREAM_TABLE = "embedding.word_embeddings.weight"
FOLDER = "checkpoint"  # of output_dir
COMMON = "common.json"
ITERATION = re.compile(r"iteration_(\d{8})")
RANK_FILE = re.compile(r"(.+)_rank_(\d+)-(\d+)_(\d+)\.safetensors")

MomentGroups = dict[str, dict[str, Array]]


@dataclass(frozen=True)
class MindFormersCheckpoint:
    """A checkpoint of MindFormers.

    Attributes:
        step: Finished steps, over all epochs.
        updates: Those of them that changed the weights (the others had an infinite gradient).
        samples: Samples that it has consumed, over all epochs.
        tensors: Weights and optimizer states, in the groups of a checkpoint of ours.
    """

    path: Path
    step: int
    updates: int
    global_batch: int
    samples: int
    tensors: dict[str, dict[str, Array]]


def newest(root: Path) -> Path | None:
    """Return the newest checkpoint that MindFormers finished under ``output_dir/checkpoint``; None: none.

    In the format for one process that is the step that ``latest_checkpointed_iteration.txt`` names, in the other the
    newest that every ``rank_N`` folder has: processes save on their own, and one may have died before.
    """
    folders = sorted(root.glob("iteration_*"))
    marker = root / "latest_checkpointed_iteration.txt"
    if folders and marker.exists():
        text = read_text(marker).strip()
        if not (text.isdecimal() and len(text) < 12):
            raise BadInputError(f"{marker}: {short(text)!r}, expected the number of a step")
        return root / f"iteration_{int(text):08d}"
    ranks = sorted(root.glob("rank_*"))
    matches = (RANK_FILE.fullmatch(p.name) for rank in ranks for p in rank.glob("*.safetensors"))
    counts = Counter((int(match[3]), int(match[4])) for match in matches if match)
    complete = [key for key, count in counts.items() if count == len(ranks)]
    if not complete:
        return None
    epoch, step = max(complete)
    return next(ranks[0].glob(f"*_rank_*-{epoch}_{step}.safetensors"))


def step_of(checkpoint: Path, recipe: Recipe) -> int:
    """Return the finished steps of what :func:`newest` found, by its name."""
    if match := ITERATION.fullmatch(checkpoint.name):
        return int(match[1])
    match = RANK_FILE.fullmatch(checkpoint.name)
    assert match is not None
    return (int(match[3]) - 1) * _steps_per_epoch(recipe) + int(match[4])


def resume_settings(root: Path, recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe must say for MindFormers to resume from the newest checkpoint in a folder.

    Raises:
        BadInputError: There is none.
    """
    checkpoint = newest(root)
    if checkpoint is None:
        raise BadInputError(f"{root}: no finished checkpoint of MindFormers to resume from")
    if recipe.devices == 1:
        if not checkpoint.is_dir():
            raise BadInputError(
                f"{root}: holds checkpoints in MindFormers' old format, from which it cannot resume one process; "
                "train with use_legacy_format False"
            )
        place = {"load_checkpoint": str(checkpoint), "resume_training": True}
        return {"use_legacy_format": False, **place}
    return {"load_checkpoint": str(root), "resume_training": checkpoint.name}


def read(path: Path, recipe: Recipe) -> MindFormersCheckpoint:
    """Read a checkpoint of MindFormers that holds whole tensors.

    Args:
        path: ``iteration_...`` folder, ``..._rank_...safetensors`` file, or the folder of them (the newest is read).

    Raises:
        BadInputError: There is none, or it is broken.
    """
    if path.is_dir() and not (path / COMMON).exists():
        folder = newest(path)
        if folder is None:
            raise BadInputError(
                f"{path}: no checkpoint of MindFormers; expected an iteration_... folder with {COMMON}, or "
                "rank_N folders with ..._rank_N-EPOCH_STEP.safetensors"
            )
        path = folder
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, Array] = {}
    for file in files:
        tensors |= _parsed(file)
    state = {name: tensors.pop(name) for name in STATE if name in tensors}
    try:
        updates = state["global_step"].item()
        if path.is_dir():
            common = parse_json((path / COMMON).read_bytes())
            step, batch = int(common["global_step"]), int(common["global_batch_size"])
            samples = int(common.get("consumed_samples", step * batch))  # MindFormers 2
        else:
            batch = state["global_batch_size"].item()
            step = (state["epoch_num"].item() - 1) * _steps_per_epoch(recipe, max(1, batch))
            step += state["step_num"].item()
            samples = step * batch
    except MALFORMED as error:
        text = f"not a training checkpoint of MindFormers: no {error}"
        raise BadInputError(f"{path}: {text}") from None
    if min(step, updates, samples) < 0 or not 1 <= batch <= recipe.epoch_samples:
        raise BadInputError(
            f"{path}: {step} steps, {updates} of them applied, of {batch} samples, {samples} in all; expected a batch from 1 "
            f"to the {recipe.epoch_samples} samples of the recipe (train_dataset.data_loader.sizes)"
        )
    stored = {name: t for name, t in tensors.items() if not is_transient(name)}
    groups = grouped(stored)
    if UPSTREAM_TABLE in groups["model"]:
        groups = _renamed(groups, upstream_names.to_ours, recipe, path)
    return MindFormersCheckpoint(path, int(step), int(updates), int(batch), int(samples), groups)


def _renamed(
    groups: MomentGroups, rename: Callable[..., dict[str, Array]], recipe: Recipe, path: Path
) -> MomentGroups:
    """Return the tensors of a checkpoint under the other model's names and in its layouts.

    Args:
        rename: `upstream_names.to_ours` or `upstream_names.to_upstream`.
    """
    config, optimizer = recipe.model_config, dict[str, Array]()
    try:
        for moment in MOMENTS:
            prefix, states = f"{moment}.", groups["optimizer"].items()
            moments = {n.removeprefix(prefix): x for n, x in states if n.startswith(prefix)}
            renamed = rename(moments, config, only_trained=True)
            optimizer |= {f"{moment}.{name}": tensor for name, tensor in renamed.items()}
        return {"model": rename(groups["model"], config), "optimizer": optimizer}
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None


def _parsed(file: Path) -> dict[str, Array]:
    try:
        data = files.read(file, keep=True).data
        assert data is not None
        return parse(data)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{file}: {error}") from error


def to_ours(path: Path, recipe: Recipe) -> Path:
    """Write a checkpoint of MindFormers as one of ours, from which ``telechat-moe train --resume`` continues.

    Args:
        recipe: The recipe that goes on, of any batch; the checkpoint goes into its ``output_dir``.

    Raises:
        BadInputError: It is broken, or of another model.
        UsageError: ``output_dir`` holds checkpoints of ours already.
    """
    import yaml

    from telechat_moe.recipe import loads
    from telechat_moe.train.trainer import Trainer

    saved = read(path, recipe)
    text = yaml.safe_dump(_on_one_device(recipe.given, recipe.micro_batch_samples))
    trainer = Trainer(loads(text, name=str(recipe.source)))
    trainer.engine.put(checkpoints.Checkpoint(saved.path, saved.step, saved.tensors, {}))
    trainer.state.step, trainer.state.updates = saved.step, saved.updates
    trainer.state.skipped = saved.step - saved.updates
    trainer.state.samples = saved.samples
    trainer.state.applied_samples = saved.updates * saved.global_batch
    batch, epochs = saved.global_batch, trainer.loader.epochs
    trainer.state.lr_batches = BatchSchedule(((0, batch),), batch)
    trainer.loader.seek(epochs.place_of(saved.samples, epochs.size // batch * batch))
    trainer.state.writer()(saved.tensors)
    return trainer.state.root / f"step-{saved.step:08d}"


def _on_one_device(sections: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return what a recipe says, laid out for one device with the same global batch; checkpoints hold no layout."""
    sections = json.loads(json.dumps(sections))
    sections["use_parallel"] = False
    degrees = sections.setdefault("parallel_config", {})
    degrees |= {**dict.fromkeys(DEGREES, 1), "use_seq_parallel": False}
    sections["runner_config"]["batch_size"] = batch
    for section in (sections["train_dataset"], sections["model"]["model_config"]):
        if section.get("batch_size"):
            section["batch_size"] = batch
    sections["train_dataset_task"]["dataset_config"] = sections["train_dataset"]
    return sections


def to_mindformers(path: Path, out: Path, recipe: Recipe) -> None:
    """Write a checkpoint of ours as one from which MindFormers' trainer resumes.

    Args:
        out: Folder to make, in the layout that MindFormers resumes the recipe's number of processes from.
        recipe: The recipe of the resumed run; its ``trainer.type`` says whose names are written.

    Raises:
        BadInputError: The checkpoint is broken, or its place in the data is none of MindFormers.
        UsageError: ``out`` exists.
        CheckFailedError: Writing failed; nothing is left.
    """
    saved = checkpoints.load(path)
    if out.exists():
        raise UsageError(f"{out} exists; name a folder that does not")
    _check_place(saved, recipe)
    if recipe.trainer.type != TRAINER:
        saved.tensors.update(_renamed(saved.tensors, upstream_names.to_upstream, recipe, path))
    monitor = recipe.checkpoints
    prefix = (monitor.prefix if monitor else None) or "CKP"
    try:
        with files.new_folder(out) as hidden:
            if recipe.devices == 1:
                _iteration(hidden, saved, recipe, prefix)
            else:
                _ranks(hidden, saved, recipe, prefix)
    except OSError as error:
        raise CheckFailedError(f"{out}: {error.strerror}; nothing was written") from error


def _check_place(saved: checkpoints.Checkpoint, recipe: Recipe) -> None:
    """Refuse a place in the data other than that of as many steps of the recipe, from which MindFormers goes on."""
    if (data := saved.state.get("data")) is None:
        return
    size, batch = data["samples_per_epoch"], recipe.global_batch
    epochs = Epochs(size, batch)
    place = epochs.place_of(saved.step * batch, size // batch * batch)
    if epochs.begin(place) != epochs.begin(data["next_sample"]):
        raise BadInputError(
            f"{saved.path}: goes on at sample {data['next_sample']}, MindFormers at {place} after {saved.step} steps of {batch}: "
            "the run left samples out, changed its batch or began with new data; take its weights alone (telechat-moe convert)"
        )


def _steps_per_epoch(recipe: Recipe, batch: int | None = None) -> int:
    return max(1, recipe.epoch_samples // (batch or recipe.global_batch))


def _place(step: int, recipe: Recipe) -> tuple[int, int]:
    """Return epoch and step in it, both from 1, as MindFormers counts."""
    per_epoch = _steps_per_epoch(recipe)
    return max(0, step - 1) // per_epoch + 1, (step - 1) % per_epoch + 1


def _iteration(folder: Path, saved: checkpoints.Checkpoint, recipe: Recipe, prefix: str) -> None:
    name = f"iteration_{saved.step:08d}"
    (folder / name).mkdir()
    updates = {"global_step": np.array([saved.state["updates"]], np.int32)}
    model = saved.tensors["model"]
    biases = {name: bias for name, bias in model.items() if name.endswith("expert_bias")}
    counters = {
        n.replace("expert_bias", "expert_load"): np.zeros_like(b) for n, b in biases.items()
    }
    groups = {"model": model | counters, "opt": saved.tensors["optimizer"] | updates}
    for group, tensors in groups.items():
        file = f"{prefix}-{group}-0000000-0000001.safetensors"
        file_of(file, tensors, {"format": "ms"}).write(folder / name / file)
    epoch, _ = _place(saved.step, recipe)
    common = {
        "epoch_num": epoch,
        "step_num": saved.step,
        "global_step": saved.step,
        "loss_scale": 1.0,
        "global_batch_size": recipe.global_batch,
        "ckpt_status": None,
    }
    (folder / name / COMMON).write_text(json.dumps(common, indent=4), encoding="utf-8")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(saved.step), encoding="utf-8")


def _ranks(folder: Path, saved: checkpoints.Checkpoint, recipe: Recipe, prefix: str) -> None:
    epoch, step = _place(saved.step, recipe)
    tensors: dict[str, Array] = {
        **saved.tensors["model"],
        **saved.tensors["optimizer"],
        **{name: np.zeros(1, np.float32) for name in LOSSES},
        "global_step": np.array([saved.state["updates"]], np.int32),
        "epoch_num": np.array(epoch, np.int64),
        "step_num": np.array(step, np.int64),
        "global_batch_size": np.array(recipe.global_batch, np.int64),
        "loss_scale": np.array(1.0, np.float32),
        "scale_sense": np.array(1.0, np.float32),
    }
    words = {"remove_redundancy": "False", "format": "ms"}
    first = folder / "rank_0" / f"{prefix}_rank_0-{epoch}_{step}.safetensors"
    for rank in range(recipe.devices):
        place = folder / f"rank_{rank}"
        place.mkdir()
        file = f"{prefix}_rank_{rank}-{epoch}_{step}.safetensors"
        if rank:
            os.link(first, place / file)
        else:
            file_of(file, tensors, words).write(first)
        meta = {"last_epoch": epoch, "last_step": step, "last_ckpt_file": file}
        (place / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
