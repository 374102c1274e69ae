"""Choice of experts: scores, group limit, selection with a bias, weights (DeepSeek-V3, section 2.1.2)."""

from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from telechat_moe.ops.custom import Tensors, custom_op
from telechat_moe.ops.select import backend, host_computes


class RoutingRule(NamedTuple):
    """How experts are chosen.

    Attributes:
        experts: ``E``.
        top_k: ``K``, experts per token.
        groups: Equal groups that the experts fall into; 1 = no group limit.
        kept_groups: Groups ``M`` that a token may choose from. The score of a group is the sum of
            its ``max(1, K / M)`` highest biased scores.
        normalize: Divide the weights by their sum.
        scale: Factor of the weights.
        softmax: Scores are the softmax of the logits instead of the sigmoid (fused backend only).
    """

    experts: int
    top_k: int
    groups: int = 1
    kept_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    softmax: bool = False


def routing(rule: RoutingRule) -> nn.Cell:
    """Return ``(logits_TE, bias_E) -> (score_TE, index_TK, weight_TK, chosen_TE, load_E)``.

    The ``K`` highest ``score + bias`` are chosen; the weights are made of the scores without it.
    ``chosen`` is 1 where a token chose an expert, ``load`` its sum over the tokens; both fp32.
    """
    return FusedRouting(rule) if backend("routing") == "fused" else Routing(rule)


class GroupLimit(nn.Cell):
    """Mask the experts outside each token's best groups with -inf.

    MindFormers and HF mask with 0.0 instead, so there a masked expert can win over a kept one whose
    biased score is negative.

    Source: DeepSeek-V3, section 2.1.2, "Node-Limited Routing".
    """

    def __init__(self, rule: RoutingRule) -> None:
        super().__init__()
        self.num_groups, self.kept_groups = rule.groups, rule.kept_groups
        self.best = max(1, rule.top_k // rule.kept_groups)
        self.experts_per_group = rule.experts // rule.groups
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
        best = (self.reshape, self.best_of_group, self.group_score, self.best_groups)
        mask = (self.one_hot, self.kept, self.stretch, self.is_kept, self.select)
        host_computes("top_k", *best, *mask)

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


class Routing(nn.Cell):
    """The plain backend of :func:`routing`. Among equal scores ``TopK`` chooses as it likes."""

    def __init__(self, rule: RoutingRule) -> None:
        super().__init__()
        self.num_experts, self.top_k = rule.experts, rule.top_k
        self.score = ops.Sigmoid()
        self.add_bias = ops.Add()
        self.limit = GroupLimit(rule) if rule.groups > 1 else None
        self.top = ops.TopK(sorted=True)
        self.one_hot = ops.OneHot()
        self.on, self.off = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
        self.reshape = ops.Reshape()
        self.pick = ops.Mul()
        self.sum_experts = ops.ReduceSum()
        self.normalize = rule.normalize
        self.sum_chosen = ops.ReduceSum(keep_dims=True)
        self.add_eps = ops.Add()
        self.divide = ops.RealDiv()
        self.eps = Tensor(1e-20, ms.float32)
        self.scale = ops.Mul()
        self.scaling_factor = Tensor(rule.scale, ms.float32)
        self.sum_choices = ops.ReduceSum()
        self.count = ops.ReduceSum()
        host_computes("top_k", self.top)
        host_computes("histogram", self.count)

    def construct(self, logits_TE: Tensor, bias_E: Tensor) -> Tensors:
        """Return ``(score_TE, index_TK, weight_TK, chosen_TE, load_E)``; all fp32, ``index`` int32."""
        score_TE = self.score(logits_TE)
        choice_TE = self.add_bias(ops.stop_gradient(score_TE), bias_E)
        if self.limit is not None:
            choice_TE = self.limit(choice_TE)
        _, index_TK = self.top(choice_TE, self.top_k)
        chosen_TKE = self.one_hot(index_TK, self.num_experts, self.on, self.off)
        score_T1E = self.reshape(score_TE, (score_TE.shape[0], 1, self.num_experts))
        weight_TK = self.sum_experts(self.pick(chosen_TKE, score_T1E), -1)
        if self.normalize:
            weight_TK = self.divide(
                weight_TK, self.add_eps(self.sum_chosen(weight_TK, -1), self.eps)
            )
        chosen_TE = self.sum_choices(chosen_TKE, 1)
        weight_TK = self.scale(weight_TK, self.scaling_factor)
        return score_TE, index_TK, weight_TK, chosen_TE, self.count(chosen_TE, 0)


class FusedRouting(nn.Cell):
    """The fused backend of :func:`routing`: one pass over the tokens. Of equal scores the first wins."""

    def __init__(self, rule: RoutingRule) -> None:
        super().__init__()
        attributes: dict[str, Any] = rule._asdict() | {"scale": float(rule.scale)}
        del attributes["experts"]
        self.forward = custom_op("Routing", lambda x, bias: (x, ms.int32, x, x, x), 5, **attributes)
        self.backward = custom_op(
            "RoutingGrad", lambda score, index, dscore, dweight: score, **attributes
        )

    def construct(self, logits_TE: Tensor, bias_E: Tensor) -> Tensors:
        """Return ``(score_TE, index_TK, weight_TK, chosen_TE, load_E)``; all fp32, ``index`` int32."""
        return self.forward(logits_TE, bias_E)

    def bprop(
        self, logits_TE: Tensor, bias_E: Tensor, out: Tensors, dout: Tensors
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the logits from those of scores and weights; the bias has none."""
        return self.backward(out[0], out[1], dout[0], dout[2]), ops.zeros_like(bias_E)


class FusedBalance(nn.Cell):
    """``scale / g * sum_gi f_gi P_gi`` over ``g`` groups of tokens: ``f`` the share of tokens that chose expert i, ``P`` its mean normalised score.

    No gradient flows through ``f``.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.forward = custom_op(
            "BalanceLoss", lambda score, chosen: (score, score), 2, scale=scale
        )
        self.backward = custom_op("BalanceLossGrad", lambda score, f, d: score, scale=scale)

    def construct(self, score_gnE: Tensor, chosen_gnE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss ``(1,)`` and ``f``, both fp32."""
        return self.forward(score_gnE, chosen_gnE)

    def bprop(
        self, score_gnE: Tensor, chosen_gnE: Tensor, out: Tensors, dout: Tensors
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the scores; the choices have none."""
        return self.backward(score_gnE, out[1], dout[0]), ops.zeros_like(chosen_gnE)


def balance_reference(score_gnE: np.ndarray, chosen_gnE: np.ndarray, scale: float) -> float:
    """Define the balance loss in float64."""
    score = score_gnE.astype(np.float64)
    mean_gE = (score / (score.sum(-1, keepdims=True) + 1e-20)).mean(1)
    return scale * float((chosen_gnE.astype(np.float64).mean(1) * mean_gE).sum(-1).mean())


def ranked(rule: RoutingRule, choice_TE: np.ndarray) -> np.ndarray:
    """Return biased scores with -inf for the experts outside each token's best groups."""
    if rule.groups == 1:
        return choice_TE
    choice_TGe = choice_TE.reshape(len(choice_TE), rule.groups, -1)
    best = max(1, rule.top_k // rule.kept_groups)
    group_TG = np.sort(choice_TGe, -1)[..., ::-1][..., :best].sum(-1)
    kept_TM = np.argsort(-group_TG, 1, kind="stable")[:, : rule.kept_groups]
    dropped_TG = np.ones(group_TG.shape, bool)
    np.put_along_axis(dropped_TG, kept_TM, False, 1)
    return np.where(dropped_TG[..., None], -np.inf, choice_TGe).reshape(choice_TE.shape)


def routing_reference(
    rule: RoutingRule, logits_TE: np.ndarray, bias_E: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Define ``(score, index, weight)`` in float64; of equal scores the first wins."""
    x = logits_TE.astype(np.float64)
    exp = np.exp(x - x.max(1, keepdims=True))
    score_TE = exp / exp.sum(1, keepdims=True) if rule.softmax else 1 / (1 + np.exp(-x))
    choice_TE = ranked(rule, score_TE + bias_E)
    index_TK = np.argsort(-choice_TE, 1, kind="stable")[:, : rule.top_k]
    weight_TK = np.take_along_axis(score_TE, index_TK, 1)
    if rule.normalize:
        weight_TK = weight_TK / (weight_TK.sum(1, keepdims=True) + 1e-20)
    return score_TE, index_TK, weight_TK * rule.scale
