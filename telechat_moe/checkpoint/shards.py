"""Tensor files of a checkpoint: safetensors, written and read with the checksum on the way.

The `safetensors` package can read these files and the other way round (tests compare the two). It
is not used to write them because its writer offers neither a checksum of what it wrote nor an
fsync, and a second pass over the file would cost as much as the first. A file is::

    8 bytes    length of the header, little-endian
    header     JSON {tensor name: {"dtype", "shape", "data_offsets"}}, padded with spaces to 8 bytes
    data       the tensors, C order, little-endian, without holes, widest dtypes first (alignment)
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError

Array = NDArray[Any]

BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""What a BF16 tensor is loaded as: its raw bits under a name, since numpy has no bfloat16.

``array.view(np.uint16)`` gives the bits, ``array.view(some_bfloat16_dtype)`` the numbers. A record
dtype cannot be taken for integers by accident. Arrays of this dtype, and of any library's dtype
called ``bfloat16``, can be saved.
"""

_DTYPE_OF_NAME: dict[str, np.dtype[Any]] = {
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
_NAME_OF_KIND = {d.str[1:]: name for name, d in _DTYPE_OF_NAME.items() if name != "BF16"}

_PIECE_BYTES = 1 << 20  # hashed, then written or read while it is still in the cache


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the safetensors name of a dtype.

    Raises:
        BadInputError: If safetensors files cannot hold it (objects, strings, complex numbers...).
    """
    if dtype == BFLOAT16 or (dtype.name == "bfloat16" and dtype.itemsize == 2):
        return "BF16"
    name = _NAME_OF_KIND.get(dtype.str[1:])
    if name is None:
        known = ", ".join(_DTYPE_OF_NAME)
        raise BadInputError(f"dtype {dtype} cannot be stored in a checkpoint; known are {known}")
    return name


@dataclass(frozen=True)
class Shard:
    """One tensor file that is to be written: its name, header and tensors in file order."""

    file: str
    header: bytes
    tensors: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(a.nbytes for a in self.tensors.values())


def plan(group: str, tensors: Mapping[str, Array], shard_bytes: int) -> list[Shard]:
    """Distribute the tensors of a group over files of about ``shard_bytes``.

    The outcome depends on names, dtypes and shapes only, not on the order of ``tensors``. A tensor
    is never split; one that is larger than ``shard_bytes`` gets a file of its own.
    """
    bins: list[dict[str, Array]] = [{}]
    filled = 0
    for name in sorted(tensors):
        array = tensors[name]
        if bins[-1] and filled + array.nbytes > shard_bytes:
            bins.append({})
            filled = 0
        bins[-1][name] = array
        filled += array.nbytes
    count = len(bins)
    shards: list[Shard] = []
    for number, content in enumerate(bins, start=1):
        ordered = dict(sorted(content.items(), key=lambda item: -item[1].dtype.itemsize))
        file = f"{group}-{number:05d}-of-{count:05d}.safetensors"
        shards.append(Shard(file, _header(ordered), ordered))
    return shards


def single(file: str, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> Shard:
    """Return one file with all tensors and a few words about it."""
    ordered = dict(sorted(sorted(tensors.items()), key=lambda item: -item[1].dtype.itemsize))
    return Shard(file, _header(ordered, metadata), ordered)


def _header(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in tensors.items():
        if name == "__metadata__":
            raise BadInputError("a tensor cannot be called '__metadata__' in a safetensors file")
        end = offset + array.nbytes
        entries[name] = {
            "dtype": dtype_name(array.dtype),
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(array: Array) -> memoryview:
    if array.dtype.name == "bfloat16":
        array = np.ascontiguousarray(array).view(np.uint16)
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return plain.reshape(-1).view(np.uint8).data


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), _PIECE_BYTES):
        yield view[start : start + _PIECE_BYTES]


def write(folder: Path, shard: Shard) -> str:
    """Write one tensor file, wait until it is on the disk, return its SHA-256."""
    digest = hashlib.sha256(shard.header)
    with (folder / shard.file).open("xb") as file:
        file.write(shard.header)
        for array in shard.tensors.values():
            for piece in _pieces(_raw(array)):
                digest.update(piece)
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


@dataclass(frozen=True)
class FileContent:
    """What was found in a tensor file; ``data`` is None if only the checksum was wanted."""

    nbytes: int
    sha256: str
    data: NDArray[np.uint8] | None


def read(path: Path, *, keep: bool) -> FileContent:
    """Read a tensor file once, for its checksum and, with ``keep``, for its content.

    Raises:
        OSError: If the file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = np.empty(size if keep else min(size, _PIECE_BYTES), np.uint8)
        view = data.data
        found = 0
        while found < size:
            start = found if keep else 0
            count = file.readinto(view[start : start + min(_PIECE_BYTES, size - found)])
            if not count:
                break
            digest.update(view[start : start + count])
            found += count
    return FileContent(found, digest.hexdigest(), data if keep else None)


def _entries(data: NDArray[np.uint8]) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Return the header of a safetensors file and what follows it."""
    if len(data) < 8:
        raise ValueError(f"{len(data)} bytes are too few for a header")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > len(data) - 8:
        raise ValueError(f"the header says it is {length:,} bytes long, the file is {len(data):,}")
    try:
        entries = json.loads(data[8 : 8 + length].tobytes().decode())
    except ValueError as error:
        raise ValueError(f"the header is not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object")
    return entries, data[8 + length :]


def metadata(data: NDArray[np.uint8]) -> dict[str, str]:
    """Return the words that the bytes of a safetensors file carry.

    Raises:
        ValueError: See :func:`parse`.
    """
    found = _entries(data)[0].get("__metadata__")
    return found if isinstance(found, dict) else {}


def parse(data: NDArray[np.uint8]) -> dict[str, Array]:
    """Return the tensors in the bytes of a safetensors file, as writable views of ``data``.

    Raises:
        ValueError: If the header does not describe the bytes; the message says how.
    """
    entries, body = _entries(data)
    entries.pop("__metadata__", None)
    tensors: dict[str, Array] = {}
    for name, entry in entries.items():
        try:
            dtype = _DTYPE_OF_NAME[entry["dtype"]]
            shape = tuple(int(n) for n in entry["shape"])
            start, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"bad entry {entry!r} for tensor {name!r} in the header") from error
        wanted = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if not 0 <= start <= end <= len(body) or end - start != wanted:
            raise ValueError(
                f"tensor {name!r}: bytes {start:,}..{end:,} of {len(body):,} do not fit "
                f"dtype {entry['dtype']} and shape {list(shape)}"
            )
        tensors[name] = body[start:end].view(dtype).reshape(shape)
    return tensors
