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

from telechat_moe import tensor_files
from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.compare.measures import errors
from telechat_moe.tools.align.dump.logical import Logical, Shard, logical_regions
from telechat_moe.tools.align.dump.records import Array, TensorRecord
from telechat_moe.tools.align.dump.value_files import widen
from telechat_moe.tools.align.numerics import is_float, ulps

Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        group: ``model`` or ``optimizer``.
        dtype: Canonical name.
        shape: Whole shape.
        shards: Its shards, each with its region.
    """

    group: str
    dtype: str
    shape: tuple[int, ...]
    shards: list[tuple[Region, TensorRecord]]

    def merged(self) -> Logical:
        """Return the tensor, merged from its shards as it is read."""
        shards = [Shard(i, values) for i, (_, values) in enumerate(self.shards)]
        return logical_regions(shards, {i: r for i, (r, _) in enumerate(self.shards)}, self.shape)


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose tensors are read on demand.

    Attributes:
        path: Its folder.
        step: Number of finished training steps.
        layout: Its layout, as it describes it.
        tensors: Its tensors by name.
    """

    path: Path
    step: int
    layout: str
    tensors: Mapping[str, StoredTensor]


def open_checkpoint(path: Path) -> Stored:
    """Open a checkpoint after comparing all its checksums.

    Raises:
        BadInputError: It is missing, broken or not a checkpoint of this package.
    """
    from telechat_moe.checkpoint import checkpoint, manifest, reshard

    shards: dict[str, list[tuple[str, Region]]] = {}
    if (path / reshard.FILE).exists():
        content = reshard.verify(path)
        described = {n: (entry["group"], entry) for n, entry in content["tensors"].items()}
        for file in content["files"]:
            metadata = tensor_files.metadata(np.memmap(path / file, np.uint8, "r"))
            for name, region in json.loads(metadata["regions"]).items():
                shards.setdefault(name, []).append((file, tuple((a, b) for a, b in region)))
    else:
        checkpoint.verify(path)
        content = manifest.read(path)
        described = {n: (g, x) for g, found in content["tensors"].items() for n, x in found.items()}
        shards = {name: manifest.pieces(entry) for name, (_, entry) in described.items()}
    if unknown := shards.keys() - described.keys():
        raise BadInputError(f"{path}: {min(unknown)} has a shard and no description")
    files = {file: tensor_files.read_header(path / file) for file in content["files"]}
    tensors: dict[str, StoredTensor] = {}
    for name, (group, entry) in described.items():
        found = [(region, _values(files[file][name])) for file, region in shards.get(name, ())]
        tensors[name] = StoredTensor(
            group, _canonical(entry["dtype"]), tuple(entry["shape"]), found
        )
    layout = content.get("layout", "whole tensors")
    said = layout if isinstance(layout, str) else json.dumps(layout)
    return Stored(path, content["step"], said, tensors)


def _canonical(dtype: str) -> str:
    return "bfloat16" if dtype == "BF16" else tensor_files.DTYPES[dtype].name


def _values(entry: tensor_files.Entry) -> TensorRecord:
    """Return a stored tensor, which is mapped when it is read; bfloat16 as its bits."""
    dtype = np.dtype("<u2") if entry.dtype == "BF16" else tensor_files.DTYPES[entry.dtype]

    def load() -> Array:
        if not entry.nbytes:
            return np.zeros(entry.shape, dtype)
        try:
            return np.memmap(entry.file, dtype, "r", entry.start, entry.shape)
        except (OSError, ValueError) as error:
            raise BadInputError(f"{entry.file}: cannot be read ({error})") from None

    return TensorRecord(_canonical(entry.dtype), entry.shape, read=load)


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
_NAMES = ("0", *(f"<={edge:g}" for edge in _EDGES[1:]), "more")


def compare(a: Logical, b: Logical) -> Compared:
    """Compare two tensors of one shape and type, block by block."""
    found = Compared(a.dtype)
    counts = np.zeros(len(_NAMES), np.int64)
    apart = size = 0.0
    for (box, x), (_, y) in zip(a.blocks(), b.blocks(), strict=True):
        unequal = np.asarray(_bits(x) != _bits(y))
        count = int(unequal.sum())
        found.elements += x.size
        found.different += count
        counts[0] += x.size - count
        wide_x = _float64(x, a.dtype)
        size += float(np.sum(np.where(np.isfinite(wide_x), wide_x, 0.0) ** 2))
        if not count:
            continue
        wide_y = _float64(y, a.dtype)
        if found.first is None:
            at = tuple(int(i) for i in np.unravel_index(int(np.argmax(unequal)), unequal.shape))
            index = tuple(s.start + i for s, i in zip(box, at, strict=True))
            found.first = (index, widened(x[at], a.dtype).item(), widened(y[at], a.dtype).item())
        difference, _ = errors(wide_y.reshape(-1), wide_x.reshape(-1))
        with np.errstate(over="ignore"):
            apart += float(np.sum(difference**2))
        found.max_abs = max(found.max_abs, float(difference.max(initial=0.0)))
        if is_float(a.dtype):
            far = ulps(wide_y[unequal], wide_x[unequal], a.dtype)
            counts += np.bincount(np.searchsorted(_EDGES, far), minlength=counts.size)
    found.relative_l2 = math.sqrt(apart / size) if size else math.inf if apart else 0.0
    if is_float(a.dtype):
        found.histogram = {name: n for name, n in zip(_NAMES, counts.tolist(), strict=True) if n}
    return found


def widened(x: Array, dtype: str) -> Array:
    """Return bfloat16 bits as float32; other values as they are."""
    if dtype != "bfloat16" or x.dtype != np.uint16:
        return np.asarray(x)
    return widen(np.asarray(x), dtype)


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
            counts = {} if c.histogram is None else c.histogram
            beyond = sum(n for edge, n in counts.items() if _upper(edge) > ulp)
            outside = c.different if c.histogram is None else beyond
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
        group: Compare only this group (``model``, ``optimizer``).
        progress: Wraps the names of tensors as they are compared.

    Raises:
        BadInputError: One is broken, or there is nothing of that group.
        LayoutError: Shards do not tile a tensor, or copies differ.
    """
    first, second = open_checkpoint(a), open_checkpoint(b)
    ours, theirs = (
        {n: t for n, t in stored.tensors.items() if group in (None, t.group)}
        for stored in (first, second)
    )
    if not ours and not theirs:
        raise BadInputError(f"{a} and {b} have no tensors{f' of group {group}' if group else ''}")
    problems = {n: f"only in {a if n in ours else b}" for n in sorted(ours.keys() ^ theirs)}
    for n in sorted(ours.keys() & theirs):
        x, y = ours[n], theirs[n]
        if x.shape != y.shape:
            problems[n] = f"shape {list(x.shape)} and {list(y.shape)}"
        elif x.dtype != y.dtype:
            problems[n] = f"type {x.dtype} and {y.dtype}"
    left = [n for n in sorted(ours.keys() & theirs) if n not in problems]
    names = progress(left) if progress else left
    compared = {n: compare(ours[n].merged(), theirs[n].merged()) for n in names}
    return Report(first, second, compared, problems)
