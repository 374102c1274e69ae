"""Synthetic loss curves: what two runs share, what each has of its own, and what can be planted.

Both runs see the same batches: most of the noise is common. Each run's own noise is small, autocorrelated, of changing
size, with light or heavy tails. ``chaos`` is what real runs do: equal but for rounding at first, parting
exponentially, then drifting apart for good.
"""

from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from telechat_moe.tools.loss.curve import LossCurve


@dataclass(frozen=True)
class Kind:
    """A family of pairs; noise is relative to the loss."""

    steps: int
    data: float
    ratio: float
    memory: float
    heavy: bool
    growing: bool
    bases: int
    chaos: bool = False


def draw(rng: np.random.Generator, steps: int | None = None, chaos: bool = False) -> Kind:
    """Return a kind by chance; ``ratio`` is the share of a run's own noise in the noise of the data."""
    return Kind(
        steps=int(steps or rng.choice([200, 500, 1000, 2000, 5000], p=[0.2, 0.2, 0.35, 0.15, 0.1])),
        data=float(rng.uniform(0.01, 0.03)),
        ratio=float(rng.choice([0.02, 0.05, 0.1, 0.2], p=[0.25, 0.3, 0.3, 0.15])),
        memory=float(rng.choice([0.0, 0.5, 0.8])),
        heavy=bool(rng.random() < 0.4),
        growing=bool(rng.random() < 0.3),
        bases=int(rng.choice([1, 2, 3], p=[0.6, 0.3, 0.1])),
        chaos=chaos,
    )


def make(rng: np.random.Generator, kind: Kind) -> tuple[list[np.ndarray], np.ndarray]:
    """Return losses of base runs and of one more run that is alike."""
    n = kind.steps
    t = np.arange(1, n + 1)
    fall = (1 + t / rng.uniform(10, 60)) ** -rng.uniform(0.4, 0.9)
    curve = rng.uniform(1.6, 2.6) + rng.uniform(5, 8) * fall
    size = 1 + 1.5 * np.exp(-t / (n / 5))
    common = kind.data * size * noise(rng, n, float(rng.choice([0.0, 0.3, 0.6])), False)
    for k in np.flatnonzero(rng.random(n) < 1 / 400):  # spikes of the data
        k = max(int(k), 5)
        length = min(int(rng.integers(1, 6)), n - k)
        common[k : k + length] += rng.uniform(0.05, 0.5) * np.exp(-np.arange(length) / 2)
    own = kind.ratio * kind.data * size
    if kind.growing:
        own = own * np.minimum(1, t / (n / 2)) ** 0.7
    runs = []
    for _ in range(kind.bases + 1):
        mine = own * noise(rng, n, kind.memory, kind.heavy)
        if kind.chaos:
            mine = _chaos(rng, mine, float(np.median(own)))
        runs.append(curve * np.exp(common + mine))
    return runs[:-1], runs[-1]


def noise(rng: np.random.Generator, n: int, memory: float, heavy: bool) -> np.ndarray:
    """Return an autoregressive series of variance 1."""
    e = rng.standard_t(5, n + 200) / np.sqrt(5 / 3) if heavy else rng.standard_normal(n + 200)
    return lfilter([1.0], [1.0, -memory], e)[200:] * np.sqrt(1 - memory**2)


def _chaos(rng: np.random.Generator, mine: np.ndarray, size: float) -> np.ndarray:
    """Let noise grow out of rounding within some 100 steps, with a drift that stays."""
    t = np.arange(len(mine))
    since = np.maximum(0, t - rng.uniform(20, 60)) / rng.uniform(2, 6)
    grown = 1e-5 * np.exp(np.minimum(since, np.log(1e5)))
    drift = np.cumsum(rng.standard_normal(len(mine))) / np.sqrt(len(mine))
    return grown * (mine + 0.35 * size * drift)


def curve(loss: np.ndarray, name: str = "run.csv", norm: np.ndarray | None = None) -> LossCurve:
    """Return losses as a reader would, in the six decimals of a log."""
    steps = np.arange(1, len(loss) + 1)
    norm = np.full(len(loss), np.nan) if norm is None else norm
    return LossCurve(name, "CSV", "loss", steps, np.round(loss, 6), norm)
