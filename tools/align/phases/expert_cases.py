"""Cases of phase one whose rows depend on the routing, and those of the update. Needs MindSpore.

The order of rows is computed here from the descriptions of each backend in ``ops/permute.py``: sorted by expert in a
stable order (fused), or padded to blocks of one expert each (plain).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.model.dispatch import DroplessDispatch, build_dispatch, drops
from telechat_moe.ops import grouped_matmul, permute
from telechat_moe.tools.align.operators.approx import Approx, Array
from telechat_moe.tools.align.operators.joining import concatenate, where
from telechat_moe.tools.align.operators.ms_custom import combine_rows
from telechat_moe.tools.align.phases.cases import (
    COLUMNS,
    ROWS,
    Draw,
    OperatorCase,
    call,
    fewer,
    named,
    rounded,
)
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import GlobalNorm

_EXPERTS = 4
"""Experts of a case: a bound depends on the rows of an expert, not on the number of experts."""
_BLOCK = 8


class _Rows(NamedTuple):
    """The rows that pairs of token and expert are moved to.

    Attributes:
        row: Row of each pair.
        token: Token of each row; 0 for a row without a pair.
        taken: Rows that have a pair.
    """

    row: Array
    token: Array
    taken: Array


def cases(config: Any, tokens: int, rng: np.random.Generator) -> list[OperatorCase]:
    """Return the cases of a model section's experts, for micro-batches of a number of tokens; none if it has none."""
    if not config.n_routed_experts:
        return []
    draw, rows = Draw(config.compute_dtype, rng), min(tokens, ROWS)
    found = [*_dispatched(config, rows, draw), *_grouped(config, rows, draw)]
    return [*found, _dropping(config, rows, draw)] if drops(config) else found


# ------------------------------------------------------------------ rows in the order of experts


def sorted_rows(index: Array) -> _Rows:
    """Return rows in the order of their experts, with a stable order of pairs."""
    pair = np.argsort(index.reshape(-1), kind="stable")
    return _Rows(np.argsort(pair), pair // index.shape[1], np.ones(pair.size, bool))


def block_rows(index: Array, experts: int, block: int) -> _Rows:
    """Return rows in whole blocks of one expert, with as many blocks as the worst routing needs."""
    flat = index.reshape(-1)
    blocks = -(-np.bincount(flat, minlength=experts) // block)
    begin = (np.cumsum(blocks) - blocks) * block
    row = np.zeros(flat.size, np.int64)
    for expert in range(experts):
        mine = flat == expert
        row[mine] = begin[expert] + np.arange(mine.sum())
    total = (flat.size + experts * (block - 1)) // block * block
    token, taken = np.zeros(total, np.int64), np.zeros(total, bool)
    token[row], taken[row] = np.arange(flat.size) // index.shape[1], True
    return _Rows(row, token, taken)


def _choices(rows: int, experts: int, per_token: int, rng: np.random.Generator) -> Array:
    """Return distinct experts for each token; the first are chosen more often, the last of three or more never."""
    known = max(per_token, experts - 1) if experts > 2 else experts
    scores = rng.standard_normal((rows, known)) - np.arange(known) * 2 / known
    return np.argsort(-scores, 1)[:, :per_token].astype(np.int32)


def _dispatched(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    experts, per_token = config.n_routed_experts, config.num_experts_per_tok
    index = _choices(rows, experts, per_token, x.rng)
    width = min(config.hidden_size, COLUMNS // 4)
    block = DroplessDispatch(experts).rows(index.size)
    layouts = {"fused": sorted_rows(index), "plain": block_rows(index, experts, block)}
    weight = np.abs(x(rows, per_token))
    what = f"{per_token} of {experts} experts"
    found: list[OperatorCase] = []
    for backend, order in layouts.items():
        size = block if backend == "plain" else 0
        given = [x(rows, width)], [x(order.token.size, width), weight]
        words, formulas = ("to", "back from"), (_to_experts, _to_tokens)
        for back, (taken, word, formula) in enumerate(zip(given, words, formulas, strict=True)):
            build, formula = partial(_Moved, experts, size, bool(back)), partial(formula, order)
            case = OperatorCase(
                "permute", f"{word} {what}", build, taken, formula, [index], [backend]
            )
            found.append(case)
    return found


def _to_experts(rows: _Rows, backend: str, a: Approx) -> Approx:
    filled = np.broadcast_to(rows.taken[:, None], (rows.token.size, a.shape[1]))
    return where(filled, a[rows.token], a.value[rows.token])


def _to_tokens(rows: _Rows, backend: str, y: Approx, weight: Approx) -> Approx:
    return combine_rows(y, rows.row.reshape(weight.shape), weight)


class _Fixed(nn.Cell):
    """A plan of integers that is not differentiated; outside of a graph it would be."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core

    def construct(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Return the plan."""
        return tuple(ops.stop_gradient(x) for x in self.core(*inputs))


class _Moved(nn.Cell):
    """Moves tokens to the rows of their experts, or reduces these to weighted sums of tokens; block 0: fused."""

    def __init__(self, experts: int, block: int, back: bool) -> None:
        super().__init__()
        self.block, self.back = block, back
        plain, fused = permute.Permute, permute.FusedPermute
        if back:
            plain, fused = permute.Unpermute, permute.FusedUnpermute
        self.core: Any = plain() if block else fused()
        self.plan = _Fixed(permute.BlockPlan(experts) if block else permute.SortPlan(experts))

    def construct(self, x: Tensor, *given: Tensor) -> Tensor:
        """Return ``[rows, H]``, or back ``[T, H]``; given are the chosen experts, before them back the weights."""
        *weight, index = given
        if self.block:
            row, blocks = self.plan(index, self.block)
            return self.core(x, row, *(weight if self.back else (blocks.shape[0] * self.block,)))
        row, pair, _ = self.plan(index)
        return self.core(x, pair, row, *weight)


# ------------------------------------------------------------------ experts with a capacity


def kept_pairs(index: Array, weight: Array, capacity: int, by_weight: bool) -> Array:
    """Return the pairs that an expert has capacity for: those of the highest weight, or the first."""
    flat = index.reshape(-1)
    order = np.argsort(-weight.reshape(-1), kind="stable") if by_weight else np.arange(flat.size)
    kept = np.zeros(flat.size, bool)
    for expert in np.unique(flat):
        kept[[i for i in order if flat[i] == expert][:capacity]] = True
    return kept.reshape(index.shape)


def _dropping(config: Any, rows: int, x: Draw) -> OperatorCase:
    """Return the case of dispatch to identity experts and combination: a sum of the weights that are kept."""
    index = _choices(rows, config.n_routed_experts, config.num_experts_per_tok, x.rng)
    factor, policy = config.moe_expert_capacity_factor, config.moe_token_drop_policy
    weight = np.abs(x(*index.shape))
    capacity = int(np.ceil(factor * index.size / config.n_routed_experts))
    keep = kept_pairs(index, weight, capacity, policy == "probs").astype(np.float64)

    def formula(backend: str, a: Approx, w: Approx) -> Approx:
        a = a.reshape(a.shape[0], 1, a.shape[1])
        return (w.times(keep).reshape(*w.shape, 1) * a).sum(1)

    taken = [x(rows, min(config.hidden_size, COLUMNS)), weight]
    what = f"there and back, capacity {capacity} of {policy}"
    return OperatorCase("permute", what, partial(_ThereAndBack, config), taken, formula, [index])


class _ThereAndBack(nn.Cell):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.core: Any = build_dispatch(config)
        self.core.plan = _Fixed(self.core.plan)
        if self.core.fused:
            self.core.sort_plan = _Fixed(self.core.sort_plan)

    def construct(self, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        return self.core(x, index, weight, _unchanged)


def _unchanged(rows: Tensor, group: Any = None) -> Tensor:
    return rows


# ------------------------------------------------------------------ products of experts


def _grouped(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    hidden, wide = config.hidden_size, config.moe_intermediate_size
    compute = getattr(ms, config.compute_dtype)
    experts = min(config.n_routed_experts, _EXPERTS)
    rows = fewer(rows, max(hidden, wide))
    sizes = _uneven(rows, experts)
    blocks: Array = np.repeat(np.arange(experts, dtype=np.int32), -(-sizes // _BLOCK))
    found: list[OperatorCase] = []
    for inner, outer in sorted({(hidden, wide), (wide, hidden)}):
        what = f"{inner} to {outer}, {experts} experts"
        weight = x(experts, inner, _columns(inner, outer, experts), scale=inner**-0.5)
        coming = x(rows, weight.shape[2])
        into = partial(_into_main_grad, compute)
        fused = partial(grouped_matmul.FusedGroupedMatmul, compute)
        taken = [x(rows, inner), weight]
        adding = [*taken, coming, x(*weight.shape)]
        formula = named("Primitive.TelechatGroupedMatmul", sizes)
        found += [
            OperatorCase("grouped_matmul", what, fused, taken, formula, [sizes], ["fused"]),
            OperatorCase("grouped_matmul", f"{what}, added to the main gradient", into, adding, partial(_added, sizes),
                 [sizes], ["fused"], backward=False),
            OperatorCase("grouped_matmul", what, grouped_matmul.GroupedMatmul,
                 [x(blocks.size, _BLOCK, inner), weight], partial(_block_products, blocks), [blocks], ["plain"]),
        ]  # fmt: skip
    columns, stored = _columns(hidden, wide, experts), rounded(config.compute_dtype)
    formula = named("Primitive.TelechatGroupedSwiGLU", sizes)
    gates = [x(experts, hidden, columns, scale=hidden**-0.5) for _ in range(2)]
    both = partial(grouped_matmul.GroupedSwiGLU, compute)
    what = f"{hidden} to {wide} with SwiGLU, {experts} experts"
    taken, given = [x(rows, hidden), *gates], ([sizes], ["fused"])
    found.append(OperatorCase("grouped_matmul", what, both, taken, formula, *given, stored=stored))
    return found


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
        rows, made = slice(int(end - n), int(end)), main[i]
        if n:
            into.append(coming[rows].matmul(w[i].swap(-1, -2)))
            made = made + x[rows].swap(-1, -2).matmul(coming[rows])
        out.append(made.reshape(1, *made.shape))
    return [concatenate(into, 0), concatenate(out, 0)]


def _into_main_grad(compute: Any) -> Callable[..., Sequence[Any]]:
    """Return GMMAdd: the gradient of the rows, and the main gradient to which that of the weights was added."""
    core = grouped_matmul.GroupedMatmulIntoMainGrad(compute)
    back = ops.GradOperation(get_all=True, sens_param=True)(core)

    def run(x: Tensor, weight: Tensor, coming: Tensor, main: Tensor, sizes: Tensor) -> Any:
        kept = Parameter(main, name="main")
        return back(x, weight, sizes, kept, coming)[0], kept

    return run


# ------------------------------------------------------------------ the update


def update_cases(recipe: Any, rng: np.random.Generator) -> list[OperatorCase]:
    """Return the cases of a recipe's optimizer: its first and tenth update, and the norm of gradients."""
    given, rate = recipe.optimizer, float(recipe.lr_schedule.learning_rate)
    hidden = recipe.model_config.hidden_size
    x = Draw("float32", rng)
    shapes = [(ROWS, min(hidden, COLUMNS)), (hidden,)]
    grads = [x(*s, scale=1e-3) for s in shapes]
    found = [
        OperatorCase("adamw", f"norm of gradients, width {hidden}", partial(_norms, len(shapes)), grads, _norm,
             backward=False, dtype="float32")
    ]  # fmt: skip
    for step in (1, 10):
        taken: list[Array] = []
        for shape, grad in zip(shapes, grads, strict=True):
            first, second = x(*shape, scale=1e-3), x(*shape, scale=1e-3) ** 2
            states = [0 * first, 0 * second] if step == 1 else [first, second]
            taken += [x(*shape, scale=0.02), *states, grad]
        build, formula = (
            partial(_Update, given, shapes, rate, step),
            partial(_updated, given, rate, step),
        )
        found.append(
            OperatorCase("adamw", f"update {step} at rate {rate:g}", build, taken, formula,
                 backward=False, dtype="float32")
        )  # fmt: skip
    return found


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
        self, given: Any, shapes: Sequence[tuple[int, ...]], rate: float, step: int
    ) -> None:
        names = [f"w{i}" for i in range(len(shapes) - 1)] + ["norm"]
        self.params = [
            Parameter(Tensor(np.zeros(s, np.float32)), name=n)
            for s, n in zip(shapes, names, strict=True)
        ]
        self.core = AdamW(self.params, tuple(given.betas), given.eps, given.weight_decay, ["norm"])
        self.scalars = self.core.scalars(step, rate)

    def __call__(self, *states: Tensor) -> list[Any]:
        kept = (self.params, self.core.moment1, self.core.moment2)
        for i, parameters in enumerate(kept):
            for parameter, value in zip(parameters, states[i::4], strict=True):
                parameter.set_data(value)
        self.core(states[3::4], *self.scalars, Tensor(np.float32(_CLIP)))
        return [x for row in zip(*kept, strict=True) for x in row]


def _updated(given: Any, rate: float, step: int, backend: str, *states: Approx) -> list[Approx]:
    found: list[Approx] = []
    for i in range(0, len(states), 4):
        weight, first, second, grad = states[i : i + 4]
        decay = given.weight_decay if i + 4 < len(states) else 0.0
        settings = (step, rate, given.betas, given.eps, decay)
        found += call("AdamW", weight, grad * _CLIP, first, second, *settings)
    return found
