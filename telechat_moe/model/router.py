"""Router: logits, choice of experts, loads and balance losses (DeepSeek-V3, section 2.1.2)."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

from telechat_moe.model.balance import BalanceLoss, ZLoss
from telechat_moe.model.linear import DTYPES, weight
from telechat_moe.ops.matmul import matmul
from telechat_moe.ops.routing import RoutingRule, routing
from telechat_moe.recipe import ModelConfig


class Router(nn.Cell):
    """Choose ``K`` experts for each token and weigh them.

    ``s = sigmoid(W h)``. The ``K`` highest ``s + bias`` are chosen; the weights are
    ``s`` without the bias, divided by their sum (``norm_topk_prob``) and scaled. The bias is no
    gradient parameter: :class:`telechat_moe.train.step.TrainStep` moves it after each step.

    State:
        expert_bias: ``[E]`` fp32.
        expert_load: ``[E]`` fp32, tokens each expert got since it was last cleared (training only).

    Source: DeepSeek-V3, equations 12 to 16.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.num_experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        shape = (self.num_experts, config.hidden_size)
        params = DTYPES[config.params_dtype]
        self.weight = weight(shape, config.initializer_range, "weight", params)
        # As in MindFormers: whole on every device, also under optimizer sharding.
        self.expert_bias = self._state("expert_bias")
        self.expert_load = self._state("expert_load")
        self.use_bias = config.moe_router_enable_expert_bias
        self.dtype = DTYPES[config.router_dense_type]
        self.to_router = ops.Cast()
        self.weight_to_router = ops.Cast()
        single = self.dtype == ms.float32
        self.gate: nn.Cell | ops.Primitive = (
            matmul(self.dtype) if single else ops.MatMul(transpose_b=True)
        )
        self.to_float = ops.Cast()
        self.rule = RoutingRule(
            experts=self.num_experts,
            top_k=self.top_k,
            groups=max(1, config.n_group),
            kept_groups=max(1, config.topk_group),
            normalize=config.norm_topk_prob and self.top_k > 1,
            scale=config.routed_scaling_factor,
        )
        self.choose = routing(self.rule)
        self.no_bias = Tensor(np.zeros(self.num_experts, np.float32))
        self.add_load, self.accumulate_load = ops.Add(), ops.AssignAdd()
        self.balance = BalanceLoss(config)
        self.z_loss = ZLoss(config.moe_z_loss_coeff or 0.0)
        self.losses: nn.Cell | None = None  # replaces both where tokens are spread over devices

    def _state(self, name: str) -> Parameter:
        zeros = initializer(Zero(), (self.num_experts,), ms.float32)
        return Parameter(zeros, name=name, requires_grad=False, parallel_optimizer=False)

    def construct(self, x_TH: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Route.

        Args:
            x_TH: Normalised activations.
            batch: Sequences ``B`` in ``T = B * S``, for the sequence-level balance loss.

        Returns:
            ``(index_TK, weight_TK, aux)``: int32, fp32, and the balance and z-loss, ``(1,)`` fp32.
        """
        gate = self.weight_to_router(self.weight, self.dtype)
        logits_TE = self.to_float(self.gate(self.to_router(x_TH, self.dtype), gate), ms.float32)
        bias = self.expert_bias if self.use_bias else self.no_bias
        score_TE, index_TK, weight_TK, chosen_TE, load_E = self.choose(logits_TE, bias)
        count_E = load_E
        if self.training:
            if self.balance.by_step:
                count_E = self.add_load(self.expert_load, load_E)
            self.accumulate_load(self.expert_load, load_E)
        if self.losses is not None:
            return index_TK, weight_TK, self.losses(logits_TE, score_TE, chosen_TE, count_E)
        aux = self.balance(score_TE, chosen_TE, count_E, batch) + self.z_loss(logits_TE)
        return index_TK, weight_TK, aux
