"""Values of tensors in files, mapped and never unpickled: ``.npy``, and the ``.pt`` of ``torch.save`` without torch.

A ``.pt`` file is a zip archive whose ``data.pkl`` says with a few opcodes which member holds which tensor. Those opcodes
are read as data; nothing that they name is imported or called, and any other opcode is refused.
"""

import io
import math
import mmap
import os
import pickletools
import stat
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.numerics import Array

_NPY: Any = np.lib.format  # NumPy's stubs leave it without types

WIDENED = {"bfloat16", "float8_e4m3", "float8_e5m2"}
"""Types that NumPy lacks: files hold them widened to float32, or as their bits."""

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
_BROKEN = (
    *(OSError, ValueError, EOFError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(MemoryError, RuntimeError, SyntaxError, struct.error, zlib.error, tokenize.TokenError),
    zipfile.BadZipFile,
)
_MAX_PICKLE = 1 << 16
_SMALL, _LARGE = 1 << 16, 1 << 24  # bytes
_STEP = 1 << 20  # elements
_RELEASE = 1 << 22  # elements after which the pages of mapped files are released


def load(path: Path, dtype: str, shape: Sequence[int], root: Path) -> Array:
    """Return the values of a tensor, mapped where the file holds a NumPy type.

    Args:
        path: ``.npy`` or ``.pt`` file.
        dtype: Canonical name of the type that the program computed in.
        shape: Shape in the dump.
        root: Folder that must contain the file after links are followed.

    Raises:
        BadInputError: The file is missing, outside of the root, broken, pickled, or not of that type and shape.
    """
    shape = tuple(shape)
    try:
        real = _real(path, root)
        values = _load_pt(Path(real)) if path.suffix == ".pt" else _load_npy(real)
    except BadInputError:
        raise
    except RecursionError:
        raise BadInputError(f"{path}: nested too deeply") from None
    except _BROKEN as error:
        raise BadInputError(f"{path}: {_said(error)}") from None
    if values.shape != shape:
        raise BadInputError(f"{path}: shape {list(values.shape)}, the dump says {list(shape)}")
    if not _fits(values.dtype.name, dtype):
        values = _narrowed(values, dtype)
    if not _fits(values.dtype.name, dtype):
        raise BadInputError(f"{path}: holds {values.dtype.name}, the dump says {dtype}")
    return values


def widen(bits: Array, dtype: str) -> Array:
    """Return bfloat16 or float8, given as its bits, in float32.

    Args:
        bits: uint16 or uint8.
        dtype: ``bfloat16``, ``float8_e4m3`` (finite, without infinity) or ``float8_e5m2``.
    """
    if dtype == "bfloat16":
        return np.left_shift(bits.astype(np.uint32), np.uint32(16)).view(np.float32)
    if dtype == "float8_e5m2":
        return (bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    table = np.where(
        exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent.astype(float) - 10)
    )
    table[code & 127 == 127] = np.nan
    return np.where(code < 128, table, -table).astype(np.float32)[bits]


def from_bytes(content: bytes, dtype: str) -> Array:
    """Return the flat values of a type's bytes; bfloat16 in float32."""
    if dtype == "bfloat16":
        return widen(np.frombuffer(content, np.uint16), dtype)
    return np.frombuffer(content, np.dtype(dtype))


def _widened(bits: Array) -> Array:
    """Return flat bfloat16 in float32; large arrays in a temporary file that is removed with the array."""
    if bits.nbytes <= _LARGE:
        return widen(np.asarray(bits), "bfloat16")
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * bits.nbytes)
        wide: Array = np.ndarray(bits.shape, np.float32, mmap.mmap(file.fileno(), 2 * bits.nbytes))
    for i in range(0, bits.size, _STEP):
        wide[i : i + _STEP] = widen(np.asarray(bits[i : i + _STEP]), "bfloat16")
        release(bits)
        release(wide)
    wide.flags.writeable = False
    return wide


def save_pt(path: Path, values: Array, dtype: str) -> None:
    """Write a tensor as ``torch.save`` does; equal values give equal bytes.

    Args:
        values: The values; bfloat16 widened.
        dtype: Canonical name of the type to store.
    """
    names = {name: storage for storage, name in _STORAGES.items()}
    if dtype == "bfloat16":
        wide = np.ascontiguousarray(values, np.float32).reshape(-1)
        stored: Array = (wide.view(np.uint32) >> 16).astype(np.uint16)
    else:
        dtype = dtype if dtype in names else "float32"
        stored = np.ascontiguousarray(values, np.dtype(dtype)).reshape(-1)
    strides = [math.prod(values.shape[d + 1 :]) for d in range(values.ndim)]
    pickle = b"".join(
        [
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((",
            _text("storage"),
            f"ctorch\n{names[dtype]}\n".encode(),
            _text("0") + _text("cpu"),
            _number(stored.size) + b"tQ" + _number(0),
            b"(" + b"".join(map(_number, values.shape)) + b"t",
            b"(" + b"".join(map(_number, strides)) + b"t",
            b"\x89ccollections\nOrderedDict\n)RtR.",
        ]
    )
    stem = path.stem
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (("data.pkl", pickle), ("byteorder", b"little")):
            archive.writestr(zipfile.ZipInfo(f"{stem}/{name}"), content)
        with archive.open(zipfile.ZipInfo(f"{stem}/data/0"), "w", force_zip64=True) as member:
            for i in range(0, stored.size, 1 << 22):
                member.write(stored[i : i + (1 << 22)].tobytes())
        archive.writestr(zipfile.ZipInfo(f"{stem}/version"), b"3\n")


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
    """Yield flat chunks of arrays of one shape, with the index of their first element; release what was read.

    Args:
        arrays: Arrays, maybe mapped.
        elements: About as many elements make a chunk; exactly, if all arrays are contiguous.
    """
    flat = all(a.flags.c_contiguous for a in arrays)
    lines = [a.reshape(-1) for a in arrays] if flat else list(arrays)
    begin = released = 0
    for box in boxes(lines[0].shape, elements):
        parts = [np.ascontiguousarray(line[box]).reshape(-1) for line in lines]
        yield begin, parts
        begin += parts[0].size
        if begin - released >= _RELEASE:
            released = begin
            for array in arrays:
                release(array)


def within(path: Path, root: Path) -> Path:
    """Return the real path of a file or folder that must be inside a folder, links followed.

    Raises:
        BadInputError: It is outside of the folder.
    """
    return Path(_within(path, root))


def _within(path: Path, root: Path) -> str:
    real, folder = _realpath(path), _folder(os.fspath(root))
    if real != folder and not real.startswith(folder.rstrip(os.sep) + os.sep):
        raise BadInputError(f"{path}: leads out of {root}, to {real}; expected a file in it")
    return real


def _realpath(path: Path) -> str:
    """Return the real path of a file; that of its folder is cached, because a dump has thousands of files in one."""
    found = os.path.join(_folder(os.fspath(path.parent)), path.name)  # noqa: PTH118 (pathlib is slow)
    known = path.name not in ("", "..") and not os.path.islink(found)  # noqa: PTH114
    return found if known else os.path.realpath(found)


@lru_cache(64)
def _folder(path: str) -> str:
    return os.path.realpath(path)


def _real(path: Path, root: Path) -> str:
    real = _within(path, root)
    try:
        mode = os.stat(real).st_mode  # noqa: PTH116 (pathlib is slow)
    except FileNotFoundError:
        raise BadInputError(f"{path}: missing; the dump names it") from None
    if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
        raise BadInputError(f"{path}: no regular file")
    return real


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return f"broken ({str(error)[:200] or type(error).__name__})"


def _fits(found: str, dtype: str) -> bool:
    if found == dtype:
        return True
    if dtype in WIDENED:
        return found == "float32"
    try:
        np.dtype(dtype)
    except TypeError:  # an unknown type: the file says what it holds
        return True
    return False


def _narrowed(values: Array, dtype: str) -> Array:
    """Return values that were stored in a wider type in their own type, if they fit it; others unchanged."""
    kind = "float32" if dtype in WIDENED else dtype
    with np.errstate(all="ignore"):
        narrow = values.astype(kind)
    same = np.array_equal(narrow.astype(values.dtype), values, equal_nan=values.dtype.kind in "fc")
    return narrow if same else values


def _load_npy(path: str) -> Array:
    with open(path, "rb") as file:  # noqa: PTH123 (pathlib is slow)
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
        return _mapped(file, dtype, begin, shape, "F" if fortran else "C")


@lru_cache(1024)
def _header(text: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Parse the header of a ``.npy`` file; a dump has few different ones in thousands of files."""
    return _NPY.read_array_header_1_0(io.BytesIO(text))


def _mapped(file: BinaryIO, dtype: np.dtype[Any], begin: int, shape: Any, order: Any) -> Array:
    count = math.prod(shape) * dtype.itemsize
    if count == 0:
        return np.empty(shape, dtype)
    buffer: Any
    if count <= _SMALL:  # mapping takes longer than reading
        file.seek(begin)
        buffer, begin = file.read(count), 0
    else:
        start = begin - begin % mmap.ALLOCATIONGRANULARITY
        buffer = mmap.mmap(
            file.fileno(), count + begin - start, access=mmap.ACCESS_READ, offset=start
        )
        begin -= start
    values: Array = np.ndarray(tuple(shape), dtype, buffer, begin, order=order)
    if dtype.kind == "V" and dtype.itemsize == 2:  # ml_dtypes' bfloat16 as NumPy stores it
        bits = values.view(np.uint16)
        lines = _widened(bits.reshape(-1, order=order))
        return lines.reshape(shape, order=order)
    return values if dtype.isnative else values.astype(dtype.newbyteorder("="))


class _Global(NamedTuple):
    name: str


class _Storage(NamedTuple):
    type: str
    member: str
    size: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _load_pt(path: Path) -> Array:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as archive:
            index = {about.filename.partition("/")[2]: about for about in archive.infolist()}
        about = index["data.pkl"]
        if about.file_size > _MAX_PICKLE:
            raise ValueError("data.pkl is too large for one tensor")
        tensor = _interpret(_content(file, about))
        if "byteorder" in index and _content(file, index["byteorder"]) != b"little":
            raise ValueError("big-endian values")
        member = index[f"data/{tensor.storage.member}"]
        begin = _begin(file, member)
        dtype = _STORAGES[tensor.storage.type]
        stored = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        count, shape, strides = tensor.storage.size, tensor.shape, tensor.strides
        if count * stored.itemsize > member.file_size or begin + member.file_size > size:
            raise ValueError("fewer values than the file says")
        if len(shape) != len(strides) or min((tensor.offset, *shape, *strides)) < 0:
            raise ValueError(f"shape {shape} with strides {strides}")
        if math.prod(shape) == 0:
            return np.empty(shape, np.float32 if dtype == "bfloat16" else stored)
        last = tensor.offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if last >= count:
            raise ValueError(f"shape {shape} with strides {strides} reaches beyond the values")
        flat = _mapped(file, stored, begin, (count,), "C")[tensor.offset :]
    if dtype == "bfloat16":  # the repeated elements of an expanded tensor are widened once
        flat = _widened(flat)
    step = flat.itemsize
    return np.lib.stride_tricks.as_strided(
        flat, shape, [s * step for s in strides], writeable=False
    )


def _begin(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Return the position at which the content of a member begins, which must be stored uncompressed."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise ValueError("compressed or encrypted values")
    file.seek(member.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\x03\x04":
        raise ValueError("no member where the archive says")
    return member.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))


def _content(file: BinaryIO, member: zipfile.ZipInfo) -> bytes:
    """Return the content of a small member, faster than ``zipfile``."""
    if member.file_size > _MAX_PICKLE:
        raise ValueError(f"{member.filename} is too large")
    file.seek(_begin(file, member))
    content = file.read(member.file_size)
    if zlib.crc32(content) != member.CRC:
        raise ValueError(f"{member.filename}: wrong checksum")
    return content


_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE")


@lru_cache(256)
def _interpret(pickle: bytes) -> _Tensor:
    """Return the one tensor that a pickle describes."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    mark = object()

    def cut() -> tuple[Any, ...]:
        begin = len(stack) - 1 - stack[::-1].index(mark)
        items = tuple(stack[begin + 1 :])
        del stack[begin:]
        return items

    def several(count: int) -> tuple[Any, ...]:
        return tuple(reversed([stack.pop() for _ in range(count)]))

    pushed: Mapping[str, Callable[[Any], Any]] = {
        **dict.fromkeys(_LITERALS, lambda argument: argument),
        "GLOBAL": _Global,
        "BINGET": memo.__getitem__,
        "LONG_BINGET": memo.__getitem__,
        "MARK": lambda _: mark,
        "EMPTY_TUPLE": lambda _: (),
        "TUPLE": lambda _: cut(),
        "TUPLE1": lambda _: several(1),
        "TUPLE2": lambda _: several(2),
        "TUPLE3": lambda _: several(3),
        "NEWFALSE": lambda _: False,
        "NEWTRUE": lambda _: True,
        "BINPERSID": lambda _: _storage(stack.pop()),
        "REDUCE": lambda _: _reduced(*several(2)),
    }
    argument: Any
    for code, argument, _ in pickletools.genops(pickle):
        if code.name in pushed:
            stack.append(pushed[code.name](argument))
        elif code.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif code.name not in ("PROTO", "STOP"):
            raise ValueError(f"pickled values are never read (opcode {code.name})")
    if len(stack) != 1 or not isinstance(stack[0], _Tensor):
        raise ValueError("not one tensor")
    return stack[0]


def _storage(found: Any) -> _Storage:
    kind, storage, member, _, size = found
    if kind != "storage" or not isinstance(storage, _Global) or not isinstance(member, str):
        raise ValueError("no storage")
    return _Storage(storage.name.removeprefix("torch "), member, _count(size))


def _reduced(function: Any, arguments: Any) -> Any:
    if function == _Global("collections OrderedDict") and arguments == ():
        return ()
    if function == _Global("torch._utils _rebuild_tensor_v2"):
        storage, offset, shape, strides = arguments[:4]
        if isinstance(storage, _Storage):
            whole = tuple(map(_count, shape)), tuple(map(_count, strides))
            return _Tensor(storage, _count(offset), *whole)
    if function == _Global("torch._utils _rebuild_parameter") and isinstance(arguments[0], _Tensor):
        return arguments[0]
    raise ValueError(f"pickled values are never read ({function})")


def _count(x: Any) -> int:
    if type(x) is not int or x < 0 or x > mmap.PAGESIZE << 50:
        raise ValueError(f"{x!r} is no size")
    return x


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(n: int) -> bytes:
    if n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    content = n.to_bytes(n.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(content)]) + content


def write_npy_header(file: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
    """Write the header of a ``.npy`` file; values follow in C order."""
    header = {"descr": _NPY.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
    _NPY.write_array_header_1_0(file, header)
