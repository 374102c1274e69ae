"""Draw the model's weights whole, and shard them over the ranks of a layout."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.align_faults.kernels import Numerics, rounded
from benchmarks.align_faults.layouts import RankLayout
from benchmarks.align_faults.tensors import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes.

    Attributes:
        hidden: Of the residual stream.
        layers: All of them with experts but the first, where ``dense`` says so.
        top: Experts of a token.
        inner: Of an expert.
        sequence: Tokens of a sequence; a replica has one in a micro-batch.
        dense: Whether the first layer has no experts.
        fused: Whether attention, SwiGLU and rotation are one operator each.
        rate: Of learning.
        decay: Of weights.
        clip: Largest norm of gradients.
        ties: Whether experts score nearly the same.
    """

    hidden: int = 16
    heads: int = 4
    layers: int = 2
    experts: int = 4
    top: int = 2
    inner: int = 16
    vocab: int = 32
    sequence: int = 8
    dense: bool = False
    fused: bool = True
    steps: int = 1
    eps: float = 1e-6
    rate: float = 1e-2
    decay: float = 0.1
    clip: float = 1.0
    ties: bool = False


@dataclass
class Weight:
    """A weight on the ranks that hold it.

    Attributes:
        model: As operators take it, in the program's type.
        master: As the optimizer keeps it, float32.
        groups: Ranks among which gradients are added.
        copies: How many ranks hold each element.
        tensor: The dimension that is sharded over ``tp``.
        halves: Whether that dimension holds two things (gate and up), each of them sharded.
        sequence: Ranks among which gradients are added because each saw a shard of the sequence.
        state: Moments of Adam.
    """

    name: str
    model: Tensor
    master: Tensor
    groups: list[list[int]]
    copies: int
    tensor: int | None = None
    halves: bool = False
    sequence: list[list[int]] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the shard that a rank computes with."""
        return next(iter(self.model.values.values())).shape


def _shard(x: Any, pieces: int, index: int, axis: int, halves: bool) -> Any:
    """Return one of equal pieces; of halves, the same piece of both."""
    if halves:
        return np.concatenate(
            [np.split(h, pieces, axis)[index] for h in np.split(x, 2, axis)], axis
        )
    return np.split(x, pieces, axis)[index]


@dataclass
class WeightSource:
    """Draws the weights of a model.

    Attributes:
        rng: Draws the values, the same for every layout.
    """

    layout: RankLayout
    shape: Shape
    numerics: Numerics
    rng: np.random.Generator
    stage_of: list[int]
    weights: dict[str, Weight] = field(default_factory=dict)

    def draw(self) -> dict[str, Weight]:
        """Return the weights of all stages by name."""
        s, lay = self.shape, self.layout
        self._weight("embedding", (s.vocab, s.hidden), 0, sequence=True)
        for i in range(s.layers):
            stage, p = self.stage_of[i], f"layers.{i}."
            for norm in ("norm1", "norm2"):
                self._weight(p + norm, (s.hidden,), stage, norm=True)
            for name in ("q", "k", "v"):
                self._weight(p + name, (s.hidden, s.hidden), stage, cut=0)
            self._weight(p + "o", (s.hidden, s.hidden), stage, cut=1)
            self._weight(p + "gate_up", (2 * s.inner, s.hidden), stage, cut=0, halves=True)
            self._weight(p + "down", (s.hidden, s.inner), stage, cut=1)
            if i or not s.dense:
                self._weight(p + "router", (s.experts, s.hidden), stage, sequence=True, scale=2.0)
                self._expert(p + "w1", (s.experts, s.hidden, 2 * s.inner), stage, 2)
                self._expert(p + "w2", (s.experts, s.inner, s.hidden), stage, 1)
        last = lay.pp - 1
        self._weight("norm", (s.hidden,), last, norm=True)
        self._weight("head", (s.vocab, s.hidden), last, sequence=True)
        assert lay.tp <= s.heads
        return self.weights

    def _weight(
        self,
        name: str,
        shape: tuple[int, ...],
        stage: int,
        cut: int | None = None,
        norm: bool = False,
        halves: bool = False,
        sequence: bool = False,
        scale: float = 1.0,
    ) -> None:
        lay = self.layout
        x = self.rng.normal(size=shape) * scale / np.sqrt(shape[-1])
        if norm:
            x = 1 + 0.2 * self.rng.normal(size=shape)
        if name == "embedding":
            x = self.rng.normal(size=shape)
        if name.endswith("router") and self.shape.ties:
            x[1:] = x[:1] * (1 + 8e-3 * self.rng.normal(size=x[1:].shape))
        values = {
            rank: x if cut is None else _shard(x, lay.tp, lay.place(rank)[2], cut, halves)
            for rank in lay.ranks(stage)
        }
        copies = lay.dp * lay.cp * (1 if cut is not None else lay.tp)
        self._add(name, values, lay.data(stage), copies, cut, halves)
        if lay.sp and lay.tp > 1 and (norm or sequence):
            self.weights[name].sequence = lay.tensor(stage)

    def _expert(self, name: str, shape: tuple[int, ...], stage: int, cut: int) -> None:
        lay = self.layout
        x = self.rng.normal(size=shape) / np.sqrt(shape[1])
        values = {}
        members = lay.ep * (lay.tp if lay.extend else 1)
        for rank in lay.ranks(stage):
            index, t = lay.expert_place(rank)  # type: ignore[misc]
            part = np.split(x, members, 0)[index]
            values[rank] = part if lay.extend else _shard(part, lay.tp, t, cut, cut == 2)
        copies = lay.stage_size // members // (1 if lay.extend else lay.tp)
        within = None if lay.extend else cut
        self._add(name, values, lay.same_experts(stage), copies, within, cut == 2)

    def _add(
        self,
        name: str,
        values: dict[int, Any],
        groups: list[list[int]],
        copies: int,
        cut: int | None,
        halves: bool,
    ) -> None:
        kind = self.numerics.dtype
        # values that every type holds, so that runs in different types begin with the same
        exact = {
            r: rounded(np.ascontiguousarray(v, np.float32), "bfloat16") for r, v in values.items()
        }
        master = Tensor(exact, "float32")
        model = Tensor({r: rounded(v, kind) for r, v in exact.items()}, kind, True)
        self.weights[name] = Weight(name, model, master, groups, copies, cut, halves)
