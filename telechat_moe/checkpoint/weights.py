"""Read weights tensor by tensor from any source, also from a checkpoint that several ranks wrote together."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from telechat_moe.checkpoint import checkpoint, manifest
from telechat_moe.checkpoint.manifest import Region
from telechat_moe.tensor_files import READ_BYTES, Bytes, Entry, read_entries, read_header


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


def read_weights(source: Path) -> dict[str, Entry]:
    """Return the weights of a training checkpoint, which is verified first, or of another file or folder.

    Raises:
        BadInputError: If nothing readable is there; says what was found.
    """
    if not (source / manifest.FILE).is_file():
        return read_entries(source)
    checkpoint.verify(source)
    described = manifest.read(source)["tensors"].get("model", {})
    shards = {name: manifest.pieces(tensor) for name, tensor in described.items()}
    files = {file for found in shards.values() for file, _ in found}
    headers = {file: read_header(source / file) for file in sorted(files)}
    entries: dict[str, Entry] = {}
    for name, found in shards.items():
        parts = tuple((headers[file][name], region) for file, region in found)
        first, shape = parts[0][0], tuple(described[name]["shape"])
        nbytes = sum(part.nbytes for part, _ in parts)
        whole = ShardedEntry(first.file, first.dtype, shape, first.start, nbytes, parts)
        entries[name] = first if len(parts) == 1 else whole
    return entries
