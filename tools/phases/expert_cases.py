"""Cases of phase one whose rows depend on the routing, and those of the update. Needs MindSpore."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.model.dispatch import DroplessDispatch, SortedDispatch, build_dispatch, drops
from telechat_moe.ops import grouped_matmul
from telechat_moe.ops.select import backend as chosen_backend
from telechat_moe.tools.align.operators.approx import Approx, Array, concatenate
from telechat_moe.tools.align.operators.registry import call
from telechat_moe.tools.phases.cases import (
    COLUMNS,
    ROWS,
    Draw,
    OperatorCase,
    fewer,
    named,
    rounded,
)
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import GlobalNorm

_EXPERTS = 4
"""Experts of a case: a bound depends on the rows of an expert, not on the number of experts."""
_BLOCK = 8


def cases(config: Any, tokens: int, rng: np.random.Generator) -> list[OperatorCase]:
    """Return the cases of a model section's experts, for micro-batches of a number of tokens; none if it has none."""
    if not config.n_routed_experts:
        return []
    draw, rows = Draw(config.compute_dtype, rng), min(tokens, ROWS)
    limits = [False, True] if drops(config) else [False]
    dispatches = [_dispatched(config, rows, draw, limit) for limit in limits]
    return [*dispatches, *_grouped(config, rows, draw)]


def _choices(rows: int, experts: int, per_token: int, rng: np.random.Generator) -> Array:
    """Return distinct experts for each token; the first are chosen more often, the last of three or more never."""
    chosen = max(per_token, experts - 1) if experts > 2 else experts
    scores = rng.standard_normal((rows, chosen)) - np.arange(chosen) * 2 / chosen
    return np.argsort(-scores, 1)[:, :per_token].astype(np.int32)


def pairs_within_capacity(index: Array, weight: Array, capacity: int, by_weight: bool) -> Array:
    """Return the pairs that an expert has capacity for: those of the highest weight, or the first."""
    flat = index.reshape(-1)
    order = np.argsort(-weight.reshape(-1), kind="stable") if by_weight else np.arange(flat.size)
    mask = np.zeros(flat.size, bool)
    for expert in np.unique(flat):
        mask[[i for i in order if flat[i] == expert][:capacity]] = True
    return mask.reshape(index.shape)


def _dispatched(config: Any, rows: int, x: Draw, capacity: bool) -> OperatorCase:
    """Return the case of dispatch to experts that multiply by :func:`_factors`, and combination."""
    experts, per_token = config.n_routed_experts, config.num_experts_per_tok
    index = _choices(rows, experts, per_token, x.rng)
    weight = np.abs(x(*index.shape))
    factors, build = _factors(experts)[index].astype(np.float64), partial(_dropless, experts)
    description = f"there and back, {per_token} of {experts} experts"
    if capacity:
        policy, build = config.moe_token_drop_policy, partial(build_dispatch, config)
        limit = int(np.ceil(config.moe_expert_capacity_factor * index.size / experts))
        factors *= pairs_within_capacity(index, weight, limit, policy == "probs")
        description = f"there and back, capacity {limit} of {policy}"

    def formula(backend: str, a: Approx, w: Approx) -> Approx:
        a = a.reshape(a.shape[0], 1, a.shape[1])
        return (w.times(factors).reshape(*w.shape, 1) * a).sum(1)

    inputs = [x(rows, min(config.hidden_size, COLUMNS)), weight]
    build = partial(_ThereAndBack, build, experts)
    return OperatorCase("permute", description, build, inputs, formula, [index])


def _factors(experts: int) -> Array:
    """Return a power of two for each expert, exact in a product, so that rows of another expert show."""
    return (2.0 ** (np.arange(experts) % 7)).astype(np.float32)


def _dropless(experts: int) -> nn.Cell:
    fused = chosen_backend("permute") == "fused"
    return SortedDispatch(experts) if fused else DroplessDispatch(experts)


class _Fixed(nn.Cell):
    """A plan of integers that is not differentiated; outside of a graph it would be."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core

    def construct(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return the plan."""
        return tuple(ops.stop_gradient(x) for x in self.core(*inputs))


class _ThereAndBack(nn.Cell):
    def __init__(self, build: Callable[[], Any], experts: int) -> None:
        super().__init__()
        self.core: Any = build()
        self.factors = _factors(experts)
        for name in ("plan", "sort_plan"):
            if hasattr(self.core, name):
                setattr(self.core, name, _Fixed(getattr(self.core, name)))

    def construct(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        return self.core(x, index, weight, self.multiplied)

    def multiplied(self, rows: Tensor, group: Any = None) -> Tensor:
        """Return each row times the factor of its expert; rows are sorted, in blocks, or of one size for each expert."""
        factors = self.factors
        if len(rows.shape) == 3:
            factors = factors if group is None else factors[group.asnumpy()]
            return rows * Tensor(factors[:, None, None])
        row_factors = np.repeat(factors, group.asnumpy())
        return rows * Tensor(
            np.resize(row_factors, (rows.shape[0], 1))
        )  # rows after them belong to none


def _grouped(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    hidden, wide = config.hidden_size, config.moe_intermediate_size
    compute = getattr(ms, config.compute_dtype)
    experts = min(config.n_routed_experts, _EXPERTS)
    rows = fewer(rows, max(hidden, wide))
    sizes = _uneven(rows, experts)
    blocks: Array = np.repeat(np.arange(experts, dtype=np.int32), -(-sizes // _BLOCK))
    products: list[OperatorCase] = []
    for inner, outer in sorted({(hidden, wide), (wide, hidden)}):
        sizes_text = f"{inner} to {outer}, {experts} experts"
        weight = x(experts, inner, _columns(inner, outer, experts), scale=inner**-0.5)
        coming = x(rows, weight.shape[2])
        into = partial(_into_main_grad, compute)
        fused = partial(grouped_matmul.FusedGroupedMatmul, compute)
        inputs = [x(rows, inner), weight]
        adding = [*inputs, coming, x(*weight.shape)]
        formula = named("Primitive.TelechatGroupedMatmul", sizes)
        products += [
            OperatorCase("grouped_matmul", sizes_text, fused, inputs, formula, [sizes], ["fused"]),
            OperatorCase("grouped_matmul", f"{sizes_text}, added to the main gradient", into, adding, partial(_added, sizes),
                 [sizes], ["fused"], backward=False),
            OperatorCase("grouped_matmul", sizes_text, grouped_matmul.GroupedMatmul,
                 [x(blocks.size, _BLOCK, inner), weight], partial(_block_products, blocks), [blocks], ["plain"]),
        ]  # fmt: skip
    columns, stored = _columns(hidden, wide, experts), rounded(config.compute_dtype)
    formula = named("Primitive.TelechatGroupedSwiGLU", sizes)
    gates = [x(experts, hidden, columns, scale=hidden**-0.5) for _ in range(2)]
    both = partial(grouped_matmul.GroupedSwiGLU, compute)
    sizes_text = f"{hidden} to {wide} with SwiGLU, {experts} experts"
    inputs, constants = [x(rows, hidden), *gates], ([sizes], ["fused"])
    products.append(
        OperatorCase("grouped_matmul", sizes_text, both, inputs, formula, *constants, stored=stored)
    )
    return products


def _columns(inner: int, outer: int, experts: int) -> int:
    return fewer(min(outer, COLUMNS // experts), inner * experts)


def _uneven(rows: int, experts: int) -> Array:
    """Return the number of rows of each expert: decreasing and odd, none for the last of two or more experts."""
    if experts == 1:
        return np.array([rows], np.int32)
    share = np.arange(experts - 1, 0, -1)
    sizes = rows * share // share.sum()
    sizes[0] += rows - sizes.sum()
    return np.append(sizes, 0).astype(np.int32)


def _block_products(blocks: Array, backend: str, x: Approx, w: Approx) -> Approx:
    return x.matmul(w[blocks])


def _added(
    sizes: Array, backend: str, x: Approx, w: Approx, coming: Approx, main: Approx
) -> list[Approx]:
    into: list[Approx] = []
    out: list[Approx] = []
    for i, (n, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        rows, main_grad = slice(int(end - n), int(end)), main[i]
        if n:
            into.append(coming[rows].matmul(w[i].swap(-1, -2)))
            main_grad = main_grad + x[rows].swap(-1, -2).matmul(coming[rows])
        out.append(main_grad.reshape(1, *main_grad.shape))
    return [concatenate(into, 0), concatenate(out, 0)]


def _into_main_grad(compute: Any) -> Callable[..., Sequence[Any]]:
    """Return GMMAdd: the gradient of the rows, and the main gradient to which that of the weights was added."""
    core = grouped_matmul.GroupedMatmulIntoMainGrad(compute)
    gradient = ops.GradOperation(get_all=True, sens_param=True)(core)

    def run(x: Tensor, weight: Tensor, coming: Tensor, main: Tensor, sizes: Tensor) -> Any:
        parameter = Parameter(main, name="main")
        return gradient(x, weight, sizes, parameter, coming)[0], parameter

    return run


def update_cases(recipe: Any, rng: np.random.Generator) -> list[OperatorCase]:
    """Return the cases of a recipe's optimizer: its first and tenth update, and the norm of gradients."""
    optimizer, rate = recipe.optimizer, float(recipe.lr_schedule.learning_rate)
    hidden = recipe.model_config.hidden_size
    x = Draw("float32", rng)
    shapes = [(ROWS, min(hidden, COLUMNS)), (hidden,)]
    grads = [x(*s, scale=1e-3) for s in shapes]
    updates = [
        OperatorCase("adamw", f"norm of gradients, width {hidden}", partial(_norms, len(shapes)), grads, _norm,
             backward=False, dtype="float32")
    ]  # fmt: skip
    for step in (1, 10):
        inputs: list[Array] = []
        for shape, grad in zip(shapes, grads, strict=True):
            first, second = x(*shape, scale=1e-3), x(*shape, scale=1e-3) ** 2
            states = [0 * first, 0 * second] if step == 1 else [first, second]
            inputs += [x(*shape, scale=0.02), *states, grad]
        build = partial(_Update, optimizer, shapes, rate, step)
        formula = partial(_updated, optimizer, rate, step)
        updates.append(
            OperatorCase("adamw", f"update {step} at rate {rate:g}", build, inputs, formula,
                 backward=False, dtype="float32")
        )  # fmt: skip
    return updates


_CLIP = 0.375


def _norms(tensors: int) -> Callable[..., Sequence[Any]]:
    core = GlobalNorm(tensors)
    return lambda *grads: core(grads)


def _norm(backend: str, *grads: Approx) -> list[Approx]:
    norm, squares = call("Primitive.TelechatSquareSums", *grads)
    return [norm.reshape(), squares]


class _Update:
    """AdamW on several tensors, the last of which is not decayed: the weights and moments after the update."""

    def __init__(
        self, optimizer: Any, shapes: Sequence[tuple[int, ...]], rate: float, step: int
    ) -> None:
        names = [f"w{i}" for i in range(len(shapes) - 1)] + ["norm"]
        zeros = [Tensor(np.zeros(shape, np.float32)) for shape in shapes]
        self.params = [Parameter(x, name=n) for x, n in zip(zeros, names, strict=True)]
        self.core = AdamW(
            self.params, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay, ["norm"]
        )
        self.scalars = self.core.scalars(step, rate)

    def __call__(self, *states: Tensor) -> list[Any]:
        states_of_weights = (self.params, self.core.moment1, self.core.moment2)
        for i, parameters in enumerate(states_of_weights):
            for parameter, value in zip(parameters, states[i::4], strict=True):
                parameter.set_data(value)
        self.core(states[3::4], *self.scalars, Tensor(np.float32(_CLIP)))
        return [x for row in zip(*states_of_weights, strict=True) for x in row]


def _updated(optimizer: Any, rate: float, step: int, backend: str, *states: Approx) -> list[Approx]:
    updated: list[Approx] = []
    for i in range(0, len(states), 4):
        weight, first, second, grad = states[i : i + 4]
        decay = optimizer.weight_decay if i + 4 < len(states) else 0.0
        settings = (step, rate, optimizer.betas, optimizer.eps, decay)
        updated += call("AdamW", weight, grad * _CLIP, first, second, *settings)
    return updated
