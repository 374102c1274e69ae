"""Losses and updates that keep the experts evenly loaded."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from telechat_moe.ops.routing import FusedBalance
from telechat_moe.ops.select import backend
from telechat_moe.recipe import ModelConfig


class BalanceLoss(nn.Cell):
    """Balance loss over groups of tokens: sequences, devices, expert groups, the micro-batch, or a step.

    With ``f_i = E / (K n) * (pairs of expert i)`` and ``P_i`` the mean normalised score of expert i, both over the ``n``
    tokens of a group::

        loss = coefficient * mean over groups ( sum_i f_i P_i )

    A group is a sequence (``seq_aux_loss``), else the micro-batch, unless :attr:`groups` says otherwise. With
    ``gbs_aux_loss`` ``f`` is the mean over the step's micro-batches up to this one. No gradient flows through ``f``.

    Attributes:
        groups: Runs of consecutive tokens, equally long, that are the groups of one micro-batch; None: as above.

    Source: DeepSeek-V3, equations 17 to 20; MindFormers, ``TopKRouter``; Pangu Ultra MoE's loss over expert groups.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.moe_router_load_balancing_type
        self.groups: int | None = None
        self.by_step = self.kind == "gbs_aux_loss"
        self.active = bool(config.moe_aux_loss_coeff) and self.kind != "none"
        self.num_experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        self.coefficient = config.moe_aux_loss_coeff
        self.fused = None
        if self.active and not self.by_step and backend("routing") == "fused":
            self.fused = FusedBalance(float(self.coefficient * self.num_experts / self.top_k))
        self.zero = Tensor([0.0], ms.float32)
        self.reshape = ops.Reshape()
        self.sum_experts = ops.ReduceSum(keep_dims=True)
        self.add_eps = ops.Add()
        self.eps = Tensor(1e-20, ms.float32)
        self.divide = ops.RealDiv()
        self.fraction = ops.ReduceMean()
        self.sum_counts, self.to_share = ops.ReduceSum(), ops.RealDiv()
        self.mean_score = ops.ReduceMean()
        self.product = ops.Mul()
        self.total = ops.ReduceSum()
        self.scale = ops.Mul()

    def share(self, count_E: Tensor) -> Tensor:
        """Return each expert's share of all pairs that were counted, ``[1, E]``."""
        return self.reshape(self.to_share(count_E, self.sum_counts(count_E)), (1, -1))

    def construct(self, score_TE: Tensor, chosen_TE: Tensor, count_E: Tensor, batch: int) -> Tensor:
        """Return the loss.

        Args:
            score_TE: Scores, fp32.
            chosen_TE: 1 where a token chose an expert, else 0; fp32.
            count_E: Tokens that each expert got in the step's micro-batches up to this one, fp32.
            batch: Sequences ``B`` in ``T = B * S``.

        Returns:
            ``(1,)`` fp32.
        """
        if not self.active:
            return self.zero
        E = self.num_experts
        groups = self.groups or (batch if self.kind == "seq_aux_loss" else 1)
        if self.fused is not None:
            shape = (groups, -1, E)
            return self.fused(self.reshape(score_TE, shape), self.reshape(chosen_TE, shape))[0]
        score_TE = self.divide(score_TE, self.add_eps(self.sum_experts(score_TE, -1), self.eps))
        if self.by_step:
            fraction_gE, chosen = self.share(count_E), 1
        else:
            fraction_gE, chosen = (
                self.fraction(self.reshape(chosen_TE, (groups, -1, E)), 1),
                self.top_k,
            )
        score_gE = self.mean_score(self.reshape(score_TE, (groups, -1, E)), 1)
        total = self.reshape(
            self.total(self.product(ops.stop_gradient(fraction_gE), score_gE)), (1,)
        )
        return self.scale(total, Tensor(self.coefficient * E / (chosen * groups), ms.float32))


def set_groups(model: nn.Cell, groups: int | None) -> None:
    """Give every balance loss of a built model its :attr:`BalanceLoss.groups`, before it is compiled."""
    for _, cell in model.cells_and_names():
        if isinstance(cell, BalanceLoss):
            cell.groups = groups


class ZLoss(nn.Cell):
    """``coefficient * mean(logsumexp(router logits)^2)`` (ST-MoE, equation 5)."""

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        self.coefficient = coefficient
        self.zero = Tensor([0.0], ms.float32)
        self.max = ops.ReduceMax(keep_dims=True)
        self.sub = ops.Sub()
        self.exp = ops.Exp()
        self.sum = ops.ReduceSum(keep_dims=True)
        self.log = ops.Log()
        self.add = ops.Add()
        self.square = ops.Square()
        self.mean = ops.ReduceMean()
        self.reshape = ops.Reshape()
        self.scale = ops.Mul()

    def construct(self, logits_TE: Tensor) -> Tensor:
        """Return the loss, ``(1,)`` fp32."""
        if not self.coefficient:
            return self.zero
        top = ops.stop_gradient(self.max(logits_TE, -1))
        log_z = self.add(self.log(self.sum(self.exp(self.sub(logits_TE, top)), -1)), top)
        mean = self.reshape(self.mean(self.square(log_z)), (1,))
        return self.scale(mean, Tensor(self.coefficient, ms.float32))


class BiasUpdate(nn.Cell):
    """Raise the selection bias of experts below the mean load, lower it above, by a fixed rate.

    Source: DeepSeek-V3, section 2.1.2, "Auxiliary-Loss-Free Load Balancing".
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = Tensor(rate, ms.float32)
        self.mean = ops.ReduceMean(keep_dims=True)
        self.sub = ops.Sub()
        self.sign = ops.Sign()
        self.scale = ops.Mul()

    def construct(self, load_E: Tensor) -> Tensor:
        """Return the change of the bias ``[E]`` for the load of one step."""
        return self.scale(self.sign(self.sub(self.mean(load_E, -1), load_E)), self.rate)
