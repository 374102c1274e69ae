"""The cases of phase one: each operator of `telechat_moe.ops` at the sizes of a recipe, and its formula. Needs MindSpore.

Those of the experts and of the update are in ``expert_cases.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from telechat_moe.narrowing import is_sequence
from telechat_moe.numerics import round_to
from telechat_moe.ops import attention, cross_entropy, matmul, norm, rope, routing, swiglu
from telechat_moe.ops.select import backend as chosen_backend
from telechat_moe.tools.align.operators.approx import Approx, Array
from telechat_moe.tools.align.operators.ms_primitives import LOG
from telechat_moe.tools.align.operators.registry import call

ROWS = 256
"""The number of tokens of a case, and of positions in attention."""

COLUMNS = 1024
"""The most columns of a result; bounds depend on inner dimensions only."""

ELEMENTS = 1 << 20
"""The approximate number of elements of a tensor; wide tensors have fewer rows or columns."""

_HEADS = 8


@dataclass(frozen=True)
class OperatorCase:
    """One operator at the sizes of a recipe."""

    operator: str  # name in `ops/select.py`
    what: str  # its sizes, in words
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


def cases(config: Any, tokens: int, rng: np.random.Generator) -> list[OperatorCase]:
    """Return the cases of a recipe's model section, for micro-batches of a number of tokens."""
    draw, rows = Draw(config.compute_dtype, rng), min(tokens, ROWS)
    found = [*_linear(config, rows, draw), *_pointwise(config, rows, draw)]
    found += [_turning(config, rows, draw), *_attending(config, rows, draw)]
    if config.n_routed_experts:
        found.append(_routing(config, rows, draw))
    return found


def fewer(rows: int, width: int) -> int:
    """Return as many rows of a width as :data:`ELEMENTS` allows, but at least 16."""
    return min(rows, max(16, ELEMENTS // width))


def rounded(compute: str) -> str:
    """Return the type of intermediate results in a fused operator of several products."""
    return "bfloat16" if compute == "bfloat16" else "float32"


def _linear(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    compute = getattr(ms, config.compute_dtype)
    found: list[OperatorCase] = []
    for inner, outer in sorted(_products(config)):
        columns = fewer(min(outer, COLUMNS), inner)
        taken = [x(fewer(rows, inner), inner), x(columns, inner, scale=inner**-0.5)]
        build = partial(matmul.matmul, compute)
        formula = named("Primitive.TelechatMatmul")
        found.append(OperatorCase("matmul", f"{inner} to {outer}", build, taken, formula))
    return found


def _pointwise(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    hidden, eps, classes = config.hidden_size, config.rms_norm_eps, config.vocab_size
    labelled = fewer(rows, classes)
    labels = np.arange(labelled, dtype=np.int64) * 7919 % classes
    logits = x(labelled, classes)
    constants, formula = [labels, np.ones(labelled, np.float32)], partial(_loss, labels)
    build = cross_entropy.CrossEntropy
    found = [
        OperatorCase("cross_entropy", f"{classes} classes", build, [logits], formula, constants),
    ]
    for width in sorted({hidden, config.q_lora_rank or hidden, config.kv_lora_rank or hidden}):
        taken = [x(fewer(rows, width), width)]
        formula = named("rms_norm", (width,), np.ones(width), eps)
        build = partial(norm.RMSNorm, width, eps)
        found.append(OperatorCase("rms_norm", f"width {width}", build, taken, formula))
    dense = config.intermediate_size
    for width in sorted({dense, config.moe_intermediate_size or dense}):
        taken = [x(fewer(rows, width), width) for _ in range(2)]
        found.append(OperatorCase("swiglu", f"width {width}", swiglu.SwiGLU, taken, _swiglu))
    return found


def _turning(config: Any, rows: int, x: Draw) -> OperatorCase:
    wide = config.qk_pos_emb_head_dim or config.qk_rope_head_dim
    heads = min(config.num_attention_heads, _HEADS)
    tables: Any = rope.rope_table(wide, rows, config.rope_theta)
    cos, sin = (t[None, :rows, None] for t in tables)
    pairs = bool(config.rope_interleave)
    what, build = f"width {wide}, theta {config.rope_theta}", partial(rope.Rope, wide, pairs)
    formula = named("Primitive.TelechatRope", cos, sin, interleaved=pairs)
    return OperatorCase("rope", what, build, [x(1, rows, heads, wide)], formula, [cos, sin])


def _attending(config: Any, rows: int, x: Draw) -> list[OperatorCase]:
    query, value, scale = config.query_width, config.v_head_dim, config.query_width**-0.5
    heads = min(config.num_attention_heads, _HEADS)
    taken = [x(1, rows, heads, query), x(1, rows, heads, query), x(1, rows, heads, value)]
    build = partial(_Attention, heads, scale, getattr(ms, config.compute_dtype))
    stored = {"fused": rounded(config.compute_dtype), "plain": "float32"}
    what, formula = f"{heads} heads of {query} and {value}", partial(_attention, scale)
    return [
        OperatorCase("attention", what, build, taken, formula, backends=[backend], stored=kind)
        for backend, kind in stored.items()
    ]


def _routing(config: Any, rows: int, x: Draw) -> OperatorCase:
    count, scale = config.n_routed_experts, config.routed_scaling_factor or 1.0
    rule = routing.RoutingRule(count, config.num_experts_per_tok, scale=scale)
    build, taken, bias = partial(routing.routing, rule), [x(rows, count)], np.zeros(count, "f4")
    return OperatorCase("routing", f"{count} experts", build, taken, _sigmoid, [bias])


def _products(config: Any) -> set[tuple[int, int]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    pairs = {(hidden, wide), (wide, hidden), (hidden, config.vocab_size)}
    pairs.add((config.num_attention_heads * config.v_head_dim, hidden))
    if config.n_routed_experts:
        pairs |= {(hidden, config.n_routed_experts), (config.moe_intermediate_size, hidden)}
    return pairs


def named(name: str, *constants: Any, plain: str = "", **settings: Any) -> Callable[..., Approx]:
    """Return a case's formula: that of the registry, with constants after the inputs; of plain backends maybe another."""

    def formula(backend: str, *inputs: Approx) -> Approx:
        used = plain if plain and backend == "plain" else name
        return call(used, *inputs, *constants, **settings)[0]

    return formula


_sigmoid = named("sigmoid", plain="Primitive.Sigmoid")
_softmax = named("softmax", -1, plain="Primitive.Softmax")


def _swiglu(backend: str, gate: Approx, up: Approx) -> Approx:
    s = _sigmoid(backend, gate).stop()
    y = gate * s
    y.parents = ((gate, lambda g: g * (s * (gate.stop() * (1 - s) + 1))),)  # as programs do
    return y * up


def _loss(labels: Array, backend: str, a: Approx) -> Approx:
    found = call("cross_entropy", a, labels)[0].reshape(1)
    return found.plus(LOG * 2.0**-24) if backend == "plain" else found


def _attention(scale: float, backend: str, q: Approx, k: Approx, v: Approx) -> Approx:
    q, k, v = (t.transpose(0, 2, 1, 3) for t in (q, k, v))
    if backend == "plain":
        hidden = np.triu(np.full((q.shape[-2], q.shape[-2]), -1e30), 1)
        made = _softmax(backend, (q * scale).matmul(k.swap(-1, -2)) + hidden).matmul(v)
    else:
        made = call("scaled_dot_product_attention", q, k, v, is_causal=True, scale=scale)[0]
    return made.transpose(0, 2, 1, 3)


def _first(made: Any) -> Any:
    return made[0] if is_sequence(made) else made


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
        made: Any = self.core(q, k, v, Tensor(np.tile(hidden, (1, self.heads, 1, 1))))
        return _first(made).transpose(0, 2, 1, 3)


class First(nn.Cell):
    """Returns the first result of a cell or primitive, which is differentiated."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core

    def construct(self, *inputs: Any) -> Any:
        """Return the first result."""
        return _first(self.core(*inputs))
