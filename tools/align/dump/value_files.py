"""Values of tensors in files, mapped and never unpickled: ``.npy``, and the ``.pt`` of ``torch.save`` without torch.

A ``.pt`` file is a zip archive whose ``data.pkl`` says with a few opcodes which member holds which tensor. Any other
opcode is refused, and so is every name but those of a tensor's parts; nothing that a file names is imported.
"""

import io
import math
import mmap
import os
import pickle
import pickletools
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.numerics import WIDENED, Array, dot, widen
from telechat_moe.tools.align.dump.records import Stats

_NPY: Any = np.lib.format  # NumPy's stubs leave it without types

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_UNTYPED = {
    "float8_e4m3fn": "float8_e4m3",
    "float8_e5m2": "float8_e5m2",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
}
"""Types without a storage of their own, by torch's names: their tensors are made of bytes."""
_BITS = {"bfloat16": "uint16", "float8_e4m3": "uint8", "float8_e5m2": "uint8"}
_BROKEN = (
    *(OSError, ValueError, EOFError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(MemoryError, RuntimeError, SyntaxError, struct.error, zlib.error, tokenize.TokenError),
    *(zipfile.BadZipFile, pickle.UnpicklingError),
)
_MAX_PICKLE = 1 << 16
_MAX_COUNT = 1 << 62
_SMALL, _LARGE = 1 << 16, 1 << 24  # bytes
_STEP, _FEW = 1 << 20, 1 << 18  # elements
_RELEASE = 1 << 22  # elements after which the pages of mapped files are released


def load(path: Path, dtype: str, shape: Sequence[int], root: Path) -> Array:
    """Return the values of a tensor, mapped where the file holds a NumPy type.

    Args:
        dtype: Canonical name of the type that the program computed in.
        root: Folder that must contain the file after links are followed.

    Raises:
        BadInputError: The file is missing, outside of the root, broken, pickled, or not of that type and shape.
    """
    shape = tuple(shape)
    try:
        real = within(path, root)
        if not real.is_file():  # opening a pipe would wait for ever
            reason = "no regular file" if real.exists() else "missing; the dump names it"
            raise BadInputError(f"{path}: {reason}")
        values = _load_pt(real) if path.suffix == ".pt" else _load_npy(real)
    except BadInputError:
        raise
    except RecursionError:
        raise BadInputError(f"{path}: nested too deeply") from None
    except _BROKEN as error:
        raise BadInputError(f"{path}: {_error_text(error)}") from None
    if values.shape != shape:
        raise BadInputError(f"{path}: shape {list(values.shape)}, the dump says {list(shape)}")
    if not is_known(dtype):  # the file says what it holds
        return values
    kind = np.dtype("float32" if dtype in WIDENED else dtype)
    if values.dtype == kind:
        return values
    with np.errstate(all="ignore"):
        narrow = values.astype(kind)
    # A file may store a wider type than the dump says, if the values fit the narrow one.
    if np.array_equal(narrow.astype(values.dtype), values, equal_nan=values.dtype.kind in "fc"):
        return narrow
    raise BadInputError(f"{path}: holds {values.dtype.name}, the dump says {dtype}")


def is_known(dtype: str) -> bool:
    """Return whether values of a type, by its canonical name, can be read."""
    if dtype in WIDENED:
        return True
    is_name = dtype.isalnum() and dtype[0].isalpha()  # NumPy reads structures of types, too
    try:
        return is_name and np.dtype(dtype).kind in "fiubc"
    except TypeError:
        return False


def empty(dtype: str, shape: Sequence[int]) -> Array:
    """Return the values of a tensor without elements."""
    return np.zeros(shape, "float32" if dtype in WIDENED or not is_known(dtype) else dtype)


def _widened(bits: Array, dtype: str) -> Array:
    """Return flat bfloat16 or float8 in float32; large arrays in a temporary file that is removed with the array."""
    if bits.nbytes <= _LARGE:
        wide: Array = widen(np.asarray(bits), dtype)
        wide.flags.writeable = False
        return wide
    with tempfile.TemporaryFile() as file:
        wide = np.memmap(file, np.float32, "w+", shape=bits.shape)
    for i in range(0, bits.size, _STEP):
        wide[i : i + _STEP] = widen(np.asarray(bits[i : i + _STEP]), dtype)
        release(bits)
        release(wide)
    wide.flags.writeable = False
    return wide


def save_pt(path: Path, values: Array, dtype: str) -> None:
    """Write a tensor (bfloat16 widened) in a type as ``torch.save`` does; equal values give equal bytes."""
    names = {name: storage for storage, name in _STORAGES.items()}
    if dtype == "bfloat16":
        wide = np.ascontiguousarray(values, np.float32).reshape(-1)
        stored: Array = (wide.view(np.uint32) >> 16).astype(np.uint16)
    else:
        dtype = dtype if dtype in names else "float32"
        stored = np.ascontiguousarray(values, np.dtype(dtype)).reshape(-1)
    strides = tuple(math.prod(values.shape[d + 1 :]) for d in range(values.ndim))
    content = b"".join(
        [
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((",
            _opcodes("storage") + f"ctorch\n{names[dtype]}\n".encode(),
            *map(_opcodes, ("0", "cpu", stored.size)),
            b"tQ",
            *map(_opcodes, (0, values.shape, strides)),
            b"\x89ccollections\nOrderedDict\n)RtR.",
        ]
    )
    stem = path.stem
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, text in (("data.pkl", content), ("byteorder", b"little")):
            archive.writestr(zipfile.ZipInfo(f"{stem}/{name}"), text)
        with archive.open(zipfile.ZipInfo(f"{stem}/data/0"), "w", force_zip64=True) as member:
            for i in range(0, stored.size, 1 << 22):
                member.write(stored[i : i + (1 << 22)].tobytes())
        archive.writestr(zipfile.ZipInfo(f"{stem}/version"), b"3\n")


def _opcodes(value: Any) -> bytes:
    """Return the opcodes that put a text, a number or a tuple of numbers on the stack."""
    return pickle.dumps(value, 2)[2:-1]


def release(values: Array) -> None:
    """Release the pages of a mapped file, so that what was read of it is no longer resident."""
    base: Any = values
    while base is not None and not isinstance(base, mmap.mmap):  # as_strided puts an object between
        base = getattr(base, "base", None)
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def boxes(shape: Sequence[int], elements: int) -> Iterator[tuple[slice, ...]]:
    """Yield the blocks of an array in C order: contiguous, at most so many elements (but one at least)."""
    if math.prod(shape) == 0:
        return
    cut = len(shape)
    while cut and math.prod(shape[cut - 1 :]) <= elements:
        cut -= 1
    if not cut:
        yield tuple(slice(0, n) for n in shape)
        return
    rows = max(1, elements // math.prod(shape[cut:]))
    full = tuple(slice(0, n) for n in shape[cut:])
    for outer in np.ndindex(*shape[: cut - 1]):
        for begin in range(0, shape[cut - 1], rows):
            end = min(begin + rows, shape[cut - 1])
            yield (*(slice(i, i + 1) for i in outer), slice(begin, end), *full)


def chunks(arrays: Sequence[Array], elements: int) -> Iterator[tuple[int, list[Array]]]:
    """Yield flat chunks of so many elements of arrays of one shape, in C order, with the index of their first element.

    What was read of mapped arrays is released. A chunk may be overwritten by the next one.
    """
    begin = released = 0
    flags: Any = ["external_loop", "buffered", "zerosize_ok"]
    operand_flags: Any = [["readonly", "contig"]] * len(arrays)
    for parts in np.nditer(arrays, flags, operand_flags, order="C", buffersize=elements):
        chunk: list[Array] = list(parts) if len(arrays) > 1 else [np.asarray(parts)]
        yield begin, chunk
        begin += chunk[0].size
        if begin - released >= _RELEASE:
            released = begin
            for array in arrays:
                release(array)


def stats(values: Array) -> Stats | None:
    """Return largest, smallest and mean value and L2 norm; None for no elements. NaN makes all of them NaN."""
    if values.size == 0:
        return None
    high, low, total, squares = -math.inf, math.inf, 0.0, 0.0
    for _, (part,) in chunks([values], _FEW):
        x = part.astype(np.float64)
        high, low = float(np.maximum(high, x.max())), float(np.minimum(low, x.min()))
        total += float(x.sum())
        squares += dot(x, x)
    if values.dtype.kind == "b":
        return Stats(high, low, None, None)
    return Stats(high, low, total / values.size, math.sqrt(squares))


def within(path: Path, root: Path) -> Path:
    """Return the real path of a file or folder that must be inside a folder, links followed.

    Raises:
        BadInputError: It is outside of the folder.
    """
    # Only the path of the folder is resolved, and cached: a dump has thousands of files in one.
    real = os.path.join(_folder(os.fspath(path.parent)), path.name)  # noqa: PTH118 (pathlib is slow)
    if path.name in ("", "..") or os.path.islink(real):  # noqa: PTH114
        real = os.path.realpath(real)
    folder = _folder(os.fspath(root))
    if real != folder and not real.startswith(folder.rstrip(os.sep) + os.sep):
        raise BadInputError(f"{path}: leads out of {root}, to {real}; expected a file in it")
    return Path(real)


@lru_cache(64)
def _folder(path: str) -> str:
    return os.path.realpath(path)


def _error_text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return f"broken ({str(error)[:200] or type(error).__name__})"


def _load_npy(path: Path) -> Array:
    with path.open("rb") as file:
        version = _NPY.read_magic(file)
        if version == (1, 0):
            length = file.read(2)
            shape, fortran, dtype = _header(length + file.read(int.from_bytes(length, "little")))
        elif version in ((2, 0), (3, 0)):
            shape, fortran, dtype = _NPY.read_array_header_2_0(file)
        else:
            raise ValueError(f"version {version} of the format")
        begin, size = file.tell(), os.fstat(file.fileno()).st_size
        if dtype.hasobject or dtype.names is not None:
            raise ValueError(f"{dtype}: pickled or structured values are never read")
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {shape}")
        count = math.prod(shape)
        if begin + count * dtype.itemsize != size:
            raise ValueError(f"{size:,} bytes, {begin + count * dtype.itemsize:,} expected")
        flat = _mapped(file, dtype, begin, count)
    if dtype.kind == "V" and dtype.itemsize == 2:  # ml_dtypes' bfloat16 as NumPy stores it
        flat = _widened(flat.view(np.uint16), "bfloat16")
    elif not dtype.isnative:
        flat = flat.astype(dtype.newbyteorder("="))
    return flat.reshape(shape, order="F" if fortran else "C")


@lru_cache(1024)
def _header(text: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parse the header of a ``.npy`` file; a dump has few different ones in thousands of files."""
    return _NPY.read_array_header_1_0(io.BytesIO(text))


def _mapped(file: BinaryIO, dtype: np.dtype[Any], begin: int, count: int) -> Array:
    """Return the numbers at a place of a file, mapped or, if they are few, read: mapping takes longer."""
    size = count * dtype.itemsize
    if size <= _SMALL:
        file.seek(begin)
        return np.ndarray(count, dtype, file.read(size))
    start = begin - begin % mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(file.fileno(), size + begin - start, access=mmap.ACCESS_READ, offset=start)
    return np.ndarray(count, dtype, pages, begin - start)


class _Tensor(NamedTuple):
    dtype: str
    member: str
    size: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _load_pt(path: Path) -> Array:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as archive:
            members = {about.filename.partition("/")[2]: about for about in archive.infolist()}
            description = _described(_start(archive, members["data.pkl"]))
            if "byteorder" in members and _start(archive, members["byteorder"]) != b"little":
                raise ValueError("big-endian values")
        dtype = np.dtype(_BITS.get(description.dtype, description.dtype))
        member = members[f"data/{description.member}"]
        begin = _begin(file, member)
        if description.size * dtype.itemsize > member.file_size or begin + member.file_size > size:
            raise ValueError("fewer values than the file says")
        flat = _mapped(file, dtype, begin, description.size)
    if description.dtype in _BITS:  # the repeats of an expanded tensor are widened once
        flat = _widened(flat, description.dtype)
    step = flat.itemsize
    strides = [s * step for s in description.strides]
    return np.ndarray(description.shape, flat.dtype, flat, description.offset * step, strides)


def _start(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return a small member; one that is larger, or only says that it is small, is not inflated beyond that."""
    with archive.open(member) as stream:
        content = stream.read(_MAX_PICKLE + 1)
    if len(content) > _MAX_PICKLE:
        raise ValueError(f"{member.filename} is too large for one tensor")
    return content


def _begin(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Return the position at which the content of a member begins, which must be stored uncompressed."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise ValueError("compressed or encrypted values")
    file.seek(member.header_offset)
    header = file.read(30)
    name, extra = struct.unpack("<HH", header[26:30])
    if header[:4] != b"PK\x03\x04" or file.read(name) != member.orig_filename.encode():
        raise ValueError("no such member where the archive says")
    return member.header_offset + 30 + name + extra


_ALLOWED = """
PROTO STOP MARK GLOBAL REDUCE BINPERSID BINPUT BINGET NEWFALSE NEWTRUE BININT BININT1 BININT2 LONG1 BINUNICODE
SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
"""
_OPCODES = frozenset(_ALLOWED.split())


def _first(tensor: Any, *_: object) -> Any:
    return tensor


class _Description(pickle.Unpickler):
    """Makes the :class:`_Tensor` that a ``data.pkl`` describes, from no names but those of a tensor's parts."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise ValueError(f"pickled values are never read ({module} {name})")
        return _NAMES[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _tensor(storage: Any, offset: int, shape: Any, strides: Any, *_: object) -> _Tensor:
    kind, dtype, member, _, size = storage
    numbers = (size, offset, *shape, *strides)
    if kind != "storage" or dtype not in {*_STORAGES.values(), *_UNTYPED.values()}:
        raise ValueError("no storage")
    if any(type(n) is not int or not 0 <= n < _MAX_COUNT for n in numbers):
        raise ValueError(f"no sizes: {numbers}")
    return _Tensor(dtype, member, size, offset, tuple(shape), tuple(strides))


def _tensor_of_bytes(storage: Any, offset: int, shape: Any, strides: Any, *others: Any) -> _Tensor:
    """Return a tensor whose storage is of bytes; its type follows ``requires_grad`` and the hooks."""
    kind, unit, member, place, size = storage
    if unit != "bytes" or len(others) < 3 or others[2] not in _UNTYPED.values():
        raise ValueError("no storage of bytes of a known type")
    dtype = others[2]
    count = size // np.dtype(_BITS.get(dtype, dtype)).itemsize
    return _tensor((kind, dtype, member, place, count), offset, shape, strides)


_NAMES: dict[tuple[str, str], Any] = {
    **{("torch", storage): dtype for storage, dtype in (_STORAGES | _UNTYPED).items()},
    ("torch.storage", "UntypedStorage"): "bytes",
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_bytes,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("collections", "OrderedDict"): tuple,
}


@lru_cache(256)
def _described(content: bytes) -> _Tensor:
    codes = {code.name for code, _, _ in pickletools.genops(content)}
    if unknown := codes - _OPCODES:
        raise ValueError(f"pickled values are never read (opcode {min(unknown)})")
    tensor = _Description(io.BytesIO(content)).load()
    if not isinstance(tensor, _Tensor):
        raise ValueError("not one tensor")
    return tensor
