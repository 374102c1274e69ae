"""The losses of a model and their gradient, as one graph."""

import mindspore as ms
from mindspore import ParameterTuple, Tensor, nn, ops


class ForwardBackward(nn.Cell):
    """Losses, and gradients by ``params``, of one micro-batch; the model returns ``(lm, mtp, aux)``, each ``(1,)``."""

    def __init__(self, model: nn.Cell, params: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

        def loss(*batch):
            lm, mtp, aux = model(*batch)
            return lm + mtp + aux, ops.concat((lm, mtp, aux))

        self.gradient = ms.value_and_grad(loss, None, params, has_aux=True)

    def construct(self, *batch: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return ``(losses, gradients)``."""
        (_, losses), gradients = self.gradient(*batch)
        return losses, gradients
