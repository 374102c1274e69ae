"""Watch the routers of a model while it computes a fixed text: what they chose, how clearly, and what experts add.

The model is built as for training; its named primitives are replaced by ones that also keep what they see in parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.analysis.statistics import margins
from telechat_moe.checkpoint.weights import own_weights
from telechat_moe.model.block import Block
from telechat_moe.model.router import Router
from telechat_moe.moe.loads import entropy
from telechat_moe.numerics import Array
from telechat_moe.ops.routing import ranked
from telechat_moe.recipe import Recipe
from telechat_moe.train import parameters
from telechat_moe.train.engine import build_model
from telechat_moe.train.step import Evaluate, tensors


def _zero_parameter(shape: tuple[int, ...], dtype: Any = ms.float32) -> Parameter:
    return Parameter(Tensor(np.zeros(shape), dtype), requires_grad=False)


class ObservedChoice(nn.Cell):
    """The choice of a router; keeps scores ``[T, E]`` and chosen experts ``[T, K]``."""

    def __init__(self, router: Router, tokens: int) -> None:
        super().__init__()
        self.choose = router.choose
        self.score = _zero_parameter((tokens, router.num_experts))
        self.index = _zero_parameter((tokens, router.top_k), ms.int32)
        self.keep_score, self.keep_index = ops.Assign(), ops.Assign()

    def construct(self, logits_TE: Tensor, bias_E: Tensor) -> tuple[Tensor, ...]:
        """Return what :func:`telechat_moe.ops.routing.routing` does."""
        score_TE, index_TK, weight_TK, chosen_TE, load_E = self.choose(logits_TE, bias_E)
        self.keep_score(self.score, score_TE)
        self.keep_index(self.index, index_TK)
        return score_TE, index_TK, weight_TK, chosen_TE, load_E


class ObservedAdd(nn.Cell):
    """A sum of two ``[T, H]``; keeps the norms of both, ``[2, T]``."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.norms = _zero_parameter((2, tokens))
        self.add, self.keep, self.stack = ops.Add(), ops.Assign(), ops.Stack()
        self.to_float, self.square = ops.Cast(), ops.Square()
        self.sum, self.root = ops.ReduceSum(), ops.Sqrt()

    def norm(self, x_TH: Tensor) -> Tensor:
        """Return the norm of each row, float32 ``[T]``."""
        return self.root(self.sum(self.square(self.to_float(x_TH, ms.float32)), 1))

    def construct(self, a_TH: Tensor, b_TH: Tensor) -> Tensor:
        """Return the sum ``[T, H]`` and keep the norms of both terms."""
        self.keep(self.norms, self.stack((self.norm(a_TH), self.norm(b_TH))))
        return self.add(a_TH, b_TH)


@dataclass(frozen=True)
class Observation:
    """What the routers of one checkpoint did on a text.

    Attributes:
        index_LTK: Chosen experts, int32.
        entropy_LT: Entropy of the scores over the experts, 0 to 1.
        margin_LT: By how much the last chosen expert was ahead of the next.
        routed_LT: Norm of what the routed experts add to the residual stream.
        shared_LT: Norm of what the shared expert adds; NaN without one.
        residual_LT: Norm of the residual stream before.
    """

    index_LTK: Array  # noqa: N815
    entropy_LT: Array  # noqa: N815
    margin_LT: Array  # noqa: N815
    routed_LT: Array  # noqa: N815
    shared_LT: Array  # noqa: N815
    residual_LT: Array  # noqa: N815


class Observer:
    """A model whose routers are watched.

    Args:
        recipe: Of the run.
        rows: Sequences of a batch.
    """

    def __init__(self, recipe: Recipe, rows: int) -> None:
        settings = recipe.telechat_moe
        # Fused regions have no primitives to replace.
        operators = replace(settings.operators, fuse_plain=False)
        recipe = replace(recipe, telechat_moe=replace(settings, operators=operators))
        self.config = recipe.model_config
        self.model, _ = build_model(recipe)
        blocks: list[Block] = [*self.model.layers]
        if self.model.mtp_depth:
            blocks += [layer.block for layer in self.model.mtp]
        blocks = [block for block in blocks if block.is_moe]
        tokens = rows * self.config.seq_length
        self.choices: list[ObservedChoice] = []
        self.sums: list[tuple[ObservedAdd, ObservedAdd | None]] = []
        for number, block in enumerate(blocks):
            moe = block.moe
            moe.router.choose = choice = ObservedChoice(moe.router, tokens)
            block.add_ffn = residual = ObservedAdd(tokens)
            shared = ObservedAdd(tokens) if moe.has_shared else None
            if shared is not None:
                moe.add_shared = shared
            self.choices.append(choice)
            self.sums.append((residual, shared))
            for cell in (choice, residual, shared):
                for parameter in cell.get_parameters() if cell is not None else ():
                    # Such a name is in no checkpoint (`checkpoint.weights.TRANSIENT`).
                    parameter.name = f"moe_layer_{number}.{parameter.name}.observed"
        self.routers = [block.moe.router for block in blocks]
        self.evaluate = Evaluate(self.model)
        self.model.set_train(False)
        self.evaluate.set_train(False)

    def load(self, path: Path) -> None:
        """Load the weights of a checkpoint into the model.

        Raises:
            BadInputError: It is broken, or of another model.
        """
        weights = own_weights(path, self.config)
        parameters.load_weights(self.model, weights, path, in_place=True)

    def run(self, batches: Sequence[Mapping[str, Array]], tokens: int) -> Observation:
        """Compute batches and return what the routers did on their first ``tokens`` tokens."""
        kinds: list[list[Array]] = [[] for _ in range(6)]
        for columns in batches:
            self.evaluate(*tensors(columns)).asnumpy()  # waits until all is computed
            for arrays, array in zip(kinds, self._layers(), strict=True):
                arrays.append(array)
        return Observation(*(np.concatenate(arrays, 1)[:, :tokens] for arrays in kinds))

    def _layers(self) -> tuple[Array, ...]:
        """Return what the last batch left in the parameters, all layers of each kind stacked."""
        rows: list[tuple[Array, ...]] = []
        for choice, sums, router in zip(self.choices, self.sums, self.routers, strict=True):
            score_TE, index_TK = choice.score.asnumpy(), choice.index.asnumpy().copy()
            bias_E = router.expert_bias.asnumpy() if router.use_bias else 0.0
            margin_T = margins(ranked(router.rule, score_TE + bias_E), index_TK)
            residual_T, added_T = sums[0].norms.asnumpy().copy()
            routed_T, shared_T = added_T, np.full_like(added_T, np.nan)
            if sums[1] is not None:
                routed_T, shared_T = sums[1].norms.asnumpy().copy()
            share_T = entropy(score_TE)
            rows.append((index_TK, share_T, margin_T, routed_T, shared_T, residual_T))
        return tuple(np.stack(kind) for kind in zip(*rows, strict=True))
