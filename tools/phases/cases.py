"""The cases of phase one: each operator of `telechat_moe.ops` at the sizes of a recipe, and its formula. Needs MindSpore."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from telechat_moe.model.dispatch import DroplessDispatch, SortedDispatch, build_dispatch, drops
from telechat_moe.narrowing import is_sequence
from telechat_moe.numerics import round_to
from telechat_moe.ops import (
    attention,
    cross_entropy,
    grouped_matmul,
    matmul,
    norm,
    rope,
    routing,
    swiglu,
)
from telechat_moe.ops.select import backend as chosen_backend
from telechat_moe.tools.align.operators.approx import Approx, Array, concatenate
from telechat_moe.tools.align.operators.ms_primitives import LOG
from telechat_moe.tools.align.operators.registry import call
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import GlobalNorm

ROWS = 256
"""The number of tokens of a case, and of positions in attention."""

COLUMNS = 1024
"""The most columns of a result; bounds depend on inner dimensions only."""

ELEMENTS = 1 << 20
"""The approximate number of elements of a tensor; wide tensors have fewer rows or columns."""

_HEADS = 8
_EXPERTS = 4
"""Experts of a case: a bound depends on the rows of an expert, not on the number of experts."""
_BLOCK = 8


@dataclass(frozen=True)
class OperatorCase:
    """One operator at the sizes of a recipe."""

    operator: str  # name in `ops/select.py`
    sizes: str  # in words
    build: Callable[[], Any]  # makes the cell that computes it; called once for each backend
    inputs: Sequence[Array]  # floating-point inputs, for which gradients are computed
    # The same computation on `Approx`; its first argument is the backend, because MindSpore's own exponential on CPU
    # is less exact than ours. Several results are a list.
    formula: Callable[..., Any]
    constants: Sequence[Array] = ()  # further inputs: tables, labels, indices
    backends: Sequence[str] = ()  # the backends that accept these inputs; empty: all
    # Whether its first result is differentiated; otherwise all its results are judged
    backward: bool = True
    dtype: str = ""  # type of its values; empty: the recipe's
    # Type to which it rounds intermediate results: float32 on CPU, whatever the type of its inputs
    stored: str = "float32"


class Draw:
    """Draws values for inputs, rounded to the type of the recipe."""

    def __init__(self, dtype: str, rng: np.random.Generator) -> None:
        self.dtype, self.rng = dtype, rng

    def __call__(self, *shape: int, scale: float = 1.0) -> Array:
        """Return normal values."""
        x = (self.rng.standard_normal(shape) * scale).astype(np.float32)
        return round_to(x, self.dtype).astype(np.float32)


def cases(recipe: Any, rng: np.random.Generator) -> list[OperatorCase]:
    """Return the cases of a recipe: operators of its model, of its experts, and of its optimizer."""
    config = recipe.model_config
    rows = min(recipe.runner_config.batch_size * config.seq_length, ROWS)
    sizes = config, rows, Draw(config.compute_dtype, rng)
    operators = [*_linear(*sizes), *_pointwise(*sizes), _turning(*sizes), *_attending(*sizes)]
    if config.n_routed_experts:
        limits = [False, True] if drops(config) else [False]
        operators.append(_routing(*sizes))
        operators += [*(_dispatched(*sizes, limit) for limit in limits), *_grouped(*sizes)]
    return [*operators, *_update_cases(recipe, rng)]


def _fewer(rows: int, width: int) -> int:
    """Return as many rows of a width as :data:`ELEMENTS` allows, but at least 16."""
    return min(rows, max(16, ELEMENTS // width))


def _rounded(compute: str) -> str:
    """Return the type of intermediate results in a fused operator of several products."""
    return "bfloat16" if compute == "bfloat16" else "float32"


def _linear(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    compute = getattr(ms, config.compute_dtype)
    products: list[OperatorCase] = []
    for inner, outer in sorted(_products(config)):
        columns = _fewer(min(outer, COLUMNS), inner)
        inputs = [x(_fewer(rows, inner), inner), x(columns, inner, scale=inner**-0.5)]
        build = partial(matmul.matmul, compute)
        formula = _named("Primitive.TelechatMatmul")
        products.append(OperatorCase("matmul", f"{inner} to {outer}", build, inputs, formula))
    return products


def _pointwise(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    hidden, eps, classes = config.hidden_size, config.rms_norm_eps, config.vocab_size
    labelled = _fewer(rows, classes)
    labels = np.arange(labelled, dtype=np.int64) * 7919 % classes
    logits, sizes = x(labelled, classes), f"{classes} classes"
    constants, formula = [labels, np.ones(labelled, np.float32)], partial(_loss, labels)
    build = cross_entropy.CrossEntropy
    pointwise = [OperatorCase("cross_entropy", sizes, build, [logits], formula, constants)]
    for width in sorted({hidden, config.q_lora_rank or hidden, config.kv_lora_rank or hidden}):
        inputs = [x(_fewer(rows, width), width)]
        formula = _named("rms_norm", (width,), np.ones(width), eps)
        build = partial(norm.RMSNorm, width, eps)
        pointwise.append(OperatorCase("rms_norm", f"width {width}", build, inputs, formula))
    dense = config.intermediate_size
    for width in sorted({dense, config.moe_intermediate_size or dense}):
        inputs = [x(_fewer(rows, width), width) for _ in range(2)]
        pointwise.append(OperatorCase("swiglu", f"width {width}", swiglu.SwiGLU, inputs, _swiglu))
    return pointwise


def _turning(config: Any, rows: int, x: Draw) -> OperatorCase:
    wide = config.qk_pos_emb_head_dim or config.qk_rope_head_dim
    heads = min(config.num_attention_heads, _HEADS)
    tables: Any = rope.rope_table(wide, rows, config.rope_theta)
    cos, sin = (t[None, :rows, None] for t in tables)
    pairs = bool(config.rope_interleave)
    sizes, build = f"width {wide}, theta {config.rope_theta}", partial(rope.Rope, wide, pairs)
    formula = _named("Primitive.TelechatRope", cos, sin, interleaved=pairs)
    return OperatorCase("rope", sizes, build, [x(1, rows, heads, wide)], formula, [cos, sin])


def _attending(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    query, value, scale = config.query_width, config.v_head_dim, config.query_width**-0.5
    heads = min(config.num_attention_heads, _HEADS)
    inputs = [x(1, rows, heads, query), x(1, rows, heads, query), x(1, rows, heads, value)]
    build = partial(_Attention, heads, scale, getattr(ms, config.compute_dtype))
    stored = {"fused": _rounded(config.compute_dtype), "plain": "float32"}
    sizes, formula = f"{heads} heads of {query} and {value}", partial(_attention, scale)
    return [
        OperatorCase("attention", sizes, build, inputs, formula, backends=[backend], stored=kind)
        for backend, kind in stored.items()
    ]


def _routing(config: Any, rows: int, x: Draw) -> OperatorCase:
    count, scale = config.n_routed_experts, config.routed_scaling_factor or 1.0
    rule = routing.RoutingRule(count, config.num_experts_per_tok, scale=scale)
    build, inputs, bias = partial(routing.routing, rule), [x(rows, count)], np.zeros(count, "f4")
    return OperatorCase("routing", f"{count} experts", build, inputs, _sigmoid, [bias])


def _products(config: Any) -> set[tuple[int, int]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    pairs = {(hidden, wide), (wide, hidden), (hidden, config.vocab_size)}
    pairs.add((config.num_attention_heads * config.v_head_dim, hidden))
    if config.n_routed_experts:
        pairs |= {(hidden, config.n_routed_experts), (config.moe_intermediate_size, hidden)}
    return pairs


def _named(name: str, *constants: Any, plain: str = "", **settings: Any) -> Callable[..., Approx]:
    """Return a case's formula: that of the registry, with constants after the inputs; of plain backends maybe another."""

    def formula(backend: str, *inputs: Approx) -> Approx:
        used = plain if plain and backend == "plain" else name
        return call(used, *inputs, *constants, **settings)[0]

    return formula


_sigmoid = _named("sigmoid", plain="Primitive.Sigmoid")
_softmax = _named("softmax", -1, plain="Primitive.Softmax")


def _swiglu(backend: str, gate: Approx, up: Approx) -> Approx:
    s = _sigmoid(backend, gate).stop()
    y = gate * s
    y.parents = ((gate, lambda g: g * (s * (gate.stop() * (1 - s) + 1))),)  # as programs do
    return y * up


def _loss(labels: Array, backend: str, a: Approx) -> Approx:
    loss = call("cross_entropy", a, labels)[0].reshape(1)
    return loss.plus(LOG * 2.0**-24) if backend == "plain" else loss


def _attention(scale: float, backend: str, q: Approx, k: Approx, v: Approx) -> Approx:
    q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
    if backend == "plain":
        hidden = np.triu(np.full((q.shape[-2], q.shape[-2]), -1e30), 1)
        attended = _softmax(backend, (q * scale).matmul(k.swap(-1, -2)) + hidden).matmul(v)
    else:
        attended = call("scaled_dot_product_attention", q, k, v, is_causal=True, scale=scale)[0]
    return attended.transpose(0, 2, 1, 3)


def _first(outputs: Any) -> Any:
    return outputs[0] if is_sequence(outputs) else outputs


class _Attention(nn.Cell):
    """Gives both backends the same inputs and result."""

    def __init__(self, heads: int, scale: float, compute: Any) -> None:
        super().__init__()
        self.fused: bool = chosen_backend("attention") == "fused"
        self.heads = heads
        fused = self.fused
        self.core = (
            attention.FlashAttention(scale, compute) if fused else attention.PlainAttention(scale)
        )

    def construct(self, q: Any, k: Any, v: Any) -> Any:
        """Return ``[B, S, N, D]``, causal."""
        length = q.shape[1]
        if self.fused:
            return self.core(q, k, v, Tensor(np.zeros((1, length), np.int32)))[0]
        hidden = np.triu(np.full((1, 1, length, length), -1e30, np.float32), 1)
        q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
        attended: Any = self.core(q, k, v, Tensor(np.tile(hidden, (1, self.heads, 1, 1))))
        return _first(attended).transpose(0, 2, 1, 3)


class First(nn.Cell):
    """Returns the first result of a cell or primitive, which is differentiated."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core

    def construct(self, *inputs: Any) -> Any:
        """Return the first result."""
        return _first(self.core(*inputs))


def _choices(rows: int, experts: int, per_token: int, rng: np.random.Generator) -> Array:
    """Return distinct experts for each token; the first are chosen more often, the last of three or more never."""
    chosen = max(per_token, experts - 1) if experts > 2 else experts
    scores = rng.standard_normal((rows, chosen)) - np.arange(chosen) * 2 / chosen
    return np.argsort(-scores, 1)[:, :per_token].astype(np.int32)


def _pairs_within_capacity(index: Array, weight: Array, capacity: int, by_weight: bool) -> Array:
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
        factors *= _pairs_within_capacity(index, weight, limit, policy == "probs")
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


class _Fixed(First):
    """A plan of integers that is not differentiated; outside of a graph it would be."""

    def construct(self, *inputs: Any) -> tuple[Tensor, ...]:
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
        row_factors = np.repeat(factors, group.asnumpy())  # rows after them belong to none
        return rows * Tensor(np.resize(row_factors, (rows.shape[0], 1)))


def _grouped(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    hidden, wide = config.hidden_size, config.moe_intermediate_size
    compute = getattr(ms, config.compute_dtype)
    experts = min(config.n_routed_experts, _EXPERTS)
    rows = _fewer(rows, max(hidden, wide))
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
        formula = _named("Primitive.TelechatGroupedMatmul", sizes)
        products += [
            OperatorCase("grouped_matmul", sizes_text, fused, inputs, formula, [sizes], ["fused"]),
            OperatorCase("grouped_matmul", f"{sizes_text}, added to the main gradient", into, adding, partial(_added, sizes),
                 [sizes], ["fused"], backward=False),
            OperatorCase("grouped_matmul", sizes_text, grouped_matmul.GroupedMatmul,
                 [x(blocks.size, _BLOCK, inner), weight], partial(_block_products, blocks), [blocks], ["plain"]),
        ]  # fmt: skip
    columns, stored = _columns(hidden, wide, experts), _rounded(config.compute_dtype)
    formula = _named("Primitive.TelechatGroupedSwiGLU", sizes)
    gates = [x(experts, hidden, columns, scale=hidden**-0.5) for _ in range(2)]
    both = partial(grouped_matmul.GroupedSwiGLU, compute)
    text = f"{hidden} to {wide} with SwiGLU, {experts} experts"
    inputs, constants = [x(rows, hidden), *gates], ([sizes], ["fused"])
    case = OperatorCase("grouped_matmul", text, both, inputs, formula, *constants, stored=stored)
    return [*products, case]


def _columns(inner: int, outer: int, experts: int) -> int:
    return _fewer(min(outer, COLUMNS // experts), inner * experts)


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


def _update_cases(recipe: Any, rng: np.random.Generator) -> list[OperatorCase]:
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
        settings = tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay
        self.core = AdamW(self.params, *settings, ["norm"])
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
