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

:mod:`telechat_moe.interop.mindformers_tensors` opens the files, those of several ranks and of mode 1 of MindFormers 2 too.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe import files
from telechat_moe.checkpoint import checkpoint as checkpoints
from telechat_moe.checkpoint.rank_shards import grouped
from telechat_moe.checkpoint.weights import is_transient
from telechat_moe.data.epochs import Epochs
from telechat_moe.data.loader import Loader
from telechat_moe.errors import BadInputError, CheckFailedError, UsageError
from telechat_moe.interop import data_record, mindformers_tensors, upstream_names
from telechat_moe.interop.mindformers_config import DEGREES, TRAINER
from telechat_moe.interop.mindformers_tensors import (
    COMMON,
    EMBEDDING,
    LOSSES,
    STATE,
    TRACKER,
    MindFormersTensors,
    newest_iteration,
)
from telechat_moe.numerics import Array
from telechat_moe.reading import MALFORMED, parse_json
from telechat_moe.recipe import ModelConfig, Recipe, RecipeError
from telechat_moe.recipe.batch_schedule import BatchSchedule
from telechat_moe.recipe.rules.mindformers import reads_data
from telechat_moe.recipe.rules.parallel import PARALLEL_MODES
from telechat_moe.tensor_files import DTYPES, TensorEntry, file_of, read_header
from telechat_moe.train.preflight import open_loader

MOMENTS = ("adam_m", "adam_v")
FOLDER = "checkpoint"  # of output_dir
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


def newest(root: Path, processes: int | None = None) -> Path | None:
    """Return the newest checkpoint that MindFormers finished under ``output_dir/checkpoint``; None: none.

    In the format for one process that is the step that ``latest_checkpointed_iteration.txt`` names, in the other the
    newest that every ``rank_N`` folder has: processes save on their own, and one may have died before.

    Args:
        processes: Processes of the run, each of which must have saved it, also one that made no folder yet; None: not known.
    """
    if (iteration := newest_iteration(root)) is not None:
        return iteration
    ranks = sorted(root.glob("rank_*"))
    matches = (RANK_FILE.fullmatch(p.name) for rank in ranks for p in rank.glob("*.safetensors"))
    counts = Counter((int(match[3]), int(match[4])) for match in matches if match)
    complete = [key for key, count in counts.items() if count == (processes or len(ranks))]
    if not complete:
        return None
    epoch, step = max(complete)
    return next(ranks[0].glob(f"*_rank_*-{epoch}_{step}.safetensors"))


def _root(checkpoint: Path) -> Path:
    """Return the folder of all checkpoints of the run of what :func:`newest` found."""
    return checkpoint.parent if ITERATION.fullmatch(checkpoint.name) else checkpoint.parents[1]


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
    checkpoint = newest(root, recipe.devices if recipe.devices > 1 else None)
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


def resumed(recipe: Recipe) -> Path | None:
    """Return the checkpoint from which MindFormers goes on by a recipe; None: it begins."""
    source, named = Path(recipe.load_checkpoint), recipe.resume_training
    if not named or not recipe.load_checkpoint:
        return None
    path = source / "rank_0" / named if isinstance(named, str) and source.is_dir() else source
    if ITERATION.fullmatch(path.name) or RANK_FILE.fullmatch(path.name):
        return path
    return newest(source) if source.is_dir() else None


def open_data(recipe: Recipe, rank: int) -> tuple[Loader, int]:
    """Open the training data of a recipe where MindFormers goes on, and record where that is beside its checkpoints.

    Args:
        rank: Of this process; the first writes the record.

    Returns:
        The loader, and the steps before its position.

    Raises:
        BadInputError: The data are not there, broken or too few, or others than the checkpoint's.
    """
    # Our model alone unmarks the samples of each source, where it is whole.
    split = recipe.use_parallel and recipe.parallel.parallel_mode in PARALLEL_MODES
    loader = open_loader(recipe, marks=recipe.trainer.type == TRAINER and not split)
    checkpoint = resumed(recipe)
    assert isinstance(loader, Loader)  # it shares with no other process
    batch, step, starts = recipe.global_batch, 0, list[Any]()
    is_new, finding = recipe.telechat_moe.resume_data == "new", "new, but the run starts at step 0"
    if checkpoint is not None:
        root, step = _root(checkpoint), step_of(checkpoint, recipe)
        starts = data_record.starts_before(root, step)
        finding = (
            f"new, but {root} has no {data_record.FILE} that says which data the checkpoint saw"
        )
    if is_new and not starts:
        expected = "same, or a checkpoint of a run with TelechatDataLoader"
        raise RecipeError([recipe.problem("telechat_moe.resume_data", finding, expected)])
    if starts:
        loader.load_state(data_record.state_after(starts[-1], step), is_new)
        step = step * starts[-1]["global_batch"] // batch  # as MindFormers counts on
    else:
        loader.seek(loader.epochs.after(0, step * batch))
    if rank == 0:
        state, blend = loader.state(), loader.blend
        if blend is not None and "mixture" in state:
            state["mixture"] = loader.past(len(blend))  # what comes later, too
        data_record.write(Path(recipe.output_dir) / FOLDER, starts, step, batch, state)
    return loader, step


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
    stored = mindformers_tensors.read(path) if path.is_dir() else _rank_file(path)
    mindformers_tensors.refuse_muon(stored.entries, path)
    tensors = {name: _array(name, entry) for name, entry in stored.entries.items()}
    state = {name: tensors.pop(name) for name in STATE if name in tensors}
    try:
        updates = state["global_step"].item()
        if stored.mode == 1 and state["global_step"].dtype == np.int32:
            updates += 1  # its fused AdamW counts from -1
        if path.is_dir():
            common = parse_json((path / COMMON).read_bytes())
            step, batch = int(common["global_step"]), int(common["global_batch_size"])
            samples = common.get("consumed_samples")  # MindFormers 2; null in graph mode
            samples = step * batch if samples is None else int(samples)
        else:
            batch = state["global_batch_size"].item()
            step = (state["epoch_num"].item() - 1) * _steps_per_epoch(recipe, max(1, batch))
            step += state["step_num"].item()
            samples = step * batch
    except MALFORMED as error:
        text = (
            f"no {error}" if isinstance(error, KeyError) else f"its counters are broken ({error})"
        )
        raise BadInputError(
            f"{path}: not a training checkpoint of MindFormers: {text}; its weights alone: load_checkpoint, or telechat-moe convert"
        ) from None
    if min(step, updates, samples) < 0 or not 1 <= batch <= recipe.epoch_samples:
        raise BadInputError(
            f"{path}: {step} steps, {updates} of them applied, of {batch} samples, {samples} in all; expected a batch from 1 "
            f"to the {recipe.epoch_samples} samples of the recipe (train_dataset.data_loader.sizes)"
        )
    groups = grouped({name: t for name, t in tensors.items() if not is_transient(name)})
    if EMBEDDING in groups["model"]:
        model = stored.model(recipe.model_config)
        groups = _renamed(groups, upstream_names.to_ours, model, path)
    return MindFormersCheckpoint(path, int(step), int(updates), int(batch), int(samples), groups)


def _rank_file(file: Path) -> MindFormersTensors:
    try:
        return mindformers_tensors.graph_names(read_header(file), file)
    except OSError as error:
        raise BadInputError(f"{file}: {error.strerror}") from error


def _array(name: str, entry: TensorEntry) -> Array:
    """Return a tensor; experts of mode 1, which have three dimensions, as the graph class holds them."""
    if entry.dtype not in DTYPES:
        raise BadInputError(f"{entry.file}: {name} is {entry.dtype}, which NumPy does not have")
    array = entry.read().view(DTYPES[entry.dtype]).reshape(entry.shape)
    if ".mlp.experts." in name and array.ndim == 3:
        return array.reshape(-1, array.shape[-1])
    return array


def _renamed(
    groups: MomentGroups, rename: Callable[..., dict[str, Array]], config: ModelConfig, path: Path
) -> MomentGroups:
    """Return the tensors of a checkpoint under the other model's names and in its layouts.

    Args:
        rename: `upstream_names.to_ours` or `upstream_names.to_upstream`.
    """
    optimizer: dict[str, Array] = {}
    about = ""
    try:
        model = rename(groups["model"], config)
        for moment in MOMENTS:
            about = f"{moment}: "
            prefix, states = f"{moment}.", groups["optimizer"].items()
            moments = {n.removeprefix(prefix): x for n, x in states if n.startswith(prefix)}
            renamed = rename(moments, config, only_trained=True)
            optimizer |= {f"{moment}.{name}": tensor for name, tensor in renamed.items()}
        return {"model": model, "optimizer": optimizer}
    except BadInputError as error:
        raise BadInputError(f"{path}: {about}{error}") from None


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
    if starts := data_record.starts_before(_root(saved.path), saved.step):
        state = data_record.state_after(starts[-1], saved.step)
        trainer.loader.load_state(state, recipe.telechat_moe.resume_data == "new")
    trainer.state.writer()(saved.tensors, None)
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
    data = saved.state.get("data")
    if data is not None:
        _check_place(saved, data, recipe)
    if recipe.trainer.type != TRAINER:
        renamed = _renamed(saved.tensors, upstream_names.to_upstream, recipe.model_config, path)
        saved.tensors.update(renamed)
    monitor = recipe.checkpoints
    prefix = (monitor.prefix if monitor else None) or "CKP"
    try:
        with files.new_folder(out) as hidden:
            if recipe.devices == 1:
                _iteration(hidden, saved, recipe, prefix)
            else:
                _ranks(hidden, saved, recipe, prefix)
            if data is not None and reads_data(recipe):
                data_record.write(hidden, [], saved.step, recipe.global_batch, data)
    except OSError as error:
        raise CheckFailedError(f"{out}: {error.strerror}; nothing was written") from error


def _check_place(saved: checkpoints.Checkpoint, data: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse a place in the data other than that of as many steps of the recipe, from which MindFormers goes on.

    Our loader goes on at any place; with it the steps must have had the batch of the recipe, for MindFormers counts steps.
    """
    size, batch = data["samples_per_epoch"], recipe.global_batch
    if reads_data(recipe) and saved.state.get("samples") == saved.step * batch:
        return
    epochs = Epochs(size, batch)
    place = epochs.place_of(saved.step * batch, size // batch * batch)
    if epochs.begin(place) != epochs.begin(data["next_sample"]):
        raise BadInputError(
            f"{saved.path}: goes on at sample {data['next_sample']}, MindFormers at {place} after {saved.step} steps of {batch}: "
            "the run left samples out, changed its batch or began with new data; with one batch throughout a recipe with "
            "train_dataset.data_loader.type TelechatDataLoader goes on there, else take its weights alone (telechat-moe convert)"
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
    (folder / TRACKER).write_text(str(saved.step), encoding="utf-8")


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
