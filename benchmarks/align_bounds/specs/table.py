"""The table of operators' specifications, and samples that many of them share."""

from collections.abc import Callable
from typing import Any

from benchmarks.align_bounds.inputs import Sample, Source, Spec

SPECS: dict[str, Spec] = {}


def spec(name: str, make: Any, *programs: Any, torch: Any = None, backward: bool = True) -> None:
    """Register an operator."""
    SPECS[name] = Spec(name, make, programs, torch, backward)


def one(**options: Any) -> Callable[[Source], Sample]:
    """Draw one argument."""
    return lambda s: Sample([s.x(s.rows(64), 64, **options)])


def pair(**options: Any) -> Callable[[Source], Sample]:
    """Draw two arguments; sometimes the second is a row that is broadcast."""

    def make(s: Source) -> Sample:
        other = s.x(64, **options) if s.rng.random() < 0.3 else s.x(s.rows(64), 64, **options)
        return Sample([s.x(s.rows(64), 64), other])

    return make


def exact(name: str, make: Any, function: Any, torch: Any = None) -> None:
    """Register an operator that rounds nothing."""
    spec(name, make, lambda m, *a, **k: function(*a, **k), torch=torch)


def few(*lengths: int, **options: Any) -> Callable[[Source], Sample]:
    """Draw fewer elements, in rows of these lengths, for results that are shorter than the input."""

    def make(s: Source) -> Sample:
        n = s.length(*lengths)
        return Sample([s.x(max(8, s.size // 8), n, **options), -1])

    return make
