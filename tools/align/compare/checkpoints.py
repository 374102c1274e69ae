"""Checkpoints as tensors that merge from their shards as they are read, whatever layouts wrote them.

A checkpoint is a folder with ``checkpoint.json`` (whole tensors, or what several ranks wrote together) or one with
``pieces.json`` (``telechat-moe ckpt reshard``). Checksums of all files are compared first.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from telechat_moe import tensor_files
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump.logical import Logical, Shard, logical_regions
from telechat_moe.tools.align.dump.records import Array, TensorRecord, nbytes_of

Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    group: str  # `model` or `optimizer`
    dtype: str  # canonical name
    shape: tuple[int, ...]
    shards: list[tuple[Region, TensorRecord]]  # its shards, each with its region

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return nbytes_of(self.dtype, self.shape)

    def merged(self) -> Logical:
        """Return the tensor, merged from its shards as it is read."""
        shards = [Shard(i, values) for i, (_, values) in enumerate(self.shards)]
        return logical_regions(shards, {i: r for i, (r, _) in enumerate(self.shards)}, self.shape)


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose tensors are read on demand."""

    path: Path
    step: int  # number of finished training steps
    layout: str  # its layout, as it describes it
    tensors: Mapping[str, StoredTensor]


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, or what ``telechat-moe ckpt reshard`` made of one."""
    if not any(
        path.glob("*.json")
    ):  # a dump: the import would take longer than to read a small one
        return False
    from telechat_moe.checkpoint import manifest, reshard

    return any((path / name).exists() for name in (manifest.FILE, reshard.FILE))


def open_checkpoint(path: Path) -> Stored:
    """Open a checkpoint after comparing all its checksums.

    Raises:
        BadInputError: It is missing, broken or not a checkpoint of this package.
    """
    from telechat_moe.checkpoint import checkpoint, manifest, reshard

    shards: dict[str, list[tuple[str, Region]]] = {}
    if (path / reshard.FILE).exists():
        content = reshard.verify(path)
        described = {n: (entry["group"], entry) for n, entry in content["tensors"].items()}
        for file in content["files"]:
            metadata = tensor_files.metadata(np.memmap(path / file, np.uint8, "r"))
            for name, region in json.loads(metadata["regions"]).items():
                shards.setdefault(name, []).append((file, tuple((a, b) for a, b in region)))
    else:
        checkpoint.verify(path)
        content = manifest.read(path)
        described = {n: (g, x) for g, found in content["tensors"].items() for n, x in found.items()}
        shards = {name: manifest.pieces(entry) for name, (_, entry) in described.items()}
    if unknown := shards.keys() - described.keys():
        raise BadInputError(f"{path}: {min(unknown)} has a shard and no description")
    files = {file: tensor_files.read_header(path / file) for file in content["files"]}
    tensors: dict[str, StoredTensor] = {}
    for name, (group, entry) in described.items():
        found = [(region, _values(files[file][name])) for file, region in shards.get(name, ())]
        tensors[name] = StoredTensor(
            group, _canonical(entry["dtype"]), tuple(entry["shape"]), found
        )
    layout = content.get("layout", "whole tensors")
    said = layout if isinstance(layout, str) else json.dumps(layout)
    return Stored(path, content["step"], said, tensors)


def _canonical(dtype: str) -> str:
    return "bfloat16" if dtype == "BF16" else tensor_files.DTYPES[dtype].name


def _values(entry: tensor_files.Entry) -> TensorRecord:
    """Return a stored tensor, which is mapped when it is read; bfloat16 as its bits."""
    dtype = np.dtype("<u2") if entry.dtype == "BF16" else tensor_files.DTYPES[entry.dtype]

    def load() -> Array:
        if not entry.nbytes:
            return np.zeros(entry.shape, dtype)
        try:
            return np.memmap(entry.file, dtype, "r", entry.start, entry.shape)
        except (OSError, ValueError) as error:
            raise BadInputError(f"{entry.file}: cannot be read ({error})") from None

    return TensorRecord(_canonical(entry.dtype), entry.shape, read=load)
