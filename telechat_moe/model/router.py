"""Router: scores, group limit, selection with a bias, weights (DeepSeek-V3, section 2.1.2)."""

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Zero, initializer

from telechat_moe.model.balance import BalanceLoss, ZLoss
from telechat_moe.model.linear import DTYPES, weight
from telechat_moe.recipe import ModelConfig


class GroupLimit(nn.Cell):
    """Mask the experts outside each token's best groups with -inf.

    The score of a group is the sum of its ``max(1, K / M)`` highest scores, ``M`` groups kept.
    MindFormers and HF mask with 0.0 instead, so there a masked expert can win over a kept one whose
    biased score is negative.

    Source: DeepSeek-V3, section 2.1.2, "Node-Limited Routing".
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_groups, self.kept_groups = config.n_group, config.topk_group
        self.best = max(1, config.num_experts_per_tok // config.topk_group)
        self.experts_per_group = config.n_routed_experts // config.n_group
        self.reshape = ops.Reshape()
        self.best_of_group = ops.TopK(sorted=True)
        self.group_score = ops.ReduceSum()
        self.best_groups = ops.TopK(sorted=True)
        self.one_hot = ops.OneHot()
        self.on, self.off = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        self.kept = ops.ReduceSum()
        self.stretch = ops.Tile()
        self.is_kept = ops.Greater()
        self.minus_inf = Tensor(float("-inf"), ms.float32)
        self.select = ops.Select()

    def construct(self, score_TE: Tensor) -> Tensor:
        """Return the scores with the experts of dropped groups at -inf."""
        T = score_TE.shape[0]
        score_TGe = self.reshape(score_TE, (T, self.num_groups, self.experts_per_group))
        best, _ = self.best_of_group(score_TGe, self.best)
        _, group_TM = self.best_groups(self.group_score(best, -1), self.kept_groups)
        kept_TG = self.kept(self.one_hot(group_TM, self.num_groups, self.on, self.off), 1)
        kept_TGe = self.stretch(self.reshape(kept_TG, (T, -1, 1)), (1, 1, self.experts_per_group))
        kept_TE = self.is_kept(self.reshape(kept_TGe, score_TE.shape), self.off)
        return self.select(kept_TE, score_TE, ops.zeros_like(score_TE) + self.minus_inf)


class Router(nn.Cell):
    """Choose ``K`` experts for each token and weigh them.

    ``s = sigmoid(W h)``. The ``K`` highest ``s + bias`` are chosen; the weights are
    ``s`` without the bias, divided by their sum (``norm_topk_prob``) and scaled. The bias is no
    gradient parameter: :class:`telechat_moe.train.step.TrainStep` moves it after each step.

    State:
        expert_bias: ``[E]`` fp32.
        expert_load: ``[E]`` fp32, tokens each expert got since it was last cleared (training only).

    Args:
        config: Model section of the recipe.

    Source: DeepSeek-V3, equations 12 to 16.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        shape = (self.num_experts, config.hidden_size)
        params = DTYPES[config.params_dtype]
        self.weight = weight(shape, config.initializer_range, "weight", params)
        # TeleChat3, as MindFormers: whole on every device, also under optimizer sharding.
        self.expert_bias = self._state("expert_bias")
        self.expert_load = self._state("expert_load")
        self.use_bias = config.moe_router_enable_expert_bias
        self.dtype = DTYPES[config.router_dense_type]
        self.to_router = ops.Cast()
        self.gate = ops.MatMul(transpose_b=True)
        self.to_float = ops.Cast()
        self.score = ops.Sigmoid()
        self.add_bias = ops.Add()
        self.limit = GroupLimit(config) if config.n_group > 1 else None
        self.top = ops.TopK(sorted=True)
        self.one_hot = ops.OneHot()
        self.on, self.off = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        self.reshape = ops.Reshape()
        self.pick = ops.Mul()
        self.sum_experts = ops.ReduceSum()
        self.normalize = config.norm_topk_prob and self.top_k > 1
        self.sum_chosen = ops.ReduceSum(keep_dims=True)
        self.add_eps = ops.Add()
        self.divide = ops.RealDiv()
        self.eps = Tensor(1e-20, ms.float32)
        self.scale = ops.Mul()
        self.scaling_factor = Tensor(config.routed_scaling_factor, ms.float32)
        self.count = ops.ReduceSum()
        self.accumulate_load = ops.AssignAdd()
        self.balance = BalanceLoss(config)
        self.z_loss = ZLoss(config.moe_z_loss_coeff or 0.0)

    def _state(self, name: str) -> Parameter:
        zeros = initializer(Zero(), (self.num_experts,), ms.float32)
        return Parameter(zeros, name=name, requires_grad=False, parallel_optimizer=False)

    def select_experts(self, score_TE: Tensor) -> Tensor:
        """Return the indices ``[T, K]`` int32 of the chosen experts."""
        choice_TE = ops.stop_gradient(score_TE)
        if self.use_bias:
            choice_TE = self.add_bias(choice_TE, self.expert_bias)
        if self.limit is not None:
            choice_TE = self.limit(choice_TE)
        _, index_TK = self.top(choice_TE, self.top_k)
        return index_TK

    def construct(self, x_TH: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Route.

        Args:
            x_TH: Normalised activations.
            batch: Sequences ``B`` in ``T = B * S``, for the sequence-level balance loss.

        Returns:
            ``(index_TK, weight_TK, aux)``: int32, fp32, and the balance and z-loss, ``(1,)`` fp32.
        """
        gate = self.to_router(self.weight, self.dtype)
        logits_TE = self.to_float(self.gate(self.to_router(x_TH, self.dtype), gate), ms.float32)
        score_TE = self.score(logits_TE)
        index_TK = self.select_experts(score_TE)
        chosen_TKE = self.one_hot(index_TK, self.num_experts, self.on, self.off)
        score_T1E = self.reshape(score_TE, (score_TE.shape[0], 1, self.num_experts))
        weight_TK = self.sum_experts(self.pick(chosen_TKE, score_T1E), -1)
        if self.normalize:
            weight_TK = self.divide(
                weight_TK, self.add_eps(self.sum_chosen(weight_TK, -1), self.eps)
            )
        weight_TK = self.scale(weight_TK, self.scaling_factor)
        if self.training:
            self.accumulate_load(self.expert_load, self.count(chosen_TKE, (0, 1)))
        aux = self.balance(score_TE, chosen_TKE, batch) + self.z_loss(logits_TE)
        return index_TK, weight_TK, aux
