"""A simulated cluster: times of ranks x steps with noise, and causes that are planted in them.

Ranks are pp x dp x tp, tensor-parallel ranks next to each other, eight to a host. Within a step a rank reads, works on the host and
computes; then its tensor-parallel group, its data-parallel group and its pipeline meet, each waiting for its last member.
"""

from dataclasses import dataclass, field

import numpy as np

from telechat_moe.numerics import Array
from telechat_moe.tools.diagnose.causes import KINDS
from telechat_moe.tools.diagnose.records import COMM, Records

HOST = 8
"""Ranks of a host."""
STEP = {"data": 0.006, "host": 0.05, "compute": 0.72}
"""Seconds of a calm step's own parts."""
TRANSFER = {"tp": 0.06, "dp": 0.09, "pp": 0.07}
"""Seconds of a calm step's collectives."""
TOTAL = sum(STEP.values()) + sum(TRANSFER.values())


@dataclass(frozen=True)
class Noise:
    """How times vary; shares of the part. Step to step, drift and spikes are fitted to the CPU time of two ranks of a run (README).

    Attributes:
        each: Standard deviation from step to step.
        drift: That of a slow wave (first-order autoregression) beside it.
        spread: Standard deviation from rank to rank, which lasts.
        spikes: Probability that a step is hit by something.
        spike: Mean length of that (exponential).
        rows: Standard deviation of experts' rows and sequences' work, which computation follows.
    """

    each: float = 0.018
    drift: float = 0.014
    spread: float = 0.003
    spikes: float = 0.009
    spike: float = 0.1
    rows: float = 0.01


@dataclass(frozen=True)
class Planted:
    """A cause: its kind, the ranks, how much later (share of the step, mean of the steps from its onset), onset and period."""

    kind: str
    ranks: tuple[int, ...]
    share: float
    onset: int = 0
    period: int = 1


@dataclass
class Cluster:
    """Degrees and steps of a simulated run."""

    dp: int
    tp: int = 8
    pp: int = 4
    steps: int = 200
    noise: Noise = field(default_factory=Noise)

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.pp

    def places(self) -> tuple[Array, Array, Array]:
        """Return stage, data-parallel and tensor-parallel number of each rank."""
        rank = np.arange(self.ranks)
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def simulate(self, rng: np.random.Generator, planted: tuple[Planted, ...] = ()) -> Records:
        """Return the records of a run."""
        shape = (self.ranks, self.steps)
        n = self.noise
        columns: dict[str, Array] = {}
        common = 1 + 0.01 * rng.standard_normal(self.steps, np.float32)
        rows, work = (1 + n.rows * rng.standard_normal(shape, np.float32) for _ in range(2))
        columns["faults"] = rng.poisson(0.02, shape).astype(np.float32)
        columns["clock"] = 1.8 + 0.004 * rng.standard_normal(shape, np.float32)
        columns["remote"] = np.abs(0.02 * rng.standard_normal(shape, np.float32))
        for name in ("gc", "delay", "paused"):
            columns[name] = np.abs(1e-4 * rng.standard_normal(shape, np.float32))
        columns["save"] = np.zeros(shape, np.float32)
        columns["save"][:, 49::50] = (
            TOTAL * 0.05 * (1 + 0.1 * rng.random((self.ranks, self.steps // 50), np.float32))
        )
        for name, seconds in STEP.items():
            columns[name] = (
                seconds * common * _varied(rng, shape, n, 3.0 if name != "compute" else 1.0)
            )
        columns["compute"] *= 0.4 * rows + 0.6 * (0.5 + 0.5 * work)
        links = {axis: np.ones(shape, np.float32) for axis in TRANSFER}
        for cause in planted:
            self._plant(rng, cause, columns, links, rows, work)
        columns["rows"], columns["work"] = 4096 * rows, 1e6 * work
        return self._meet(rng, columns, links)

    def _plant(
        self,
        rng: np.random.Generator,
        cause: Planted,
        columns: dict[str, Array],
        links: dict[str, Array],
        rows: Array,
        work: Array,
    ) -> None:
        """Put a cause into the times."""
        hit = np.zeros(self.steps, np.float32)
        hit[cause.onset :: cause.period] = 1
        which = list(cause.ranks)
        # Pulses come at their own times on each rank.
        late = (
            np.stack([np.roll(hit, int(rng.integers(cause.period))) for _ in which])
            if cause.period > 1
            else hit
        )
        late = late * (cause.share * cause.period * TOTAL)
        late = late * (1 + 0.1 * rng.standard_normal((len(which), self.steps), np.float32))
        late = np.broadcast_to(late, (len(which), self.steps)).astype(np.float32)
        after = np.arange(self.steps) >= cause.onset
        longer = late / STEP["compute"]
        if cause.kind in ("expert_imbalance", "sequence_imbalance"):
            x, weight = (rows, 0.4) if cause.kind == "expert_imbalance" else (work, 0.3)
            x[which] += longer / weight
        if cause.kind == "frequency_drop":
            columns["clock"][which] /= 1 + longer
        if KINDS[cause.kind].part == "compute":
            columns["compute"][which] *= 1 + longer
        elif cause.kind == "slow_link":
            for axis in ("dp", "pp"):
                links[axis][which] += late / TRANSFER[axis]
        elif KINDS[cause.kind].part in ("gc", "delay", "paused"):
            columns[KINDS[cause.kind].part][which] += late
            columns["host"][which] += late
        else:
            columns[KINDS[cause.kind].part][which] += late
        if cause.kind == "page_cache":
            columns["faults"][which] += rng.poisson(40, late.shape) * (late > 0)
        if cause.kind == "numa":
            columns["remote"][which] += 0.5 * after

    def _meet(
        self, rng: np.random.Generator, columns: dict[str, Array], links: dict[str, Array]
    ) -> Records:
        """Let groups wait for their last members."""
        stage, data, tensor = self.places()
        numbers = {
            "tp": stage * self.dp + data,
            "dp": stage * self.tp + tensor,
            "pp": data * self.tp + tensor,
        }
        at = columns["data"] + columns["host"] + columns["compute"] + columns["save"]
        for axis, number in numbers.items():
            order = np.argsort(number, kind="stable")
            starts = np.flatnonzero(np.diff(number[order], prepend=-1))
            last = np.maximum.reduceat(at[order], starts, axis=0)
            # A ring is as slow as its slowest member's link.
            link = np.maximum.reduceat(links[axis][order], starts, axis=0)
            took = TRANSFER[axis] * link * _varied(rng, link.shape, self.noise, 2.0)
            end = (last + took)[number]
            columns[COMM + axis] = end - at
            at = end
        hosts = np.arange(self.ranks) // HOST
        return Records(
            source=f"a simulated cluster of {self.ranks} ranks",
            ranks=np.arange(self.ranks),
            steps=np.arange(1, self.steps + 1),
            columns=columns,
            stage=stage,
            host=hosts,
            hosts=[f"host{i}" for i in range(int(hosts[-1]) + 1)],
            groups=numbers,
        )


def _varied(rng: np.random.Generator, shape: tuple[int, ...], n: Noise, wider: float) -> Array:
    """Return factors around 1: each rank's own speed, a slow wave, what varies from step to step, and spikes."""
    x = rng.standard_normal(shape, np.float32)
    x *= n.each * wider
    x += n.spread * wider * rng.standard_normal((shape[0], 1), np.float32)
    wave = np.cumsum(rng.standard_normal((shape[0], shape[1] // 10 + 2), np.float32), axis=1)
    wave -= wave.mean(1, keepdims=True)
    wave /= max(float(wave.std()), 1e-9)
    x += n.drift * np.repeat(wave, 10, axis=1)[:, : shape[1]]
    count = rng.poisson(n.spikes * x.size)
    x.ravel()[rng.integers(x.size, size=count)] += rng.exponential(n.spike, count).astype(
        np.float32
    )
    return np.exp(x)


def draw(
    rng: np.random.Generator, cluster: Cluster, causes: int, smallest: float = 0.03
) -> tuple[Planted, ...]:
    """Return as many causes of different kinds on different hosts."""
    kinds = rng.choice(list(KINDS), causes, replace=False)
    hosts = rng.choice(max(cluster.ranks // HOST, causes), causes, replace=False)
    found: list[Planted] = []
    for kind, host in zip(kinds, hosts, strict=True):
        first = int(host) * HOST % cluster.ranks
        rank = first + int(rng.integers(HOST))
        ranks = tuple(range(first, first + HOST)) if kind == "slow_host" else (rank,)
        share = float(np.exp(rng.uniform(np.log(smallest), np.log(0.3))))
        period = int(rng.integers(5, 16)) if KINDS[kind].pulsed else 1
        onset = int(rng.integers(0, cluster.steps // 2)) if rng.random() < 0.5 else 0
        found.append(Planted(str(kind), ranks, share, onset, period))
    return tuple(found)
