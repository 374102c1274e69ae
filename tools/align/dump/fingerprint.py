"""Fingerprints of tensors: 2 KiB each, which show whether two tensors are equal and how far apart they are.

``of(values)`` is the fingerprint of a tensor. ``distance`` estimates the relative L2 distance of two tensors from their
fingerprints alone; the checksum is equal only for equal bits in equal positions. The kernel of ``ops/tap.py`` computes
the same numbers.

The sketch is a count sketch (Charikar, Chen and Farach-Colton 2002) with a cheap hash: element i of the whole,
row-major, is lane ``i % 241`` of row ``i // 241``; 32 rows are a block. The element is multiplied by a sign for its
position in the block and a sign for its block, and added to the bucket ``lane + shift(block)`` modulo 241. The checksum
is the sum over i of ``odd(position) * odd(block) * mix(bits)`` modulo 2^64; ``mix`` is one-to-one, so one changed
element always shows.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump.value_files import release
from telechat_moe.tools.align.numerics import Array, einsum, widened

BUCKETS = 241
"""The number of buckets: a prime, so that no common length of a row returns to the same bucket in every row."""

_ROWS = 32
_BLOCK = _ROWS * BUCKETS
_CHUNK = 4 * _BLOCK  # a few of these in float64 fit a core's cache
_MANY = 4096  # blocks whose hashes are computed at once
_HEADER = struct.Struct("<4sHHQQQQd")
_MAGIC = b"TCF1"
_EXACT, _NORM = 1, 2
_RELEASE = 512
"""Chunks after which the pages of a mapped file are released."""


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a tensor, in 2 KiB.

    Attributes:
        buckets: The sketch, ``[241]`` in float64; infinities and NaN count as 0 in it.
        count: Number of elements that were added.
        total: Number of elements of the whole tensor.
        special: Number of infinities and NaN among the added elements.
        checksum: See the module; None where the writer of the fingerprint has not seen the bits.
        squares: Sum of the squares of the finite elements; None where the writer has not seen the elements.
    """

    buckets: Array
    count: int
    total: int
    special: int = 0
    checksum: int | None = 0
    squares: float | None = 0.0

    @property
    def norm(self) -> float:
        """L2 norm: exact where the elements were seen, else estimated."""
        squares = float(self.buckets @ self.buckets) if self.squares is None else self.squares
        return math.sqrt(squares)

    @property
    def whole(self) -> bool:
        """Whether every element was added once."""
        return self.count == self.total

    def to_bytes(self) -> bytes:
        """Return it in 1,976 bytes."""
        flags = (_EXACT if self.checksum is not None else 0) | (
            _NORM if self.squares is not None else 0
        )
        numbers = (self.count, self.total, self.special, self.checksum or 0, self.squares or 0.0)
        return _HEADER.pack(_MAGIC, flags, BUCKETS, *numbers) + self.buckets.astype("<f8").tobytes()

    @staticmethod
    def from_bytes(content: bytes) -> "Fingerprint":
        """Return what :meth:`to_bytes` wrote.

        Raises:
            BadInputError: The content is not a fingerprint.
        """
        if len(content) != _HEADER.size + 8 * BUCKETS:
            raise BadInputError(
                f"a fingerprint has {_HEADER.size + 8 * BUCKETS} bytes, found {len(content)}"
            )
        magic, flags, buckets, count, total, special, checksum, squares = _HEADER.unpack_from(
            content
        )
        if magic != _MAGIC or buckets != BUCKETS or count > total or special > count:
            raise BadInputError(f"no fingerprint: {content[:8]!r}, {count} of {total} elements")
        return Fingerprint(
            np.frombuffer(content, "<f8", offset=_HEADER.size).astype(np.float64),
            count,
            total,
            special,
            checksum if flags & _EXACT else None,
            squares if flags & _NORM else None,
        )


def of(values: Array) -> Fingerprint:
    """Return the fingerprint of a whole tensor.

    Args:
        values: Numbers of any shape and type, maybe mapped: they are read in chunks. bfloat16 and float8 widened to
    float32.
    """
    values = _numbers(values)
    sketch = _Sketch(values.size)
    for begin, part in _contiguous(values):
        sketch.add(part, begin)
    return sketch.result()


def distance(target: Fingerprint, golden: Fingerprint) -> float:
    """Estimate the L2 norm of the difference over that of ``golden``, within 20 % in 99 of 100 cases.

    Return 0 where all bits are equal, NaN where one fingerprint is not of a whole tensor or has infinities or NaN.

    Raises:
        ValueError: They are of tensors of different sizes.
    """
    if target.total != golden.total:
        raise ValueError(f"tensors of {target.total:,} and {golden.total:,} elements")
    if equal(target, golden):
        return 0.0
    if not (target.whole and golden.whole) or target.special != golden.special:
        return math.nan
    difference = float(np.linalg.norm(target.buckets - golden.buckets))
    if golden.norm == 0:
        return math.inf if difference else 0.0
    return difference / golden.norm


def equal(a: Fingerprint, b: Fingerprint) -> bool | None:
    """Return whether the bits of two tensors are equal; None: a checksum is missing."""
    if a.checksum is None or b.checksum is None or not (a.whole and b.whole):
        return None
    return a.checksum == b.checksum and a.total == b.total


def _numbers(values: Array) -> Array:
    if values.dtype.kind == "c":
        values = np.ascontiguousarray(values)
        return values.view(values.real.dtype).reshape(*values.shape, 2)
    if values.dtype.kind not in "fiub":
        raise TypeError(f"numbers expected, found {values.dtype}")
    return values


def _contiguous(values: Array) -> Iterator[tuple[int, Array]]:
    """Yield flat chunks of a tensor, each with its first index."""
    if values.flags.c_contiguous or values.ndim < 2:
        flat = values.reshape(-1)
        for i in range(0, flat.size, _CHUNK):
            yield i, flat[i : i + _CHUNK]
            if i // _CHUNK % _RELEASE == _RELEASE - 1:
                release(values)
        return
    inner = math.prod(values.shape[1:])
    group = _CHUNK // max(1, inner)
    if group:
        for j in range(0, values.shape[0], group):
            yield j * inner, values[j : j + group].reshape(-1)
        return
    for j in range(values.shape[0]):
        for i, part in _contiguous(values[j]):
            yield j * inner + i, part


class _Sketch:
    def __init__(self, total: int) -> None:
        self._buckets = np.zeros(BUCKETS)
        self._total, self._count, self._special = total, 0, 0
        self._checksum, self._squares = 0, 0.0
        self._spare = np.empty(0)

    def result(self) -> Fingerprint:
        return Fingerprint(
            self._buckets,
            self._count,
            self._total,
            self._special,
            self._checksum,
            self._squares,
        )

    def add(self, flat: Array, begin: int) -> None:
        """Add elements from ``begin`` on."""
        self._count += flat.size
        shift = begin % _BLOCK
        first = begin // _BLOCK
        if shift or flat.size % _BLOCK:
            padded = self._zeros(shift + flat.size, flat.dtype)
            padded[shift : shift + flat.size] = flat
            flat = padded
        self._aligned(flat, first)

    def _zeros(self, size: int, dtype: Any) -> Array:
        """Return whole blocks of zeros, in memory that the next call reuses."""
        size = -(-size // _BLOCK) * _BLOCK
        if self._spare.dtype != dtype or self._spare.size < size:
            self._spare = np.empty(size, dtype)
        found = self._spare[:size]
        found.fill(0)
        return found

    def _aligned(self, flat: Array, first: int) -> None:
        for i in range(0, flat.size, _CHUNK):
            self._blocks(flat[i : i + _CHUNK].reshape(-1, _BLOCK), first + i // _BLOCK)

    def _blocks(self, values: Array, first: int) -> None:
        signs, odds = _places()
        shifts, block_signs, block_odds = _hashes_from(first, first + len(values))
        sums = _mixed_sums(values, odds)
        self._check(sums * block_odds)
        lanes = einsum("qkb,kb->qb", self._wide(values).reshape(-1, _ROWS, BUCKETS), signs)
        self._turn(lanes, shifts, block_signs)

    def _check(self, terms: Array) -> None:
        self._checksum = (self._checksum + int(terms.sum(dtype=np.uint64))) % (1 << 64)

    def _wide(self, values: Array) -> Array:
        """Return elements in float64; count infinities and NaN and replace them by 0."""
        wide = widened(values)
        squares = _squares(wide)
        if not math.isfinite(squares):
            finite = np.isfinite(wide)
            self._special += int(finite.size - finite.sum())
            wide = np.where(finite, wide, 0.0)
            squares = _squares(wide)
        self._squares += squares
        return wide

    def _turn(self, lanes: Array, shifts: Array, signs: Array) -> None:
        """Add the sums over blocks, each rotated by its shift."""
        lanes *= signs[:, None]
        turned = (np.arange(BUCKETS) - shifts[:, None]) % BUCKETS
        self._buckets += np.take_along_axis(lanes, turned, 1).sum(0)


def _squares(x: Array) -> float:
    x = x.reshape(-1)
    return float(einsum("i,i->", x, x))  # BLAS would wake all cores for a chunk


def _splitmix(x: Array) -> Array:
    """Return 64 well mixed bits of each number (Steele, Lea and Flood 2014)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(1)
def _places() -> tuple[Array, Array]:
    """Return the sign and the odd factor of each position in a block."""
    bits = _splitmix(np.arange(_BLOCK, dtype=np.uint64) + np.uint64(1 << 40))
    signs = 1.0 - 2.0 * (bits >> np.uint64(63)).astype(np.float64)
    odds = _splitmix(bits) | np.uint64(1)
    return signs.reshape(_ROWS, BUCKETS), odds


def _hashes(block: Array) -> tuple[Array, Array, Array]:
    bits = _splitmix(block)
    signs = 1.0 - 2.0 * (bits >> np.uint64(63)).astype(np.float64)
    shifts = ((bits & np.uint64(0xFFFFFFFF)) % np.uint64(BUCKETS)).astype(np.int64)
    return shifts, signs, _splitmix(bits) | np.uint64(1)


def _hashes_from(first: int, end: int) -> tuple[Array, Array, Array]:
    """Return shift, sign and odd factor of blocks."""
    many, i = divmod(first, _MANY)
    if i + end - first > _MANY:
        return _hashes(np.arange(first, end, dtype=np.uint64))
    shifts, signs, odds = _many_hashes(many)
    here = slice(i, i + end - first)
    return shifts[here], signs[here], odds[here]


@lru_cache(64)
def _many_hashes(i: int) -> tuple[Array, Array, Array]:
    return _hashes(np.arange(i * _MANY, (i + 1) * _MANY, dtype=np.uint64))


def _mix(values: Array) -> Array:
    """Return 64 bits for each element, one-to-one, 0 for bits that are all 0."""
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
    mixed = bits.astype(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _mixed_sums(values: Array, odds: Array) -> Array:
    return einsum("qp,p->q", _mix(values), odds)
