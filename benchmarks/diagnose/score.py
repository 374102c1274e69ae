"""Plant causes, judge, count: what was named and right, named and wrong, missed."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from benchmarks.diagnose.cluster import Cluster, Planted, draw
from telechat_moe.tools.diagnose.causes import Cause
from telechat_moe.tools.diagnose.judge import Judge


@dataclass
class Score:
    """Counts by kind."""

    right: Counter[str] = field(default_factory=Counter[str])
    wrong: Counter[str] = field(default_factory=Counter[str])
    missed: Counter[str] = field(default_factory=Counter[str])
    examples: list[str] = field(default_factory=list[str])
    runs_with_wrong: int = 0

    def add(
        self,
        planted: tuple[Planted, ...],
        named: list[Cause],
        allowed: dict[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Count a run. A cause is right with exactly the planted ranks and the one kind, or the set that ``allowed`` proves."""
        left = list(named)
        for one in planted:
            kinds = (allowed or {}).get(one.kind, (one.kind,))
            hit = next(
                (c for c in left if set(c.kinds) == set(kinds) and c.ranks == one.ranks), None
            )
            if hit is None:
                self.missed[one.kind] += 1
                self.examples.append(
                    f"missed {one}; named {[(c.kinds, c.ranks[:9], round(c.share, 4)) for c in named]}"
                )
            else:
                self.right[one.kind] += 1
                left.remove(hit)
        self.runs_with_wrong += bool(left)
        for cause in left:
            self.wrong[cause.kinds[0]] += 1
            self.examples.append(
                f"wrong {cause.kinds, cause.ranks[:9], cause.share, cause.sigmas, cause.scope}; planted {planted}"
            )

    def join(self, other: "Score") -> None:
        """Add the counts of other runs."""
        self.right += other.right
        self.wrong += other.wrong
        self.missed += other.missed
        self.examples += other.examples
        self.runs_with_wrong += other.runs_with_wrong

    def precision(self) -> float:
        """Share of the named causes that are right."""
        right = self.right.total()
        return right / max(right + self.wrong.total(), 1)

    def recall(self) -> float:
        """Share of the planted causes that were named."""
        right = self.right.total()
        return right / max(right + self.missed.total(), 1)


def run(cluster: Cluster, runs: int, causes: int, seed: int) -> Score:
    """Judge simulated runs with so many causes each."""
    score = Score()
    for number in range(runs):
        rng = np.random.default_rng((seed, number))
        planted = draw(rng, cluster, causes) if causes else ()
        score.add(planted, Judge(cluster.simulate(rng, planted)).causes())
    return score
