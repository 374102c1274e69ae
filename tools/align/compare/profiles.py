"""Published standards for the difference of two tensors, by name, with their numbers and sources.

A standard's thresholds depend on the type that the judged program computed in (a record's ``dtype``, not that of a file
that holds it widened). Integers and booleans must be equal in all standards. How a standard treats infinities, NaN and
zero is documented with its class in ``measures.py``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from telechat_moe.errors import UsageError
from telechat_moe.numerics import FLOATS, is_float
from telechat_moe.tools.align.compare.measures import (
    Bitwise,
    Close,
    DoubleBenchmark,
    EqualValues,
    Measure,
    Mixed,
    Relative,
    Ulps,
)
from telechat_moe.tools.align.compare.measures_whole import Cosine, Thousandths

HF32 = "tfloat32"
"""The precision that Ascend's HF32 keeps of a float32."""

ASCEND_RATIO = {"l0": (10.0, 2.0, 2.0), "l1": (5.0, 1.5, 1.5), "l2": (2.0, 1.2, 1.2)}
"""Largest MARE, MERE and RMSE over those of a third-party chip. Source: CANN, operator precision standard, double
benchmark; the same numbers in msprobe 26.2.0, ``precision_standard/standard_config.py``."""

ASCEND_CASES: Mapping[str, int] = {"l0": 5_000, "l1": 10_000, "l2": 30_000}
"""Number of test cases that the standard requires for each level."""

ASCEND_LEAST: Mapping[str, float] = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-14}
"""The lower limit of the third chip's error. Source: msprobe 26.2.0, ``_minmum_err``."""

ECOSYSTEM: Mapping[str, float] = {
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "float32": 2**-13,
    HF32: 2**-11,
    "float8_e4m3": 2**-3,
    "float8_e5m2": 2**-2,
}
"""T of ``MERE < T and MARE < 10 T``. Source: CANN, ecosystem operators' standard, single benchmark (ATK ``single_bm``)."""


class Tolerance(NamedTuple):
    """A line of the mixed tolerance."""

    rtol: float
    atol: float
    floor: float


MIXED: Mapping[str, Tolerance] = {
    "float16": Tolerance(2**-9, 2**-9, 1e-1),
    "bfloat16": Tolerance(2**-6, 2**-6, 1.0),
    "float32": Tolerance(2**-10, 2**-16, 1e-2),
    HF32: Tolerance(2**-9, 2**-10, 1e-1),
    "float8_e4m3": Tolerance(2**-2, 2**-4, 1.0),
    "float8_e5m2": Tolerance(2**-1, 2**-3, 1e-1),
}
"""Source: cann/opbase, docs/zh/ops_precision_standard/mixed_tolerance_standard.md (September 2026)."""

MIXED_TIGHT: Mapping[str, Tolerance] = {
    "float16": Tolerance(2**-10, 2**-10, 1e-1),
    "bfloat16": Tolerance(2**-7, 2**-7, 1e-1),
    "float32": Tolerance(2**-13, 2**-13, 1e-2),
}
"""The same page as revised on 2026-09-24 (cann/opbase a5e8e71); its lines for other types could not be read."""

MIXED_UNMATCHED, MIXED_ULPS = 0.01, 32.0

TORCH: Mapping[str, tuple[float, float]] = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
    "complex64": (1.3e-6, 1e-5),
    "complex128": (1e-7, 1e-7),
}
"""rtol, atol by type. Source: ``torch.testing.assert_close``; types without a line must be equal."""

MINDFORMERS = (0.999, 0.01, 0.005)
"""Cosine, sum of magnitudes, divergence. Source: MindFormers, ``tests/utils/precision_utils.py``, PrecisionChecker."""

MSPROBE_COSINE, MSPROBE_ERROR = 0.99, 0.001
MSPROBE_SHARES: Mapping[str, tuple[tuple[float, bool], ...]] = {
    "float16": ((0.01, True), (0.001, False)),
    "bfloat16": ((0.01, True), (0.001, False)),
    "float32": ((0.001, True), (0.0001, False)),
    "float64": ((0.001, True), (0.0001, False)),
}
"""Limits of relative error and share, and whether failing is an error. Source: msprobe 26.2.0, ``acc_check``."""

MSPROBE_EPSILON = {"float16": 2**-10, "bfloat16": 2**-8, "float32": 2**-23, "float64": 2**-52}


Measures = Callable[[str, str], Measure | None]
Line = TypeVar("Line")


@dataclass(frozen=True)
class Profile:
    """A standard."""

    source: str  # where its numbers are published
    # Returns a measure for a target type and a golden type; None: the standard does not cover them
    measures: Measures
    same_dtype: bool = False  # whether the types must be equal
    # Whether it needs a third run, whose errors against the golden run are compared with the target's
    third: bool = False
    cases: int = 0  # number of tensors that the standard requires
    nan_differs: bool = False  # whether NaN are unequal, so that equal bits may fail
    # Tensors of wider types are judged by the thresholds of this type, from which their values were computed
    kind: str | None = None
    name: str = ""  # as on the command line

    def line(self, dtype: str) -> str:
        """Return the type whose thresholds apply to a tensor of this type."""
        if self.kind is None or dtype not in FLOATS or FLOATS[dtype].bits <= FLOATS[self.kind].bits:
            return dtype
        return dtype if self.kind == HF32 and dtype != "float32" else self.kind

    def measure(self, dtype: str, golden: str) -> Measure | None:
        """Return a measure for types of target and golden tensor; None: the standard does not cover them."""
        if not is_float(dtype) and not dtype.startswith("complex") and self.name != "bitwise":
            return EqualValues()
        return self.measures(self.line(dtype), golden)


def read(text: str) -> Profile:
    """Return a standard from the text of a command line: a name, or ``name:option=value,option=value``.

    Raises:
        UsageError: No such name or option, or a value that the option cannot have.
    """
    name, _, options = text.partition(":")
    if name not in _STANDARDS:
        raise UsageError(f"--standard {name}: unknown; expected one of {', '.join(NAMES)}")
    values: dict[str, Any] = {}
    for part in options.split(",") if options else ():
        option, _, value = part.partition("=")
        if option not in _OPTIONS or (option == "equal_nan" and part != option):
            expected = ", ".join(_OPTIONS)
            raise UsageError(f"--standard {text}: unknown option {part!r}; expected {expected}")
        names, convert = _OPTIONS[option]
        if name not in names:
            purpose = f"no option {option}, which is for {', '.join(names)}"
            raise UsageError(f"--standard {name}: {purpose}")
        try:
            values[option] = convert(value)
        except ValueError as error:
            raise UsageError(f"--standard {text}: {part!r} {error}") from None
    kind = values.pop("as", None)
    return replace(_STANDARDS[name](**values), name=name, kind=kind)


def _number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ValueError("needs a number of 0 or more")
    return number


def _kind(value: str) -> str:
    kind = HF32 if value == "hf32" else value
    if kind not in FLOATS:
        raise ValueError(f"is no type; expected hf32 or one of {', '.join(FLOATS)}")
    return kind


def _by_type(lines: Mapping[str, Line], measure: Callable[[str, Line], Measure]) -> Measures:
    """Return the measures of a standard that has a line for each type that it covers."""
    return lambda dtype, golden: measure(dtype, lines[dtype]) if dtype in lines else None


def _ascend(level: str) -> Profile:
    ratios = ASCEND_RATIO[level]
    measures = _by_type(ASCEND_LEAST, lambda _, floor: DoubleBenchmark(ratios, floor))
    source = "CANN operator precision standard, double benchmark"
    return Profile(source, measures, third=True, cases=ASCEND_CASES[level])


def _ecosystem() -> Profile:
    measures = _by_type(ECOSYSTEM, lambda _, limit: Relative(limit, 10 * limit))
    return Profile("CANN ecosystem standard, single benchmark", measures)


def _mixed(lines: Mapping[str, Tolerance]) -> Profile:
    share = MIXED_UNMATCHED, MIXED_ULPS
    measures = _by_type(lines, lambda dtype, line: Mixed(dtype, *line, *share))
    return Profile("cann/opbase mixed_tolerance_standard.md", measures)


def _mindformers() -> Profile:
    source = "MindFormers PrecisionChecker"
    return Profile(source, lambda dtype, golden: Cosine(*MINDFORMERS), same_dtype=True)


def _msprobe() -> Profile:
    def measures(dtype: str, golden: str) -> Measure | None:
        if dtype not in MSPROBE_SHARES or golden not in MSPROBE_EPSILON:
            return None
        shares, epsilon = MSPROBE_SHARES[dtype], MSPROBE_EPSILON[golden]
        return Thousandths(MSPROBE_COSINE, MSPROBE_ERROR, shares, epsilon)

    return Profile("msprobe 26.2.0 acc_check", measures)


def _torch(equal_nan: bool = False) -> Profile:
    def measures(dtype: str, golden: str) -> Measure:
        return Close(*TORCH.get(dtype, (0.0, 0.0)), nan_equal=equal_nan)

    source = "torch.testing.assert_close"
    return Profile(source, measures, same_dtype=True, nan_differs=not equal_nan)


def _close(rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Profile:
    source = f"numpy.isclose, rtol {rtol:g}, atol {atol:g}"
    return Profile(
        source, lambda dtype, golden: Close(rtol, atol, equal_nan), nan_differs=not equal_nan
    )


def _ulp(max: float = 1.0) -> Profile:
    source = f"at most {max:g} ULP of the target's type"
    return Profile(source, lambda dtype, golden: Ulps(dtype, max) if dtype in FLOATS else None)


_STANDARDS: Mapping[str, Callable[..., Profile]] = {
    **{f"ascend-{level}": partial(_ascend, level) for level in ASCEND_RATIO},
    "ecosystem": _ecosystem,
    "mixed": partial(_mixed, MIXED),
    "mixed-0924": partial(_mixed, MIXED_TIGHT),
    "mindformers": _mindformers,
    "msprobe": _msprobe,
    "torch": _torch,
    "close": _close,
    "ulp": _ulp,
    "bitwise": lambda: Profile("equal bytes", lambda dtype, golden: Bitwise(), same_dtype=True),
}
NAMES = tuple(_STANDARDS)
_BY_TYPE = tuple(n for n in NAMES if n not in ("mindformers", "close", "ulp", "bitwise"))
_OPTIONS: Mapping[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
    "rtol": (("close",), _number),
    "atol": (("close",), _number),
    "max": (("ulp",), _number),
    "as": (_BY_TYPE, _kind),
    "equal_nan": (("torch", "close"), lambda _: True),
}
"""The standards that have an option, and how its value is read."""
