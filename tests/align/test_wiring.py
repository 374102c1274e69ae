"""Whatever a call is handed is looked at: each operator's inputs, doubled one at a time on one rank."""

from collections.abc import Container, Iterator

import numpy as np
import pytest

from benchmarks.align_faults.engine import Planted, Site
from benchmarks.align_faults.layouts import LAYOUTS
from benchmarks.align_faults.score import Base, run, sites_of
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.judge.comparison import ReferenceCache

PHASES = ("forward", "backward", "reduction", "optimizer")
# Shares of a norm, from outside and behind the first backward call: it might be a gradient of an operator not dumped.
NOT_JUDGED = ("Torch.mul", "clip", 1)


def handed(base: Base, phases: Container[str]) -> Iterator[tuple[Site, int, Planted]]:
    """Yield a fault that doubles an input for each input of one call of each kind, on the last rank."""
    last = max(s.ranks[0] for s in sites_of(base))
    seen = set()
    for site in sites_of(base):
        if site.ranks[0] != last or site.phase not in phases or "Distributed." in site.name:
            continue
        for i in range(min(4, len(site.shapes))):
            kind = (site.key.endswith("backward"), site.name, site.tag, i)
            if kind not in seen:
                seen.add(kind)
                yield site, i, Planted(site, "given", doubled(i))


def doubled(place: int):
    def change(ins, *_):
        twice = 2 * ins[place] if ins[place].dtype.kind == "f" else ins[place]
        return [twice if i == place else x for i, x in enumerate(ins)]

    return change


def missed(base: Base, phases: Container[str] = PHASES) -> tuple[int, list[str]]:
    """Return how many inputs were doubled, and those that were not named with call and rank."""
    reference, known = run(base).dump(), ReferenceCache()
    tried, found = 0, []
    for site, i, planted in handed(base, phases):
        target = run(base, planted).dump()
        before = planted.done["before"][i]
        finite = before[np.isfinite(before)]
        if before.dtype.kind != "f" or not np.any(finite):
            continue
        tried += 1
        outcome = bisect(reference, target, known)
        first = outcome.findings[0] if outcome.findings else None
        if first is None or (first.verdict.key, outcome.ranks) != (site.key, [*site.ranks]):
            kind = (site.name, site.tag, i)
            assert kind != NOT_JUDGED or outcome.judged["not judged"] > 0
            if kind != NOT_JUDGED:
                found.append(f"{site.key} of {site.phase}: input {i}")
    return tried, found


@pytest.mark.slow
def test_a_doubled_input_is_seen():
    """The norm before the experts gets a sum over collectives; clipping hands on scalars; the optimizer begins with states."""
    tried, found = missed(Base("tp2 sp", "float16", seed=2), PHASES[1:])
    assert tried > 30
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_doubled_input_is_seen_in_every_layout(layout):
    """``make test-slow GROUP=wiring``; an hour."""
    for dtype in ("float32", "bfloat16", "float16"):
        assert missed(Base(layout, dtype, fused=dtype != "float32", seed=45))[1] == [], dtype
