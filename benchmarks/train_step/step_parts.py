"""Time of each part of our training step, run alone: forward and backward, as often as in a step.

 A profile of the whole step cannot tell this: MindSpore's backward operators
carry the scope of one layer, whichever they belong to.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from telechat_moe.model import CausalLM
from telechat_moe.model.block import Block
from telechat_moe.train.step import TrainStep

WARM_UP = 8  # MindSpore tries two ways to run a graph in its first calls and keeps the faster
CALLS = 7


class Routed(nn.Cell):
    """Router and dispatch of a mixture of experts whose experts do nothing."""

    def __init__(self, moe: nn.Cell, batch: int) -> None:
        super().__init__(auto_prefix=False)
        self.router, self.dispatch, self.batch = moe.router, moe.dispatch, batch
        self.nothing = Nothing()

    def construct(self, x_TH: Tensor) -> Tensor:
        """Return the weighted sum of copies of each token."""
        index_TK, weight_TK, _ = self.router(x_TH, self.batch)
        return self.dispatch(x_TH, index_TK, weight_TK, self.nothing)


class Nothing(nn.Cell):
    """Experts that return their rows unchanged."""

    def construct(self, x_GRH: Tensor, expert_G: Tensor | None = None) -> Tensor:
        """Return the input."""
        return x_GRH


class HeadLoss(nn.Cell):
    """Output head and loss."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(auto_prefix=False)
        self.head, self.loss = model.head, model.loss

    def construct(self, hidden_TH: Tensor, label_T: Tensor, mask_T: Tensor) -> Tensor:
        """Return the loss."""
        return self.loss(self.head(hidden_TH), label_T, mask_T)


class Backward(nn.Cell):
    """Forward and backward of a cell, by its parameters and its first input."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        params = ms.ParameterTuple(cell.trainable_params())
        self.cell, self.params = cell, params
        self.gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)

    def construct(self, dout: Tensor, *inputs: Tensor) -> tuple[Any, ...]:
        """Return the gradients."""
        return self.gradient(self.cell, self.params)(*inputs, dout)


class Update(nn.Cell):
    """Gradient norm, clipping and AdamW of a step."""

    def __init__(self, step: TrainStep) -> None:
        super().__init__(auto_prefix=False)
        self.step = step

    def construct(self, scalars: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> Tensor:
        """Update with the gradients given."""
        norm, _ = self.step.norm(gradients)
        self.step.apply(gradients, norm, (), scalars)
        return norm


def seconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call, warmed up."""
    times = []
    for i in range(WARM_UP + CALLS):
        began = time.perf_counter()
        output = call()
        while isinstance(output, (tuple, list)):
            output = output[0]
        output.asnumpy()
        if i >= WARM_UP:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(step: TrainStep, model: CausalLM, batch: int) -> dict[str, float]:
    """Return seconds of each part in one step of ``batch`` sequences."""
    config = model.config
    S, H = config.seq_length, config.hidden_size
    T, pairs = batch * S, batch * S * config.num_experts_per_tok
    generator = np.random.default_rng(0)

    def random(*shape: int) -> Tensor:
        return Tensor(generator.standard_normal(shape, np.float32))

    ids = Tensor(generator.integers(0, config.vocab_size, (batch, S)).astype(np.int32))
    positions = Tensor(np.tile(np.arange(S, dtype=np.int32), (batch, 1)))
    cos, sin = model.rope(positions)
    mask = Tensor(model.mask(batch, S, None).asnumpy().copy())
    x = random(T, H)
    layers: list[Block] = list(model.layers)
    dense = [layer for layer in layers if not layer.is_moe]
    sparse = [layer for layer in layers if layer.is_moe]
    label, ones = ids.reshape(-1), Tensor(np.ones(T, np.float32))

    def alone(cell: nn.Cell, dout: Tensor, *inputs: Tensor) -> float:
        cell.set_train(False)  # the routers' counters stay out of it
        backward = Backward(cell)
        return seconds(lambda: backward(dout, *inputs))

    parts = {
        "attention": len(layers) * alone(layers[0].attention, x, x, cos, sin, mask),
        "norms": (2 * len(layers) + 1) * alone(model.norm, x, x),
        "head + loss": alone(HeadLoss(model), random(1), x, label, ones),
        "embedding": alone(model.embedding, x, ids),
    }
    if dense:
        parts["dense MLP"] = len(dense) * alone(dense[0].ffn, x, x)
    if sparse:
        moe = sparse[0].moe
        if hasattr(moe.dispatch, "rows"):  # plain: blocks of rows, each with its expert
            rows = moe.dispatch.rows(pairs)
            blocks = moe.dispatch.plan.num_blocks(pairs, rows)
            share = pairs // config.n_routed_experts + rows
            group = np.minimum(np.arange(blocks) * rows // share, config.n_routed_experts - 1)
            y = random(blocks, rows, H)
        else:  # fused: rows sorted by expert, and how many each has
            group = np.full(config.n_routed_experts, pairs // config.n_routed_experts)
            y = random(pairs, H)
        owner = Tensor(group.astype(np.int32))
        routed = alone(Routed(moe, batch), x, x)
        experts = alone(moe.experts, y, y, owner)
        shared = alone(moe.shared, x, x) if moe.has_shared else 0.0
        parts["router + dispatch"] = len(sparse) * routed
        parts["experts"] = len(sparse) * (experts + shared)
    gradients = tuple(random(*p.shape) for p in step.optimizer.params)
    update, scalars = Update(step), step.optimizer.scalars(1, 0.0)
    parts["optimizer"] = seconds(lambda: update(scalars, gradients))
    return parts
