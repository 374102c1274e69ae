"""Find what noise does not explain in a run's losses: evidence for :mod:`telechat_moe.tools.loss.verdict`.

Three kinds of noise are distinguished:

- noise of the step: both runs see a batch slightly differently; it is autocorrelated, of changing size, and averages
  out;
- noise of the run: where runs diverge through rounding alone (:func:`_chaos`), they settle on slightly different
  courses for good. This does not average out. Its size is estimated from the base runs and from a prior, and a smaller
  difference needs evidence from the steps before rounding errors have grown (:func:`_early`);
- noise of single steps: judged by the tail of the noise itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from telechat_moe.narrowing import is_object, is_sequence
from telechat_moe.numerics import Array
from telechat_moe.tools.loss import migration_standard as gates
from telechat_moe.tools.loss import statistics as stats

WANDER = 0.5
"""Prior for the lasting drift between equivalent runs, as a share of the spread of their single steps' difference."""
PRIOR = 8.0
"""Degrees of freedom of that prior."""
ROUNDING = 6e-8
"""Relative rounding error of a float32 loss."""


@dataclass(frozen=True)
class LossSettings:
    """Thresholds of the tests."""

    # A lasting relative difference below this is acceptable (which must be proved, not assumed)
    margin: float = 0.003
    # A lasting difference below this is no divergence, however certain it is
    negligible: float = 0.0005
    spike: float = 0.03  # a difference of a single step below this is no divergence
    # Probability of `diverged` for two equivalent runs; half of it goes to single steps and stretches
    alpha: float = 0.005
    steps: int = gates.STEPS  # the fewest steps for a `pass`


@dataclass(frozen=True)
class CurveFinding:
    """A difference that noise does not explain."""

    # `not finite`, `first loss`, `early departure`, `single step`, `lasting difference` or `passing difference`
    kind: str
    first: int  # first step concerned
    last: int  # last step concerned
    size: float  # relative difference; positive: the target's loss is higher
    low: int  # lower end of the 90 % range of the first step, where it is estimated
    high: int  # upper end of that range
    # Probability of such a difference under noise; None where noise cannot cause it
    p: float | None
    text: str  # the finding in words


@dataclass(frozen=True)
class LossSpike:
    """A jump of the loss: its step, its height over its surroundings in base and target, and which of them has it."""

    step: int
    base: float
    target: float
    where: str


@dataclass
class LossReport:
    """The verdict and its evidence; :meth:`plain` is what ``--json`` writes."""

    # Common steps of the curves; the three fields after it hold their losses there
    steps: Array
    bases: list[Array]  # losses of the base runs
    target: Array  # losses of the judged run
    every: int  # training steps from one value to the next
    settings: LossSettings  # thresholds of the tests
    inputs: list[dict[str, Any]]  # path, kind, metric and steps of each curve
    verdict: str = ""  # pass, diverged or inconclusive
    sentence: str = ""  # the verdict for a person
    # Why it is inconclusive; empty if it is not
    reasons: list[str] = field(default_factory=list[str])
    # What noise does not explain, the earliest first
    findings: list[CurveFinding] = field(default_factory=list[CurveFinding])
    gate: gates.Gate | None = None  # the published standard's answer; None if no step can be judged
    # Mean difference, its error, interval and test; None where noise could not be estimated
    bias: dict[str, float] | None = None
    power: dict[str, float] | None = None  # what difference the test would have found
    # Noise of the differences: `spread` of single steps, `correlation_time` in values, `inflation` of standard
    # errors, `wander` (lasting differences of equivalent runs, as a standard deviation)
    noise: dict[str, float] | None = None
    spikes: list[LossSpike] = field(default_factory=list[LossSpike])  # jumps of either curve
    notes: list[str] = field(default_factory=list[str])  # what a reader should know
    # Relative difference at each step; NaN where a loss is not finite
    difference: Array | None = None
    # Half-width in which the smoothed difference of equivalent runs stays (95 %)
    envelope: Array | None = None

    def plain(self) -> dict[str, Any]:
        """Return the report as plain data without the curves."""
        curves = ("bases", "target", "every", "difference", "envelope")
        ends = self.steps[[0, -1]].tolist() if len(self.steps) else [None, None]
        steps = {"compared": len(self.steps), "first": ends[0], "last": ends[1]}
        return _json({k: v for k, v in vars(self).items() if k not in curves} | {"steps": steps})


def _json(value: Any) -> Any:
    """Return JSON types: an object for a dataclass, null for what is not finite."""
    if is_dataclass(value):
        value = vars(value)
    if is_object(value):
        return {key: _json(item) for key, item in value.items()}
    if is_sequence(value):
        return [_json(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def examine(report: LossReport, finite: Array) -> None:
    """Test the differences at the finite steps; add what is found to the report, unless there are too few steps."""
    settings = report.settings
    indices = np.flatnonzero(finite)
    logs = [np.log(x[indices]) for x in report.bases]
    d = np.log(report.target[indices]) - np.mean(logs, axis=0)
    steps = report.steps[indices]
    if len(d) < 5 * stats.MIN_BLOCKS:
        need = f"statistics need {5 * stats.MIN_BLOCKS} at least"
        report.reasons.append(f"{len(d)} comparable steps; {need}")
        return
    tamed = stats.tame(d)
    white = stats.whiten(tamed)
    share = settings.alpha / 5
    spread = stats.spread(tamed - stats.levels(tamed))
    chaos = _chaos(d, spread)
    factor, margin, apart = _base_noise(report, logs, share, chaos)
    if len(d) / white.time < stats.MIN_BLOCKS:
        report.reasons.append(
            f"the difference is correlated over {white.time:.0f} values; at least "
            f"{int(stats.MIN_BLOCKS * white.time) * report.every:,} steps are needed"
        )
        factor *= 2  # the noise is poorly known: only differences far beyond it count
    blocks = stats.Blocks.of(white).inflated(factor)
    early = chaos and _early(report, d, steps, spread, white.time)
    wander, freedom = _wander(d, logs, spread) if chaos else (0.0, np.inf)
    drifts = chaos and not early
    drift = (stats.t_limit(freedom, share) * wander, apart) if drifts else (0.0, 0.0)
    error = blocks.error if early else float(np.hypot(blocks.error, wander))
    freedom = blocks.freedom if early else min(blocks.freedom, freedom)
    mean = stats.mean_test(blocks.mean, error, freedom, share)
    _single_steps(report, indices, d, share)
    _first_loss(report, d, steps)
    scanned = stats.scan(blocks, 3 * share, settings.negligible)
    _lasting(report, tamed, white, steps, blocks, scanned, drift)
    noise = {"spread": spread, "correlation_time": white.time, "inflation": blocks.inflation}
    report.noise = noise | {"wander": wander}
    low, high = stats.equivalence(blocks)
    bias = {"mean": blocks.mean, "error": error, "low": low, "high": high, "margin": margin}
    report.bias = bias | mean._asdict() | {"effective_steps": len(report.steps) / white.time}
    detectable = stats.detectable(error, 0.95, mean.limit)
    report.power = {"seen_95": detectable, "margin": stats.power(error, margin, mean.limit)}
    report.difference = np.full(len(finite), np.nan)
    report.difference[finite] = d
    report.envelope = _envelope(blocks, wander, finite)


def _chaos(d: Array, spread: float) -> bool:
    """Return whether the runs were almost equal at first, so that their whole difference has grown from rounding."""
    return float(np.sqrt(np.mean(np.square(d[1:9])))) < 0.05 * spread


def _wander(d: Array, logs: Sequence[Array], spread: float) -> tuple[float, float]:
    """Return the standard deviation of lasting differences between equivalent runs, and its degrees of freedom."""
    ratio = 1 + 1 / len(logs)
    variance, freedom = (WANDER * spread) ** 2 / ratio, PRIOR
    if len(logs) > 1:
        late = np.array([x[len(d) // 3 :].mean() for x in logs])
        freedom += len(logs) - 1
        variance = (PRIOR * variance + np.square(late - late.mean()).sum()) / freedom
    return float(np.sqrt(variance * ratio)), freedom


def _early(report: LossReport, d: Array, steps: Array, spread: float, time: float) -> bool:
    """Look for a systematic difference before rounding errors have grown.

    Grown rounding errors change their sign from time to time. A target that computes something else departs smoothly:
    many steps in a row on one side, far above the rounding of the first losses. Such steps are evidence however small
    they are, and a finding if they are not negligible.
    """
    floor = 30 * max(ROUNDING, float(np.abs(d[:2]).max()), _resolution(report))
    grown = np.flatnonzero(np.abs(d) > 0.5 * spread)
    end = int(grown[min(4, len(grown) - 1)]) if len(grown) else len(d)
    side = np.where(np.abs(d[:end]) > floor, np.sign(d[:end]), 0.0)
    change = np.flatnonzero(np.diff(np.concatenate([[0.0], side, [0.0]])))
    runs = [(a, b) for a, b in pairwise(change) if side[a] != 0]
    first, last = max(runs, key=lambda run: run[1] - run[0], default=(0, 0))
    if last - first < max(16, 14 * time):
        return False
    largest = float(d[first:last][np.argmax(np.abs(d[first:last]))])
    a, b = int(steps[first]), int(steps[last - 1])
    text = (
        f"before rounding errors have grown, the target departs to one side in steps {a} to {b}, by up to {100 * largest:+.2g} %; "
        f"equal computations would agree within {100 * floor:.0e} %"
    )
    p = min(1.0, 2.0 ** (1 - (last - first) / time) * end)
    if abs(largest) > report.settings.negligible:
        report.findings.append(CurveFinding("early departure", a, b, largest, a, a, p, text))
    else:
        report.notes.append(text)
    return True


def _resolution(report: LossReport) -> float:
    """Return the relative size of the last digit in the files."""
    values = np.concatenate([report.target[:64], *(b[:64] for b in report.bases)])
    values = values[np.isfinite(values)]
    for digits in range(2, 8):
        if np.allclose(values, np.round(values, digits), rtol=0, atol=1e-9):
            return 10.0**-digits / float(np.median(np.abs(values)))
    return 0.0


def _base_noise(
    report: LossReport, logs: list[Array], share: float, chaos: bool
) -> tuple[float, float, float]:
    """Return by how much base runs exceed noise among themselves, the margin they leave, and their distance.

    Where they diverge through rounding alone, their lasting differences are drift and not badly estimated noise.
    """
    factor, margin, apart = 1.0, report.settings.margin, 0.0
    for base, other in combinations(logs, 2):
        e = stats.tame(other - base)
        apart = max(apart, abs(float(e[len(e) // 3 :].mean())))
        margin = max(margin, abs(float(e.mean())))
        if not chaos:
            blocks = stats.Blocks.of(stats.whiten(e))
            stretch = stats.scan(blocks, 3 * share)
            mean = stats.mean_test(blocks.mean, blocks.error, blocks.freedom, share)
            excess = max(abs(stretch.statistic) / stretch.limit, abs(mean.statistic) / mean.limit)
            # One pair shows such an excess only roughly, so twice the excess is allowed.
            factor = max(factor, 2 * excess if excess > 1 else 1.0)
    if factor > 1:
        report.notes.append(
            f"base runs differ from each other more than noise explains: errors are taken {factor:.1f} times larger"
        )
    if margin > report.settings.margin:
        note = f"base runs differ by {margin:.2%} on average: the margin is relaxed to that"
        report.notes.append(note)
    return factor, margin, apart


def _single_steps(report: LossReport, indices: Array, d: Array, share: float) -> None:
    steps, jumps = report.steps[indices], _jumps(report, indices)
    singles = stats.outliers(d, share, report.settings.spike)
    for run in _events(np.array([index for index, _ in singles], np.int64)):
        index, size = max((s for s in singles if s[0] in run), key=lambda item: abs(item[1]))
        who = "target" if abs(jumps[1][index]) > abs(jumps[0][index]) else "base"
        first, last = int(steps[run[0]]), int(steps[run[-1]])
        place = f"step {first}" if first == last else f"steps {first} to {last}"
        jump = f"{np.expm1(jumps[who == 'target'][index]):+.1%}"
        text = f"{place}: the {who} alone jumps by {jump}, a difference of {np.expm1(size):+.1%}"
        finding = CurveFinding("single step", first, last, size, first, last, share, text)
        report.findings.append(finding)


def _jumps(report: LossReport, indices: Array) -> list[Array]:
    """Return how far the logarithms of the mean base and of the target are above their surroundings."""
    base = np.mean([np.log(x[indices]) for x in report.bases], axis=0)
    curves = base, np.log(report.target[indices])
    return [curve - stats.rolling_median(curve, 51) for curve in curves]


def _events(indices: Array) -> list[Array]:
    """Return indices in groups: neighbouring steps are one event."""
    groups = np.split(indices, np.flatnonzero(np.diff(indices) > 3) + 1)
    return [group for group in groups if len(group)]


def _first_loss(report: LossReport, d: Array, steps: Array) -> None:
    """Judge the first loss, which is computed before any update: noise that grows later does not excuse it."""
    following = d[1:31]
    first = int(steps[0])
    reported = any(f.first == first for f in report.findings)
    gate = report.gate
    if gate is None or gate.first.ok or reported or first != report.steps[0]:
        return
    usual = float(np.sqrt(np.mean(np.square(following))))
    if abs(d[0]) > 10 * usual:
        text = (
            f"first loss (step {first}) off by {np.expm1(d[0]):+.2%}, allowed {gate.first.relative_limit:.2%}; the next "
            f"{len(following)} are off by {usual:.2%}"
        )
        finding = CurveFinding("first loss", first, first, float(d[0]), first, first, None, text)
        report.findings.append(finding)


def _lasting(
    report: LossReport,
    tamed: Array,
    white: stats.Whitened,
    steps: Array,
    blocks: stats.Blocks,
    scanned: stats.StretchTest,
    drift: tuple[float, float],
) -> None:
    """Look for a mean other than 0, over the run or a stretch of it, that equivalent runs do not show.

    ``drift``: how large lasting differences of equivalent runs may be, and how large they are between base runs.
    """
    allowed, shown = drift
    limit = report.settings.negligible
    test = stats.mean_test(blocks.mean, blocks.error, blocks.freedom, report.settings.alpha / 5)
    certain = abs(test.statistic) > test.limit
    part = abs(scanned.statistic) > scanned.limit
    if not part and not (certain and abs(blocks.mean) > limit):
        note = f"a mean difference of {blocks.mean:+.4%} is certain, and negligible"
        report.notes += [f"{note} (below {limit:.2%})"] if certain else []
        return
    first, last, since = _when(tamed, white, blocks, scanned if part else None)
    size = float(tamed[first:last].mean())
    if abs(size) < limit:
        return
    lasting = last == len(tamed)
    start, end, low, high = (int(steps[min(i, len(steps) - 1)]) for i in (first, last - 1, *since))
    p = max(min(test.p, scanned.p), 1e-12)
    when = f"in steps {start} to {end}"
    if lasting:
        when = f"from step {start} on (90 %: {low} to {high})" if first else "from the start"
    side = "higher" if size > 0 else "lower"
    how = _shape(tamed[first:last])
    text = f"the target's loss is {abs(np.expm1(size)):.2%} {side} {when}{how}"
    if abs(size) < allowed:
        text += "; these runs first differ by rounding alone, and then equivalent runs may differ permanently by up to"
        if abs(size) <= max(shown, report.settings.margin):
            report.notes.append(f"{text} {allowed:.2%}")
        else:
            report.reasons.append(f"{text} {allowed:.2%}; more base runs would decide")
        return
    text += f"; noise of single steps does this with a probability of {p:.0e}"
    kind = "lasting difference" if lasting else "passing difference"
    report.findings.append(CurveFinding(kind, start, end, size, low, high, p, text))


def _when(
    tamed: Array, white: stats.Whitened, blocks: stats.Blocks, scanned: stats.StretchTest | None
) -> tuple[int, int, tuple[int, int]]:
    """Return the first index and one past the last index of the difference, and the 90 % range of the first."""
    count, a = len(blocks.means), white.coefficients
    if scanned is None:
        return 0, len(tamed), (0, 0)
    lasting = scanned.last >= count - max(2, count // 20)
    end = len(tamed) if lasting else int(blocks.edges[scanned.last])
    since = stats.onset(tamed[:end], a, blocks.inflation)
    if not lasting:
        reverse = stats.onset(tamed[since.first :][::-1], a, blocks.inflation)
        end = max(since.first + 1, len(tamed) - reverse.first)
    if since.low <= max(5, blocks.edges[1]):
        return 0, end, (0, since.high)
    return since.first, end, (since.low, since.high)


def _shape(d: Array) -> str:
    """Say whether a difference grows or fades, if it clearly does either."""
    if len(d) < 80:
        return ""
    blocks = stats.Blocks.of(stats.whiten(d), max_blocks=40)
    half = len(blocks.means) // 2
    early, late = blocks.means[:half], blocks.means[half:]
    change = float(late.mean() - early.mean())
    variances = np.square(blocks.errors)
    error = np.sqrt(variances[:half].mean() / half + variances[half:].mean() / len(late))
    if abs(change) < 4 * error:
        return ""
    return ", growing" if change * blocks.mean > 0 else ", fading"


def find_spikes(report: LossReport, finite: Array) -> list[LossSpike]:
    """List jumps of either curve, matched within two values."""
    indices = np.flatnonzero(finite)
    if len(indices) < 30:
        return []
    jumps = _jumps(report, indices)
    high = [over > np.maximum(6 * stats.local_spread(over), 0.03) for over in jumps]
    spikes: list[LossSpike] = []
    for group in _events(np.flatnonzero(high[0] | high[1])):
        window = slice(max(0, group[0] - 2), group[-1] + 3)
        base_jumps, target_jumps = (bool(over[window].any()) for over in high)
        curve = "both" if target_jumps and base_jumps else "target" if target_jumps else "base"
        heights = [float(np.expm1(jump[group].max())) for jump in jumps]
        top = group[int(np.argmax(jumps[target_jumps][group]))]
        spikes.append(LossSpike(int(report.steps[indices[top]]), heights[0], heights[1], curve))
    return spikes


def _envelope(blocks: stats.Blocks, wander: float, finite: Array) -> Array:
    """Return the half-width, at each compared step, that the mean over 1/25 of the run keeps under noise (95 %)."""
    middle = (blocks.edges[:-1] + blocks.edges[1:]) / 2
    blocks_per_stretch = len(blocks.means) / 25
    width = 1.96 * np.hypot(blocks.errors / np.sqrt(max(1.0, blocks_per_stretch)), wander)
    index = np.cumsum(finite) - 1
    return np.asarray(np.interp(index, middle, width), np.float64)
