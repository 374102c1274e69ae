"""Run the whole benchmark: faults, right pairs and real bugs, with the outcome of each."""

import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.align_faults import baselines, score
from benchmarks.align_faults.engine import Planted
from benchmarks.align_faults.faults import AREAS, CLASSES, Fault
from benchmarks.align_faults.history import BUGS, Bug
from benchmarks.align_faults.layouts import LAYOUTS
from benchmarks.align_faults.score import Base, Result, Stopped
from telechat_moe.errors import UsageError
from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump.records import Dump
from telechat_moe.tools.align.judge.comparison import ReferenceCache
from telechat_moe.tools.align.judge.pins import chose_otherwise

BARS = {"detected": 1.0, "exact": 0.99, "family": 0.95, "reproducer": 1.0, "observable": 0.95}
"""Shares that must be reached: of the observable faults, the last of all."""

FLIPS = 0.3
"""Share of right pairs that must have a legal flip of routing."""

_ORDERS = ("blas", "split", "reversed", "serial", "wide")


@dataclass
class Pair:
    """Two right runs that differ.

    Attributes:
        flips: Tokens whose experts differ.
        judged: Tensors that were judged.
        unknown: Tensors that were not.
        baselines: What each other method flagged.
    """

    reference: Base
    target: Base
    verdict: str
    flips: int
    judged: int
    unknown: int
    said: str = ""
    baselines: dict[str, bool] = field(default_factory=dict)


@dataclass
class Report:
    """The outcome of the whole benchmark.

    Attributes:
        bugs: Real bugs, each with its result and whether the loss changed.
        nowhere: Classes for which no layout had a site.
        stopped: Faults that stopped their programs; not counted among the faults.
    """

    faults: list[Result] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    bugs: list[tuple[Bug, Result, bool]] = field(default_factory=list)
    nowhere: list[str] = field(default_factory=list)
    stopped: list[Stopped] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def observable(self) -> list[Result]:
        """The faults that can be seen."""
        return [r for r in self.faults if r.ranks]

    @property
    def missed(self) -> list[Result]:
        """The observable faults that are not named right in all."""
        return [r for r in self.observable if not all(r.marks)]

    @property
    def shares(self) -> dict[str, float]:
        """The shares of :data:`BARS`; 1 where there is nothing to count."""
        observable = self.observable
        shares = {
            name: _share(r.marks[i] for r in observable) for i, name in enumerate(COLUMNS[4:])
        }
        return {**shares, "observable": _share(bool(r.ranks) for r in self.faults)}

    @property
    def false_alarms(self) -> int:
        """Right pairs that the tool found wrong."""
        return sum(p.verdict == "diverged" for p in self.pairs)

    @property
    def inconclusive(self) -> int:
        """Right pairs of which too little could be judged for a pass."""
        return sum(p.verdict == "inconclusive" for p in self.pairs)

    @property
    def flips(self) -> float:
        """Share of the right pairs with a flip of routing."""
        return _share(p.flips > 0 for p in self.pairs)

    def failures(self) -> list[str]:
        """Return the bars that do not hold, in words."""
        found = [
            f"{name}: {value:.2%}, at least {BARS[name]:.0%} expected"
            for name, value in self.shares.items()
            if value < BARS[name]
        ]
        if self.false_alarms:
            found.append(f"{self.false_alarms} false alarms on {len(self.pairs)} right pairs")
        if len(self.pairs) >= 20 and self.flips < FLIPS:
            found.append(f"only {self.flips:.0%} of the right pairs have a flip of routing")
        found += [f"{bug.source}: not detected" for bug, r, _ in self.bugs if not r.detected]
        found += [
            f"{bug.source}: the loss changed"
            for bug, _, changed in self.bugs
            if bug.quiet and changed
        ]
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON types."""
        return {
            "verdict": "diverged" if self.failures() else "pass",
            "failures": self.failures(),
            "seconds": round(self.seconds, 1),
            "faults": len(self.faults),
            "classes": len({r.name for r in self.faults}),
            "shares": self.shares,
            "areas": {row[0]: dict(zip(COLUMNS[1:], row[1:], strict=True)) for row in table(self)},
            "clean": {
                "pairs": len(self.pairs),
                "of_two_layouts": sum(p.reference.ranks != p.target.ranks for p in self.pairs),
                "false_alarms": self.false_alarms,
                "inconclusive": self.inconclusive,
                "with_flips": self.flips,
                "not_judged": sum(p.unknown for p in self.pairs),
            },
            "baselines": scored(self),
            "history": [
                {
                    "source": bug.source,
                    "what": bug.said,
                    "layout": bug.layout,
                    "detected": r.detected,
                    "exact": r.exact,
                    "said": r.said,
                    "loss_changed": changed,
                }
                for bug, r, changed in self.bugs
            ],
            "missed": [asdict(r) for r in self.missed],
            "not_observable": [asdict(r) for r in self.faults if not r.ranks],
            "alarms": [asdict(p) for p in self.pairs if p.verdict == "diverged"],
            "no_place": self.nowhere,
            "stopped": [asdict(s) for s in self.stopped],
        }


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 1.0


COLUMNS = ("area", "classes", "faults", "observable", "detected", "exact", "family", "reproducer")


def table(report: Report) -> list[list[Any]]:
    """Return a row for each area and one for all, in the order of :data:`COLUMNS`."""
    rows: list[list[Any]] = []
    for area in (*AREAS, "all"):
        these = [r for r in report.faults if area in (r.area, "all")]
        seen = [r for r in these if r.ranks]
        if these:
            counts = [sum(r.marks[i] for r in seen) for i in range(4)]
            rows.append([area, len({r.name for r in these}), len(these), len(seen), *counts])
    return rows


def scored(report: Report) -> dict[str, dict[str, int]]:
    """Return for each method what it flagged and named of the observable faults, and its false alarms."""
    seen = report.observable
    found = {
        "align bisect": {
            "detected": sum(r.detected for r in seen),
            "exact": sum(r.exact for r in seen),
            "false_alarms": report.false_alarms,
            "pairs": len(report.pairs),
        }
    }
    for name in baselines.METHODS:
        mine = [r.baselines[name] for r in seen if name in r.baselines]
        found[name] = {
            "detected": sum(flagged for flagged, _ in mine),
            "exact": sum(exact for _, exact in mine),
            "false_alarms": sum(p.baselines.get(name, False) for p in report.pairs),
            "pairs": sum(name in p.baselines for p in report.pairs),
        }
    return found


# ------------------------------------------------------------------ running

Progress = Callable[[str, int, int], None]


def run_suite(
    faults: int,
    clean: int,
    classes: str = "*",
    layouts: str = "*",
    seed: int = 0,
    jobs: int = 1,
    history: bool = True,
    first: int = 0,
    progress: Progress = lambda what, done, of: None,
) -> Report:
    """Run the benchmark.

    Args:
        faults: How many; classes take turns.
        clean: Right pairs.
        classes: Pattern of the names or areas of classes.
        layouts: Pattern of the names of layouts.
        seed: Another seed, other faults.
        history: Whether to reproduce the real bugs, too.
        first: Number of the first fault and of the first pair, to divide a long run.
        progress: Called with the activity, how much is done, and the total.

    Raises:
        UsageError: No class or layout fits.
    """
    begin = time.perf_counter()
    kinds, names = _fitting(classes, layouts, seed)
    report = Report()
    planted: dict[Base, list[tuple[str, int]]] = {}
    for done, i in enumerate(range(first, first + faults), 1):
        kind = kinds[i % len(kinds)]
        number = seed * 1_000_003 + i // len(kinds)
        found = score.plant(kind, names, number)
        if found is None:
            report.nowhere.append(kind.name)
        else:
            planted.setdefault(found[0], []).append((kind.name, number))
        progress("planted", done, faults)
    work: list[tuple[Any, ...]] = [(_faults, b, some, names) for b, some in planted.items()]
    last = first + clean
    work += [(_pairs, names, seed, range(i, min(i + 8, last))) for i in range(first, last, 8)]
    total = faults - len(report.nowhere) + clean
    into: dict[type, list[Any]] = {
        Result: report.faults,
        Stopped: report.stopped,
        Pair: report.pairs,
    }
    for outcomes in _mapped(work, jobs):
        for item in outcomes:
            into[type(item)].append(item)
        judged = len(report.faults) + len(report.stopped) + len(report.pairs)
        progress("judged", judged, total)
    if history:
        report.bugs = [_bug(bug, seed) for bug in BUGS]
    report.nowhere = sorted(set(report.nowhere))
    report.faults.sort(key=lambda r: (AREAS.index(r.area), r.name))
    report.seconds = time.perf_counter() - begin
    return report


def _fitting(classes: str, layouts: str, seed: int) -> tuple[list[Fault], list[str]]:
    """Return the classes, in an order that the seed gives, and the names of layouts that fit two patterns."""
    kinds, names = score.chosen(classes), [n for n in LAYOUTS if fnmatch(n, layouts)]
    if not kinds or not names:
        what = f"classes {classes!r}" if not kinds else f"layouts {layouts!r}"
        raise UsageError(f"no {what}; there are {', '.join(CLASSES if not kinds else LAYOUTS)}")
    return [kinds[i] for i in np.random.default_rng(seed).permutation(len(kinds))], names


def _mapped(work: list[tuple[Any, ...]], jobs: int) -> Iterable[list[Any]]:
    if jobs <= 1:
        yield from map(_do, work)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        yield from pool.map(_do, work)


def _do(item: tuple[Any, ...]) -> list[Any]:
    function, *arguments = item
    return function(*arguments)


def _faults(
    base: Base, some: list[tuple[str, int]], names: Sequence[str]
) -> list[Result | Stopped]:
    found: list[Result | Stopped] = []
    for name, number in some:
        planted = score.plant(CLASSES[name], names, number)
        assert planted is not None
        found.append(score.try_fault(CLASSES[name], base, planted[1], number))
    return found


def pair_of(names: Sequence[str], seed: int, number: int) -> tuple[Base, Base]:
    """Return two right runs that differ in type, order of sums, fusion, layout, or all of them.

    Every fourth pair has two layouts that see the same batch; in every second of these the reference has one device.
    """
    rng = np.random.default_rng([seed, number, 5])
    layout = names[number % len(names)]
    dtype = ("float32", "bfloat16", "float16")[int(rng.choice(3, p=[0.2, 0.5, 0.3]))]
    ties = bool(rng.random() < 0.85)
    shared = {"seed": 10_000 * seed + number, "ties": ties, "steps": 1 + int(rng.random() < 0.1)}
    fused = bool(rng.integers(2))
    other = fused if rng.random() < 0.6 else not fused
    reference = Base(layout, "float32", "blas", fused, **shared)
    order = _ORDERS[int(rng.integers(1 if dtype == "float32" else 0, len(_ORDERS)))]
    target = Base(layout, dtype, order, other, **shared)
    if number % 4 != 3:
        return reference, target
    able = [n for n in names if n != layout and _batch(layout) % LAYOUTS[n].dp == 0]
    believed = able[int(rng.integers(len(able)))] if able and number % 8 == 3 else "one"
    reference, target = in_layout(target, believed)
    return replace(reference, dtype="float32", order="blas", fused=fused), target


def in_layout(target: Base, layout: str) -> tuple[Base, Base]:
    """Return the same program in another layout of its batch, and the program with as many layers."""
    micro = _batch(target.layout) // LAYOUTS[layout].dp
    stages = max(LAYOUTS[n].pp * LAYOUTS[n].chunks for n in (layout, target.layout))
    layers = max(stages, target.shape.layers)
    target = replace(target, layers=layers)
    return replace(target, layout=layout, micro=micro), target


def _batch(layout: str) -> int:
    return LAYOUTS[layout].dp * LAYOUTS[layout].micro


def _pairs(names: Sequence[str], seed: int, numbers: range) -> list[Pair]:
    return [judge_pair(*pair_of(names, seed, number)) for number in numbers]


def judge_pair(reference: Base, target: Base) -> Pair:
    """Let the tool judge two right runs, and the other methods too if both have the same layout."""
    same = reference.ranks == target.ranks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        one, two = score.run(reference).dump(), score.run(target).dump()
        outcome = bisect(one, two, ReferenceCache()) if same else across(one, two)
    first = outcome.findings[0] if outcome.findings else None
    said = f"{first.verdict.key}: {first.verdict.reason}" if first else outcome.reason
    judged, unknown = outcome.judged.get("pass", 0), outcome.judged.get("not judged", 0)
    named = baselines.judged(one, two) if same else {}
    flags = {n: key is not None for n, key in named.items()}
    flips = sum(chose_otherwise(one.at(step), two.at(step)) for step in one.steps)
    return Pair(reference, target, outcome.verdict, flips, judged, unknown, said, flags)


def _bug(bug: Bug, seed: int) -> tuple[Bug, Result, bool]:
    base = Base(bug.layout, bug.dtype, seed=zlib.crc32(bug.source.encode()) % 97)
    able = [s for s in score.sites_of(base) if bug.fault.pick(s)]
    if not able:
        raise RuntimeError(f"{bug.source}: no place in layout {bug.layout}")
    rng = np.random.default_rng([seed, zlib.crc32(bug.source.encode())])
    site = able[int(rng.integers(len(able)))]
    found = score.try_fault(
        bug.fault, base, Planted(site, bug.fault.stage, bug.fault.change(rng)), seed
    )
    if isinstance(found, Stopped):
        raise RuntimeError(f"{bug.source}: {found.key} stops its program: {found.reason}")
    again = Planted(site, bug.fault.stage, bug.fault.change(np.random.default_rng(seed)))
    wrong = score.run(base, again, seed).dump()
    return bug, found, _losses(score.right(base)[0]) != _losses(wrong)


def _losses(dump: Dump) -> list[bytes]:
    return [
        call.outputs[0].load().tobytes()  # type: ignore[union-attr]
        for rank in dump.ranks.values()
        for call in rank.calls.values()
        if call.name == "Functional.cross_entropy" and call.key.endswith("forward")
    ]
