"""Measures of a tensor as a whole: MindFormers' PrecisionChecker, msprobe's acc_check."""

import math
from dataclasses import dataclass

import numpy as np

from telechat_moe.numerics import Array, dot
from telechat_moe.tools.align.compare.measures import Check, Chunk, Measure


@dataclass
class Cosine(Measure):
    """MindFormers' PrecisionChecker: cosine, sum of magnitudes, divergence of the softmax over all elements.

    As published, the sum of magnitudes may be too small by any amount; a note says if a tensor passes because of that.
    """

    cosine: float  # lower limit, exclusive
    magnitude: float  # upper limit of `sum |target| / sum |golden| - 1`, exclusive
    divergence: float  # upper limit of the Kullback-Leibler divergence, exclusive
    _cross = 0.0

    def __post_init__(self) -> None:
        self._dots, self._sums = np.zeros(3), np.zeros(2)
        self._softmax = [_Softmax(), _Softmax()]

    def add(self, chunk: Chunk) -> None:
        """See :class:`Measure`."""
        a, g = chunk.target, chunk.golden
        with np.errstate(invalid="ignore", over="ignore"):
            self._dots += [dot(x, y) for x, y in ((a, g), (a, a), (g, g))]
            room = np.abs(a)
            self._sums[0] += room.sum()
            self._sums[1] += np.abs(g, out=room).sum()
            target, golden = self._softmax
            target.add(a, room)
            scale = golden.add(g, room)
            self._cross = self._cross * scale + dot(room, g - a)

    def checks(self) -> list[Check]:
        """See :class:`Measure`."""
        lowest_cosine, largest_ratio, divergence = self.cosine, self.magnitude, self.divergence
        dot, aa, gg = self._dots.tolist()
        norm = math.sqrt(aa) * math.sqrt(gg)
        if aa == 0 and gg == 0:
            self.undefined = "both tensors are all zero: no cosine"
        cosine = dot / norm if norm else 0.0 if norm == 0 else math.nan
        with np.errstate(invalid="ignore", divide="ignore"):
            l1 = float(self._sums[0] / self._sums[1] - 1)
        target, golden = self._softmax
        kl = self._cross / golden.total - (golden.logarithm - target.logarithm)
        if l1 <= -largest_ratio:
            self.note = f"the published check is signed: magnitudes {-l1:.3g} too small pass"
        excess = max(0.0, l1) if l1 == l1 else l1
        return [
            Check("1 - cosine", max(0.0, 1 - cosine), 1 - lowest_cosine, cosine > lowest_cosine),
            Check("L1 ratio - 1", excess, largest_ratio, l1 < largest_ratio),
            Check("KL divergence", max(0.0, kl) if kl == kl else kl, divergence, kl < divergence),
        ]


class _Softmax:
    """A running sum of exponentials."""

    def __init__(self) -> None:
        self.largest, self.total = -math.inf, 0.0

    def add(self, x: Array, terms: Array) -> float:
        """Return the factor by which earlier terms shrink; write the chunk's terms into ``terms``."""
        largest = max(self.largest, float(x.max())) if x.size else self.largest
        scale = math.exp(self.largest - largest) if self.largest > -math.inf else 0.0
        np.subtract(x, largest, out=terms)
        np.exp(terms, out=terms)
        self.largest, self.total = largest, self.total * scale + float(terms.sum())
        return scale

    @property
    def logarithm(self) -> float:
        return self.largest + math.log(self.total) if self.total > 0 else math.nan


_TINY = float(np.finfo(float).eps)
"""A tensor without a larger magnitude counts as zero."""


def _high(x: Array, squares: float) -> float:
    """Return the root mean square if it is well above :data:`_TINY`, else the largest magnitude."""
    mean = math.sqrt(squares / max(1, x.size))
    return mean if mean > 2 * _TINY else float(np.abs(x).max())


@dataclass
class Thousandths(Measure):
    """msprobe's acc_check: cosine, then largest error, then shares with a relative error of 1 %, 0.1 %, 0.01 %.

    As published, only the shares test NaN, so a tensor with few NaN passes; a note says where.
    """

    cosine: float  # lower limit, exclusive, if there are several elements that are not all zero
    error: float  # a tensor whose largest error is below this passes without further tests
    # For each test the limit of the relative error, which also limits the share of elements beyond it; True: failing
    # is an error, False: a warning
    shares: tuple[tuple[float, bool], ...]
    epsilon: float  # added to the golden value's magnitude: unit roundoff of its tensor's type
    _count = _special = 0
    _largest = 0.0

    def __post_init__(self) -> None:
        self._dots, self._highest = np.zeros(3), np.zeros(2)
        self._below = np.zeros(len(self.shares), np.int64)

    def add(self, chunk: Chunk) -> None:
        """See :class:`Measure`."""
        a, g = chunk.target, chunk.golden
        self._count += a.size
        with np.errstate(invalid="ignore", over="ignore"):
            dots = [dot(x, y) for x, y in ((a, g), (a, a), (g, g))]
            self._dots += dots
            highest = _high(a, dots[1]), _high(g, dots[2])
            self._highest = np.maximum(self._highest, highest)
            error = np.abs(a - g) if chunk.special is not None else chunk.error
            self._largest = float(np.maximum(self._largest, error.max()))
            relative = np.abs(g)
            relative += self.epsilon
            np.divide(error, relative, out=relative)
            self._below += [np.count_nonzero(relative < limit) for limit, _ in self.shares]
        if chunk.special is not None:
            self._special += int(np.count_nonzero(np.isinf(chunk.error)))

    def checks(self) -> list[Check]:
        """See :class:`Measure`."""
        checks = self._of_cosine()
        if checks and not checks[-1].ok:
            return checks
        if self._largest < self.error:
            return [*checks, Check("largest error", self._largest, self.error, True)]
        for (limit, fatal), below in zip(self.shares, self._below.tolist(), strict=True):
            share = below / self._count
            ok = share > 1 - limit
            name = f"share with relative error >= {limit:g}"
            checks.append(Check(name, 1 - share, limit, ok or not fatal))
            if not ok and not fatal:
                part = f"{1 - share:.3g} of the elements"
                self.note = f"warning: {part} have a relative error >= {limit:g}"
            if not ok:
                break
        if all(c.ok for c in checks) and self._special:
            passed = f"the published check passes {self._special} misplaced infinities or NaN"
            self.note = f"{self.note}; {passed}" if self.note else passed
        return checks

    def _of_cosine(self) -> list[Check]:
        zero = [bool(h <= _TINY) for h in self._highest]
        if self._count == 1 or all(zero):
            return []
        limit = 1 - self.cosine
        if any(zero):
            return [Check("1 - cosine (one is all zero)", 1.0, limit, False)]
        dot, aa, gg = self._dots.tolist()
        cosine = dot / (math.sqrt(aa) * math.sqrt(gg))
        if math.isnan(cosine):
            return []
        return [Check("1 - cosine", max(0.0, 1 - cosine), limit, cosine > self.cosine)]
