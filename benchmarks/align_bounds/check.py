"""Check the derived bounds against correct programs, millions of elements for each operator.

A bound is wrong if a correct program exceeds it, and useless if no wrong program does. So each operator is computed by
programs that share nothing with its formula (``specs/``: NumPy in the stated type, sums in six orders, results
rounded after each operation or after the last; torch's CPU kernels, backward ones included, where torch is installed),
and ``judge/verdict.py`` judges each result. Two figures are counted: the elements beyond their bound, which must be
none, and how wide the bound is: the median bound of a case over the 99.9 % quantile of its errors.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.align_bounds import specs as bounds_specs
from benchmarks.align_bounds.inputs import (
    KINDS,
    ORDERS,
    Array,
    Machine,
    Sample,
    Source,
    Spec,
    narrow,
)
from telechat_moe.numerics import FLOATS
from telechat_moe.tools.align.judge.replay import exactly, free_choices
from telechat_moe.tools.align.judge.verdict import judge
from telechat_moe.tools.align.operators import Arguments, Formula, find
from telechat_moe.tools.align.operators.approx import Approx
from telechat_moe.tools.align.operators.indexing import CHOOSES
from telechat_moe.tools.align.operators.registry import NotJudgedError

DTYPES = ("float32", "bfloat16", "float16", "float64")
BINS = 2.0 ** np.arange(-30, 2, 1 / 16)
"""Edges of the classes of error over bound."""


@dataclass
class Tally:
    """The counts of one operator's checks.

    Attributes:
        checks: Elements compared.
        violations: Elements of correct programs beyond their bound.
        ratios: By type, how many elements have which error over bound: a histogram over :data:`BINS`.
        skipped: Results that could not be compared, by reason.
        worst: Largest error over its bound, and where.
        broken: The first violations, in words.
    """

    checks: int = 0
    violations: int = 0
    ratios: dict[str, Array] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    worst: tuple[float, str] = (0.0, "")
    broken: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the counts of another tally."""
        self.checks += other.checks
        self.violations += other.violations
        for dtype, counts in other.ratios.items():
            self.ratios[dtype] = self.ratios.get(dtype, 0) + counts
        for reason, count in other.skipped.items():
            self.skipped[reason] = self.skipped.get(reason, 0) + count
        self.worst = max(self.worst, other.worst)
        self.broken = [*self.broken, *other.broken][:20]

    def tightness(self, dtype: str | None = None) -> float | None:
        """Return the bound over the 99.9 % quantile of observed errors, None where no program errs.

        Args:
            dtype: Only this type.
        """
        counts = sum(c for d, c in self.ratios.items() if dtype in (None, d))
        if not np.sum(counts):
            return None
        place = int(np.searchsorted(np.cumsum(counts), 0.999 * np.sum(counts)))
        return None if place == 0 else float(1 / BINS[place - 1])


def cases(
    rounds: Iterable[int], names: Sequence[str] | None = None
) -> Iterator[tuple[str, str, str, int]]:
    """Yield name, type, distribution and seed of every case, in an order that mixes operators."""
    for number in rounds:
        for kind in KINDS:
            for dtype in DTYPES:
                for name in names or bounds_specs.SPECS:
                    yield name, dtype, kind, number


def check(
    name: str, dtype: str, kind: str, number: int, size: int = 8192, torch: Any = None
) -> Tally:
    """Compute one case by several programs and judge each.

    Args:
        number: Seed.
        size: About how many elements a result has.
        torch: The module; None: NumPy's programs only.
    """
    spec, formula = bounds_specs.SPECS[name], find(name)
    if formula is None:
        raise LookupError(f"no formula named {name}")
    rng = np.random.default_rng([number, zlib.crc32(f"{name} {dtype} {kind}".encode())])
    sample = spec.make(Source(rng, kind, dtype, size))
    tally = Tally()
    where = f"{name} {dtype} {kind} {number}"
    with np.errstate(all="ignore"):
        try:
            arguments, tensors = _bind(formula, sample, dtype, formula.stores)
            expected = list(formula.compute(arguments))
        except NotJudgedError as error:
            tally.skipped[str(error)] = 1
            return tally
        results = list(_programs(spec, formula, sample, dtype, rng))
        if torch is not None and spec.torch is not None:
            results += _by_torch(torch, spec, sample, dtype, tally)
        _judge(tally, where, formula, arguments, expected, results, dtype)
        if torch is not None and spec.torch is not None and spec.backward and tensors:
            _backward(torch, tally, where, spec, formula, sample, dtype, rng)
    return tally


def _bind(
    formula: Formula, sample: Sample, dtype: str, stores: bool
) -> tuple[Arguments, list[Approx]]:
    tensors: list[Approx] = []

    def argument(x: Any) -> Any:
        if isinstance(x, list) and x and isinstance(x[0], np.ndarray):
            return [argument(v) for v in x]
        if isinstance(x, np.ndarray) and x.dtype.kind == "f":
            tensors.append(exactly(x, dtype, stores))
            return tensors[-1]
        return x

    named = {k: argument(v) for k, v in sample.named.items()}
    return formula.bind([argument(v) for v in sample.arguments], named), tensors


def _programs(
    spec: Spec, formula: Formula, sample: Sample, dtype: str, rng: np.random.Generator
) -> Iterator[tuple[str, list[Array]]]:
    for i, program in enumerate(spec.programs):
        orders = rng.choice(ORDERS, 1 if formula.exact else 2, replace=False)
        for order in orders:
            stores = (
                formula.stores and dtype in ("bfloat16", "float16") and bool(rng.random() < 0.5)
            )
            machine = Machine(dtype, str(order), stores)
            outputs = program(
                machine, *map(machine_input(machine), sample.arguments), **sample.named
            )
            outputs = outputs if isinstance(outputs, list) else [outputs]
            rounded = [
                narrow(x, dtype) if np.asarray(x).dtype.kind == "f" else np.asarray(x)
                for x in outputs
            ]
            yield f"program {i}, {order}{', rounded each time' if stores else ''}", rounded


def machine_input(machine: Machine) -> Any:
    """Return a function that gives arrays of floating point the type that a machine works in."""
    return lambda x: (
        x.astype(machine.work) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
    )


def _judge(
    tally: Tally,
    where: str,
    formula: Formula,
    arguments: Arguments,
    expected: Sequence[Any],
    results: Iterable[tuple[str, Sequence[Array]]],
    dtype: str,
) -> None:
    """Judge results of a case; ``dtype`` is that of those of floating point."""
    for who, arrays in results:
        for place, (x, value) in enumerate(zip(arrays, expected, strict=False)):
            if value is None:
                continue
            kind = dtype if x.dtype.kind == "f" and isinstance(value, Approx) else "int64"
            free = free_choices(formula, arguments, place, x, value)
            verdict = judge(formula.name, f"output.{place}", x, value, kind, free)
            tally.checks += x.size
            tally.violations += verdict.wrong
            said = f"{where}, {who}, output {place}: {verdict.reason}"
            if verdict.wrong:
                tally.broken.append(said)
            tally.worst = max(tally.worst, (verdict.ratio, said))
            if isinstance(value, Approx) and x.size == value.value.size:
                _count(tally, x.reshape(value.shape), value, dtype)


def _count(tally: Tally, values: Array, value: Approx, dtype: str) -> None:
    """Add errors over bounds; skip exact results, and numbers so small that they may be flushed to zero."""
    bound = value.bound(dtype)
    error = np.abs(values.astype(np.float64) - value.value)
    if dtype == "float64" or not error.any():
        return  # the reference is of that type itself
    least = 2.0 ** (FLOATS[dtype].low + (0 if dtype == "float16" else 24))
    plain = np.isfinite(bound) & np.isfinite(error) & (np.abs(value.value) > least)
    ratio = (error[plain] / bound[plain]).reshape(-1)
    counts = np.bincount(np.searchsorted(BINS, ratio), minlength=len(BINS) + 1)
    tally.ratios[dtype] = tally.ratios.get(dtype, 0) + counts


# ---------------------------------------------------------------- torch


def _by_torch(
    torch: Any, spec: Spec, sample: Sample, dtype: str, tally: Tally
) -> list[tuple[str, list[Array]]]:
    try:
        outputs = _flat(_run(torch, spec, *_tensors(torch, sample, dtype)))
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = f"torch: {str(error).splitlines()[0][:80]}"
        tally.skipped[reason] = tally.skipped.get(reason, 0) + 1
        return []
    return [("torch", [_array(torch, x) for x in outputs])]


def _tensors(
    torch: Any, sample: Sample, dtype: str, grad: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    def convert(x: Any) -> Any:
        if isinstance(x, list) and x and isinstance(x[0], np.ndarray):
            return [convert(v) for v in x]
        if isinstance(x, np.ndarray):
            tensor = torch.from_numpy(np.ascontiguousarray(x))
            return (
                tensor.to(getattr(torch, dtype)).requires_grad_(grad)
                if x.dtype.kind == "f"
                else tensor
            )
        return x

    return [convert(x) for x in sample.arguments], {k: convert(v) for k, v in sample.named.items()}


def _run(torch: Any, spec: Spec, arguments: list[Any], named: dict[str, Any]) -> Any:
    if not isinstance(spec.torch, str):
        assert spec.torch is not None
        return spec.torch(torch, *arguments, **named)
    functional = torch.nn.functional
    home = functional if hasattr(functional, spec.torch) else torch
    return getattr(home, spec.torch)(*arguments, **named)


def _array(torch: Any, x: Any) -> Array:
    x = x.detach()
    return np.array(x.float().numpy() if x.dtype in (torch.bfloat16, torch.float16) else x.numpy())


def _flat(x: Any) -> list[Any]:
    return [y for v in x for y in _flat(v)] if isinstance(x, list | tuple) else [x]


def _backward(
    torch: Any,
    tally: Tally,
    where: str,
    spec: Spec,
    formula: Formula,
    sample: Sample,
    dtype: str,
    rng: np.random.Generator,
) -> None:
    """Judge torch's gradients."""
    from telechat_moe.tools.align.operators.approx import gradients

    arguments, named = _tensors(torch, sample, dtype, True)
    leaves = [x for x in _flat([*arguments, *named.values()]) if getattr(x, "requires_grad", False)]
    try:
        made = _flat(_run(torch, spec, arguments, named))
        outputs = [x for x in made if x.requires_grad]
        if not outputs:
            return
        coming = [narrow(rng.standard_normal(tuple(x.shape)), dtype) for x in outputs]
        seeds = [torch.from_numpy(g).to(x.dtype) for g, x in zip(coming, outputs, strict=True)]
        going = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = f"torch backward: {str(error).splitlines()[0][:80]}"
        tally.skipped[reason] = tally.skipped.get(reason, 0) + 1
        return
    bound, tensors = _bind(formula, sample, dtype, True)
    place = CHOOSES.get(formula.name)
    if place is not None and place < len(made):
        bound.chosen = _array(torch, made[place]).astype(np.int64)
    results = [x for x in formula.compute(bound) if isinstance(x, Approx)]
    pairs = zip(results, coming, strict=False)
    expected = gradients([(r, exactly(g, dtype, True)) for r, g in pairs], tensors)
    gradients_of_inputs = [None if g is None else _array(torch, g) for g in going]
    for i, (g, value) in enumerate(zip(gradients_of_inputs, expected, strict=True)):
        if g is not None and value is not None:
            _judge(
                tally, f"{where}, gradient {i}", formula, bound, [value], [("torch", [g])], dtype
            )
