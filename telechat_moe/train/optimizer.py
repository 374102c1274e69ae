"""AdamW with decoupled weight decay and fp32 states."""

import math
import re
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from telechat_moe.errors import BadInputError
from telechat_moe.graph.swapped_states import groups_of
from telechat_moe.graph.swapping import PooledTensor, State, open_pool, room
from telechat_moe.ops.adamw import FusedAdamW
from telechat_moe.ops.custom import custom_op
from telechat_moe.ops.select import backend
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.swap import require_pool

COPIES = ("SwapBack", "SwapBackWait", "SwapOut", "SwapOutWait")
"""Operators of the native library that copy a moment (``ops/csrc/swap.cc``)."""


class AdamW(nn.Cell):
    """AdamW; the learning rate and the bias correction come in from the host.

    MindSpore's ``AdamWeightDecay`` kernel has no bias correction: it computes
    ``w -= a (m / (sqrt(v) + e) + d w)``. With ``c1 = 1 - beta1^t`` and ``c2 = 1 - beta2^t``, AdamW is
    that with ``a = lr sqrt(c2) / c1``, ``e = eps sqrt(c2)`` and ``d = decay lr / a``; these three are
    computed in float64 by :meth:`scalars`.

    Args:
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        no_decay: Regular expressions; a parameter whose name one of them finds is not decayed.

    Source: Loshchilov and Hutter 2019, algorithm 2.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        no_decay: Sequence[str] = (),
    ) -> None:
        super().__init__(auto_prefix=False)
        self.params = ParameterTuple(params)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.moment1, self.moment2 = map(self._zeros, ("adam_m", "adam_v"))
        patterns = [re.compile(pattern) for pattern in no_decay]
        self.decayed = tuple(not any(p.search(w.name) for p in patterns) for w in self.params)
        self.beta1 = Tensor(betas[0], ms.float32)
        self.beta2 = Tensor(betas[1], ms.float32)
        self.zero = Tensor(0.0, ms.float32)
        self.fused = FusedAdamW(betas, self.decayed) if backend("adamw") == "fused" else None
        self.beta_unchanged = Tensor(1.0, ms.float32)
        self.update = ops.AdamWeightDecay()
        self.clip, self.select = ops.Mul(), ops.Select()

    def _zeros(self, prefix: str) -> Sequence[Any]:
        """Return a moment of every weight, by the names of checkpoints."""
        return self.params.clone(prefix=prefix, init="zeros")

    def scalars(self, step: int, learning_rate: float) -> tuple[Tensor, ...]:
        """Return ``(a, e, d)`` of update number ``step`` (from 1), fp32 scalars."""
        c1 = 1 - self.betas[0] ** step
        root = math.sqrt(1 - self.betas[1] ** step)
        rate = learning_rate * root / c1
        decay = self.weight_decay * c1 / root
        return tuple(Tensor(np.float32(x)) for x in (rate, self.eps * root, decay))

    def construct(
        self,
        gradients: tuple[Tensor, ...],
        rate: Tensor,
        epsilon: Tensor,
        decay: Tensor,
        clip: Tensor,
        applied: Tensor | None = None,
    ) -> Tensor:
        """Update parameters and moments in place with ``clip * gradients``; return True.

        Args:
            applied: Where it is False every value stays equal, as by a branch that is not taken, which would make the host
                wait for the device. None: it is always applied.
        """
        beta1, beta2 = self.beta1, self.beta2
        if applied is not None:
            rate = self.select(applied, rate, self.zero)
            beta1 = self.select(applied, beta1, self.beta_unchanged)
            beta2 = self.select(applied, beta2, self.beta_unchanged)
        if self.fused is not None and applied is None:
            moments = (self.moment1, self.moment2)
            token = self.fused(self.params, *moments, gradients, rate, epsilon, decay, clip)
            return ops.depend(Tensor(True), token)
        for i in range(len(self.params)):
            gradient = self.clip(gradients[i], clip)
            if applied is not None:
                gradient = self.select(applied, gradient, self.zero)
            self.update(
                self.params[i],
                self.moment1[i],
                self.moment2[i],
                rate,
                beta1,
                beta2,
                epsilon,
                decay if self.decayed[i] else self.zero,
                gradient,
            )
        return Tensor(True)


class SwappedAdamW(AdamW):
    """AdamW whose moments wait in a pool between updates (docs/plan_memory.md), to the last bit the same.

    Groups of weights are updated in turn, as in :mod:`telechat_moe.graph.swapped_states`: at group ``i`` the moments of
    group ``i + 1`` begin to come, once those of group ``i - 2`` have gone.

    Args:
        given: What :class:`AdamW` takes besides.
        folder: See :func:`telechat_moe.graph.swapping.open_pool`.

    Attributes:
        states: The moments; two for each weight.
        size: Bytes of the pool.
    """

    def __init__(
        self, params: Sequence[Parameter], *settings: Any, folder: str | None = None
    ) -> None:
        self.states: list[State] = []
        self.size = 0
        for weight in params:
            for moment in ("adam_m", "adam_v"):
                self.states.append(State(f"{moment}.{weight.name}", self.size, weight.shape))
                self.size += room(self.states[-1].nbytes)
        pool = open_pool(self.size, folder)
        self.pooled = {state.name: PooledTensor(state, pool) for state in self.states}
        super().__init__(params, *settings)
        if self.fused is None:
            raise BadInputError(
                "optimizer.swap True: one process swaps moments beside the fused AdamW only; build the native library, "
                "set telechat_moe.operators.adamw to fused, or swap nothing"
            )
        groups = groups_of([2 * self.states[2 * i].nbytes for i in range(len(params))])
        self.groups = nn.CellList([_SwappedGroup(self, g) for g in groups], auto_prefix=False)

    def _zeros(self, prefix: str) -> Sequence[Any]:
        return [self.pooled[f"{prefix}.{weight.name}"] for weight in self.params]

    def construct(
        self,
        gradients: tuple[Tensor, ...],
        rate: Tensor,
        epsilon: Tensor,
        decay: Tensor,
        clip: Tensor,
        applied: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`AdamW.construct`; one process takes a branch, so ``applied`` is None."""
        ready = ops.depend(clip, gradients)
        moments, gone = (self.groups[0].come(ready),), ()
        for i in range(len(self.groups)):
            if i > 1:
                ready = self.groups[i - 2].go(moments[i - 2])
                gone += (ready,)
            if i + 1 < len(self.groups):
                coming = self.groups[i + 1].come(ready)
                moments += (coming,)
                rate = ops.depend(rate, coming)  # the next ones begin to come before the update
            leaving = self.groups[i](moments[i], gradients, (rate, epsilon, decay, clip))
            moments = (*moments[:i], leaving, *moments[i + 1 :])
        for i in range(max(len(self.groups) - 2, 0), len(self.groups)):
            gone += (self.groups[i].go(moments[i]),)
        return ops.depend(Tensor(True), gone)


class _SwappedGroup(nn.Cell):
    """Weights that are updated together, and the copies of their moments."""

    def __init__(self, optimizer: SwappedAdamW, group: range) -> None:
        super().__init__(auto_prefix=False)
        self.first, self.last = group.start, group.stop
        self.params = ParameterTuple(optimizer.params[group.start : group.stop])
        self.update = FusedAdamW(optimizer.betas, optimizer.decayed[group.start : group.stop])
        copies: dict[str, list[ops.Custom]] = {name: [] for name in COPIES}
        for number in range(2 * group.start, 2 * group.stop):
            state = optimizer.states[number]
            for name, operators in copies.items():
                shape = {"extents": list(state.shape)} if name == "SwapBack" else {}
                attributes = {"number": number, "at": state.offset, **shape}
                operators.append(custom_op(name, lambda x, *_: x, **attributes))
        self.back, self.back_wait, self.out, self.out_wait = map(tuple, copies.values())

    def come(self, ready: Tensor) -> tuple[Tensor, ...]:
        """Start to copy the moments from the pool once ``ready`` is computed; return them."""
        moments = ()
        for i in range(len(self.back)):
            moments += (self.back[i](ready),)
        return moments

    def construct(
        self,
        moments: tuple[Tensor, ...],
        gradients: tuple[Tensor, ...],
        scalars: tuple[Tensor, ...],
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """Update the weights once the moments have come, and start to copy the moments back; return them with their tokens."""
        first, second = (), ()
        for i in range(len(self.params)):
            m, v = moments[2 * i], moments[2 * i + 1]
            first += (ops.depend(m, self.back_wait[2 * i](m)),)
            second += (ops.depend(v, self.back_wait[2 * i + 1](v)),)
        token = self.update(self.params, first, second, gradients[self.first : self.last], *scalars)
        pairs = ()
        for i in range(len(self.params)):
            m, v = ops.depend(first[i], token), ops.depend(second[i], token)
            pairs += ((m, self.out[2 * i](m)), (v, self.out[2 * i + 1](v)))
        return pairs

    def go(self, moments: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
        """Copy the moments to the pool; return a token that is ready when they are there."""
        token = self.out_wait[0](*moments[0])
        for i in range(1, len(self.out_wait)):
            token = ops.depend(token, self.out_wait[i](*moments[i]))
        return token


def from_recipe(recipe: Recipe, params: Sequence[Parameter], swap: bool = False) -> AdamW:
    """Return the optimizer of a recipe.

    Args:
        swap: Whether this process keeps the moments in a pool, if the recipe says so; the graphs of several do it themselves.
    """
    section, pool = recipe.optimizer, recipe.telechat_moe.swap
    betas, exclude = (section.betas[0], section.betas[1]), recipe.telechat_moe.weight_decay_exclude
    settings = (params, betas, section.eps, section.weight_decay, exclude)
    if not (swap and section.swap):
        return AdamW(*settings)
    swapped = SwappedAdamW(*settings, folder=pool and pool.pool_folder)
    require_pool(recipe, swapped.size, "this process")
    return swapped
