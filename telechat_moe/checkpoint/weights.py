"""Read weights tensor by tensor from any source, also from a checkpoint that several ranks wrote together."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from telechat_moe.checkpoint import checkpoint, manifest
from telechat_moe.checkpoint.manifest import Region
from telechat_moe.checkpoint.stored import tensors_of
from telechat_moe.errors import BadInputError
from telechat_moe.files import require_checksums
from telechat_moe.recipe import ModelConfig
from telechat_moe.recipe.weights import weights
from telechat_moe.tensor_files import (
    BYTES_OF_DTYPE,
    READ_BYTES,
    Bytes,
    Entry,
    Output,
    read_entries,
)

# Zero between steps, or of an analysis (`train.observe`).
TRANSIENT = ("expert_load", "dropped", "main_grad", "observed")
_SHOWN = 4


class ReadWeights(Protocol):
    """What finds the weights of a model in a file or folder: :func:`own_weights`, or one that knows more formats."""

    def __call__(self, source: Path, config: ModelConfig, *, verify: bool = True) -> list[Output]:
        """See :func:`own_weights`."""
        ...


def is_transient(name: str) -> bool:
    """Return whether a parameter is zero between steps and so belongs in no checkpoint."""
    return name.split(".")[-1] in TRANSIENT


def own_weights(source: Path, config: ModelConfig, *, verify: bool = True) -> list[Output]:
    """Return the weights of a model, all that it has and no others; their bytes are read later.

    The source has this package's names: a safetensors file, a folder with an index, or a training checkpoint.

    Args:
        verify: Compare the files with their checksums; False: only names, shapes and types are looked at.

    Raises:
        BadInputError: Nothing readable is there, or it does not fit the model; says how.
    """
    if verify:
        require_checksums(source)
    found = read_weights(source, verify=verify)
    entries = {name: entry for name, entry in found.items() if not is_transient(name)}
    wanted = {w.name: w.shape for w in weights(config)}
    problems = [f"{name} is missing" for name in wanted if name not in entries]
    problems += [f"{name} is unknown" for name in entries if name not in wanted]
    for name in wanted.keys() & entries.keys():
        shape, dtype = list(entries[name].shape), entries[name].dtype
        if shape != list(wanted[name]):
            problems.append(f"{name} is {shape} instead of {list(wanted[name])}")
        elif dtype not in BYTES_OF_DTYPE:
            problems.append(f"{name} is {dtype}, weights are one of {', '.join(BYTES_OF_DTYPE)}")
    if problems:
        raise unfit(source, sorted(problems))
    return [Output(n, entries[n].dtype, shape, entries[n].chunks) for n, shape in wanted.items()]


@dataclass(frozen=True)
class ShardedEntry(Entry):
    """A tensor whose shards are in several files; it is put together in memory, one tensor at a time.

    Attributes:
        shards: Each shard and its (begin, end) in every dimension of the tensor.
    """

    shards: tuple[tuple[Entry, Region], ...] = ()

    def read(self, offset: int = 0, count: int | None = None) -> Bytes:
        """See :meth:`Entry.read`."""
        whole = self._whole()
        return whole[offset : len(whole) if count is None else offset + count]

    def chunks(self) -> Iterator[Bytes]:
        """See :meth:`Entry.chunks`."""
        whole = self._whole()
        for offset in range(0, len(whole), READ_BYTES):
            yield whole[offset : offset + READ_BYTES]

    def _whole(self) -> Bytes:
        width = self.nbytes // max(math.prod(self.shape), 1)
        whole = np.empty((*self.shape, width), np.uint8)
        for shard, region in self.shards:
            target = whole[manifest.slices(region)]
            target[...] = shard.read().reshape(target.shape)
        return whole.reshape(-1)


def unfit(source: Path, problems: Sequence[str]) -> BadInputError:
    """Return the error that says in one line how weights do not fit a model."""
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return BadInputError(
        f"{source} does not fit the model: {', '.join(problems[:_SHOWN])}{more}; weights of the recipe's model, or a "
        "model section that says what these are of"
    )


def read_weights(source: Path, *, verify: bool = True, group: str = "model") -> dict[str, Entry]:
    """Return the weights of a training checkpoint, which is verified first, or of another file or folder.

    Args:
        verify: False: of a checkpoint, only look at the names and sizes of its files.
        group: Group of a checkpoint.

    Raises:
        BadInputError: If nothing readable is there; says what was found.
    """
    if not (source / manifest.FILE).is_file():
        return read_entries(source)
    if verify:
        checkpoint.verify(source)
    elif problem := manifest.incomplete(source):
        raise problem
    entries: dict[str, Entry] = {}
    for name, tensor in tensors_of(source, manifest.read(source)).items():
        if tensor.group == group:
            first, nbytes = tensor.shards[0][0], sum(part.nbytes for part, _ in tensor.shards)
            about = first.file, first.dtype, tensor.shape, first.start, nbytes
            entries[name] = (
                first if len(tensor.shards) == 1 else ShardedEntry(*about, tensor.shards)
            )
    return entries
