"""Tensors that lie in several files, as in a checkpoint that several ranks wrote together."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.tensor_files import PIECE_BYTES, Bytes, Entry, read_header

Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PiecedEntry(Entry):
    """A tensor in pieces; it is put together in memory, one tensor at a time.

    Attributes:
        parts: Each piece and which part of the tensor it is, as (begin, end) of every dimension.
    """

    parts: tuple[tuple[Entry, Region], ...] = ()

    def read(self, offset: int = 0, count: int | None = None) -> Bytes:
        """See :meth:`Entry.read`."""
        whole = self._whole()
        return whole[offset : len(whole) if count is None else offset + count]

    def pieces(self) -> Iterator[Bytes]:
        """See :meth:`Entry.pieces`."""
        whole = self._whole()
        for offset in range(0, len(whole), PIECE_BYTES):
            yield whole[offset : offset + PIECE_BYTES]

    def _whole(self) -> Bytes:
        width = self.nbytes // max(math.prod(self.shape), 1)
        whole = np.empty((*self.shape, width), np.uint8)
        for part, region in self.parts:
            place = whole[tuple(slice(begin, end) for begin, end in region)]
            place[...] = part.read().reshape(place.shape)
        return whole.reshape(-1)


def pieced_entries(folder: Path, described: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the tensors of a checkpoint by name.

    Args:
        folder: Of the checkpoint, verified.
        described: What its ``checkpoint.json`` says of the tensors of a group.
    """
    from telechat_moe.checkpoint import manifest

    lying = {name: manifest.pieces(tensor) for name, tensor in described.items()}
    files = {file for pieces in lying.values() for file, _ in pieces}
    headers = {file: read_header(folder / file) for file in sorted(files)}
    entries: dict[str, Entry] = {}
    for name, pieces in lying.items():
        parts = tuple((headers[file][name], region) for file, region in pieces)
        first, shape = parts[0][0], tuple(described[name]["shape"])
        nbytes = sum(part.nbytes for part, _ in parts)
        whole = PiecedEntry(first.file, first.dtype, shape, first.start, nbytes, parts)
        entries[name] = first if len(parts) == 1 else whole
    return entries
