"""The losses of a model and their gradient, as one graph."""

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops


class ForwardBackward(nn.Cell):
    """Losses, and gradients by ``params``, of one micro-batch; the model returns ``(lm, mtp, aux)``, each ``(1,)``, and sums by source.

    Args:
        token_weights: See ``train.token_weights``: by which next-token and MTP losses are multiplied if they are sums over
            tokens; None: they are means.
    """

    def __init__(
        self, model: nn.Cell, params: ParameterTuple, token_weights: Parameter | None = None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.token_weights = model, token_weights

        def loss(*batch):
            results = model(*batch)
            lm, mtp, aux = results[:3]
            if self.token_weights is not None:
                lm = lm * self.token_weights[:1]
                mtp = ops.reduce_sum(mtp * self.token_weights[1:-1]).reshape((1,))
            return lm + mtp + aux, ops.concat((lm, mtp, aux, *results[3:]))

        self.gradient = ms.value_and_grad(loss, None, params, has_aux=True)

    def construct(self, *batch: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return ``(losses [3], gradients)``; of Z sources there are 2 Z more numbers behind the losses."""
        (_, losses), gradients = self.gradient(*batch)
        return losses, gradients
