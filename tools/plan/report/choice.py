"""Say how sure the choice of a layout is under the posterior of the device's constants, and which measurements would decide it.

The time of layout i in draw d is the simulated one, times the ratio of the closed form with the draw's constants to that with the
shipped ones, times a factor of the layout's own. Errors that all layouts share cancel in their order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.collectives import all_gather, all_to_all
from telechat_moe.tools.plan.cost.columns import Floats
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.fitting import probability_of_graph
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.posterior import NINETY, Posterior, predicted, recomputation
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.search.search import SearchResult, search
from telechat_moe.units import GIB, size_text

DRAWS = 200
SHOWN = 6
"""Most layouts that are listed as not told apart."""
LEAST = 0.03
"""Probability to be best below which a layout is not listed."""
NEAR = 0.03
"""Relative difference below which the order of two predictions says nothing: half of such pairs are in the right order."""
MOST = 6
"""Most measurements that are suggested."""
STEP_NOISE, COLLECTIVE_NOISE = 0.01, 0.05
"""Spread of a measured step of 20, and of a measured collective with what its formula does not explain."""
WORTH = 5e-4
"""Regret that another measurement must save to be suggested."""
SEARCH_S = 5.0
"""Seconds of each search with drawn constants."""


@dataclass(frozen=True)
class SimulatedLayout:
    """A layout's step under the shipped constants, and its peak memory."""

    step_s: float
    peak_bytes: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """Something that can be measured in minutes: its name, and the logarithm of its result in each draw."""

    name: str
    value: Floats


def complexity(layout: Layout) -> tuple[bool, int, int, int]:
    """Return what orders layouts from simple to complex: recomputation, how far a layer is divided, stages, small micro-batches."""
    divided = layout.tp * layout.cp
    return recomputation(layout) != "none", divided, layout.pp, -layout.micro_batch


def first_to_try(layouts: Sequence[Layout], seconds: Sequence[float] | Floats) -> list[int]:
    """Return the order in which to try layouts: by time, but of those within `NEAR` of the fastest the simplest is first."""
    order = [int(i) for i in np.argsort(seconds, kind="stable")]
    close = [i for i in order if seconds[i] <= seconds[order[0]] * (1 + NEAR)]
    simplest = min(close, key=lambda i: complexity(layouts[i]))
    return [simplest, *(i for i in order if i != simplest)]


def named(layout: Layout) -> str:
    """Return a layout in words, apart from where its layers are."""
    return layout.with_changes(recompute=recomputation(layout)).short()


def candidates(
    plan: SearchResult,
    posterior: Posterior,
    searches: int,
    limit_s: float,
    progress: Callable[[int, int], object],
) -> dict[Layout, SimulatedLayout]:
    """Return layouts that are fast under the shipped or under drawn constants, simulated under the shipped ones, the fastest first."""
    steps = {
        named(c.layout): (c.layout, SimulatedLayout(c.step_s, c.simulated_bytes))
        for c in reversed(plan.best)
    }
    for i, device in enumerate(posterior.draws(plan.device, searches, seed=2)):
        progress(i, searches)
        drawn = search(plan.architecture, plan.space, device, top=1, limit_s=min(limit_s, SEARCH_S))
        for c in drawn.best[:2]:
            if named(c.layout) not in steps:
                step = simulate_step(plan.architecture, c.layout, plan.device)
                simulated = SimulatedLayout(step.step_s, float(step.peak_bytes.max()))
                steps[named(c.layout)] = c.layout, simulated
    return dict(sorted(steps.values(), key=lambda pair: pair[1].step_s))


def sampled(
    a: Architecture, steps: dict[Layout, SimulatedLayout], device: Device, posterior: Posterior
) -> tuple[Floats, list[Device]]:
    """Return the logarithms of the layouts' times in each draw, [draws, n], and the draws' devices."""
    layouts = list(steps)
    devices = posterior.draws(device, DRAWS)
    pairs = [(a, x) for x in layouts]
    ratio = np.log(predicted(pairs, devices)) - np.log(predicted(pairs, [device]))
    random = np.random.default_rng(3)
    factors = random.multivariate_normal(
        np.zeros(len(layouts)), posterior.own_factors(layouts), DRAWS
    )
    return np.log([x.step_s for x in steps.values()]) + ratio + factors, devices


def regret(times: Floats, chosen: NDArray[Any] | int) -> float:
    """Return the expected regret of a choice, one for all draws or one for each; `times` are logarithms, [draws, n]."""
    picked = times[np.arange(len(times)), np.zeros(len(times), dtype=np.int64) + chosen]
    excess: Floats = np.exp(picked - times.min(axis=1)) - 1
    return float(excess.mean())


def decided(times: Floats, results: Floats) -> float:
    """Return the expected regret once results, [draws, k], are known: the layout is then taken whose expectation is least."""
    design = np.column_stack([np.ones(len(results)), results])
    expected = design @ np.linalg.lstsq(design, times, rcond=None)[0]
    return regret(times, expected.argmin(axis=1))


def possible(
    a: Architecture, layouts: Sequence[Layout], times: Floats, devices: Sequence[Device]
) -> list[Measurement]:
    """Return what could be measured: the layouts themselves, and the collectives that they use most."""
    random = np.random.default_rng(4)
    steps = times + random.normal(0, STEP_NOISE, times.shape)
    out = [
        Measurement(f"20 steps of layout {i}", steps[:, i - 1]) for i in range(1, len(layouts) + 1)
    ]
    calls: set[tuple[str, int, int, int]] = set()
    for x in layouts:
        tokens = x.micro_batch * a.seq / x.cp
        if x.ep > 1:
            calls.add(
                ("all-to-all", x.ep * x.etp, 1, round(2 * tokens / x.tp * a.top_k * a.hidden))
            )
        calls.add(("all-gather", x.tp, 1, round(2 * tokens * a.hidden)))
        calls.add(("all-gather", x.dp * x.cp, x.tp, GIB))
    for kind, members, stride, size in sorted(calls):
        if members > 1:
            group = f"{members} devices" + (f", each {stride} ranks apart" if stride > 1 else "")
            seconds = np.log([collective_s(kind, members, stride, size, d) for d in devices])
            noise = random.normal(0, COLLECTIVE_NOISE, len(devices))
            out.append(Measurement(f"{kind} of {size_text(size)} over {group}", seconds + noise))
    return out


def collective_s(kind: str, members: int, stride: int, size: int, device: Device) -> float:
    """Return the seconds of an all-to-all, ``size`` bytes leaving each member, or of an all-gather to ``size`` bytes."""
    call = all_to_all if kind == "all-to-all" else all_gather
    bytes_, ranks, apart = (np.array([float(n)]) for n in (size, members, stride))
    return float(call(bytes_, ranks, apart, device).sum())


def measurements(times: Floats, options: Sequence[Measurement]) -> list[tuple[str, float]]:
    """Return the measurements that lower the expected regret most, one after the other, with what is left after each."""
    remaining, chosen = regret(times, int(np.exp(times).mean(axis=0).argmin())), list[Measurement]()
    out: list[tuple[str, float]] = []
    while len(chosen) < MOST:
        untried = [m for m in options if m not in chosen]
        if not untried:
            break
        scores = [
            decided(times, np.column_stack([m.value for m in [*chosen, new]])) for new in untried
        ]
        best = int(np.argmin(scores))
        # a single step says nothing of the order by itself; the second one does
        if remaining - scores[best] < WORTH and len(chosen) >= 2:
            break
        chosen.append(untried[best])
        remaining = scores[best]
        out.append((untried[best].name, remaining))
    return out


def choice(
    a: Architecture, steps: dict[Layout, SimulatedLayout], device: Device, posterior: Posterior
) -> dict[str, Any]:
    """Return how sure the choice among layouts is, as plain data: the layouts not told apart, and measurements that decide.

    `steps` are simulated with the shipped constants, the fastest first; that one is always listed.
    """
    layouts, memory = list(steps), device.memory_bytes - device.reserved_bytes
    fits = [probability_of_graph(x.peak_bytes, memory) for x in steps.values()]
    times, devices = sampled(a, steps, device, posterior)
    best = np.bincount(times.argmin(axis=1), minlength=len(layouts)) / DRAWS
    expected = np.exp(times).mean(axis=0)
    order = first_to_try(layouts, expected)
    likely = sorted((i for i in order if best[i] >= LEAST), key=lambda i: -best[i])[:SHOWN]
    shown = [i for i in order if i in likely or i in (0, order[0])]
    wide = NINETY * np.sqrt(times.var(axis=0) + posterior.stack_spread**2)
    centre = times.mean(axis=0)
    compared = [layouts[i] for i in shown]
    return {
        "layouts": [
            {
                "layout": named(layouts[i]), "shipped": i == 0, "probability": float(best[i]), "expected_s": float(expected[i]),
                "low_s": float(np.exp(centre[i] - wide[i])), "high_s": float(np.exp(centre[i] + wide[i])),
                "regret": regret(times, i),
                "fits": fits[i],
            }
            for i in shown
        ],
        "considered": len(layouts),
        "measure": [
            {"what": name, "regret_left": remaining}
            for name, remaining in measurements(times[:, shown], possible(a, compared, times[:, shown], devices))
        ],
        "no_row_has": posterior.missing(a, compared),
        "unmeasured": posterior.unmeasured(a, compared),
    }  # fmt: skip


def lines(data: dict[str, Any]) -> list[str]:
    """Return what `choice` says, as text."""
    out = [
        f"which of {data['considered']} layouts is fastest, by the posterior of the device's constants (90 % intervals); the first to try has an "
        f"expected regret of {data['layouts'][0]['regret']:.1%}:"
    ]
    for i, x in enumerate(data["layouts"], 1):
        out.append(
            f"  {i}. {x['layout']}{' (the first above)' if x['shipped'] else ''}: {x['probability']:.0%} to be fastest, {x['expected_s']:.4g} s "
            f"({x['low_s']:.4g} to {x['high_s']:.4g}), regret {x['regret']:.1%}, fits with {x['fits']:.0%}"
        )
    if data["measure"]:
        out.append("what to measure, and the regret that is left after each:")
        out += [f"  {m['what']}: {m['regret_left']:.1%}" for m in data["measure"]]
    return [*out, data["unmeasured"]] if data["unmeasured"] else out
