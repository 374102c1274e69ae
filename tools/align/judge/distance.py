"""How far two runs' tensors are apart, by the best that both dumps have: values, else checksum, else statistics."""

import math
import zlib
from dataclasses import dataclass, replace

import numpy as np

from telechat_moe.numerics import einsum
from telechat_moe.ops import fingerprint
from telechat_moe.ops.fingerprint import Fingerprint
from telechat_moe.tools.align.dump.records import Stats, TensorRecord
from telechat_moe.tools.align.dump.value_files import chunks, stats
from telechat_moe.tools.align.operators.approx import Array
from telechat_moe.tools.align.thresholds import UNEVEN

_CHUNK = 1 << 20
_FLOOR = 0.25  # of the mean size of rows: smaller rows are measured against this
_FILL = 1e4  # times any other number: after softmax, nothing is left of it
_FEW = 16  # rows from which on the mean of their scales is known


@dataclass(frozen=True)
class Distance:
    """How far a tensor is from the reference's, relative to its size."""

    rows: Array  # by row of the last dimension, in L2; one number where only statistics are known
    sizes: Array  # L2 norms of the reference's rows
    scale: float = 0.0  # mean over the rows of the part of their difference that is a scale
    spread: float = np.inf  # standard deviation of that mean; infinite: not known
    largest: float = 0.0  # the largest distance of a row or column
    # Largest difference of an element, relative to the element and its row, over the root mean square of all
    peak: float = 0.0
    exact: bool = False  # whether the tensors are known to be equal to the last bit
    basis: str = "values"  # `values`, `statistics` or `checksum`

    @property
    def whole(self) -> float:
        """Root mean square of the rows."""
        return float(np.sqrt(np.mean(np.square(self.rows)))) if self.rows.size else 0.0

    @property
    def uneven(self) -> bool:
        """Whether some rows or columns differ much more than most, as of tokens that were routed otherwise."""
        return bool(self.largest > 0 and self.largest > UNEVEN * np.median(self.rows))


def distance(golden: TensorRecord, target: TensorRecord) -> Distance | None:
    """Return how far a tensor is from the reference's; None: the dumps do not show it, or the sizes differ."""
    if math.prod(golden.shape) != math.prod(target.shape):
        return None
    if not math.prod(golden.shape):  # of an expert without tokens
        return Distance(np.zeros(1), np.zeros(1), exact=golden.dtype == target.dtype)
    if golden.read is not None and target.read is not None:
        return _of_values(golden.load(), target.load())
    if golden.fingerprint is not None or target.fingerprint is not None:
        reference_sketch, target_sketch = _fingerprint(golden), _fingerprint(target)
        if reference_sketch is not None and target_sketch is not None:
            return _of_fingerprints(reference_sketch, target_sketch, golden.dtype == target.dtype)
    crcs = checksum(golden, target), checksum(target, golden)
    if None not in crcs and crcs[0] == crcs[1] and golden.dtype == target.dtype:
        return Distance(np.zeros(1), np.zeros(1), exact=True, basis="checksum")
    by_statistics = _of_statistics(stats_of(golden), stats_of(target), math.prod(golden.shape))
    if by_statistics is None and None not in crcs and golden.dtype == target.dtype:
        return Distance(np.full(1, np.inf), np.zeros(1), largest=np.inf, basis="checksum")
    return by_statistics


def _fingerprint(record: TensorRecord) -> Fingerprint | None:
    """Return a tensor's fingerprint, made of its values if the dump has those instead; None: it has neither."""
    if record.fingerprint is not None:
        return Fingerprint.from_bytes(record.fingerprint)
    return None if record.read is None else fingerprint.of(record.load())


def _of_fingerprints(golden: Fingerprint, target: Fingerprint, same_dtype: bool) -> Distance:
    """Return the estimated distance; like statistics, it does not show that all values agree."""
    if same_dtype and fingerprint.equal(target, golden):
        return Distance(np.zeros(1), np.zeros(1), exact=True, basis="checksum")
    estimate = fingerprint.distance(target, golden)
    far = np.inf if math.isnan(estimate) else estimate
    return Distance(np.full(1, far), np.full(1, golden.norm), largest=far, basis="statistics")


def checksum(record: TensorRecord, other: TensorRecord) -> str | None:
    """Return the checksum of a tensor, of the same kind as the other tensor's; None: not known."""
    if record.crc is not None or record.read is None or other.crc is None:
        return record.crc
    if other.crc.startswith("0x"):
        return None
    crc = 0
    for _, (part,) in chunks([record.load()], _CHUNK):
        crc = zlib.crc32(part.data, crc)
    return f"{crc:08x}"


def stats_of(record: TensorRecord) -> Stats | None:
    """Return the statistics of a tensor, computed where the dump has only values."""
    if record.stats is not None or record.read is None:
        return record.stats
    return stats(record.load())


def _of_values(golden: Array, target: Array) -> Distance:
    wide = golden.shape[-1] if golden.ndim > 1 else 1
    y, x = (v.astype(np.float64).reshape(-1, wide) for v in (golden, target))
    odd = ~(np.isfinite(x) & np.isfinite(y))
    size: Array = np.linalg.norm(np.where(odd, 0.0, y), axis=1)
    if np.array_equal(x, y, equal_nan=True):
        return Distance(np.zeros(len(y)), size, exact=golden.dtype == target.dtype)
    other = (odd & (x != y) & ~(np.isnan(x) & np.isnan(y))).any(1)
    odd |= _is_fill(y) & _is_fill(x)
    size = np.linalg.norm(np.where(odd, 0.0, y), axis=1)
    x, y = np.where(odd, 0.0, x), np.where(odd, 0.0, y)
    off = x - y
    mean = float(np.sqrt(np.mean(np.square(size))))
    if not mean:
        infinite: Array = np.where(np.any(off != 0, 1) | other, np.inf, 0.0)
        return Distance(infinite, size, largest=float(infinite.max()))
    smallest_row = mean * max(_FLOOR, wide**-0.5)
    size = np.maximum(size, smallest_row)
    apart: Array = np.linalg.norm(off, axis=1)
    rows: Array = np.where(other, np.inf, apart / size)
    column: Array = np.maximum(np.linalg.norm(y, axis=0), smallest_row * (len(y) / wide) ** 0.5)
    largest = max(float(rows.max()), float((np.linalg.norm(off, axis=0) / column).max()))
    element_distance: Array = np.abs(off) / (np.abs(y) + size[:, None] / wide**0.5)
    scale = einsum("ij,ij->i", off, y) / np.square(size)
    spread = float(np.std(scale)) / len(scale) ** 0.5 if len(scale) >= _FEW else np.inf
    usual = float(np.sqrt(np.mean(np.square(element_distance))))
    peak = float(element_distance.max()) / (usual or 1.0)
    return Distance(rows, size, float(np.mean(scale)), spread, largest, peak)


def _is_fill(x: Array) -> Array:
    """Return where a tensor holds what masks are filled with: its smallest number, repeated, far below all others."""
    low = np.min(x, initial=0.0, where=np.isfinite(x))
    at_low = x == low
    largest = np.max(np.abs(x), initial=0.0, where=np.isfinite(x) & ~at_low)
    return (
        at_low & (low < -_FILL * largest) if at_low.sum() > 1 and largest else np.zeros_like(at_low)
    )


def extremes_apart(golden: TensorRecord, target: TensorRecord) -> float | None:
    """Return by how much the largest and smallest elements differ, relative to the larger; None: not known.

    Neither depends on the order of sums, as the mean and the norm do.
    """
    a, b = (s and s._replace(mean=None, norm=None) for s in map(stats_of, (golden, target)))
    far = _of_statistics(a, b, 1) if golden.shape == target.shape else None
    return None if far is None else far.whole


def _of_statistics(golden: Stats | None, target: Stats | None, count: int) -> Distance | None:
    """Return the distance of extremes, norm and mean, each relative to what it can be at most."""
    if golden is None or target is None:
        return None
    ends = [abs(x) for x in (golden.max, golden.min) if x is not None]
    sizes = {"max": max(ends, default=0.0), "min": max(ends, default=0.0)}
    if golden.norm is not None:
        sizes |= {"norm": golden.norm, "mean": golden.norm / max(1, count) ** 0.5}
    off = [
        _relative(a, b, size)
        for name, size in sizes.items()
        if (a := getattr(golden, name)) is not None and (b := getattr(target, name)) is not None
    ]
    if not off:
        return None
    norm = np.array([golden.norm or 0.0])
    return Distance(np.array([max(off)]), norm, largest=max(off), basis="statistics")


def _relative(a: float, b: float, size: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / size if math.isfinite(a - b) and size else math.inf


def differing(golden: TensorRecord, target: TensorRecord) -> Distance | None:
    """Return which rows of integers differ (1, others 0); None: the dumps do not show it, or the sizes differ."""
    difference = distance(golden, target)
    if difference is None:
        return None
    rows = (difference.rows > 0).astype(np.float64)
    return replace(difference, rows=rows, largest=float(rows.max(initial=0.0)))


def relative_distance(x: Array, y: Array, limit: float = 1.0) -> float:
    """Return the relative L2 distance of whole tensors divided by what is allowed; infinite if either is not finite."""
    x, y = (v.astype(np.float64, copy=False) for v in (x, y))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        same_positions = np.array_equal(np.isfinite(x), np.isfinite(y))
        return 0.0 if same_positions and np.array_equal(x, y, equal_nan=True) else math.inf
    norm = float(np.linalg.norm(y))
    off = float(np.linalg.norm(x - y))
    return off / norm / limit if norm else (0.0 if off < 1e-12 else math.inf)


def rows_scaled(x: Array, y: Array, limit: float) -> bool:
    """Return whether each row is a multiple of the reference's, within a relative L2 distance."""
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1])
    size = np.square(y).sum(1, keepdims=True)
    factor = (x * y).sum(1, keepdims=True) / np.where(size, size, 1.0)
    return bool(np.linalg.norm(x - factor * y) <= limit * np.linalg.norm(x))


def factor_between(x: Array, y: Array) -> tuple[str, str]:
    """Return the kind of fault if a constant factor explains a difference."""
    factor = float(np.vdot(x, y) / np.vdot(y, y)) if np.any(y) else math.nan
    residual = np.linalg.norm(x - factor * y) if math.isfinite(factor) else math.inf
    if residual <= 1e-3 * np.linalg.norm(x) and abs(factor - 1) > 1e-3:
        return "scale", f"{factor:.6g} times the reference's"
    return "unknown", ""
