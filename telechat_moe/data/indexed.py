r"""Megatron's token files: PREFIX.bin holds the tokens of all documents, PREFIX.idx the position of each.

Layout of PREFIX.idx, little endian, no padding::

    bytes   9   b"MMIDIDX\0\0"
    uint64      version, 1
    uint8       code of the token type (DTYPE_CODES)
    uint64  n   sequences
    uint64  m   entries of the document list (documents + 1)
    int32  [n]  tokens of each sequence
    int64  [n]  where each sequence starts in PREFIX.bin, in bytes
    int64  [m]  the sequence at which each document starts; the last entry is n

Source: Megatron-LM, ``megatron/core/datasets/indexed_dataset.py`` (the format only).
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.files import checksum, json_bytes, sync_file, write_atomic
from telechat_moe.reading import parse_json

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_TYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16)
DTYPE_CODES: dict[int, Any] = dict(enumerate(_TYPES, 1))
HEADER = struct.Struct("<9sQBQQ")
LARGE = 1 << 24
"""Sequences from which on an index is checked once, not by every process."""
_PART = 1 << 20
UINT16_LIMIT = 65500
"""Vocabularies below this size are stored as uint16, others as int32 (Megatron's rule)."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which Megatron stores tokens of a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab_size < UINT16_LIMIT else np.int32)


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the tokens, PREFIX.bin."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the index, PREFIX.idx."""
    return Path(f"{os.fspath(prefix)}.idx")


def write_index(
    path: Path, lengths: Sequence[int] | np.ndarray, dtype: np.dtype[Any] | type
) -> None:
    """Write an .idx for documents of one sequence each, which follow one another in the .bin.

    Args:
        path: File to write; it is flushed to the disk before the function returns.

    Raises:
        ValueError: If a length is negative or does not fit in an int32.
    """
    dtype = np.dtype(dtype)
    lengths64 = np.asarray(lengths, dtype=np.int64)
    if lengths64.size and (lengths64.min() < 0 or lengths64.max() > np.iinfo(np.int32).max):
        raise ValueError("a document's length must be between 0 and 2^31 - 1 tokens")
    codes = {np.dtype(value): code for code, value in DTYPE_CODES.items()}
    pointers = np.zeros(len(lengths64), dtype="<i8")
    np.cumsum(lengths64[:-1] * dtype.itemsize, out=pointers[1:])
    count = len(lengths64)
    with path.open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, codes[dtype], count, count + 1))
        stream.write(lengths64.astype("<i4").tobytes())
        stream.write(pointers.tobytes())
        stream.write(np.arange(count + 1, dtype="<i8").tobytes())
        sync_file(stream)


def write_indexed(
    prefix: str | os.PathLike[str],
    documents: Iterable[Sequence[int] | np.ndarray],
    dtype: np.dtype[Any] | type,
) -> None:
    """Write PREFIX.bin and PREFIX.idx from documents of token ids.

    Args:
        documents: Token ids of each document, the end-of-document token included.

    Raises:
        ValueError: If a token does not fit in ``dtype``.
    """
    dtype = np.dtype(dtype)
    limits = np.iinfo(dtype)
    lengths: list[int] = []
    with bin_path(prefix).open("wb") as stream:
        for document in documents:
            tokens = np.asarray(document, dtype=np.int64)
            if tokens.size and (tokens.min() < limits.min or tokens.max() > limits.max):
                raise ValueError(
                    f"document {len(lengths)} has a token that does not fit in {dtype}"
                )
            stream.write(tokens.astype(dtype).tobytes())
            lengths.append(tokens.size)
        sync_file(stream)
    write_index(idx_path(prefix), lengths, dtype)


class IndexedDataset:
    """Read PREFIX.bin and PREFIX.idx through memory maps.

    Everything that the index says is checked against the files when they are opened; the tokens
    themselves are only covered by the checksums of ``manifest.json`` (``telechat_moe.data.verify``).

    Attributes:
        sequence_lengths: int32, tokens of each sequence.
        sequence_pointers: int64, start of each sequence in the .bin, in bytes.
        document_indices: int64, the sequence at which each document starts, and their number.
        tokens: All tokens, one array over the whole .bin.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise BadInputError(
                    f"{path}: no such file; a dataset is a pair PREFIX.bin + PREFIX.idx and the "
                    f"prefix given is {self.prefix}; `telechat-moe data build --recipe RECIPE` makes one"
                )
        self._fingerprint = ""
        self._read_header()
        if not self._is_known():
            self._check_index()
        self._map_tokens()

    def _bad(self, path: Path, message: str) -> BadInputError:
        return BadInputError(f"{path}: {message}; build the dataset again or copy it again")

    def _read_header(self) -> None:
        size = self._idx.stat().st_size
        if size < HEADER.size:
            raise self._bad(
                self._idx, f"{size} bytes, shorter than the header of {HEADER.size} bytes"
            )
        buffer = np.memmap(self._idx, dtype=np.uint8, mode="r")
        magic, version, code, sequences, entries = HEADER.unpack(bytes(buffer[: HEADER.size]))
        if magic != MAGIC:
            raise self._bad(self._idx, f"starts with {magic!r}, not with Megatron's {MAGIC!r}")
        if version != VERSION:
            raise self._bad(self._idx, f"version {version}, expected {VERSION}")
        if code not in DTYPE_CODES:
            raise self._bad(self._idx, f"token type code {code}, expected 1 to {max(DTYPE_CODES)}")
        self.dtype = np.dtype(DTYPE_CODES[code])
        if self.dtype.kind not in "iu":
            raise self._bad(self._idx, f"tokens of type {self.dtype}, expected an integer type")
        expected = HEADER.size + 12 * sequences + 8 * entries
        if buffer.size == expected + sequences and sequences:
            raise self._bad(self._idx, "has a mode for every sequence (multimodal), not supported")
        if buffer.size != expected:
            raise self._bad(
                self._idx,
                f"{buffer.size} bytes, but its header announces {sequences} sequences and "
                f"{entries} document entries, which take {expected} bytes",
            )
        offset = HEADER.size
        self.sequence_lengths: NDArray[np.int32] = np.frombuffer(buffer, "<i4", sequences, offset)
        offset += 4 * sequences
        self.sequence_pointers: NDArray[np.int64] = np.frombuffer(buffer, "<i8", sequences, offset)
        offset += 8 * sequences
        self.document_indices: NDArray[np.int64] = np.frombuffer(buffer, "<i8", entries, offset)

    def _check_index(self) -> None:
        lengths, pointers = self.sequence_lengths, self.sequence_pointers
        documents = self.document_indices
        if lengths.size and lengths.min() < 0:
            sequence = next(i for i, part in _parts(lengths) if part.min() < 0)
            sequence += int(np.argmax(lengths[sequence : sequence + _PART] < 0))
            raise self._bad(self._idx, f"sequence {sequence} has {lengths[sequence]} tokens")
        end = 0
        for first, part in _parts(lengths):
            ends = end + np.cumsum(part, dtype=np.int64) * self.dtype.itemsize
            starts = ends - part.astype(np.int64) * self.dtype.itemsize
            wrong = np.flatnonzero(starts != pointers[first : first + len(part)])
            if wrong.size:
                sequence = first + int(wrong[0])
                raise self._bad(
                    self._idx,
                    f"sequence {sequence} points to byte {pointers[sequence]}, but the sequences before it end "
                    f"at byte {starts[wrong[0]]}",
                )
            end = int(ends[-1])
        count = len(lengths)
        rises = all(
            np.all(part[1:] >= part[:-1]) and part[0] >= documents[max(0, first - 1)]
            for first, part in _parts(documents)
        )
        if documents.size == 0 or documents[0] != 0 or documents[-1] != count or not rises:
            raise self._bad(
                self._idx, f"the document list does not rise from 0 to {count}, the sequences"
            )

    def _is_known(self) -> bool:
        """Return whether this very index was checked before; where it is large, a file beside it says so."""
        if len(self) < LARGE:
            return False
        path = self._record
        try:
            record = parse_json(path.read_bytes())
            if record["files"] != self._stamps():
                return False
            self._fingerprint = str(record["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    @property
    def _record(self) -> Path:
        return Path(f"{self.prefix}.cache") / "checked.json"

    def _stamps(self) -> list[list[int]]:
        """Return what changes when one of the files does: size and time, nanoseconds."""
        stats = [path.stat() for path in (self._idx, self._bin)]
        return [[stat.st_size, stat.st_mtime_ns] for stat in stats]

    def _map_tokens(self) -> None:
        size = self._bin.stat().st_size
        expected = self.tokens_in(0, len(self)) * self.dtype.itemsize
        if size != expected:
            raise self._bad(
                self._bin,
                f"{size} bytes, but {self._idx.name} describes {expected} bytes "
                f"({expected // self.dtype.itemsize} tokens of {self.dtype})",
            )
        # An empty file cannot be mapped.
        self.tokens: NDArray[Any] = np.empty(0, self.dtype)
        if size:
            self.tokens = np.memmap(self._bin, dtype=self.dtype, mode="r").view(np.ndarray)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return the tokens of a sequence, without copying; negative numbers count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.prefix}")
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.sequence_lengths[index])]

    def tokens_in(self, first: int, end: int) -> int:
        """Return how many tokens a range of sequences has."""
        if end <= first:
            return 0
        start = int(self.sequence_pointers[first])
        stop = int(self.sequence_pointers[end - 1])
        return (stop - start) // self.dtype.itemsize + int(self.sequence_lengths[end - 1])

    @property
    def num_documents(self) -> int:
        """Number of documents, each of one sequence or more."""
        return len(self.document_indices) - 1

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, of all its sequences."""
        ends = np.concatenate([[0], np.cumsum(self.sequence_lengths, dtype=np.int64)])
        return np.diff(ends[self.document_indices])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return len(self.tokens)

    def fingerprint(self) -> str:
        """Return a hash of the index: it tells datasets apart without reading the tokens.

        That of a large one is written beside it, and that the index was checked.
        """
        if not self._fingerprint:
            self._fingerprint = checksum(self._idx)["sha256"]
            if len(self) >= LARGE:
                about = {"files": self._stamps(), "fingerprint": self._fingerprint}
                with suppress(OSError):  # the next process checks again
                    self._record.parent.mkdir(exist_ok=True)
                    write_atomic(self._record, json_bytes(about))
        return self._fingerprint


def _parts(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield parts of an array with their first places, so that little of it is in memory."""
    for first in range(0, len(array), _PART):
        yield first, array[first : first + _PART]
