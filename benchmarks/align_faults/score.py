"""Plant faults, run the tool on them, and count what it finds."""

import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

import numpy as np

import benchmarks.align_faults.classes  # noqa: F401
from benchmarks.align_faults import baselines
from benchmarks.align_faults.engine import Engine, Planted, Site
from benchmarks.align_faults.faults import CLASSES, Fault
from benchmarks.align_faults.kernels import Numerics
from benchmarks.align_faults.layouts import LAYOUTS, RankLayout
from benchmarks.align_faults.model import Model
from benchmarks.align_faults.oracle import seen_on
from benchmarks.align_faults.weights import Shape
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump.records import Dump
from telechat_moe.tools.align.judge import reproduce
from telechat_moe.tools.align.judge.comparison import ReferenceCache
from telechat_moe.tools.align.judge.outcome import Finding, Outcome


@dataclass(frozen=True)
class Base:
    """A right run: what a fault is planted in, or compared with.

    Attributes:
        ties: Whether experts score nearly the same.
        micro: Micro-batches of a step; 0: as the layout has.
        layers: Of the model; 0: as many as the layout needs.
    """

    layout: str
    dtype: str = "float32"
    order: str = "blas"
    fused: bool = True
    steps: int = 1
    seed: int = 0
    ties: bool = False
    micro: int = 0
    layers: int = 0

    @property
    def ranks(self) -> RankLayout:
        """Its layout."""
        layout = LAYOUTS[self.layout]
        return replace(layout, micro=self.micro) if self.micro else layout

    @property
    def shape(self) -> Shape:
        """Sizes of its model."""
        lay = self.ranks
        least = lay.pp * lay.chunks
        layers = self.layers or max(least, 1 + self.seed % 2 if lay.world < 8 else 1)
        return Shape(
            layers=layers,
            fused=self.fused,
            steps=self.steps,
            dense=self.seed % 3 == 2 and layers > 1,
            ties=self.ties,
        )


def run(base: Base, planted: Planted | None = None, seed: int = 0) -> Engine:
    """Run a program."""
    numerics = Numerics(base.dtype, base.order)
    engine = Engine(numerics, planted, seed)
    Model(base.ranks, base.shape, numerics, base.seed, engine).train()
    return engine


@lru_cache(maxsize=2)
def right(base: Base) -> tuple[Dump, ReferenceCache]:
    """Return the dump of a right run, and the data that all comparisons with it share."""
    return run(base).dump(), ReferenceCache()


@lru_cache(maxsize=1024)
def sites_of(base: Base) -> tuple[Site, ...]:
    """Return where faults can be planted in a run."""
    return tuple(run(base).sites)


@dataclass
class Result:
    """The outcome of one planted fault.

    Attributes:
        base: Run that it was planted in.
        ranks: Ranks on which it can be seen; none: it cannot be seen.
        detected: The tool found the run wrong.
        exact: It named call, phase and ranks.
        family: It named the kind.
        said: What it named.
        refires: The reproducer fails again; None: none was made.
        baselines: Of each other method: flagged, and whether it named the call.
    """

    name: str
    area: str
    base: Base
    key: str
    phase: str
    ranks: list[int]
    detected: bool = False
    exact: bool = False
    family: bool = False
    said: str = ""
    refires: bool | None = None
    baselines: dict[str, tuple[bool, bool]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def marks(self) -> tuple[bool, bool, bool, bool]:
        """Whether it is detected, exact, of the right family, and its reproducer fails again."""
        return self.detected, self.exact, self.family, bool(self.refires)


@dataclass
class Stopped:
    """A fault that stops its program because shapes or indices no longer fit, so that no tool has to find it."""

    name: str
    area: str
    base: Base
    key: str
    reason: str


def bases(fault: Fault, layouts: Sequence[str], number: int) -> Iterator[Base]:
    """Yield runs to plant a fault in, in an order that the number draws."""
    rng = np.random.default_rng([zlib.crc32(fault.name.encode()), number])
    for _ in range(200):
        layout = layouts[int(rng.integers(len(layouts)))]
        dtype = fault.dtypes[int(rng.integers(len(fault.dtypes)))]
        fused = bool(rng.integers(2))
        seed = zlib.crc32(f"{layout} {dtype} {fused}".encode()) % 97  # few runs, many faults
        yield Base(layout, dtype, "blas", fused, fault.steps, seed)


def plant(fault: Fault, layouts: Sequence[str], number: int) -> tuple[Base, Planted] | None:
    """Return a run and a perturbation of it; None where no layout has a site for it."""
    for base in bases(fault, layouts, number):
        able = [s for s in sites_of(base) if fault.pick(s)]
        if able:
            rng = np.random.default_rng([zlib.crc32(fault.name.encode()), number, 1])
            site = able[int(rng.integers(len(able)))]
            return base, Planted(site, fault.stage, fault.change(rng))
    return None


def try_fault(fault: Fault, base: Base, planted: Planted, seed: int = 0) -> Result | Stopped:
    """Run with a fault, and let the tool and the other methods judge it.

    Raises:
        RuntimeError: The run does not reach the site.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # faults give infinities
        try:
            engine = run(base, planted, seed)
        except (ValueError, IndexError) as error:
            return Stopped(fault.name, fault.area, base, planted.site.key, str(error))
        if not engine.applied:
            raise RuntimeError(f"{fault.name}: {planted.site.key} was not reached")
        ranks = seen_on(planted, seed)
        found = Result(fault.name, fault.area, base, planted.site.key, planted.site.phase, ranks)
        target = engine.dump()
        reference, known = right(base)
        begin = time.perf_counter()
        outcome = bisect(reference, target, known)
        found.seconds = time.perf_counter() - begin
        _score(found, fault, planted, outcome)
        if outcome.findings and found.ranks:
            found.refires = refires(outcome.findings[0])
        keys = set(planted.site.keys)
        named = baselines.judged(reference, target)
        found.baselines = {n: (key is not None, key in keys) for n, key in named.items()}
        return found


def refires(finding: Finding) -> bool:
    """Return whether a finding's reproducer still fails after it was written to a file and read back."""
    with tempfile.TemporaryDirectory() as folder:
        script = reproduce.write(finding, Path(folder))
        return reproduce.check(script.parent).status == "diverged"


def _score(found: Result, fault: Fault, planted: Planted, outcome: Outcome) -> None:
    found.detected = outcome.verdict == "diverged"
    if not outcome.findings:
        return
    first = outcome.findings[0]
    keys = set(planted.site.keys)
    phase = first.as_json()["phase"]
    found.exact = (
        first.verdict.key in keys
        and phase == planted.site.phase
        and outcome.ranks == sorted(found.ranks)
    )
    found.family = first.family in fault.families
    found.said = f"{first.verdict.key} {phase} {outcome.ranks} {first.family}: {first.evidence or first.verdict.reason}"


def chosen(pattern: str) -> list[Fault]:
    """Return the classes whose name or area fits a pattern."""
    return [f for f in CLASSES.values() if any(fnmatch(n, pattern) for n in (f.name, f.area))]
