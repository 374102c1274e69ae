"""Faults in dumps that cannot be recomputed, compared with another program: how many does `align bisect` name?

    python -m benchmarks.align_faults.incomplete --faults 60 --clean 60

Each pair differs legally, too: the target computes in float32, bfloat16 or float16 and adds up in another order. Both
dumps then lack something: ``weights`` (weights, biases and scalars of layers), ``vendor`` (every operator has a name
that nobody knows) or ``statistics`` (values); ``complete`` lacks nothing. With ``--noise fusion`` one of the programs is
fused, with ``--noise layout`` they have two layouts of one batch. A fault answered "inconclusive" is missed.
Exit codes: 0, and 1 if a right pair is called wrong.
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from benchmarks.align_faults import baselines, suite
from benchmarks.align_faults.engine import Planted
from benchmarks.align_faults.faults import CLASSES
from benchmarks.align_faults.oracle import seen_on
from benchmarks.align_faults.score import Base, plant, run, sites_of
from telechat_moe.cli.output import show_table
from telechat_moe.tools.align.across_layouts import across
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump.records import Call, Dump, Phase, TensorRecord, Value
from telechat_moe.tools.align.dump.value_files import stats
from telechat_moe.tools.align.judge.outcome import Outcome

LAYOUTS = ["one", "dp2", "tp2"]
_WEIGHTED = {"linear", "embedding", "rms_norm", "layer_norm"}
_KEPT = {"Distributed", "Optimizer"}


def _name(name: str) -> str:
    family, _, rest = name.partition(".")
    return name if family in _KEPT else f"{family}.npu_{rest}_x"


def _vendor(call: Call) -> Call:
    name = _name(call.name)
    return replace(call, name=name, key=call.key.replace(call.name, name, 1))


def _weights(call: Call) -> Call:
    if call.phase is not Phase.FORWARD or call.name.rpartition(".")[2] not in _WEIGHTED:
        return call
    kwargs = {n: v for n, v in call.kwargs.items() if n not in ("weight", "eps", "bias")}
    return replace(call, inputs=call.inputs[:1], kwargs=kwargs)


def _statistics(place: str, value: Value) -> Value:
    if isinstance(value, TensorRecord):
        return replace(value, stats=stats(value.load()), read=None)
    return value


DUMPS: Mapping[str, Callable[[Call], Call]] = {
    "complete": lambda call: call,
    "weights": _weights,
    "vendor": _vendor,
    "statistics": lambda call: call.changed(_statistics, results=True),
}


def less(dump: Dump, kind: str) -> Dump:
    """Return a dump that lacks what the kind says."""
    change, ranks = DUMPS[kind], {}
    for place, rank in dump.ranks.items():
        calls = [change(call) for call in rank.calls.values()]
        ranks[place] = replace(rank, calls={call.key: call for call in calls})
    return Dump(dump.root, ranks)


def noise(rng: np.random.Generator) -> tuple[str, str]:
    """Return another type and order of sums."""
    dtype = ("float32", "bfloat16", "float16")[int(rng.choice(3, p=[0.5, 0.3, 0.2]))]
    return dtype, ("split", "reversed", "wide")[int(rng.integers(3))]


def pair_of(base: Base, other: str) -> tuple[Base, Base]:
    """Return a reference and a target that differ in fusion or layout; ``sums``: in neither."""
    if other == "layout":
        return suite.in_layout(base, "tp2" if base.layout == "one" else "one")
    return replace(base, fused=base.fused != (other == "fusion")), base


Named = dict[str, str | None]


def judged(theirs: Dump, ours: Dump) -> tuple[Outcome, Named]:
    """Return the outcome, and what other methods name in dumps of one layout."""
    if [*theirs.ranks] != [*ours.ranks]:
        return across(theirs, ours), dict.fromkeys(baselines.METHODS)
    return bisect(theirs, ours), baselines.judged(theirs, ours)


def right(kind: str, number: int, seed: int, other: str) -> tuple[str, Named]:
    """Return the verdict on a right pair, and what other methods name in it."""
    rng = np.random.default_rng([seed, number, 2])
    base = Base(LAYOUTS[number % 3], seed=int(rng.integers(1000)), ties=bool(rng.integers(2)))
    dtype, order = noise(rng)
    reference, target = pair_of(base, other)
    pair = reference, replace(target, dtype=dtype, order=order)
    outcome, named = judged(*(less(run(one).dump(), kind) for one in pair))
    return outcome.verdict, named


def wrong(
    kind: str, number: int, seed: int, other: str
) -> tuple[str, bool, dict[str, bool]] | None:
    """Return the verdict on a fault, and whether its call is named, also by other methods.

    None: it has no place, or shows nowhere.
    """
    rng = np.random.default_rng([seed, number, 1])
    fault = [*CLASSES.values()][int(rng.integers(len(CLASSES)))]
    planned = plant(fault, LAYOUTS, int(rng.integers(100_000)))
    if planned is None:
        return None
    base, planted = planned
    dtype, order = noise(rng)
    believed, base = pair_of(base, other)
    target = replace(base, dtype=dtype if base.dtype == "float32" else base.dtype, order=order)
    able = [s for s in sites_of(target) if fault.pick(s) and s.key == planted.site.key]
    if not able:
        return None
    planted = Planted(able[0], fault.stage, fault.change(rng))
    try:
        engine = run(target, planted)
    except (ValueError, IndexError):
        return None  # it stops its program
    if not engine.applied or not seen_on(planted, 0):
        return None
    reference = run(replace(believed, dtype="float32", order="blas")).dump()
    outcome, theirs = judged(less(reference, kind), less(engine.dump(), kind))
    name = _name(able[0].name) if kind == "vendor" else able[0].name
    keys = {key.replace(able[0].name, name, 1) for key in able[0].keys}
    named = bool(outcome.findings) and outcome.findings[0].verdict.key in keys
    others = {n: key in keys for n, key in theirs.items()}
    return outcome.verdict, named, others


def main() -> int:
    """Run, print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dumps", choices=[*DUMPS], nargs="+", default=[*DUMPS])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--clean", type=int, default=60)
    parser.add_argument("--noise", choices=["sums", "fusion", "layout"], default="sums")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # faults give infinities
    rows: list[list[object]] = []
    peers: list[list[object]] = []
    for kind in args.dumps:
        begin = time.perf_counter()
        pairs = [right(kind, i, args.seed, args.noise) for i in range(args.clean)]
        clean = Counter(verdict for verdict, _ in pairs)
        tried = (wrong(kind, i, args.seed, args.noise) for i in range(args.faults))
        found = [one for one in tried if one is not None]
        detected = sum(verdict == "diverged" for verdict, *_ in found)
        exact = sum(named for _, named, _ in found)
        for method in baselines.METHODS:
            alarms = sum(named[method] is not None for _, named in pairs)
            peers.append([kind, method, sum(named[method] for *_, named in found), alarms])
        verdicts = [clean["diverged"], clean["pass"], clean["inconclusive"]]
        rows.append(
            [kind, len(found), detected, exact, *verdicts, f"{time.perf_counter() - begin:.0f}"]
        )
    titles = ["dumps", "faults ", "detected ", "exact "]
    show_table([*titles, "alarms ", "pass ", "inconclusive ", "s "], rows)
    print()
    show_table(["dumps", "other method", "exact ", "alarms "], peers)
    return int(any(row[4] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
