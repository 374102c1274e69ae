"""Compare two checkpoints tensor by tensor, whatever layouts wrote them; values are read in blocks.

A checkpoint is a folder with ``checkpoint.json`` (whole tensors, or what several ranks wrote together) or one with
``pieces.json`` (``telechat-moe ckpt reshard``). Checksums of all files are compared first.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump.logical import Logical, logical_regions
from telechat_moe.tools.align.dump.records import Array
from telechat_moe.tools.align.dump.shard_values import Shard, ShardValues
from telechat_moe.tools.align.numerics import is_float, ulps

DTYPES = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "?"),
}
"""For each safetensors type its canonical name and the NumPy type to read it with (bfloat16: its bits)."""

Region = tuple[tuple[int, int], ...]


class _Stored(ShardValues):
    """A tensor within a safetensors file."""

    def __init__(self, file: Path, entry: Mapping[str, Any], start: int) -> None:
        name, self._numpy = DTYPES[entry["dtype"]]
        super().__init__(entry["shape"], name)
        self._file, self._start = file, start + entry["data_offsets"][0]

    def _open(self) -> Array:
        if not math.prod(self.shape):
            return np.zeros(self.shape, self._numpy)
        try:
            return np.memmap(self._file, self._numpy, "r", self._start, self.shape)
        except (OSError, ValueError) as error:
            raise BadInputError(f"{self._file}: cannot be read ({error})") from None


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose tensors are read on demand.

    Attributes:
        path: Its folder.
        step: Number of finished training steps.
        layout: Its layout, as it describes it.
        shapes: Whole shape of each tensor, by name.
        dtypes: Canonical type of each tensor.
        groups: Group of each tensor (``model``, ``optimizer``).
        pieces: The shards of each tensor, each with its region and values.
    """

    path: Path
    step: int
    layout: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    groups: Mapping[str, str]
    pieces: Mapping[str, list[tuple[Region, ShardValues]]]

    def tensor(self, name: str) -> Logical:
        """Return a tensor, merged from its shards."""
        parts = self.pieces[name]
        pieces = [Shard(i, source) for i, (_, source) in enumerate(parts)]
        regions = {i: region for i, (region, _) in enumerate(parts)}
        return logical_regions(pieces, regions, self.shapes[name])


def open_checkpoint(path: Path) -> Stored:
    """Open a checkpoint after comparing all its checksums.

    Raises:
        BadInputError: It is missing, broken or not a checkpoint of this package.
    """
    from telechat_moe.checkpoint import checkpoint, manifest, reshard

    if (path / reshard.FILE).exists():
        return _pieces(path, reshard.verify(path))
    checkpoint.verify(path)
    content = manifest.read(path)
    described = {
        name: (group, entry)
        for group, found in content["tensors"].items()
        for name, entry in found.items()
    }
    files = {file: _header(path / file) for file in content["files"]}
    pieces = {
        name: [(region, _stored(files, file, name)) for file, region in manifest.pieces(entry)]
        for name, (_, entry) in described.items()
    }
    layout = content.get("layout", "whole tensors")
    return _made(
        path,
        content["step"],
        layout if isinstance(layout, str) else json.dumps(layout),
        described,
        pieces,
    )


def _pieces(path: Path, content: Mapping[str, Any]) -> Stored:
    described = {name: (entry["group"], entry) for name, entry in content["tensors"].items()}
    pieces: dict[str, list[tuple[Region, ShardValues]]] = {name: [] for name in described}
    for file in content["files"]:
        header = _header(path / file)
        for name, region in json.loads(header[1]["__metadata__"]["regions"]).items():
            if name not in pieces:
                raise BadInputError(f"{path / file}: {name} is not in pieces.json")
            where = tuple((a, b) for a, b in region)
            pieces[name].append((where, _stored({file: header}, file, name)))
    return _made(path, content["step"], content["layout"], described, pieces)


def _made(
    path: Path,
    step: int,
    layout: str,
    described: Mapping[str, tuple[str, Mapping[str, Any]]],
    pieces: Mapping[str, list[tuple[Region, ShardValues]]],
) -> Stored:
    return Stored(
        path,
        step,
        layout,
        {n: tuple(entry["shape"]) for n, (_, entry) in described.items()},
        {n: DTYPES[entry["dtype"]][0] for n, (_, entry) in described.items()},
        {n: group for n, (group, _) in described.items()},
        pieces,
    )


def _header(file: Path) -> tuple[Path, dict[str, Any], int]:
    """Return a safetensors file, its header, and the position where its data begins."""
    try:
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            return file, json.loads(f.read(length)), 8 + length
    except (OSError, ValueError) as error:
        raise BadInputError(f"{file}: not a safetensors file ({error})") from None


def _stored(
    files: Mapping[str, tuple[Path, dict[str, Any], int]], file: str, name: str
) -> ShardValues:
    path, header, start = files[file]
    if name not in header:
        raise BadInputError(f"{path}: {name} is not in it")
    return _Stored(path, header[name], start)


# ------------------------------------------------------------------------------------ comparison


@dataclass
class Compared:
    """How a tensor of checkpoint B differs from that of A.

    Attributes:
        dtype: Type of both.
        elements: Number of elements.
        different: Number of elements that differ in any bit.
        max_abs: Largest difference; infinite where only one value is finite.
        relative_l2: ``|B - A| / |A|``.
        histogram: Number of elements by distance in ULPs of the type: 0, up to 1, up to 2, up to 4 ...; floats only.
        first: The first element that differs, with both values.
    """

    dtype: str
    elements: int = 0
    different: int = 0
    max_abs: float = 0.0
    relative_l2: float = 0.0
    histogram: dict[str, int] | None = None
    first: tuple[tuple[int, ...], Any, Any] | None = None

    @property
    def bitwise(self) -> bool:
        """Every bit is equal."""
        return self.different == 0


_EDGES = (0.0, 1.0, 2.0, 4.0, 16.0, 256.0, 65536.0)


def compare(a: Logical, b: Logical) -> Compared:
    """Compare two tensors of one shape and type, block by block."""
    found = Compared(a.dtype, histogram={} if is_float(a.dtype) else None)
    apart = size = 0.0
    for (box, x), (_, y) in zip(a.blocks(), b.blocks(), strict=True):
        unequal = np.asarray(_bits(x) != _bits(y))
        count = int(unequal.sum())
        found.elements += x.size
        found.different += count
        wide_x = _float64(x, a.dtype)
        size += float(np.sum(np.where(np.isfinite(wide_x), wide_x, 0.0) ** 2))
        if not count:
            _add(found.histogram, "0", x.size)
            continue
        if found.first is None:
            at = tuple(int(i) for i in np.unravel_index(int(np.argmax(unequal)), unequal.shape))
            index = tuple(s.start + i for s, i in zip(box, at, strict=True))
            found.first = (index, widened(x[at], a.dtype).item(), widened(y[at], a.dtype).item())
        wide_y = _float64(y, a.dtype)
        difference = _distance(wide_x, wide_y, unequal)
        with np.errstate(over="ignore"):
            apart += float(np.sum(difference**2))
        found.max_abs = max(found.max_abs, float(difference.max(initial=0.0)))
        _add(found.histogram, "0", x.size - count)
        _count(found.histogram, wide_x[unequal], wide_y[unequal], a.dtype)
    found.relative_l2 = math.sqrt(apart / size) if size else math.inf if apart else 0.0
    return found


def _distance(x: Array, y: Array, unequal: Array) -> Array:
    """Return ``|x - y|``: 0 where bits are equal or both are NaN, infinite where only one is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.where(unequal, np.abs(x - y), 0.0)
    return np.where(np.isnan(found), np.where(np.isnan(x) & np.isnan(y), 0.0, np.inf), found)


def _count(histogram: dict[str, int] | None, x: Array, y: Array, dtype: str) -> None:
    if histogram is None:
        return
    counts = np.bincount(np.searchsorted(_EDGES, ulps(y, x, dtype).reshape(-1)), minlength=1)
    for i, count in enumerate(counts.tolist()):
        name = "0" if i == 0 else "more" if i == len(_EDGES) else f"<={_EDGES[i]:g}"
        _add(histogram, name, count)


def _add(histogram: dict[str, int] | None, name: str, count: int) -> None:
    if histogram is not None and count:
        histogram[name] = histogram.get(name, 0) + count


def widened(x: Array, dtype: str) -> Array:
    """Return bfloat16 bits as float32; other values as they are."""
    if dtype != "bfloat16" or x.dtype != np.uint16:
        return np.asarray(x)
    return np.left_shift(np.asarray(x).astype(np.uint32), np.uint32(16)).view(np.float32)


def _float64(x: Array, dtype: str) -> Array:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return widened(x, dtype).astype(np.float64)


def _bits(x: Array) -> Array:
    return x.view(f"u{x.dtype.itemsize}")


@dataclass(frozen=True)
class Report:
    """Two checkpoints compared.

    Attributes:
        a: The first.
        b: The second.
        compared: By tensor.
        problems: Tensors that cannot be compared, and why.
    """

    a: Stored
    b: Stored
    compared: Mapping[str, Compared]
    problems: Mapping[str, str]

    @property
    def different(self) -> list[str]:
        """Return the names of the tensors that are not bitwise equal, the most different first."""
        wrong = [n for n, c in self.compared.items() if not c.bitwise]
        return sorted(wrong, key=lambda n: -self.compared[n].relative_l2)

    def beyond(self, ulp: float, rtol: float) -> list[str]:
        """Return the names of the tensors beyond both bounds: ULPs of every element, relative L2."""

        def far(c: Compared) -> bool:
            limit = (
                0
                if c.histogram is None
                else sum(n for e, n in c.histogram.items() if _upper(e) > ulp)
            )
            outside = c.different if c.histogram is None else limit
            return bool(outside) and not (rtol and c.relative_l2 <= rtol)

        return [n for n in self.different if far(self.compared[n])]


def _upper(edge: str) -> float:
    return math.inf if edge == "more" else float(edge.removeprefix("<="))


def compare_checkpoints(
    a: Path,
    b: Path,
    group: str | None = None,
    progress: Callable[[list[str]], Iterator[str]] | None = None,
) -> Report:
    """Compare two checkpoints.

    Args:
        a: Folder of the first.
        b: Folder of the second.
        group: Compare only this group (``model``, ``optimizer``).
        progress: Wraps the names of tensors as they are compared.

    Raises:
        BadInputError: One is broken, or there is nothing of that group.
        LayoutError: Shards do not tile a tensor, or copies differ.
    """
    first, second = open_checkpoint(a), open_checkpoint(b)

    def chosen(s: Stored) -> set[str]:
        return {n for n, g in s.groups.items() if group in (None, g)}

    names, others = chosen(first), chosen(second)
    if not names and not others:
        raise BadInputError(f"{a} and {b} have no tensors{f' of group {group}' if group else ''}")
    problems = {n: f"only in {a if n in names else b}" for n in sorted(names ^ others)}
    for n in sorted(names & others):
        if first.shapes[n] != second.shapes[n]:
            problems[n] = f"shape {list(first.shapes[n])} and {list(second.shapes[n])}"
        elif first.dtypes[n] != second.dtypes[n]:
            problems[n] = f"type {first.dtypes[n]} and {second.dtypes[n]}"
    left = [n for n in sorted(names & others) if n not in problems]
    compared = {
        n: compare(first.tensor(n), second.tensor(n))
        for n in (progress(left) if progress else left)
    }
    return Report(first, second, compared, problems)
