"""The fused operators of ``telechat_moe.ops`` by the names that a capture gives them: ``Telechat`` and the C name.

The formulas follow what each operator documents (docstrings of ``ops/``), not its kernel. Backward operators are the
derivatives of these formulas. Kernels marked ``bf16`` round the operands of a product.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from telechat_moe.numerics import FLOATS, round_to
from telechat_moe.tools.align.operators.approx import Approx, concatenate, gradients, where
from telechat_moe.tools.align.operators.elementwise import floating, integers, plain
from telechat_moe.tools.align.operators.fused import combine_rows, highest, open_groups, rotate
from telechat_moe.tools.align.operators.reductions import softmax
from telechat_moe.tools.align.operators.registry import Arguments, NotJudgedError, call, primitive


def _operand(x: Any, bf16: Any) -> Approx:
    """Return an operand of a product, rounded first where the kernel does."""
    x = floating(x)
    if not bf16:
        return x
    rounded = round_to(x.value, "bfloat16")
    if x.is_exact:
        return x.constant(rounded)
    exact = np.broadcast_to(x.limit, x.shape) == 0  # else it is not known how it is rounded
    widened = x.plus(np.where(exact, 0.0, FLOATS["bfloat16"].unit * np.abs(x.value)))
    widened.value = np.where(exact, rounded, x.value)
    return widened


def _halved(x: Approx) -> Approx:
    """Return a kernel's own result, rounded to bfloat16 for a product; the direction of the rounding is unknown."""
    return x.plus(FLOATS["bfloat16"].unit * np.abs(x.value))


def _product(factor: Approx, operand: Approx) -> Approx:
    """Multiply a kernel's rounded result by an operand. Equal values, such as flat probabilities, round alike."""
    out = _halved(factor).matmul(operand)
    return out.plus(FLOATS["bfloat16"].unit * np.abs(out.value))


def _input_gradients(
    outputs: Sequence[Approx], grads: Sequence[Any], inputs: Sequence[Approx]
) -> list[Approx]:
    seeds = [(y, floating(g).reshape(*y.shape)) for y, g in zip(outputs, grads, strict=True)]
    going = zip(gradients(seeds, inputs), inputs, strict=True)
    return [x.constant(np.zeros(x.shape)) if g is None else g for g, x in going]


def _operands(a: Arguments, *names: str) -> list[Approx]:
    return [_operand(getattr(a, name), a.bf16) for name in names]


@primitive("TelechatMatmul", "input weight | bf16=False")
def _matmul(a: Arguments) -> Any:
    """Compute ``x w^T``."""
    x, w = _operands(a, "input", "weight")
    return x.matmul(w.swap(-1, -2))


@primitive("TelechatMatmulGrad", "input weight grad | bf16=False")
def _matmul_grad(a: Arguments) -> Any:
    x, w, g = _operands(a, "input", "weight", "grad")
    return [g.matmul(w), g.swap(-1, -2).matmul(x)]


@primitive("TelechatMatmulGradAdd", "input weight grad main | bf16=False")
def _matmul_grad_add(a: Arguments) -> Any:
    raise NotJudgedError("it also writes a main gradient, of which the graph keeps no name")


def grouped_product(x: Approx, w: Approx, sizes: Any) -> Approx:
    """Return the product of each expert's rows with its matrix."""
    counts = integers(sizes)
    ends = zip(np.cumsum(counts), counts, strict=True)
    parts = [x[end - n : end].matmul(w[e]) for e, (end, n) in enumerate(ends) if n]
    return concatenate(parts, 0) if parts else x.constant(np.zeros((0, w.shape[-1])))


@primitive("TelechatGroupedMatmul", "input weight sizes | bf16=False")
def _grouped_matmul(a: Arguments) -> Any:
    x, w = _operands(a, "input", "weight")
    return grouped_product(x, w, a.sizes)


@primitive("TelechatGroupedMatmulGrad", "input weight sizes grad | bf16=False")
def _grouped_matmul_grad(a: Arguments) -> Any:
    x, w, g = _operands(a, "input", "weight", "grad")
    return _input_gradients([grouped_product(x, w, a.sizes)], [g], [x, w])


@primitive("TelechatGroupedSwiGLU", "input gate up sizes | bf16=False", stores=True)
def _grouped_swiglu(a: Arguments) -> Any:
    """Compute ``silu(x gate) * (x up)`` and both products."""
    x, gate, up = _operands(a, "input", "gate", "up")
    g, u = (grouped_product(x, w, a.sizes) for w in (gate, up))
    return [g * g.sigmoid() * u, g, u]


@primitive("TelechatGroupedSwiGLUGrad", "input gate up sizes g u grad | bf16=False", stores=True)
def _grouped_swiglu_grad(a: Arguments) -> Any:
    x, gate, up = _operands(a, "input", "gate", "up")
    g, u = floating(a.g), floating(a.u)
    dg, du = _input_gradients([g * g.sigmoid() * u], [a.grad], [g, u])
    if a.bf16:
        dg, du = _halved(dg), _halved(du)
    dx1, dgate = _input_gradients([grouped_product(x, gate, a.sizes)], [dg], [x, gate])
    dx2, dup = _input_gradients([grouped_product(x, up, a.sizes)], [du], [x, up])
    return [dx1 + dx2, dgate, dup]


def _heads(*tensors: Approx) -> list[Approx]:
    """Return ``[B, N, S, D]`` from ``[B, S, N, D]``, or back."""
    return [x.transpose(0, 2, 1, 3) for x in tensors]


def _scores(a: Arguments, q: Approx, k: Approx) -> Approx:
    """Return ``[B, N, S, K]``; a query sees keys from ``start`` to its own, other scores are minus infinity."""
    score = q.matmul(k.swap(-1, -2)) * float(a.scale)
    key, query = np.arange(score.shape[-1]), a.first + np.arange(score.shape[-2])[:, None]
    visible = (key <= query) & (key >= integers(a.start)[:, None, :, None])
    return where(np.broadcast_to(visible, score.shape), score, -np.inf)


def _attention(a: Arguments, q: Approx, k: Approx, v: Approx) -> tuple[Approx, Approx]:
    """Return output ``[B, S, N, D]`` and log-sum-exp ``[B, N, S]``."""
    q, k, v = _heads(q, k, v)
    score = _scores(a, q, k)
    top = score.value.max(-1, keepdims=True)
    e = (score - top).exp()
    total = e.sum(-1, True)
    p = e / total
    (out,) = _heads(_product(p, v) if a.bf16 else p.matmul(v))
    return out, (total.log() + top).reshape(*score.shape[:-1])


@primitive("TelechatFlashAttention", "q k v start | scale=1.0 bf16=False first=0", stores=True)
def _flash(a: Arguments) -> Any:
    return list(_attention(a, *_operands(a, "q", "k", "v")))


_FLASH_GRAD = "q k v start output lse grad | scale=1.0 bf16=False first=0"


@primitive("TelechatFlashAttentionGrad", _FLASH_GRAD, stores=True)
def _flash_grad(a: Arguments) -> Any:
    if not a.bf16:
        q, k, v = (floating(x) for x in (a.q, a.k, a.v))
        return _input_gradients([_attention(a, q, k, v)[0]], [a.grad], [q, k, v])
    # Dao et al. 2022, algorithm 4: from the output and log-sum-exp that the forward pass gave.
    q, k, v, grad = _heads(*(_operand(x, True) for x in (a.q, a.k, a.v, a.grad)))
    lse = floating(a.lse)
    p = (_scores(a, q, k) - lse.reshape(*lse.shape, 1)).exp()
    (delta,) = _heads((floating(a.output) * floating(a.grad)).sum(-1, True))
    ds = p * (grad.matmul(v.swap(-1, -2)) - delta) * float(a.scale)
    pairs = ((ds, k), (ds.swap(-1, -2), q), (p.swap(-1, -2), grad))
    return _heads(*(_product(factor, operand) for factor, operand in pairs))


def rotate_pairs(x: Approx, cos: Any, sin: Any, interleaved: bool) -> Approx:
    """Rotate pairs; the result holds the first members of all pairs, then the second ones."""
    if interleaved:
        order = np.arange(x.shape[-1]).reshape(-1, 2).T.reshape(-1)
        x = x.moved(lambda v: v[..., order])
    cos, sin = (np.concatenate([table, table], -1) for table in (cos, sin))
    return rotate(x, cos, sin, False)


@primitive("TelechatRope", "input cos sin | interleaved=True")
def _rope(a: Arguments) -> Any:
    return rotate_pairs(floating(a.input), plain(a.cos), plain(a.sin), bool(a.interleaved))


@primitive("TelechatRopeGrad", "grad cos sin | interleaved=True")
def _rope_grad(a: Arguments) -> Any:
    grad = floating(a.grad)
    x = grad.constant(np.zeros(grad.shape))
    return _input_gradients(
        [rotate_pairs(x, plain(a.cos), plain(a.sin), bool(a.interleaved))], [grad], [x]
    )


def _assembled(a: Arguments, q: Approx, kv: Approx, rope: Approx) -> list[Approx]:
    cos, sin = plain(a.cos), plain(a.sin)
    B, S, N, nope, R = *cos.shape[:2], int(a.heads), int(a.nope), 2 * cos.shape[-1]
    q = q.reshape(B, S, N, nope + R)
    kv = kv.reshape(B, S, N, -1)
    turned = rotate_pairs(q[..., nope:], cos, sin, bool(a.interleaved))
    key = rotate_pairs(rope.reshape(B, S, 1, R), cos, sin, bool(a.interleaved))
    key = key.moved(lambda x: np.broadcast_to(x, (B, S, N, R)), True)
    heads = (concatenate([x[..., :nope], part], 3) for x, part in ((q, turned), (kv, key)))
    return [*heads, kv[..., nope:]]


@primitive("TelechatMlaAssemble", "q kv rope cos sin | heads=1 nope=0 interleaved=True")
def _assemble(a: Arguments) -> Any:
    return _assembled(a, floating(a.q), floating(a.kv), floating(a.rope))


@primitive(
    "TelechatMlaAssembleGrad", "dq dk dv cos sin | heads=1 nope=0 interleaved=True", stores=True
)
def _assemble_grad(a: Arguments) -> Any:
    grads = [floating(x) for x in (a.dq, a.dk, a.dv)]
    tokens, N, R = int(np.prod(grads[0].shape[:2])), int(a.heads), 2 * plain(a.cos).shape[-1]
    widths = (N * grads[0].shape[-1], N * (int(a.nope) + grads[2].shape[-1]), R)
    inputs = [grads[0].constant(np.zeros((tokens, w))) for w in widths]
    return _input_gradients(_assembled(a, *inputs), grads, inputs)


def _weights(a: Arguments, score: Approx, index: Any) -> Approx:
    weight = score.moved(lambda x: np.take_along_axis(x, index, 1), True)
    if a.normalize:
        weight = weight / (weight.sum(1, True) + 1e-20)
    return weight * float(a.scale)


_CHOICE = "top_k=1 groups=1 kept_groups=1 scale=1.0 normalize=True softmax=False"


@primitive("TelechatRouting", f"input bias | {_CHOICE}", stores=True)
def _routing(a: Arguments) -> Any:
    """Return scores; the highest by biased score; their weights; the map of chosen experts; the loads of the experts.

    The choice must follow from the operator's own scores; among nearly equal ones rounding decides.
    """
    x = floating(a.input)
    score = softmax(x, 1) if a.softmax else x.sigmoid()
    values = score.value if a.made is None else a.made[0].load()
    choice = values.astype(np.float32) + plain(a.bias).astype(np.float32)
    T, E, K, G, M = *choice.shape, int(a.top_k), int(a.groups), int(a.kept_groups)
    index = highest(np.where(open_groups(choice, G, M, max(1, K // M)), choice, -np.inf), K)
    chosen = np.zeros((T, E))
    np.put_along_axis(chosen, index, 1.0, 1)
    return [score, index, _weights(a, score, index), x.constant(chosen), x.constant(chosen.sum(0))]


@primitive("TelechatRoutingGrad", f"score index dscore dweight | {_CHOICE}", stores=True)
def _routing_grad(a: Arguments) -> Any:
    score = floating(a.score)
    (through,) = _input_gradients([_weights(a, score, integers(a.index))], [a.dweight], [score])
    g = through + floating(a.dscore)
    if a.softmax:
        return score * (g - (g * score).sum(1, True))
    return g * (score * (1 - score))


def _balance(score: Approx, fraction: Approx, scale: Any) -> Approx:
    """Return the balance loss of groups of tokens, ``[g, n, E]``, with the share of tokens that chose each expert, ``[g, E]``."""
    g, n, _ = score.shape
    mean = (score / score.sum(2, True)).sum(1, False) / float(n)
    return (mean * fraction).reshape(-1).sum(0, True) * (float(scale) / g)


@primitive("TelechatBalanceLoss", "input chosen | scale=1.0")
def _balance_loss(a: Arguments) -> Any:
    score, chosen = floating(a.input), floating(a.chosen)
    fraction = chosen.sum(1, False) / float(score.shape[1])
    return [_balance(score, fraction, a.scale), fraction]


@primitive("TelechatBalanceLossGrad", "score fraction grad | scale=1.0")
def _balance_loss_grad(a: Arguments) -> Any:
    score = floating(a.score)
    return _input_gradients([_balance(score, floating(a.fraction), a.scale)], [a.grad], [score])[0]


@primitive("TelechatPermutePlan", "input | experts=1", exact=True)
def _permute_plan(a: Arguments) -> Any:
    """Return the row of each pair, the pair of each row, and the rows of each expert, whose pairs keep their order."""
    flat = integers(a.input).reshape(-1)
    pair = np.argsort(flat, kind="stable")
    return [np.argsort(pair, kind="stable"), pair, np.bincount(flat, minlength=int(a.experts))]


@primitive("TelechatPermute", "input pair row", exact=True)
def _permute(a: Arguments) -> Any:
    """Return each token at the rows of its pairs; rows without a pair are zero."""
    x, pair, rows = floating(a.input), integers(a.pair), integers(a.row)
    slots = rows.size // x.shape[0]
    return x[np.maximum(pair, 0) // slots].times((pair >= 0).astype(np.float64)[:, None])


@primitive("TelechatPermuteGrad", "grad row input", stores=True)
def _permute_grad(a: Arguments) -> Any:
    rows = integers(a.row).reshape(floating(a.input).shape[0], -1)
    return combine_rows(floating(a.grad), rows, None)


@primitive("TelechatUnpermute", "input row weight")
def _unpermute(a: Arguments) -> Any:
    weight = floating(a.weight)
    return combine_rows(floating(a.input), integers(a.row).reshape(weight.shape), weight)


@primitive("TelechatUnpermuteGrad", "input pair weight grad", stores=True)
def _unpermute_grad(a: Arguments) -> Any:
    y, weight, pair = floating(a.input), floating(a.weight), integers(a.pair)
    row = np.full(weight.value.size, -1)
    slots = np.flatnonzero(pair >= 0)
    row[pair[slots]] = slots
    result = combine_rows(y, row.reshape(weight.shape), weight)
    return _input_gradients([result], [a.grad], [y, weight])


def _losses(a: Arguments, x: Approx) -> tuple[Approx, Approx]:
    """Return the loss ``(1,)``, and each row's maximum and log-sum-exp above it ``[T, 2]``."""
    label, mask = integers(a.label), plain(a.mask).astype(np.float64)
    top = x.value.max(1, keepdims=True)
    over = (x - top).exp().sum(1, True).log()
    lse = (over + top).reshape(-1)
    loss = lse - x[np.arange(len(label)), label]
    if float(a.z_loss):
        loss = loss + lse * lse * float(a.z_loss)
    total = loss.times(mask).sum() / (mask.sum() + 1e-8)
    return total.reshape(1), concatenate([over.constant(top), over], 1)


@primitive("TelechatCrossEntropy", "input label mask | z_loss=0.0", stores=True)
def _cross_entropy(a: Arguments) -> Any:
    return list(_losses(a, floating(a.input)))


@primitive("TelechatCrossEntropyGrad", "input label mask lse grad | z_loss=0.0", stores=True)
def _cross_entropy_grad(a: Arguments) -> Any:
    x = floating(a.input)
    return _input_gradients([_losses(a, x)[0]], [a.grad], [x])


@primitive("TelechatSquareSums", "*input | tensors=0")
def _square_sums(a: Arguments) -> Any:
    """Return the root of the sum of all squares, and the sum of squares of each tensor."""
    sums = [(floating(x) * floating(x)).sum().reshape(1) for x in a.input]
    by_tensor = concatenate(sums, 0)
    return [by_tensor.sum().sqrt().reshape(1), by_tensor]


_ARITHMETIC = (
    *("neg", "abs", "sqrt", "rsqrt", "exp", "log", "reciprocal", "tanh", "sigmoid", "erf", "sin"),
    *("cos", "add", "sub", "mul", "div", "maximum", "minimum"),
)
"""Instructions that are the registered formulas of the same name."""


@primitive("TelechatDvm TelechatDvmMulti", "*input | prog=''", stores=True)
def _program(a: Arguments) -> Any:
    """Interpret a program of the virtual machine in float64."""
    from telechat_moe.ops.dvm import ir

    try:
        nodes = ir.DvmProgram.from_ints([int(x) for x in str(a.prog).split()]).nodes
    except ir.ProgramError as error:
        raise NotJudgedError(str(error)) from None
    inputs = [floating(x) for x in a.input]
    symbols: dict[int, int] = {}
    for node in nodes:
        if node.op == ir.LOAD:
            sizes = zip(node.dims, inputs[node.attrs[0]].shape, strict=True)
            symbols.update((d, n) for d, n in sizes if d < 0)
    values: list[Approx] = []
    stored: dict[int, Approx] = {}
    for node in nodes:
        shape = tuple(d if d >= 0 else symbols[d] for d in node.dims)
        operands = [values[i] for i in node.args]
        if node.op == ir.LOAD:
            value = inputs[node.attrs[0]]
        elif node.op == ir.SCALAR:
            value = Approx(ir.bits_float(node.attrs[0]))
        else:
            value = _instruction(ir.NAMES.get(node.op, str(node.op)), operands, shape, node.attrs)
        values.append(value)
        if node.op == ir.STORE:
            stored[node.attrs[0]] = value
    return [stored[i] for i in sorted(stored)]


def _instruction(
    name: str, operands: list[Approx], shape: tuple[int, ...], attributes: Sequence[int]
) -> Approx:
    x = operands[0]
    if name in ("store", "cast"):
        return x
    if name == "sum":
        return x.sum(tuple(attributes[1:]), True).reshape(*shape)
    if name == "broadcast":
        return x.moved(lambda v: np.broadcast_to(v, shape), True)
    if name == "reshape":
        return x.reshape(*shape)
    if name not in _ARITHMETIC:
        raise NotJudgedError(f"instruction {name} of the virtual machine")
    return call(name, *operands)[0]
