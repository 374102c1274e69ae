"""Statistics of the difference between two loss curves: is it noise, and if not, since when and how large?

The input is always d, the relative difference ``ln(target) - ln(base)`` at each compared step. It is free of the noise
that both runs share (the batches); what is left is autocorrelated and of changing size. In this order:

1. :func:`tame` clips single steps that deviate strongly, so that a spike is no bias;
2. :func:`whiten` removes autocorrelation and keeps means (y = (d_t - sum a_i d_t-i) / (1 - sum a_i));
3. :class:`Blocks` are means of y over some steps, nearly independent, each with a variance estimated from neighbours;
4. :func:`mean_test`, :func:`scan` and :func:`equivalence` judge the blocks; :func:`onset` dates a change by step.

All differences are fractions: 0.003 is 0.3 %.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np

from telechat_moe.numerics import Array

FLOOR = 1e-9
"""Relative noise below which losses are equal for every purpose (a float32 loss has 6e-8)."""
MIN_BLOCKS = 24
"""The fewest independent blocks for a test."""


class Whitened(NamedTuple):
    """A difference without its autocorrelation; ``y[i]`` belongs to ``d[i + len(coefficients)]``."""

    y: Array
    coefficients: Array
    time: float
    """Correlation time: how many steps weigh as much as one independent step."""


def spread(values: Array) -> float:
    """Return a standard deviation estimated from distances from the median.

    It uses the median distance, or the ninetieth percentile if that gives more, as where most values are equal.
    """
    n = len(values)
    if n == 0:
        return 0.0
    ordered = np.sort(values)
    away = np.sort(np.abs(values - (ordered[(n - 1) // 2] + ordered[n // 2]) / 2))
    return float(max(1.4826 * away[n // 2], 0.6080 * away[min(n - 1, int(0.9 * n))]))


def local_spread(values: Array, width: int = 60) -> Array:
    """Return the spread around each value, from bins of ``width``; never below :data:`FLOOR`."""
    n = len(values)
    bins = max(1, n // width)
    edges = np.linspace(0, n, bins + 1).astype(int)
    spreads = [spread(values[a:b]) for a, b in pairwise(edges)]
    # A bin in which almost all values are equal has no spread although its values differ.
    floor = np.sqrt(np.mean(np.square(values))) * 1e-3
    middle = (edges[:-1] + edges[1:] - 1) / 2
    return np.maximum(np.interp(np.arange(n), middle, spreads), max(FLOOR, float(floor)))


def rolling_median(values: Array, width: int) -> Array:
    """Return the median over a centred window of an odd width; beyond the ends the values are mirrored."""
    from scipy.ndimage import median_filter

    return median_filter(values, min(width, len(values) | 1), mode="mirror")


def levels(d: Array) -> Array:
    """Return the best fit of d by two levels, or by three if the third explains a quarter of the remaining variance."""
    pieces = np.split(d, [_split(d)])
    fits = [np.full(len(piece), piece.mean()) for piece in pieces]
    rests = [float(np.square(p - f).sum()) for p, f in zip(pieces, fits, strict=True)]
    finer = list(fits)
    gains = [0.0, 0.0]
    for i, piece in enumerate(pieces):
        if len(piece) >= 40:
            halves = np.split(piece, [_split(piece)])
            finer[i] = np.concatenate([np.full(len(half), half.mean()) for half in halves])
            gains[i] = rests[i] - float(np.square(piece - finer[i]).sum())
    best = int(np.argmax(gains))
    if gains[best] > sum(rests) / 4:
        fits[best] = finer[best]
    return np.concatenate(fits)


def _split(d: Array) -> int:
    """Return the index at which the means before and after differ most clearly, at least a tenth from either end."""
    n = len(d)
    k = np.arange(1, n)
    gain = np.abs(np.cumsum(d - d.mean())[:-1]) / np.sqrt(k * (n - k))
    trim = max(1, n // 10)
    return trim + int(np.argmax(gain[trim - 1 : n - trim]))


def tame(d: Array, limit: float = 4.5) -> Array:
    """Return d with deviations from the surroundings clipped to ``limit`` spreads."""
    level = rolling_median(d, 31)
    bound = limit * local_spread(d - level)
    return level + np.clip(d - level, -bound, bound)


def whiten(d: Array, max_order: int = 6) -> Whitened:
    """Fit an autoregressive model to the noise of d and remove it.

    The order (0 to ``max_order``) is chosen by the Bayesian information criterion; a change of level or of the noise's size is none.
    """
    residual = d - levels(d)
    # Stretches of little noise, such as before rounding errors have grown, say nothing about the rest.
    scale = local_spread(residual)
    unit = residual / np.maximum(scale, np.median(scale) / 2)
    n = len(unit)
    lags = np.array([unit[: n - k] @ unit[k:] for k in range(max_order + 1)]) / n
    if lags[0] <= 0:
        return Whitened(d, np.zeros(0), 1.0)
    rho = lags / lags[0]
    best: tuple[float, Array] = (n * 0.0, np.zeros(0))
    for order in range(1, max_order + 1):
        matrix = rho[np.abs(np.subtract.outer(np.arange(order), np.arange(order)))]
        a = cast("Array", np.linalg.solve(matrix, rho[1 : order + 1]))
        error = max(1e-12, float(1 - a @ rho[1 : order + 1]))
        score = n * np.log(error) + order * np.log(n)
        if score < best[0]:
            best = (score, a)
    a = best[1]
    if len(a):
        # The estimated correlation is too small by about (1 + 3 rho) / n.
        total = float(a.sum())
        larger = 1.0 + (1 + 3 * max(total, 0.0)) / n / max(abs(total), 0.05)
        a = a * min(larger, 0.995 / max(total, 0.01))
    gain = 1 - float(a.sum())
    y = d[len(a) :].copy()
    for lag, weight in enumerate(a, start=1):
        y -= weight * d[len(a) - lag : len(d) - lag]
    error = max(1e-12, float(1 - a @ rho[1 : len(a) + 1])) if len(a) else 1.0
    return Whitened(y / gain, a, max(1.0, error / gain**2))


@dataclass(frozen=True)
class Blocks:
    """Means of whitened differences over blocks of nearly equal length."""

    means: Array  # mean of each block
    edges: Array  # index of each block's first difference in d, and one past the last
    # Factor on standard errors: 1, or more where long blocks vary more than short ones suggest, or where base runs
    # differ from each other more than noise explains
    inflation: float = 1.0

    @classmethod
    def of(cls, white: Whitened, max_blocks: int = 120) -> "Blocks":
        """Divide whitened differences into at most ``max_blocks`` blocks of 5 steps or more."""
        n = len(white.y)
        count = max(1, min(max_blocks, n // 5))
        edges = np.linspace(0, n, count + 1).astype(np.int64)
        sums = np.concatenate([[0.0], np.cumsum(white.y)])
        means = np.diff(sums[edges]) / np.diff(edges)
        # The correlation is an estimate: what exceeds one standard error adds to the noise.
        unsure = 1 + 1.5 * np.sqrt(white.time / n) if len(white.coefficients) else 1.0
        return cls(means, edges + len(white.coefficients), _excess(means) * float(unsure))

    def inflated(self, factor: float) -> "Blocks":
        """Return the same blocks with larger errors."""
        return Blocks(self.means, self.edges, self.inflation * factor)

    @cached_property
    def errors(self) -> Array:
        """The standard error of each block's mean, a fraction of the loss."""
        return self.inflation * np.sqrt(_variances(self.means[None]))[0]

    @property
    def mean(self) -> float:
        """The mean difference over the run, a fraction of the loss."""
        return float(self.means.mean())

    @property
    def error(self) -> float:
        """The standard error of :attr:`mean`, a fraction of the loss."""
        return float(np.sqrt(np.mean(np.square(self.errors)) / len(self.means)))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of :attr:`error`: differences of neighbours have two thirds of the number of blocks."""
        return max(1.0, 2 / 3 * len(self.means))


def _variances(means: Array) -> Array:
    """Return the variance of each block of each row, from squared differences of neighbours, smoothed."""
    squares = np.square(np.diff(means, axis=1)) / 2
    count = squares.shape[1]
    half = min(12, (count - 1) // 2)
    sums = np.concatenate([np.zeros((len(means), 1)), np.cumsum(squares, axis=1)], axis=1)
    positions = np.arange(count + 1)
    low, high = np.maximum(positions - half, 0), np.minimum(positions + half, count)
    return np.maximum((sums[:, high] - sums[:, low]) / (high - low), FLOOR**2)


def _excess(means: Array) -> float:
    """Return the excess variation of long blocks over independent short ones, as a standard deviation.

    Two equivalent runs drift apart and back over hundreds of steps; no short-range model of the noise covers that.
    """
    variance = 1.0
    means = means - levels(means) if len(means) >= 40 else means  # a change of level is no noise
    squares = np.square(np.diff(means)).mean()
    for factor in (4, 12):
        count = len(means) // factor
        if count < 6 or squares == 0:
            break
        longer = means[-count * factor :].reshape(count, factor).mean(axis=1)
        variance = max(variance, factor * float(np.square(np.diff(longer)).mean() / squares))
    return float(np.sqrt(variance))


class MeanTest(NamedTuple):
    """The test whether the mean difference over the whole run is 0."""

    statistic: float
    limit: float
    p: float


def t_limit(freedom: float, alpha: float) -> float:
    """Return the limit that the size of Student's t exceeds with a probability of ``alpha``."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - alpha / 2))


def mean_test(mean: float, error: float, freedom: float, alpha: float) -> MeanTest:
    """Test whether a mean with this standard error is 0, two-sided at level ``alpha``."""
    from scipy.special import stdtr

    t = mean / error
    return MeanTest(t, t_limit(freedom, alpha), float(2 * stdtr(freedom, -abs(t))))


class StretchTest(NamedTuple):
    """The stretch of blocks that is least like noise.

    ``first`` and ``last`` are block numbers (``last`` is one past), ``statistic`` is its mean over its error, ``limit``
    the value that noise exceeds with probability alpha, ``p`` the probability of such a stretch anywhere under noise.
    """

    first: int
    last: int
    statistic: float
    limit: float
    p: float


def scan(
    blocks: Blocks, alpha: float, min_size: float = 0.0, draws: int = 400, seed: int = 0
) -> StretchTest:
    """Search all stretches of the run for a mean other than 0, at least of size ``min_size``.

    Noise alone is simulated by random signs: in equivalent runs each block's difference could have the other one.
    """
    generator = np.random.default_rng(seed)
    count = len(blocks.means)
    firsts, lasts = _stretches(count)
    observed = _statistics(blocks.means[None], firsts, lasts)[0] / blocks.inflation
    sums = np.concatenate([[0.0], np.cumsum(blocks.means)])
    observed[np.abs(sums[lasts] - sums[firsts]) < min_size * (lasts - firsts)] = 0.0
    best = int(np.argmax(np.abs(observed)))
    signs = generator.choice(np.array([-1.0, 1.0]), size=(draws, count))
    null = np.abs(_statistics(blocks.means * signs, firsts, lasts)).max(axis=1)
    # The largest of many statistics follows Gumbel's law; its two constants from mean and spread of the draws.
    scale = max(0.05, float(null.std())) * np.sqrt(6) / np.pi  # 0 where there is no noise
    place = float(null.mean()) - 0.5772156649 * scale
    top = float(abs(observed[best]))
    p = float(-np.expm1(-np.exp(-(top - place) / scale)))
    limit = float(place - scale * np.log(-np.log1p(-alpha)))
    return StretchTest(int(firsts[best]), int(lasts[best]), float(observed[best]), limit, p)


@lru_cache(maxsize=64)
def _stretches(count: int) -> tuple[Array, Array]:
    """Return first and last block (one past) of the stretches to test: all that reach the end, others by length."""
    pairs = {(k, count) for k in range(count - 2)}
    length = 3
    while length < count:
        pairs |= {(k, k + length) for k in range(count - length + 1)}
        length = max(length + 1, int(length * 1.35))
    stretches = np.array(sorted(pairs), np.int64)
    return stretches[:, 0], stretches[:, 1]


def _statistics(means: Array, firsts: Array, lasts: Array) -> Array:
    def sums(values: Array) -> Array:
        total = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
        return total[:, lasts] - total[:, firsts]

    return sums(means) / np.sqrt(sums(_variances(means)))


class Onset(NamedTuple):
    """When a difference began: the likeliest index in d, and its 90 % range."""

    first: int
    low: int
    high: int


def onset(d: Array, coefficients: Array, doubt: float = 1.0) -> Onset:
    """Date the step from 0 to a level that lasts to the end, by maximum likelihood under the fitted noise.

    The differences are tamed, the coefficients are those of their noise; ``doubt`` times the noise widens the range.
    """
    order = len(coefficients)
    taps = np.concatenate([[1.0], -coefficients])
    noise = np.convolve(d, taps, "valid")
    level = np.cumsum(taps)  # the response of the noise model to a unit step
    final = float(level[-1])
    residual = noise - rolling_median(noise, 101)
    weight = 1 / np.square(local_spread(residual, 200))
    size = len(noise)
    tail_up = np.cumsum((weight * noise)[::-1])[::-1] * final
    tail_down = np.cumsum(weight[::-1])[::-1] * final**2
    for j in range(order):
        shift = np.zeros(size)
        shift[: size - j] = (weight * noise)[j:]
        tail_up += (level[j] - final) * shift
        shift[: size - j] = weight[j:]
        shift[size - j :] = 0
        tail_down += (level[j] ** 2 - final**2) * shift
    last = max(1, size - 3)
    gain = (np.square(tail_up) / tail_down / 2)[:last]
    chance = np.exp((gain - gain.max()) / doubt**2)
    share = np.cumsum(chance) / chance.sum()
    likeliest = int(np.argmax(gain))
    low, high = (int(i) for i in np.searchsorted(share, [0.05, 0.95]))
    return Onset(likeliest + order, min(low, likeliest) + order, max(high, likeliest) + order)


def equivalence(blocks: Blocks, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Return the 90 % interval of the mean from a bootstrap over blocks.

    Two one-sided tests at 5 % each show equivalence within a margin if the whole interval is within it.
    """
    generator = np.random.default_rng(seed)
    count = len(blocks.means)
    picks = generator.integers(0, count, size=(draws, count))  # pyright: ignore[reportUnknownMemberType]
    # Resampling repeats each block's deviation; count / (count - 1) undoes its loss of variance.
    deviation = (blocks.means[picks].mean(axis=1) - blocks.mean) * np.sqrt(count / (count - 1))
    ends = cast("Array", np.quantile(deviation * blocks.inflation, [0.05, 0.95]))
    return blocks.mean - float(ends[1]), blocks.mean - float(ends[0])


def power(error: float, bias: float, limit: float) -> float:
    """Return the probability that :func:`mean_test` with this limit finds a lasting bias."""
    from scipy.special import ndtr

    ratio = abs(bias) / error
    return float(ndtr(ratio - limit) + ndtr(-ratio - limit))


def detectable(error: float, chance: float, limit: float) -> float:
    """Return the lasting bias that :func:`mean_test` finds with a probability of ``chance``."""
    from scipy.special import ndtri

    return float((limit + ndtri(chance)) * error)


def outliers(d: Array, alpha: float, min_size: float) -> list[tuple[int, float]]:
    """Return the indices and sizes of single differences that exceed what the tail of the noise explains.

    In equivalent runs, positive and negative differences have the same tail: each side is judged by the other one's
    (Hill's estimate over the largest fiftieth), so that noise with heavy tails is no finding. The probability of any
    finding under noise is ``alpha``; differences below ``min_size`` are none.
    """
    from scipy.ndimage import maximum_filter1d

    level = rolling_median(d, 31)
    # Where noise sets in, its size just afterwards counts.
    scale = maximum_filter1d(local_spread(d - level), 121, mode="nearest")
    unit = (d - level) / scale
    differences: list[tuple[int, float]] = []
    for sign in (1.0, -1.0):
        other = np.sort(np.maximum(-sign * unit, 0.0))[::-1]
        count = max(10, len(d) // 50)
        if len(other) <= count:
            continue
        top, base = np.maximum(other[:count], 1e-3), max(float(other[count]), 2.0)
        slope = max(float(np.mean(np.log(np.maximum(top / base, 1.0)))), 1 / 5)
        limit = base * (count / (alpha / 2)) ** slope
        hits = np.flatnonzero((sign * unit > limit) & (np.abs(d - level) > min_size))
        differences += [(int(i), float(d[i] - level[i])) for i in hits]
    return sorted(differences)
