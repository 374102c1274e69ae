"""The loads that the benchmark places: recorded, Zipf, shifting and adversarial, all whole numbers of (token, expert) pairs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RECORDED = Path(__file__).parent / "recorded.jsonl"
"""`expert_loads` lines of the metrics.jsonl of runs, with their names; README.md has the commands."""

SIZES = (
    (8, 2), (8, 4), (9, 3), (12, 4), (16, 4), (24, 8), (32, 8), (64, 8), (64, 16), (64, 64), (128, 16), (128, 64), (160, 32),
    (192, 64), (256, 8), (256, 32), (256, 64),
)  # fmt: skip
"""Experts and devices."""

PAIRS = 65536
"""Pairs of a step in the loads that are made here."""

FAMILIES = ("recorded", "zipf", "shifting", "random", "adversarial")


class Loads(NamedTuple):
    """Several loads of one size: `pairs` is `[L, E]` float64 with whole numbers."""

    family: str
    devices: int
    pairs: NDArray[np.float64]


def recorded() -> dict[str, NDArray[np.float64]]:
    """Return the recorded loads of each run, `[steps, layers, experts]`."""
    runs: dict[str, list[object]] = {}
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        runs.setdefault(record["run"], []).append(record["loads"])
    return {name: np.array(steps, np.float64) for name, steps in runs.items()}


def zipf(random: np.random.Generator, count: int, experts: int) -> NDArray[np.float64]:
    """Return shares of Zipf's law with exponents 0.1 to 1.6, in random order, `[count, E]`."""
    power = random.uniform(0.1, 1.6, (count, 1))
    return random.permuted(1 / np.arange(1, experts + 1) ** power, axis=1)


def shifting(random: np.random.Generator, count: int, experts: int) -> NDArray[np.float64]:
    """Return the mean of a window of eight steps in which each expert's popularity walks, `[count, E]`."""
    step = random.uniform(0.05, 0.6, (count, 1, 1))
    walk = (step * random.normal(size=(count, 8, experts))).cumsum(axis=1)
    return np.exp(walk + random.normal(size=(count, 1, experts)) * 0.7).mean(axis=1)


def uneven(random: np.random.Generator, count: int, experts: int) -> NDArray[np.float64]:
    """Return uniform and Dirichlet shares, `[count, E]`."""
    flat = random.uniform(0.02, 1.0, (count, experts))
    drawn = random.gamma(random.choice([0.3, 1.0, 4.0], (count, 1)), size=(count, experts))
    return np.where(random.random((count, 1)) < 0.5, flat, drawn + 1e-6)


def adversarial(
    random: np.random.Generator, count: int, experts: int, devices: int
) -> NDArray[np.float64]:
    """Return loads that mislead greedy methods, `[count, E]`: hidden perfect partitions, two sizes, one hot expert, steps."""
    kind = np.arange(count) % 4
    shares = np.empty((count, experts))
    for row, k in zip(shares, kind, strict=True):
        if k == 0:  # devices can be exactly equal, but each with its own mixture of sizes
            row[:] = random.dirichlet(np.ones(experts // devices), devices).ravel()
        elif k == 1:
            row[:] = random.choice([1.0, random.uniform(1.3, 2.0)], experts)
        elif k == 2:
            row[:] = random.uniform(0.9, 1.1, experts)
            row[random.integers(experts)] = random.uniform(0.2, 1.5) * experts / devices
        else:  # LPT's worst case: 2 D - 1, 2 D - 1, ..., D, D, D
            row[:] = np.maximum(2 * devices - 1 - np.arange(experts) // 2, 1)
    return random.permuted(shares, axis=1)


def drawn(random: np.random.Generator, share_LE: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a step's pairs in these shares, `[L, E]`."""
    share_LE = share_LE / share_LE.sum(axis=1, keepdims=True)
    return np.stack([random.multinomial(PAIRS, p) for p in share_LE]).astype(np.float64)


def windows(random: np.random.Generator, count: int, experts: int) -> NDArray[np.float64]:
    """Return sums of one to eight following records of a layer, of runs with so many experts, `[count, E]`."""
    runs = [run for run in recorded().values() if run.shape[2] == experts]
    found: list[NDArray[np.float64]] = []
    for _ in range(count):
        run = runs[random.integers(len(runs))]
        start, width = random.integers(len(run) - 8), random.integers(1, 9)
        found.append(run[start : start + width, random.integers(run.shape[1])].sum(axis=0))
    return np.array(found)


def batches(total: int, layers: int = 61, seed: int = 0) -> Iterator[Loads]:
    """Yield `total` loads, as many of each family and size, in batches of up to `layers`."""
    random = np.random.default_rng(seed)
    shares = {"zipf": zipf, "shifting": shifting, "random": uneven}
    own = {run.shape[2] for run in recorded().values()}
    for family in FAMILIES:
        sizes = [s for s in SIZES if family != "recorded" or s[0] in own]
        ends = np.linspace(0, total // len(FAMILIES), len(sizes) + 1).astype(int)
        for (experts, devices), first, end in zip(sizes, ends[:-1], ends[1:], strict=True):
            for start in range(first, end, layers):
                count = min(layers, end - start)
                if family == "recorded":
                    load_LE = windows(random, count, experts)
                elif family == "adversarial":
                    share_LE = adversarial(random, count, experts, devices)
                    load_LE = np.rint(share_LE / share_LE.sum(axis=1, keepdims=True) * PAIRS)
                else:
                    load_LE = drawn(random, shares[family](random, count, experts))
                yield Loads(family, devices, load_LE)


def sequences(decisions: int, seed: int = 0) -> Iterator[tuple[str, int, NDArray[np.float64]]]:
    """Yield name, devices and the loads of decisions in a row, `[decisions, L, E]`, for each kind of change."""
    random = np.random.default_rng(seed)
    layers = 8
    for name, run in recorded().items():
        width = len(run) // decisions
        means = run[: width * decisions].reshape(decisions, width, *run.shape[1:]).sum(axis=1)
        for devices in (run.shape[2] // 4, run.shape[2] // 2):
            yield f"recorded ({name})", devices, means
    for experts, devices in ((64, 8), (64, 16), (256, 32), (256, 64)):
        base_LE = random.normal(size=(layers, experts))
        walk = 0.1 * random.normal(size=(decisions, layers, experts)).cumsum(axis=0)
        yield "drift", devices, np.stack([drawn(random, np.exp(base_LE + w)) for w in walk])
        share_LE, found = zipf(random, layers, experts), []
        for _ in range(decisions):  # a twentieth of the experts trade places
            for row in share_LE:
                some = random.choice(experts, max(2, experts // 20), replace=False)
                row[some] = row[random.permutation(some)]
            found.append(drawn(random, share_LE))
        yield "Zipf, places traded", devices, np.stack(found)
        fresh = [drawn(random, uneven(random, layers, experts)) for _ in range(decisions)]
        yield "all new each time", devices, np.stack(fresh)
