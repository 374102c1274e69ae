"""Read the tensors of MindFormers' checkpoints, tensor by tensor, whole or in shards of several ranks.

``iteration_00000006/`` holds ``PREFIX-model-RANK-RANKS.safetensors`` and ``PREFIX-opt-...``. With several ranks
``metadata.json`` says where the shards of a tensor lie (its ``layout`` may be null) and in which files they are. Mode 1 of
MindFormers 2 (dynamic graph) writes the same files; there experts have three dimensions, a selection bias is outside
its router, and of a weight in bfloat16 the file of the optimizer holds the float32 master copy, ``main_param.NAME``.

Either way the tensors come under the names of MindFormers' graph class, or under ours if the model was ours.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.checkpoint.manifest import Region
from telechat_moe.checkpoint.weights import ShardedEntry, is_transient
from telechat_moe.errors import BadInputError
from telechat_moe.graph.execute import LIMITS
from telechat_moe.interop import upstream_names
from telechat_moe.interop.upstream_names import FusedWeight
from telechat_moe.narrowing import short
from telechat_moe.reading import MALFORMED, read_object, read_text
from telechat_moe.recipe import ModelConfig
from telechat_moe.sharding.shards import group_of
from telechat_moe.tensor_files import BITS_OF_DTYPE, READ_BYTES, Bytes, TensorEntry, read_header

COMMON = "common.json"
METADATA = "metadata.json"
ADAPTER = "mindformers_adapter_config.json"
TRACKER = "latest_checkpointed_iteration.txt"
EMBEDDING = "embedding.word_embeddings.weight"
"""A weight that every model of MindFormers has, and none of ours."""
LOSSES = ("lm_loss", "mtp_loss", "aux_loss", "indexer_loss")
STATE = (
    *("epoch_num", "step_num", "global_step", "global_batch_size", "loss_scale", "scale_sense"),
    *("learning_rate", *LOSSES, *LIMITS),
)
"""Counters, limits of a loss guard and terms of the last loss among the tensors, which are no weights."""

_OF_MODE_1 = re.compile(r".*\.mlp\.(expert_bias|tokens_per_expert)|main_param\..*")
_MASTER = "main_param."
_MODE_1_STATE = re.compile(r".*\.(tokens_per_expert|global_tokens_per_expert|ga_steps)")
_MUON = re.compile(r"muon_m\..*")
_ADAPTER = re.compile(r"(.*[._])?lora_[ab]")


class MindFormersTensors(NamedTuple):
    """The tensors of a checkpoint.

    Attributes:
        mode: 1: of MindFormers 2's dynamic graph; else 0.
    """

    entries: dict[str, TensorEntry]
    mode: int

    def model(self, config: ModelConfig) -> ModelConfig:
        """Return a model section as the checkpoint lays its weights out: mode 1 has one layout for all."""
        if self.mode == 0:
            return config
        return replace(config, mla_qkv_concat=True, use_interleaved_weight_layout_mlp=True)


def newest_iteration(root: Path) -> Path | None:
    """Return the ``iteration_...`` folder that MindFormers finished last; None: there is none.

    Raises:
        BadInputError: The file that names it is broken.
    """
    tracker = root / TRACKER
    if not tracker.exists() or not any(root.glob("iteration_*")):
        return None
    text = read_text(tracker).strip()
    if not (text.isdecimal() and len(text) < 12):
        raise BadInputError(f"{tracker}: {short(text)!r}, expected the number of a step")
    folder = root / f"iteration_{int(text):08d}"
    if not folder.is_dir():
        raise BadInputError(
            f"{tracker}: {text}, but there is no {folder.name}; name another step's folder"
        )
    return folder


def folder_of(source: Path) -> Path | None:
    """Return the folder of tensors that a path names, of a root the newest; None: it is no checkpoint of MindFormers."""
    if not source.is_dir():
        return None
    if any((source / name).is_file() for name in (COMMON, ADAPTER)):
        return source
    return newest_iteration(source)


def read(folder: Path) -> MindFormersTensors:
    """Return the tensors of an ``iteration_...`` folder; their bytes are read later.

    Raises:
        BadInputError: It holds an adapter, a shard is missing, or a file is broken.
    """
    if (folder / ADAPTER).is_file():
        raise BadInputError(
            f"{folder / ADAPTER}: holds the weights of an adapter (LoRA) alone; merge it into its base with MindFormers, "
            "then read that"
        )
    try:
        is_sharded = (folder / METADATA).is_file()
        entries = _from_shards(folder) if is_sharded else _from_files(folder)
    except OSError as error:
        raise BadInputError(f"{error.filename or folder}: {error.strerror}") from error
    return graph_names(entries, folder)


def graph_names(entries: Mapping[str, TensorEntry], path: Path) -> MindFormersTensors:
    """Return tensors under the names of MindFormers' graph class; those of another model keep theirs.

    Raises:
        BadInputError: There are weights of an adapter among them.
    """
    if adapter := next((name for name in entries if _ADAPTER.fullmatch(name)), None):
        raise BadInputError(
            f"{path}: {adapter} is a weight of an adapter (LoRA); merge it into its base with MindFormers, then read that"
        )
    if not any(_OF_MODE_1.fullmatch(name) for name in entries):
        return MindFormersTensors(dict(entries), 0)
    masters = {n.removeprefix(_MASTER): e for n, e in entries.items() if n.startswith(_MASTER)}
    models = {n: e for n, e in entries.items() if not n.startswith(_MASTER)} | masters
    return MindFormersTensors(
        {
            name.replace(".mlp.expert_bias", ".mlp.router.expert_bias"): entry
            for name, entry in models.items()
            if not _MODE_1_STATE.fullmatch(name)
        },
        1,
    )


def refuse_muon(names: Mapping[str, Any], path: Path) -> None:
    """Refuse the optimizer states of Muon, from which AdamW cannot go on."""
    if muon := next((name for name in names if _MUON.fullmatch(name)), None):
        raise BadInputError(
            f"{path}: {muon} is a state of Muon, from which AdamW cannot go on; take the weights alone "
            "(load_checkpoint, or telechat-moe convert)"
        )


def _from_files(folder: Path) -> dict[str, TensorEntry]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadInputError(f"{folder}: no safetensors files")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if (other := entries.get(name)) is not None:
                raise BadInputError(
                    f"{file}: {name} is in {other.file.name}, too; the shards of several ranks need {METADATA}, which "
                    "is missing"
                )
            entries[name] = entry
    return entries


def _from_shards(folder: Path) -> dict[str, TensorEntry]:
    file = folder / METADATA
    content = read_object(file)
    try:
        described, storage = content["state_dict_metadata"], content["storage_data"]
        places = {
            ast.literal_eval(key): [item["file_name"] for item in items]
            for key, items in storage.items()
        }
        tensors = {
            name: (tuple(map(int, entry["global_shape"])), _chunks_of(entry))
            for name, entry in described.items()
        }
    except (*MALFORMED, SyntaxError) as error:
        raise BadInputError(
            f"{file}: does not describe the shards of a checkpoint ({short(error)})"
        ) from None
    headers: dict[str, dict[str, TensorEntry]] = {}
    for name in sorted({n for names in places.values() for n in names}):
        if Path(name).name != name or not (folder / name).is_file():
            raise BadInputError(f"{file}: {short(name)} is not in the folder")
        headers[name] = read_header(folder / name)
    entries: dict[str, TensorEntry] = {}
    for name, (shape, chunks) in tensors.items():
        shards: list[tuple[TensorEntry, Region]] = []
        for offset, local in chunks:
            files = places.get((name, offset), [])
            shard = next((headers[f][name] for f in files if name in headers[f]), None)
            # `(0,)` stands for the beginning of a tensor of any rank.
            begin = offset if len(offset) == len(shape) else (0,) * len(shape)
            region = tuple((b, b + n) for b, n in zip(begin, local, strict=False))
            if shard is None or shard.shape != local or len(region) != len(shape):
                state = "in none of its files" if shard is None else f"{list(shard.shape)} there"
                raise BadInputError(f"{file}: {name} at {list(offset)}, {list(local)}: {state}")
            shards.append((shard, region))
        entries[name] = _joined(file, name, shape, shards)
    return entries


def _chunks_of(entry: Mapping[str, Any]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offset and shape of each shard."""
    return [
        (tuple(map(int, chunk["global_offset"])), tuple(map(int, chunk["local_shape"])))
        for chunk in entry["chunk"]
    ]


def _joined(
    file: Path, name: str, shape: tuple[int, ...], shards: list[tuple[TensorEntry, Region]]
) -> TensorEntry:
    """Return a tensor from shards that must cover it once, and be of one type."""
    bounds = np.array([region for _, region in shards], np.int64).reshape(len(shards), -1, 2)
    begin, end = bounds[..., 0], bounds[..., 1]
    if (begin < 0).any() or (end > np.array(shape, np.int64)).any():
        regions = ", ".join(str(list(region)) for _, region in shards)
        raise BadInputError(f"{file}: {name} is {list(shape)}, its shards are {short(regions)}")
    overlap = ((begin[:, None] < end) & (begin < end[:, None])).all(-1)
    values = int((end - begin).prod(-1).sum())
    if overlap.sum() > len(shards) or values != math.prod(shape):
        raise BadInputError(
            f"{file}: the {len(shards)} shards of {name} hold {values:,} of its {math.prod(shape):,} values"
            + (", some more than once" if overlap.sum() > len(shards) else "")
        )
    dtypes = {shard.dtype for shard, _ in shards}
    if len(dtypes) != 1:
        raise BadInputError(f"{file}: the shards of {name} are {', '.join(sorted(dtypes))}")
    first = shards[0][0]
    if len(shards) == 1:
        return first
    nbytes = math.prod(shape) * BITS_OF_DTYPE[first.dtype] // 8
    return ShardedEntry(first.file, first.dtype, shape, first.start, nbytes, tuple(shards))


def weights_of(source: Path, config: ModelConfig) -> dict[str, TensorEntry] | None:
    """Return the weights of our model in a checkpoint of MindFormers, a folder or a file; None: it is none.

    Raises:
        BadInputError: It is broken, or of another model.
    """
    if (folder := folder_of(source)) is not None:
        stored = read(folder)
    elif source.is_file():
        stored = graph_names(read_header(source), source)
        if {EMBEDDING, "global_step"}.isdisjoint(stored.entries):  # a rank's file has all in one
            return None
    else:
        return None
    if EMBEDDING in stored.entries:
        return split(stored, config, source)
    return {
        name: entry
        for name, entry in stored.entries.items()
        if name not in STATE and not is_transient(name) and group_of(name) == "model"
    }


@dataclass(frozen=True)
class PartEntry(TensorEntry):
    """A weight of ours that is a part of a fused one of MindFormers, which is read as a whole.

    Attributes:
        fused: The tensor that holds it.
        weight: How that is split, and which of its parts this is.
    """

    fused: TensorEntry | None = None
    weight: FusedWeight | None = None
    part: int = 0

    def read(self, offset: int = 0, count: int | None = None) -> Bytes:
        """See :meth:`TensorEntry.read`."""
        assert self.fused is not None
        assert self.weight is not None
        width = self.fused.nbytes // max(math.prod(self.fused.shape), 1)
        fused = self.fused.read().view(f"u{width}").reshape(self.weight.shape)
        part = np.ascontiguousarray(self.weight.split(fused)[self.part])
        data = part.reshape(-1).view(np.uint8)
        return data[offset : len(data) if count is None else offset + count]

    def chunks(self) -> Iterator[Bytes]:
        """See :meth:`TensorEntry.chunks`."""
        data = self.read()
        for offset in range(0, len(data), READ_BYTES):
            yield data[offset : offset + READ_BYTES]


def split(tensors: MindFormersTensors, config: ModelConfig, path: Path) -> dict[str, TensorEntry]:
    """Return the weights of our model from those of MindFormers' class.

    Raises:
        BadInputError: A weight is missing, unknown or of another shape; all of them are named.
    """
    table = upstream_names.pairs(tensors.model(config))
    optimizer = re.compile(r"(adam_[mv]|muon_m|max_exp_avg_sq)\..*")
    weights = {n: e for n, e in tensors.entries.items() if not optimizer.fullmatch(n)}
    problems: list[str] = []
    for weight in table:
        entry = weights.pop(weight.upstream, None)
        if entry is None:
            problems.append(f"{weight.upstream} is missing")
        elif not _same_elements(entry.shape, weight.shape):
            problems.append(
                f"{weight.upstream} is {list(entry.shape)} instead of {list(weight.shape)}"
            )
    problems += [
        f"{name} is unknown"
        for name in weights
        if name not in STATE and not upstream_names.STATE.fullmatch(name)
    ]
    if problems:
        raise BadInputError(
            f"{path} does not fit the model, {len(problems)} problem(s):\n  "
            + "\n  ".join(sorted(problems))
        )
    entries: dict[str, TensorEntry] = {}
    for weight in table:
        fused = tensors.entries[weight.upstream]
        width = BITS_OF_DTYPE[fused.dtype] // 8
        for part, (name, shape) in enumerate(zip(weight.names, weight.shapes, strict=True)):
            about = (fused.file, fused.dtype, shape, fused.start, math.prod(shape) * width)
            entries[name] = PartEntry(*about, fused, weight, part)
    return entries


def _same_elements(stored: tuple[int, ...], flat: tuple[int, ...]) -> bool:
    """Return whether a shape is that of the table, or that of experts in three dimensions (mode 1)."""
    return stored == flat or (len(stored) == 3 and (stored[0] * stored[1], stored[2]) == flat)
