"""AdamW with decoupled weight decay and fp32 states, and a passive average of the weights."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from telechat_moe.ops.adamw import FusedAdamW
from telechat_moe.ops.select import backend
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.shards import EMA


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
        self.moment1 = self.params.clone(prefix="adam_m", init="zeros")
        self.moment2 = self.params.clone(prefix="adam_v", init="zeros")
        patterns = [re.compile(pattern) for pattern in no_decay]
        self.decayed = tuple(not any(p.search(w.name) for p in patterns) for w in self.params)
        self.beta1 = Tensor(betas[0], ms.float32)
        self.beta2 = Tensor(betas[1], ms.float32)
        self.no_decay = Tensor(0.0, ms.float32)
        self.fused = FusedAdamW(betas, self.decayed) if backend("adamw") == "fused" else None
        self.update = ops.AdamWeightDecay()
        self.clip = ops.Mul()

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
    ) -> Tensor:
        """Update parameters and moments in place with ``clip * gradients``; return True."""
        if self.fused is not None:
            moments = (self.moment1, self.moment2)
            token = self.fused(self.params, *moments, gradients, rate, epsilon, decay, clip)
            return ops.depend(Tensor(True), token)
        for i in range(len(self.params)):
            self.update(
                self.params[i],
                self.moment1[i],
                self.moment2[i],
                rate,
                self.beta1,
                self.beta2,
                epsilon,
                decay if self.decayed[i] else self.no_decay,
                self.clip(gradients[i], clip),
            )
        return Tensor(True)


class WeightAverage:
    """The average of some weights, float32 like these, on the host.

    The first update copies the weights, as torch's ``AveragedModel`` does.

    Args:
        weights: Parameters by name; the average follows their memory.
        decay: Share of the average that an update keeps.
    """

    def __init__(self, weights: Mapping[str, Parameter], decay: float) -> None:
        self.decay = decay
        self.weights = dict(weights)
        self.averages = {
            f"{EMA}.{name}": Parameter(
                Tensor(w.asnumpy().copy()), name=f"{EMA}.{name}", requires_grad=False
            )
            for name, w in weights.items()
        }

    def update(self, number: int) -> None:
        """Take the weights after an update, whose number counts from 1."""
        if number == 1:
            self.begin()
            return
        rate = np.float32(1.0 - self.decay)
        for average, weight in zip(self.averages.values(), self.weights.values(), strict=True):
            # On CPU asnumpy() is the memory of the parameter.
            kept, now = average.asnumpy(), weight.asnumpy()
            kept += rate * (now - kept)

    @staticmethod
    def begins(source: Path) -> str:
        """Say that a checkpoint holds no average."""
        return f"{source.name} holds no average of the weights; it begins with its weights"

    def begin(self) -> None:
        """Begin with the present weights."""
        for average, weight in zip(self.averages.values(), self.weights.values(), strict=True):
            average.asnumpy()[...] = weight.asnumpy()


def from_recipe(recipe: Recipe, params: Sequence[Parameter]) -> AdamW:
    """Return the optimizer of a recipe."""
    given = recipe.optimizer
    return AdamW(
        params,
        (given.betas[0], given.betas[1]),
        given.eps,
        given.weight_decay,
        recipe.telechat_moe.weight_decay_exclude,
    )
