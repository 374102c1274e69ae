"""Losses and updates that keep the experts evenly loaded."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from telechat_moe.recipe import ModelConfig


class BalanceLoss(nn.Cell):
    """Balance loss over each sequence, or over the whole micro-batch.

    With ``f_i = E / (K n) * (pairs of expert i)`` and ``P_i`` the mean normalised score of expert i,
    both over the ``n`` tokens of a sequence (``seq_aux_loss``) or of the micro-batch (``aux_loss``)::

        loss = coefficient * mean over groups of tokens ( sum_i f_i P_i )

    Source: DeepSeek-V3, equations 17 to 20.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.moe_router_load_balancing_type
        self.active = bool(config.moe_aux_loss_coeff) and self.kind != "none"
        self.num_experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        self.coefficient = config.moe_aux_loss_coeff
        self.zero = Tensor([0.0], ms.float32)
        self.reshape = ops.Reshape()
        self.sum_experts = ops.ReduceSum(keep_dims=True)
        self.add_eps = ops.Add()
        self.eps = Tensor(1e-20, ms.float32)
        self.divide = ops.RealDiv()
        self.fraction = ops.ReduceMean()
        self.mean_score = ops.ReduceMean()
        self.product = ops.Mul()
        self.total = ops.ReduceSum()
        self.scale = ops.Mul()

    def construct(self, score_TE: Tensor, chosen_TE: Tensor, batch: int) -> Tensor:
        """Return the loss, ``(1,)`` fp32; ``chosen`` is 1 where a token chose an expert."""
        if not self.active:
            return self.zero
        E = self.num_experts
        groups = batch if self.kind == "seq_aux_loss" else 1
        score_TE = self.divide(score_TE, self.add_eps(self.sum_experts(score_TE, -1), self.eps))
        fraction_gE = self.fraction(self.reshape(chosen_TE, (groups, -1, E)), 1)
        score_gE = self.mean_score(self.reshape(score_TE, (groups, -1, E)), 1)
        total = self.reshape(
            self.total(self.product(ops.stop_gradient(fraction_gE), score_gE)), (1,)
        )
        return self.scale(total, Tensor(self.coefficient * E / (self.top_k * groups), ms.float32))


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
