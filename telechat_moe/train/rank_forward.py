"""The loss of a micro-batch on a model that is spread over devices: a forward graph without gradients or optimizer."""

from mindspore import Tensor, nn, ops

from telechat_moe.sharding.cells.logits import PickedLogits
from telechat_moe.train.rank_step import PlacedModel


class RankForward(nn.Cell):
    """Return the next-token loss of a micro-batch, on the devices of the stage that has the head.

    The parameters have the names and shards that they have in :class:`telechat_moe.train.rank_step.RankStep`.

    Args:
        logits: What also returns logits, for samples; None: only the loss.
    """

    def __init__(self, placed: PlacedModel, logits: PickedLogits | None) -> None:
        super().__init__(auto_prefix=False)
        self.model, self.picked = placed.model, logits
        self.reshape, self.depend = ops.Reshape(), ops.Depend()
        self.receives = placed.placement.mesh.pp > 1

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor,
        *mask: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss ``(1,)``, the mean over the tokens that the mask keeps.

        With logits also ``[B, V]``: of each sequence the sum of the logits where the mask is 1, on every device of the stage.
        """
        hidden_TH, aux, _ = self.model.hidden(input_ids, position_ids, mask[0] if mask else None)
        logits_TV, mask_T = self.model.logits(hidden_TH), self.reshape(loss_mask, (-1,))
        loss = self.model.loss(logits_TV, self.reshape(labels, (-1,)), mask_T)
        if self.receives:  # else the stage before would send what none receives
            loss = self.depend(loss, aux)
        if self.picked is None:
            return loss
        return loss, self.picked(logits_TV, mask_T)
