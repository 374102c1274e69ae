"""Read and write safetensors files in chunks; a file is held in memory as a whole only if that is asked for.

A file is::

    8 bytes    length of the header, little-endian
    header     JSON {tensor name: {"dtype", "shape", "data_offsets"}}, padded with spaces to 8 bytes
    data       the tensors, C order, little-endian, without holes, widest dtypes first (alignment)

The `safetensors` package and this module read each other's files (tests compare the two). It is not used because it
offers NumPy no bfloat16, no checksum of what it wrote and no fsync, and writes only what is in memory as a whole. Here
a tensor is its raw bytes, so every data type passes through unchanged.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.files import CHUNK_BYTES, Advance, copy_new, write_new
from telechat_moe.narrowing import is_object, short
from telechat_moe.numerics import Array
from telechat_moe.reading import parse_json, read_bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHECKPOINT = "checkpoint.json"

BYTES_OF_DTYPE = {"F32": 4, "BF16": 2, "F16": 2}
"""Data types of weights, by their safetensors names."""

READ_BYTES = 16 << 20
_LARGEST_HEADER = 100_000_000  # as the safetensors library
_SHOWN = 20  # problems in a message

Bytes = NDArray[np.uint8]


BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""What a BF16 tensor is loaded as: its raw bits under a name, since numpy has no bfloat16.

``array.view(np.uint16)`` gives the bits, ``array.view(some_bfloat16_dtype)`` the numbers. A record
dtype cannot be taken for integers by accident. Arrays of this dtype, and of any library's dtype
called ``bfloat16``, can be saved.
"""

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_OTHER_BITS = {
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64},
}
BITS_OF_DTYPE = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | _OTHER_BITS
"""Bits of an element of every data type of the safetensors library."""
_NAME_OF_KIND = {d.str[1:]: name for name, d in DTYPES.items() if name != "BF16"}


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the safetensors name of a dtype.

    Raises:
        BadInputError: If safetensors files cannot hold it (objects, strings, complex numbers...).
    """
    if dtype == BFLOAT16 or (dtype.name == "bfloat16" and dtype.itemsize == 2):
        return "BF16"
    name = _NAME_OF_KIND.get(dtype.str[1:])
    if name is None:
        raise BadInputError(
            f"dtype {dtype} cannot be stored in a checkpoint; known are {', '.join(DTYPES)}"
        )
    return name


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: its data type and shape, and the range of its bytes."""

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
            view, position = data.data, 0
            while position < len(data):
                got = file.readinto(view[position:])
                if not got:
                    raise BadInputError(f"{self.file}: ended while it was being read")
                position += got
        return data

    def chunks(self) -> Iterator[Bytes]:
        """Yield the bytes of the tensor, a few at a time."""
        for offset in range(0, self.nbytes, READ_BYTES):
            yield self.read(offset, min(READ_BYTES, self.nbytes - offset))

    def read_region(self, region: Sequence[tuple[int, int]]) -> Array:
        """Return a region of the tensor, by its (begin, end) in every dimension; of the file a few rows are in memory at once."""
        values = np.empty([end - begin for begin, end in region], DTYPES[self.dtype])
        if not self.shape:
            return self.read().view(values.dtype).reshape(())
        (first, last), *columns = region
        row_bytes = math.prod(self.shape[1:]) * values.dtype.itemsize
        index = (slice(None), *(slice(*bounds) for bounds in columns))
        rows = max(READ_BYTES // max(row_bytes, 1), 1)
        for begin in range(first, last, rows):
            end = min(begin + rows, last)
            data = self.read(begin * row_bytes, (end - begin) * row_bytes)
            data = data.view(values.dtype).reshape(end - begin, *self.shape[1:])
            values[begin - first : end - first] = data[index]
        return values


def read_entries(source: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file or of a folder of weights.

    A folder has ``model.safetensors.index.json`` or one safetensors file.

    Raises:
        BadInputError: If nothing readable is there; says what was found.
    """
    try:
        if source.is_file():
            return read_header(source)
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


def read_header(path: Path) -> dict[str, TensorEntry]:
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
        header = _Header(raw, size - 8 - length)
    except ValueError as error:
        raise BadInputError(f"{path}: broken safetensors header: {error}") from error
    if header.problems:
        hidden = len(header.problems) - _SHOWN
        lines = [line.replace("\n", "\\n") for line in header.problems[:_SHOWN]]
        lines += [f"and {hidden:,} more"] * (hidden > 0)
        raise BadInputError(f"{path}: truncated or broken:\n  " + "\n  ".join(lines))
    data = 8 + length
    return {
        name: TensorEntry(path, dtype, shape, data + start, end - start)
        for name, (dtype, shape, start, end) in header.tensors.items()
    }


Described = tuple[str, tuple[int, ...], int, int]
"""What a header says of a tensor: data type, shape, first byte and the byte after the last."""


class _Header:
    """What a header says of each tensor, and the metadata; it must fit the ``size`` bytes of all tensors.

    Attributes:
        problems: Tensors that do not fit their bytes, and bytes that belong to no tensor or to two, a line each.

    Raises:
        ValueError: It is broken.
    """

    def __init__(self, raw: bytes, size: int) -> None:
        try:
            header = parse_json(raw.decode())  # the library takes no byte order mark
        except ValueError as error:
            raise ValueError(f"the header is not valid JSON ({error})") from error
        if not is_object(header):
            raise ValueError("the header is not a JSON object")
        notes = header.pop("__metadata__", None)
        if notes is None:
            notes = {}
        if not is_object(notes) or not all(isinstance(text, str) for text in notes.values()):
            raise ValueError("__metadata__ is no object of texts")
        self.metadata: dict[str, str] = notes
        self.tensors = {name: _described(name, entry) for name, entry in header.items()}
        self.problems = [
            f"{name}: {problem}"
            for name, (dtype, shape, start, end) in self.tensors.items()
            if (problem := _misfit(dtype, shape, start, end, size))
        ]
        if not self.problems:
            self.problems = _gaps(self.tensors, size)


def _described(name: str, entry: Any) -> Described:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]}:
            if all(type(n) is int and n >= 0 for n in (*shape, start, end)):
                if dtype not in BITS_OF_DTYPE:
                    raise ValueError(f"tensor {short(name)!r}: unknown dtype {short(dtype)}")
                return dtype, tuple(shape), start, end
        case _:
            pass
    raise ValueError(f"bad entry {short(entry)} for tensor {short(name)!r} in the header")


def _misfit(dtype: str, shape: tuple[int, ...], start: int, end: int, size: int) -> str | None:
    """Return why a tensor cannot be what its header says; ``size``: bytes of all tensors."""
    # The library refuses what overflows on the way.
    largest = max(accumulate(shape, mul), default=1)
    bits = math.prod(shape) * BITS_OF_DTYPE[dtype]
    if start <= end <= size and 8 * (end - start) == bits and largest < 1 << 64:
        return None
    return f"bytes {start:,} to {end:,} of {size:,} do not fit dtype {dtype} and shape {short(list(shape))}"


def _gaps(tensors: Mapping[str, Described], size: int) -> list[str]:
    """Return where bytes belong to no tensor or to two, which the safetensors library refuses."""
    problems: list[str] = []
    last, covered = "the header", 0
    for name, (_, _, start, end) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if start != covered:
            how = "overlaps" if start < covered else f"{start - covered:,} bytes after"
            problems.append(f"{name}: begins at {start:,}, {how} {last}, which ends at {covered:,}")
        last, covered = name, end
    if covered != size:
        problems.append(f"{size - covered:,} bytes after {last}, which ends at {covered:,}")
    return problems


def _sharded(folder: Path) -> dict[str, TensorEntry]:
    index = folder / INDEX
    try:
        file_of = dict[str, str](parse_json(read_bytes(index))["weight_map"])
        names = sorted(set(file_of.values()))
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{index}: no valid index of tensors ({short(error)})") from error
    if any(not isinstance(name, str) for name in names):
        raise BadInputError(f"{index}: no valid index of tensors: a name of a file is no text")
    problems = [f"file {n!r} is outside the folder" for n in names if Path(n).name != n]
    problems += [f"file {n} is missing" for n in names if not (folder / n).is_file()]
    if problems:
        raise BadInputError(f"{index}:\n  " + "\n  ".join(problems))
    entries: dict[str, TensorEntry] = {}
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


# ---------------------------------------------------------------------------------------- in memory


def _split(data: Bytes) -> tuple[bytes, Bytes]:
    """Return the header of a safetensors file and what follows it."""
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes are too few for a header")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > len(data) - 8:
        raise ValueError(f"the header says it is {length:,} bytes long, the file is {len(data):,}")
    return data[8 : 8 + length].tobytes(), data[8 + length :]


def metadata(data: Bytes) -> dict[str, str]:
    """Return the metadata in the bytes of a safetensors file that :func:`parse` takes.

    Raises:
        ValueError: See :func:`parse`.
    """
    raw, body = _split(data)
    return _Header(raw, len(body)).metadata


def parse(data: Bytes) -> dict[str, Array]:
    """Return the tensors in the bytes of a safetensors file, as writable views of ``data``.

    Raises:
        ValueError: If the header does not describe the bytes, or a dtype is not one of :data:`DTYPES`; says how.
    """
    raw, body = _split(data)
    header = _Header(raw, len(body))
    if header.problems:
        raise ValueError(f"tensor {header.problems[0]}")
    tensors: dict[str, Array] = {}
    for name, (dtype, shape, start, end) in header.tensors.items():
        if dtype not in DTYPES:
            raise ValueError(f"tensor {name!r}: dtype {dtype} has no type of NumPy")
        tensors[name] = body[start:end].view(DTYPES[dtype]).reshape(shape)
    return tensors


# ---------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class TensorOutput:
    """A tensor that is to be written, or loaded.

    Attributes:
        chunks: Yields its bytes in order.
        read_region: Returns a region of it, by its (begin, end) in every dimension; None: it is read as a whole only.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Bytes]]
    read_region: Callable[[Sequence[tuple[int, int]]], Array] | None = None

    @property
    def width(self) -> int:
        """Return the bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return math.prod(self.shape) * self.width


def output_of(name: str, array: Array) -> TensorOutput:
    """Return an array as a tensor to be written.

    Raises:
        BadInputError: If safetensors files cannot hold its name or dtype.
    """
    if name == "__metadata__":
        raise BadInputError("a tensor cannot be called '__metadata__' in a safetensors file")
    return TensorOutput(name, dtype_name(array.dtype), array.shape, lambda: _chunks(array))


def _chunks(array: Array) -> Iterator[Bytes]:
    if array.dtype.name == "bfloat16":
        array = np.ascontiguousarray(array).view(np.uint16)
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    raw = plain.reshape(-1).view(np.uint8)
    for start in range(0, len(raw), CHUNK_BYTES):
        yield raw[start : start + CHUNK_BYTES]


@dataclass(frozen=True)
class TensorFile:
    """A file that is to be written: its name, tensors in file order, and metadata."""

    name: str
    outputs: Sequence[TensorOutput]
    metadata: Mapping[str, str] | None = None

    @property
    def header(self) -> bytes:
        """Return the bytes of the file before its tensors."""
        entries: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        offset = 0
        for output in self.outputs:
            end = offset + output.nbytes
            described = {"dtype": output.dtype, "shape": list(output.shape)}
            entries[output.name] = described | {"data_offsets": [offset, end]}
            offset = end
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Return the size of the file in bytes."""
        return len(self.header) + sum(output.nbytes for output in self.outputs)

    def write(self, path: Path, advance: Advance = lambda _: None) -> dict[str, Any]:
        """Write the file and wait until it is on the disk; return its ``bytes`` and ``sha256``."""
        return write_new(path, self._content(advance))

    def copy(self, path: Path) -> None:
        """Write the file; :func:`telechat_moe.files.settle` waits for the disk."""
        copy_new(path, self._content())

    def _content(self, advance: Advance = lambda _: None) -> Iterator[bytes | memoryview]:
        yield self.header
        for output in self.outputs:
            for chunk in output.chunks():
                yield chunk.data
                advance(chunk.nbytes)


def file_of(
    name: str, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> TensorFile:
    """Return one file with all these arrays.

    Raises:
        BadInputError: See :func:`output_of`.
    """
    outputs = in_order(output_of(n, array) for n, array in sorted(tensors.items()))
    return TensorFile(name, outputs, metadata)


def split(outputs: Iterable[TensorOutput], limit: int) -> list[list[TensorOutput]]:
    """Distribute tensors over files of at most ``limit`` bytes; a larger one gets its own file."""
    files: list[list[TensorOutput]] = [[]]
    filled = 0
    for output in outputs:
        if files[-1] and filled + output.nbytes > limit:
            files.append([])
            filled = 0
        files[-1].append(output)
        filled += output.nbytes
    return [in_order(file) for file in files]


def in_order(outputs: Iterable[TensorOutput]) -> list[TensorOutput]:
    """Return tensors with the widest types first, so that each starts at a multiple of its element's size."""
    return sorted(outputs, key=lambda output: -output.width)


def shard_names(count: int) -> list[str]:
    """Return the names of ``count`` files of a folder."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def index_of(shards: list[list[TensorOutput]]) -> dict[str, Any]:
    """Return the content of ``model.safetensors.index.json``."""
    names = shard_names(len(shards))
    outputs = [(o, file) for shard, file in zip(shards, names, strict=True) for o in shard]
    return {
        "metadata": {"total_size": sum(o.nbytes for o, _ in outputs)},
        "weight_map": {o.name: file for o, file in sorted(outputs, key=lambda x: x[0].name)},
    }
