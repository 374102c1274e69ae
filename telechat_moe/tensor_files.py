"""Safetensors files read and written piece by piece, without ever holding a whole file in memory.

The `safetensors` package offers NumPy no bfloat16 and writes only what is in memory as a whole. Here
a tensor is its raw bytes, so every data type passes through unchanged.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHECKPOINT = "checkpoint.json"

BYTES_OF_DTYPE = {"F32": 4, "BF16": 2, "F16": 2}
"""Data types of weights, by their safetensors names."""

PIECE_BYTES = 16 << 20
_LARGEST_HEADER = 100_000_000  # as the safetensors library

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Entry:
    """Where a tensor stands and what it is."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def read(self, offset: int = 0, count: int | None = None) -> Bytes:
        """Return ``count`` bytes of the tensor from ``offset``; None: all.

        Raises:
            BadInputError: If the file became shorter since its header was read.
        """
        data = np.empty(self.nbytes - offset if count is None else count, np.uint8)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start + offset)
            view, found = data.data, 0
            while found < len(data):
                got = file.readinto(view[found:])
                if not got:
                    raise BadInputError(f"{self.file}: ended while it was being read")
                found += got
        return data

    def pieces(self) -> Iterator[Bytes]:
        """Yield the bytes of the tensor, a few at a time."""
        for offset in range(0, self.nbytes, PIECE_BYTES):
            yield self.read(offset, min(PIECE_BYTES, self.nbytes - offset))


def read_entries(source: Path) -> dict[str, Entry]:
    """Return the tensors of a safetensors file or of a folder that holds a checkpoint.

    Args:
        source: A file; or a folder with ``model.safetensors.index.json``, with one safetensors file,
            or with ``checkpoint.json`` (a training checkpoint of this package: its weights).

    Raises:
        BadInputError: If nothing readable is there; says what was found.
    """
    try:
        if source.is_file():
            return read_header(source)
        if (source / CHECKPOINT).is_file():
            return _training_checkpoint(source)
        if (source / INDEX).is_file():
            return _sharded(source)
        files = sorted(source.glob("*.safetensors"))
    except OSError as error:
        raise BadInputError(f"{error.filename or source}: {error.strerror}") from error
    if len(files) == 1:
        return read_header(files[0])
    raise BadInputError(_nothing_found(source, files))


def _nothing_found(source: Path, files: list[Path]) -> str:
    if not source.exists():
        return f"{source}: no such file or folder"
    if files:
        names = ", ".join(f.name for f in files[:5]) + (", ..." if len(files) > 5 else "")
        return f"{source}: {len(files)} safetensors files ({names}) but no {INDEX}"
    steps = sorted(p.name for p in source.glob("step-*") if (p / CHECKPOINT).is_file())
    if steps:
        return (
            f"{source}: holds checkpoints of {len(steps)} steps; name one, as {source / steps[-1]}"
        )
    return f"{source}: neither {SINGLE}, {INDEX} nor {CHECKPOINT} is there"


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of one safetensors file.

    Raises:
        BadInputError: It is none, or truncated.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise BadInputError(f"{path}: not a safetensors file, or truncated ({size:,} bytes)")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(path, 8 + length, e) for name, e in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{path}: broken safetensors header ({error!r})") from error
    _check_extents(path, size, 8 + length, entries)
    return entries


def _entry(path: Path, data_start: int, described: Mapping[str, Any]) -> Entry:
    start, end = (int(n) for n in described["data_offsets"])
    shape = tuple(int(n) for n in described["shape"])
    return Entry(path, str(described["dtype"]), shape, data_start + start, end - start)


def _check_extents(path: Path, size: int, data_start: int, entries: Mapping[str, Entry]) -> None:
    problems: list[str] = []
    for name, e in entries.items():
        if e.start < data_start or e.nbytes < 0 or e.start + e.nbytes > size:
            problems.append(f"{name}: bytes {e.start:,} to {e.start + e.nbytes:,} of {size:,}")
        width = BYTES_OF_DTYPE.get(e.dtype)
        if width and int(np.prod(e.shape, dtype=np.int64)) * width != e.nbytes:
            problems.append(f"{name}: {e.nbytes:,} bytes are not {e.dtype} {list(e.shape)}")
    if problems:
        raise BadInputError(f"{path}: truncated or broken:\n  " + "\n  ".join(problems))


def _sharded(folder: Path) -> dict[str, Entry]:
    index = folder / INDEX
    try:
        file_of = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{index}: no valid index of tensors ({error!r})") from error
    names = sorted({str(f) for f in file_of.values()})
    problems = [f"file {n!r} is outside the folder" for n in names if Path(n).name != n]
    problems += [f"file {n} is missing" for n in names if not (folder / n).is_file()]
    if problems:
        raise BadInputError(f"{index}:\n  " + "\n  ".join(problems))
    entries: dict[str, Entry] = {}
    for file in names:
        for name, entry in read_header(folder / file).items():
            if file_of.get(name) == file:
                entries[name] = entry
            else:
                listed = f"listed in {file_of[name]}" if name in file_of else "not listed"
                problems.append(f"{name} is in {file}, but {listed}")
    problems += [
        f"{n} is listed in {file_of[n]}, but not there" for n in file_of if n not in entries
    ]
    if problems:
        raise BadInputError(f"{index}:\n  " + "\n  ".join(problems))
    return entries


def _training_checkpoint(folder: Path) -> dict[str, Entry]:
    from telechat_moe.checkpoint import checkpoint, manifest
    from telechat_moe.checkpoint.pieced import pieced_entries

    checkpoint.verify(folder)
    return pieced_entries(folder, manifest.read(folder)["tensors"].get("model", {}))


# ---------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Output:
    """A tensor that is to be written; ``pieces`` yields its bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Bytes]]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * BYTES_OF_DTYPE[self.dtype]


def plan_shards(outputs: list[Output], shard_bytes: int) -> list[list[Output]]:
    """Distribute tensors over files of at most ``shard_bytes``; a larger one gets its own file."""
    shards: list[list[Output]] = [[]]
    filled = 0
    for output in outputs:
        if shards[-1] and filled + output.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(output)
        filled += output.nbytes
    # Widest types first, so that every tensor starts at a multiple of its element's size.
    return [sorted(s, key=lambda o: -BYTES_OF_DTYPE[o.dtype]) for s in shards]


def write_file(
    path: Path, outputs: list[Output], label: str, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Write one safetensors file and wait until it is on the disk; return its ``bytes`` and ``sha256``.

    Args:
        path: File to be made.
        outputs: Tensors in file order.
        label: ``format`` in the metadata.
        advance: Called with the size of each piece written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": label}}
    offset = 0
    for output in outputs:
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [offset, offset + output.nbytes],
        }
        offset += output.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(head)
    with path.open("xb") as file:
        file.write(head)
        for output in outputs:
            for piece in output.pieces():
                file.write(piece.data)
                digest.update(piece.data)
                advance(piece.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(head) + offset, "sha256": digest.hexdigest()}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file and wait until it is on the disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def shard_names(count: int) -> list[str]:
    """Return the names of ``count`` files of a folder."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_of(shards: list[list[Output]]) -> dict[str, Any]:
    """Return the content of ``model.safetensors.index.json``."""
    names = shard_names(len(shards))
    outputs = [(o, file) for shard, file in zip(shards, names, strict=True) for o in shard]
    return {
        "metadata": {"total_size": sum(o.nbytes for o, _ in outputs)},
        "weight_map": {o.name: file for o, file in sorted(outputs, key=lambda x: x[0].name)},
    }
