"""Measure the difference of two tensors, chunk by chunk: one class for each kind of published standard.

Each class takes :class:`Chunk` after chunk and returns :class:`Check` lines at the end. A check's observed value is an
error with an upper limit, even if the standard words it the other way round (cosine above 0.99: ``1 - cosine`` below
0.01). Infinities of the same sign, and NaN, agree where both tensors have them in the same positions, with error 0;
otherwise the error is infinite. A class names what its standard does differently.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from telechat_moe.numerics import FLOATS, Array, dot, round_to, spacing, ulp_steps, widened

EPSILON = 1e-7
"""Added to the golden value's magnitude in MERE and MARE, so that zero has a relative error."""


class Check(NamedTuple):
    """One line of a standard."""

    metric: str  # name of the metric
    observed: float  # value found
    limit: float  # value allowed
    ok: bool  # whether the standard is met
    # Flat index of the worst element; None: the check is of the tensor as a whole
    position: int | None = None

    @property
    def ratio(self) -> float:
        """Return observed over limit; infinite where nothing is allowed and something was found."""
        if math.isnan(self.observed) or math.isnan(self.limit):
            return math.inf
        if self.observed == 0:
            return 0.0
        if self.limit == 0 or math.isinf(self.observed):
            return math.inf
        return self.observed / self.limit


@dataclass(eq=False)
class Chunk:
    """A range of the elements of two flattened tensors."""

    raw: Array  # elements of the judged run
    raw_golden: Array  # elements of the trusted run, as many
    begin: int = 0  # index of the first element
    raw_bench: Array | None = None  # elements of a third run, as many; None: there is none

    @cached_property
    def target(self) -> Array:
        """The judged run's elements in float64."""
        return widened(self.raw)

    @cached_property
    def golden(self) -> Array:
        """The trusted run's elements in float64."""
        return widened(self.raw_golden)

    @cached_property
    def magnitude(self) -> Array:
        """``|golden|``; 1 where :attr:`error` is not a difference of finite numbers."""
        magnitude = np.abs(self.golden)
        return magnitude if self.special is None else np.where(self.special, 1.0, magnitude)

    @cached_property
    def error(self) -> Array:
        """``|target - golden|``."""
        return self._errors[0]

    @property
    def special(self) -> Array | None:
        """Where one of the two is infinite or NaN; None: nowhere."""
        return self._errors[1]

    @cached_property
    def nan(self) -> Array | None:
        """Where the target is NaN; None: nowhere."""
        return None if self.special is None else np.isnan(self.target)

    @cached_property
    def _errors(self) -> tuple[Array, Array | None]:
        return errors(self.target, self.golden)


def errors(target: Array, golden: Array) -> tuple[Array, Array | None]:
    """Return ``|target - golden|`` of float64 elements, and where one is infinite or NaN (None: nowhere)."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.subtract(target, golden)
        np.abs(error, out=error)
    if not error.size or math.isfinite(error.max()):
        return error, None
    special = ~(np.isfinite(target) & np.isfinite(golden))
    agree = (target == golden) | (np.isnan(target) & np.isnan(golden))
    return np.where(special, np.where(agree, 0.0, np.inf), error), special


class Measure(ABC):
    """Takes chunks and reports in the end whether a standard is met."""

    note = ""  # what a reader must know about the result
    undefined = ""  # why the standard does not apply to these tensors

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Measure a chunk."""

    @abstractmethod
    def checks(self) -> list[Check]:
        """Return the lines of the standard."""


class _OfElements(Measure):
    """A standard for each element; its line shows the worst one."""

    metric = "error"
    limit = observed = 0.0
    wrong = 0
    position: int | None = None

    def checks(self) -> list[Check]:
        """See :class:`Measure`."""
        return [Check(self.metric, self.observed, self.limit, self.wrong == 0, self.position)]


class Close(_OfElements):
    """``|target - golden| <= atol + rtol |golden|`` everywhere, as ``numpy.isclose`` and torch have it.

    ``nan_equal``: two NaN in the same position agree.
    """

    def __init__(self, rtol: float, atol: float, nan_equal: bool = False) -> None:
        self.rtol, self.atol, self.nan_equal = rtol, atol, nan_equal
        self.limit, self._ratio = atol, 0.0

    def add(self, chunk: Chunk) -> None:
        """See :class:`Measure`."""
        error = chunk.error
        if chunk.nan is not None and not self.nan_equal:
            error = np.where(chunk.nan, np.inf, error)
        if not error.max():
            return
        allowed = chunk.magnitude * self.rtol
        allowed += self.atol
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.divide(error, allowed)
        if not self.atol:
            ratio[error == 0] = 0.0
        largest = int(np.argmax(ratio))
        if ratio[largest] >= 1:
            self.wrong += int(np.count_nonzero(error > allowed))
        if ratio[largest] > self._ratio:
            self._ratio, self.position = float(ratio[largest]), chunk.begin + largest
            self.observed, self.limit = float(error[largest]), float(allowed[largest])


class Ulps(_OfElements):
    """Distance in steps from number to number of a type, as repeated ``nextafter`` would count them.

    The golden value is first rounded to the type; -0 and 0 are one number, and infinity is infinitely far.
    """

    metric = "ULP"

    def __init__(self, dtype: str, limit: float) -> None:
        self.dtype, self.limit = dtype, limit

    def add(self, chunk: Chunk) -> None:
        """See :class:`Measure`."""
        steps = ulp_steps(chunk.raw, chunk.raw_golden, self.dtype)
        largest = int(np.argmax(steps))
        self.wrong += int(np.count_nonzero(steps > self.limit))
        if steps[largest] > self.observed:
            self.observed, self.position = float(steps[largest]), chunk.begin + largest


class RelativeErrors:
    """Mean and largest relative error, and root of the mean square error."""

    count = 0
    position: int | None = None
    mare = _sum = _squares = 0.0

    def add(self, chunk: Chunk) -> None:
        """Measure a chunk."""
        error = chunk.error
        self.count += error.size
        if chunk.special is not None:
            self.count -= int(np.count_nonzero(chunk.special & (error == 0)))
        if not error.max():
            return
        relative = chunk.magnitude + EPSILON
        np.divide(error, relative, out=relative)
        largest = int(np.argmax(relative))
        if relative[largest] > self.mare:
            self.mare, self.position = float(relative[largest]), chunk.begin + largest
        self._sum += float(relative.sum())
        with np.errstate(over="ignore"):
            self._squares += dot(error, error)

    @property
    def mere(self) -> float:
        """Mean relative error."""
        return self._sum / self.count if self.count else 0.0

    @property
    def rmse(self) -> float:
        """Root of the mean square error."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0


@dataclass
class Relative(RelativeErrors, Measure):
    """MERE and MARE: mean and largest ``|target - golden| / (|golden| + 1e-7)``, over elements that are numbers in both."""

    mean: float  # upper limit of MERE, exclusive
    largest: float  # upper limit of MARE, exclusive

    def checks(self) -> list[Check]:
        """See :class:`Measure`."""
        return [
            Check("MERE", self.mere, self.mean, self.mere < self.mean),
            Check("MARE", self.mare, self.largest, self.mare < self.largest, self.position),
        ]


@dataclass
class DoubleBenchmark(Measure):
    """The target's MARE, MERE and RMSE against the golden run, over those of a third run."""

    limits: tuple[float, float, float]  # of the three ratios
    # Lower limit of the third run's errors (without it, a third run without error would forbid any error)
    floor: float
    target: RelativeErrors = field(default_factory=RelativeErrors)
    bench: RelativeErrors = field(default_factory=RelativeErrors)

    def add(self, chunk: Chunk) -> None:
        """See :class:`Measure`."""
        self.target.add(chunk)
        assert chunk.raw_bench is not None
        self.bench.add(Chunk(chunk.raw_bench, chunk.raw_golden, chunk.begin))

    def checks(self) -> list[Check]:
        """See :class:`Measure`."""
        checks: list[Check] = []
        for name, limit in zip(("mare", "mere", "rmse"), self.limits, strict=True):
            target_error, bench_error = getattr(self.target, name), getattr(self.bench, name)
            if math.isinf(bench_error) and math.isinf(target_error):
                self.note = "the third run has infinities or NaN where the golden run has none, too"
                ratio = 1.0
            else:
                ratio = target_error / max(bench_error, self.floor)
            index = self.target.position if name == "mare" else None
            checks.append(Check(f"{name.upper()} ratio", ratio, limit, ratio <= limit, index))
        return checks


@dataclass
class Mixed(Measure):
    """Mixed tolerance: nearly all elements within rtol and atol, and a cap on the largest absolute error.

    The cap is ``max(floor, 32 ULP)``, the ULP of the golden value at the largest error, narrowed to the target's type.
    Infinities and NaN must be in the same positions; a golden value that overflows the target's type is infinity.
    """

    dtype: str  # of the target
    rtol: float
    atol: float
    floor: float  # lower limit of the cap
    unmatched: float  # share of elements that may be beyond the tolerance
    ulps: float  # of the cap
    _position = None  # the index of the largest error
    _beyond = _count = _misplaced = 0
    _worst = _golden = 0.0

    def add(self, chunk: Chunk) -> None:
        """See :class:`Measure`."""
        error = chunk.error
        self._count += error.size
        if chunk.special is not None:
            error = self._special(chunk, error)
        if not error.max():
            return
        allowed = chunk.magnitude * self.rtol
        allowed += self.atol
        self._beyond += int(np.count_nonzero(error > allowed))
        finite = np.where(np.isinf(error), 0.0, error) if chunk.special is not None else error
        largest = int(np.argmax(finite))
        if finite[largest] > self._worst:
            self._worst, self._golden = float(finite[largest]), float(chunk.golden[largest])
            self._position = chunk.begin + largest

    def _special(self, chunk: Chunk, error: Array) -> Array:
        largest = FLOATS[self.dtype].largest
        over = np.isinf(chunk.target) & (np.sign(chunk.target) == np.sign(chunk.golden))
        over &= np.abs(round_to(chunk.golden, self.dtype)) > largest
        error = np.where(over, 0.0, error)
        self._misplaced += int(np.count_nonzero(np.isinf(error)))
        return error

    def checks(self) -> list[Check]:
        """See :class:`Measure`."""
        low = float(np.nan_to_num(round_to(np.asarray(self._golden), self.dtype), posinf=0.0))
        cap = max(self.floor, self.ulps * float(spacing(np.asarray(low), self.dtype)))
        share = self._beyond / self._count if self._count else 0.0
        checks = [
            Check("unmatched share", share, self.unmatched, share <= self.unmatched),
            Check("largest error", self._worst, cap, self._worst <= cap, self._position),
        ]
        if self._misplaced:
            checks.append(Check("misplaced infinities or NaN", float(self._misplaced), 0.0, False))
        return checks


class EqualValues(_OfElements):
    """Equality of integers and booleans, whatever their width; of other values, equality of the numbers."""

    metric = "unequal elements"

    def add(self, chunk: Chunk) -> None:
        """See :class:`Measure`."""
        differs = self._differs(chunk.raw, chunk.raw_golden)
        wrong = int(np.count_nonzero(differs))
        if wrong and self.position is None:
            self.position = chunk.begin + int(np.argmax(differs))
        self.wrong += wrong
        self.observed = float(self.wrong)

    def _differs(self, target: Array, golden: Array) -> Array:
        return target != golden


class Bitwise(EqualValues):
    """Equality of bytes: -0 is not 0, and NaN are equal only if their payloads are."""

    metric = "elements with other bits"

    def _differs(self, target: Array, golden: Array) -> Array:
        kind = f"u{target.dtype.itemsize}"
        return np.ascontiguousarray(target).view(kind) != np.ascontiguousarray(golden).view(kind)
