"""What one process of a pipeline computes: the graphs of its chunks, called in the order of its program."""

from collections import defaultdict
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from telechat_moe.model import CausalLM, initialize
from telechat_moe.model.gradient import ForwardBackward
from telechat_moe.model.router import Router
from telechat_moe.ops import select
from telechat_moe.pipeline.cells import (
    ChunkModel,
    InputGradient,
    WeightGradients,
    order_sums,
)
from telechat_moe.pipeline.chunks import Chunk
from telechat_moe.pipeline.spec import Spec
from telechat_moe.pipeline.sums import Arrays, InOrder, Uses

ONE = np.ones(1, np.float32)


def build(spec: Spec) -> CausalLM:
    """Return the model with its initial weights: plain backends, whose products with weights are primitives."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    with select.using("plain"):
        model = CausalLM(spec.config, spec.block_rows, spec.capacity_tokens)
        order_sums(model).set_train()
    initialize(model, spec.seed)
    return model


def loads(model: Any) -> dict[str, np.ndarray]:
    """Return the tokens that each expert of each router got since the start, by the router's name."""
    return {
        cell.weight.name.removesuffix(".weight"): cell.expert_load.asnumpy().copy()
        for _, cell in model.cells_and_names()
        if isinstance(cell, Router)
    }


class ChunkGraphs:
    """The three graphs of a chunk of a model, which must not be used afterwards; compiled at their first call."""

    def __init__(self, model: CausalLM, chunk: Chunk) -> None:
        self.cell = ChunkModel(model, chunk)
        self.cell.set_train()
        self.deferred = self.cell.deferred
        self.taps = [p for d in self.deferred for p in d.taps]
        done = {p.name for p in self.taps} | {d.weight for d in self.deferred}
        self.direct = [p for p in self.cell.trainable_params() if p.name not in done]
        shapes = {p.name: p.shape for p in model.trainable_params()}
        self.like = [Tensor(np.zeros(shapes[d.weight], np.float32)) for d in self.deferred]
        self.input_gradient: InputGradient | None = None
        self.weight_gradients = WeightGradients(self.deferred)

    def forward(self, batch: list[Tensor], state: Arrays) -> Arrays:
        """Return what the next chunk gets, or the losses."""
        return [x.asnumpy().copy() for x in self.cell(*batch, *map(Tensor, state))]

    def backward(
        self, batch: list[Tensor], state: Arrays, sens: Arrays
    ) -> tuple[Arrays, list[Arrays], dict[str, np.ndarray]]:
        """Return the gradients of the chunk's inputs, what the taps gave, and the gradients computed here."""
        if self.input_gradient is None:
            for _, cell in self.cell.cells_and_names():
                if isinstance(cell, Router):
                    cell.set_train(False)  # the forward has counted its tokens
            self.input_gradient = InputGradient(self.cell, [*self.taps, *self.direct], len(state))
        inputs, rest = self.input_gradient(*batch, *map(Tensor, state), *map(Tensor, sens))
        values = [x.asnumpy().copy() for x in rest]
        taps: list[Arrays] = []
        for d in self.deferred:
            taps.append(values[: d.inputs])
            values = values[d.inputs :]
        direct = {p.name: g for p, g in zip(self.direct, values, strict=True)}
        return [x.asnumpy().copy() for x in inputs], taps, direct

    def weights(self, taps: list[Arrays]) -> dict[str, Uses]:
        """Return the gradient of each use of each weight."""
        if not self.deferred:
            return {}
        args = [
            x
            for like, given in zip(self.like, taps, strict=True)
            for x in (like, *map(Tensor, given))
        ]
        found: dict[str, Uses] = defaultdict(dict)
        for d, g in zip(self.deferred, self.weight_gradients(*args), strict=True):
            found[d.weight][d.use] = g.asnumpy().copy()
        return found


class NoGraphs:
    """An empty chunk; its methods are those of :class:`ChunkGraphs`."""

    def forward(self, batch: list[Tensor], state: Arrays) -> Arrays:
        """Return the state unchanged."""
        return state

    def backward(
        self, batch: list[Tensor], state: Arrays, sens: Arrays
    ) -> tuple[Arrays, list[Arrays], dict[str, np.ndarray]]:
        """Return the gradient that it gets."""
        return sens, [], {}

    def weights(self, taps: list[Arrays]) -> dict[str, Uses]:
        """Return nothing."""
        return {}


class Whole:
    """The unpipelined model: one graph for forward and backward, micro-batch after micro-batch."""

    def __init__(self, spec: Spec) -> None:
        self.model = build(spec)
        self.params = ms.ParameterTuple(self.model.trainable_params())
        self.cell = ForwardBackward(self.model, self.params)
        self.cell.set_train()

    def run(self, batches: Arrays) -> tuple[dict[str, np.ndarray], Arrays, dict[str, np.ndarray]]:
        """Return gradients (sums over micro-batches in their order), losses ``[m][3]`` and expert loads."""
        before = loads(self.model)
        total, losses = InOrder(), []
        for micro in range(len(batches[0])):
            found, gradients = self.cell(*(Tensor(column[micro]) for column in batches))
            losses.append(found.asnumpy().copy())
            for p, g in zip(self.params, gradients, strict=True):
                total.add(p.name, micro, {0: g.asnumpy().copy()}, alone=True)
        after = loads(self.model)
        return total.sums, losses, {name: after[name] - before[name] for name in after}
