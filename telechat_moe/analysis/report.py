"""What is known of the experts of a run: loads over time, and what routers do at checkpoints; as plain data for `--json`.

Shapes: N records, L MoE layers, E experts, D domains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from telechat_moe.analysis.statistics import ALPHA, ExpertPairs, Specialisation, overload
from telechat_moe.moe.loads import dead_experts, entropy, hot_experts
from telechat_moe.numerics import Array

PAIRS = 8
"""Pairs of experts of a layer that are listed."""


@dataclass(frozen=True, kw_only=True)
class LoadHistory:
    """The load of every expert over time.

    Attributes:
        step_N: Last step of each record.
        load_NLE: Tokens that an expert got in a step, mean since the record before.
        recording_share: Share of the run's time that recording took.
    """

    step_N: list[int]  # noqa: N815
    load_NLE: Array  # noqa: N815
    recording_share: float

    def overloads(self) -> Array:
        """Return the load of the busiest expert over the mean, ``[N, L]``."""
        return overload(self.load_NLE)


@dataclass(frozen=True, kw_only=True)
class RouterState:
    """What the routers of a checkpoint do on the text; a number for each MoE layer.

    Attributes:
        overload: Load of the busiest expert over the mean.
        entropy: Mean entropy of a token's scores over the experts, 0 to 1.
        margin: Median of by how much the last chosen expert was ahead of the next; None: there is no next one.
        margin_low: Tenth percentile of that.
        routed: Norm of what the routed experts add over that of the residual stream before, mean over tokens.
        shared: The same of the shared expert; None without one.
        routed_share: Norm of the routed part over the sum of both norms; None without a shared expert.
        flipped: Share of tokens that chose other experts at the checkpoint before; None at the first.
        replaced: Share of choices that differ from the checkpoint before.
    """

    step: int
    overload: list[float]
    entropy: list[float]
    margin: list[float | None]
    margin_low: list[float | None]
    routed: list[float]
    shared: list[float | None]
    routed_share: list[float | None]
    flipped: list[float] | None
    replaced: list[float] | None


@dataclass(frozen=True)
class Favourite:
    """A token that an expert takes more often than its load explains, how often, and the ratio to that."""

    token: str
    times: int
    ratio: float


@dataclass(kw_only=True)
class ExpertReport:
    """Everything about the experts of a run.

    Attributes:
        layers: Names of the MoE layers.
        tokens: Tokens of the text; 0: none was computed.
        text: What the text is.
        domains: Its domains, with the number of sequences of each.
        together: For each layer, which experts serve the same tokens.
        following: For each layer but the last, which experts of it and of the next serve the same tokens.
        favourites: For each layer and expert, tokens that it prefers.
        problems: What is wrong.
        not_judged: Sections that are not judged, and why.
    """

    run: str
    layers: list[str]
    experts: int
    top_k: int
    load: LoadHistory | None = None
    tokens: int = 0
    text: str = ""
    domains: dict[str, int] = field(default_factory=dict[str, int])
    checkpoints: list[RouterState] = field(default_factory=list[RouterState])
    specialisation: Specialisation | None = None
    together: list[ExpertPairs] = field(default_factory=list[ExpertPairs])
    following: list[ExpertPairs] = field(default_factory=list[ExpertPairs])
    favourites: list[list[list[Favourite]]] = field(default_factory=list[list[list[Favourite]]])
    problems: list[str] = field(default_factory=list[str])
    not_judged: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def neighbours(self) -> list[str]:
        """Names of the pairs of layers of ``following``."""
        return [f"{a} to {b}" for a, b in pairwise(self.layers)]

    @property
    def verdict(self) -> str:
        """``fail`` if something is wrong, ``not judged`` if dead experts are not known, else ``pass``."""
        if self.problems:
            return "fail"
        return "pass" if self.load is not None else "not judged"

    def says(self) -> str:
        """Return the verdict as a part of a sentence for the user."""
        if self.load is None:
            return "dead experts are not judged"
        return "an expert is dead" if self.problems else "no expert is dead at the end"

    def judge_load(self) -> None:
        """Add the dead experts of the last record to the problems."""
        assert self.load is not None
        last_LE = self.load.load_NLE[-1]
        for layer, load_E in zip(self.layers, last_LE, strict=True):
            if dead := dead_experts(load_E):
                names = ", ".join(map(str, dead[:8])) + (", ..." if len(dead) > 8 else "")
                self.problems.append(
                    f"{layer}: {len(dead)} of {self.experts} experts are dead at step {self.load.step_N[-1]} ({names})"
                )

    def to_json(self) -> dict[str, Any]:
        """Return all numbers but the matrices of pairs, which are only drawn, as plain data; NaN is None."""
        keys = ("run", "layers", "experts", "top_k", "tokens", "text", "domains")
        return {
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in keys},
            "load": self._load(),
            "checkpoints": [_plain(vars(state)) for state in self.checkpoints],
            "specialisation": self._specialisation(),
            "coactivation": _pairs(self.layers, self.together, True),
            "succession": _pairs(self.neighbours, self.following, False),
            "favourites": {
                layer: [[vars(token) for token in tokens] for tokens in experts]
                for layer, experts in zip(self.layers, self.favourites, strict=False)
            },
            "problems": self.problems,
            "not_judged": self.not_judged,
        }

    def _load(self) -> dict[str, Any] | None:
        if self.load is None:
            return None
        last_LE = self.load.load_NLE[-1]
        return _plain(
            {
                "steps": self.load.step_N,
                "tokens_per_step": self.load.load_NLE,
                "overload": self.load.overloads(),
                "recording_share": self.load.recording_share,
                "last": [
                    {
                        "layer": layer,
                        "overload": float(overload(load_E)),
                        "entropy": float(entropy(load_E)),
                        "dead": dead_experts(load_E),
                        "hot": hot_experts(load_E),
                    }
                    for layer, load_E in zip(self.layers, last_LE, strict=True)
                ],
            }
        )

    def _specialisation(self) -> dict[str, Any] | None:
        s = self.specialisation
        if s is None:
            return None
        return _plain(
            {
                "information_bits": s.information_L,
                "by_chance_bits": s.by_chance_L,
                "p": s.p_L,
                "adjusted_p": s.adjusted_p_L,
                "significant": [bool(p < ALPHA) for p in s.adjusted_p_L],
                "ratio": s.ratio_LDE,
            }
        )


def _pairs(
    names: Sequence[str], pairs: Sequence[ExpertPairs], symmetric: bool
) -> list[dict[str, Any]]:
    keys = ("one", "other", "share", "over_chance")
    return [
        {
            "layer": name,
            "strength": _plain(matrices.strength),
            "pairs": [
                _plain(dict(zip(keys, pair, strict=True)))
                for pair in matrices.strongest(PAIRS, symmetric)
            ],
        }
        for name, matrices in zip(names, pairs, strict=False)
    ]


def _plain(value: Any) -> Any:
    """Return arrays as lists, floats with six digits, and None for what is not finite."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value
