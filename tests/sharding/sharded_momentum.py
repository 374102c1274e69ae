"""SGD with momentum, for checks: Adam hides a gradient of the wrong scale. One graph has both."""

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from telechat_moe.train.optimizer import AdamW


class Momentum(nn.Cell):
    """SGD with momentum and the interface of the package's AdamW.

    ``v = momentum v + clip g``, ``w = w - rate v``. No weight decay.

    Args:
        params: Parameters to update.
        momentum: Decay rate of ``v``.
    """

    def __init__(self, params: Sequence[Parameter], momentum: float = 0.9) -> None:
        super().__init__(auto_prefix=False)
        self.params = ParameterTuple(params)
        self.moment1 = self.params.clone(prefix="momentum", init="zeros")
        self.momentum = Tensor(momentum, ms.float32)
        self.update = ops.ApplyMomentum()
        self.clip = ops.Mul()

    def scalars(self, step: int, learning_rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the learning rate and two zeros, fp32 scalars."""
        del step
        return tuple(Tensor(np.float32(x)) for x in (learning_rate, 0.0, 0.0))

    def construct(
        self,
        gradients: tuple[Tensor, ...],
        rate: Tensor,
        epsilon: Tensor,
        decay: Tensor,
        clip: Tensor,
        applied: None = None,
    ) -> Tensor:
        """Update parameters and ``v`` in place; ``epsilon`` and ``decay`` are not used, and steps for CPU take branches."""
        for i in range(len(self.params)):
            gradient = self.clip(gradients[i], clip)
            self.update(self.params[i], self.moment1[i], rate, gradient, self.momentum)
        return Tensor(True)


class Either(nn.Cell):
    """AdamW where the rate is positive, momentum where it is negative; an update with rate 0 changes no bit of a weight."""

    def __init__(self, adamw: AdamW, momentum: Momentum) -> None:
        super().__init__(auto_prefix=False)
        self.params, self.adamw, self.momentum = adamw.params, adamw, momentum
        self.positive, self.negative = ops.ReLU(), ops.Neg()

    def scalars(self, step: int, learning_rate: float, kind: str) -> tuple[Tensor, ...]:
        """Return the scalars of one of them; AdamW divides by its epsilon, whose update is 0, too."""
        rate, *others = self.adamw.scalars(step, learning_rate)
        return (Tensor(np.float32(-learning_rate)) if kind == "momentum" else rate, *others)

    def construct(
        self,
        gradients: tuple[Tensor, ...],
        rate: Tensor,
        epsilon: Tensor,
        decay: Tensor,
        clip: Tensor,
        applied: None = None,
    ) -> Tensor:
        self.adamw(gradients, self.positive(rate), epsilon, decay, clip)
        return self.momentum(gradients, self.positive(self.negative(rate)), epsilon, decay, clip)
