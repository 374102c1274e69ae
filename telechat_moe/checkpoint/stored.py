"""Open a checkpoint to read its tensors shard by shard, whatever layout wrote it.

A checkpoint is a folder with ``checkpoint.json`` (whole tensors, or what several ranks wrote together) or one with
``pieces.json`` (``telechat-moe ckpt reshard``).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe import tensor_files
from telechat_moe.checkpoint import checkpoint, manifest, reshard
from telechat_moe.errors import BadInputError
from telechat_moe.narrowing import short
from telechat_moe.reading import MALFORMED, parse_json
from telechat_moe.sharding.shards import Region
from telechat_moe.tensor_files import Array, TensorEntry


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        group: `model`, `optimizer` or `ema`.
        dtype: NumPy's name, or `bfloat16`.
        pieces: Its shards, each with its file and its (begin, end) in every dimension.
        header: Reads what a file holds, by name.
    """

    name: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Region], ...]
    header: Callable[[str], Mapping[str, TensorEntry]]

    @property
    def shards(self) -> tuple[tuple[TensorEntry, Region], ...]:
        """Its shards, each with its (begin, end) in every dimension."""
        return self._shards(self.pieces)

    def read_region(self, region: Region) -> Array:
        """Return a region of the tensor; of files without a part of it nothing is read."""
        parts = [piece for piece in self.pieces if _overlap(piece[1], region)]
        return merged_region(self._shards(parts or self.pieces), region)

    def _shards(
        self, pieces: Sequence[tuple[str, Region]]
    ) -> tuple[tuple[TensorEntry, Region], ...]:
        entries: list[tuple[TensorEntry, Region]] = []
        for file, region in pieces:
            if (entry := self.header(file).get(self.name)) is None:
                raise BadInputError(f"{file} lacks {self.name!r}, of which it should have a shard")
            entries.append((entry, region))
        return tuple(entries)


def _overlap(region: Region, other: Region) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(region, other, strict=True))


def merged_region(shards: Sequence[tuple[TensorEntry, Region]], region: Region) -> Array:
    """Return a region of a tensor from its shards, which tile it."""
    dtype = tensor_files.DTYPES[shards[0][0].dtype]
    values = np.empty([end - begin for begin, end in region], dtype)
    for entry, bounds in shards:
        pairs = list(zip(region, bounds, strict=True))
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in pairs]
        if any(begin >= end for begin, end in common):
            continue
        into = (slice(x - a, y - a) for (x, y), ((a, _), _) in zip(common, pairs, strict=True))
        local = [(x - c, y - c) for (x, y), (_, (c, _)) in zip(common, pairs, strict=True)]
        values[(*into,)] = entry.read_region(local)
    return values


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose tensors are read on demand."""

    path: Path
    step: int  # number of finished training steps
    layout: str  # its layout, as it describes it
    tensors: Mapping[str, StoredTensor]


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, or what ``telechat-moe ckpt reshard`` made of one."""
    return any((path / name).exists() for name in (manifest.FILE, reshard.FILE))


def open_checkpoint(path: Path) -> Stored:
    """Open a checkpoint after comparing all its checksums.

    Raises:
        BadInputError: It is missing, broken or not a checkpoint of this package.
    """
    if (path / reshard.FILE).exists():
        content = reshard.verify(path)
    else:
        checkpoint.verify(path)
        content = manifest.read(path)
    layout = content.get("layout", "whole tensors")
    layout_text = layout if isinstance(layout, str) else json.dumps(layout)
    try:
        return Stored(path, content["step"], layout_text, tensors_of(path, content))
    except MALFORMED as error:  # a checksum can be made for anything
        raise BadInputError(f"{path}: its tensors are not described ({short(error)})") from None


def open_shards(path: Path, *, verify: bool = True) -> checkpoint.Checkpoint:
    """Open a checkpoint of training; its tensors are :class:`StoredTensor`, read on demand.

    Args:
        verify: Compare all its checksums; False: of its files the names and sizes only.

    Raises:
        BrokenCheckpointError: It is missing or broken.
    """
    if verify:
        checkpoint.verify(path)
    elif problem := manifest.incomplete(path):
        raise problem
    content = manifest.read(path)
    try:
        tensors = tensors_of(path, content)
    except MALFORMED as error:
        problem = f"{manifest.FILE}: its tensors are not described ({short(error)})"
        raise manifest.BrokenCheckpointError(path, [problem]) from None
    groups: dict[str, dict[str, Any]] = {group: {} for group in content["tensors"]}
    problems: list[str] = []
    for name, tensor in tensors.items():
        groups[tensor.group][name] = tensor
        if not manifest.tiles(tensor.shape, [region for _, region in tensor.pieces]):
            problems.append(
                f"{manifest.FILE}: the shards of {name!r} do not cover {list(tensor.shape)}"
            )
    if problems:
        raise manifest.BrokenCheckpointError(path, problems)
    return checkpoint.Checkpoint(path, content["step"], groups, content["state"])


def tensors_of(path: Path, content: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name.

    Args:
        content: Its ``checkpoint.json`` or ``pieces.json``.

    Raises:
        BadInputError: A file is broken, or a shard is not described.
    """
    shards: dict[str, list[tuple[str, Region]]] = {}
    if content["format"] == reshard.FORMAT:
        described = {n: (entry["group"], entry) for n, entry in content["tensors"].items()}
        for file in content["files"]:
            metadata = tensor_files.metadata(np.memmap(path / file, np.uint8, "r"))
            for name, region in parse_json(metadata["regions"]).items():
                shards.setdefault(name, []).append((file, tuple((a, b) for a, b in region)))
    else:
        described = {n: (g, x) for g, xs in content["tensors"].items() for n, x in xs.items()}
        shards = {name: manifest.pieces(entry) for name, (_, entry) in described.items()}
    if unknown := shards.keys() - described.keys():
        raise BadInputError(f"{path}: {min(unknown)} has a shard and no description")
    header = cache(lambda file: tensor_files.read_header(path / file))
    return {
        name: StoredTensor(
            name,
            group,
            "bfloat16" if entry["dtype"] == "BF16" else tensor_files.DTYPES[entry["dtype"]].name,
            tuple(entry["shape"]),
            tuple(shards.get(name, ())),
            header,
        )
        for name, (group, entry) in described.items()
    }
