"""Find other arguments that would make a wrong result right: another setting, tensor, order, mask or operator."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from telechat_moe.numerics import is_float
from telechat_moe.tools.align.dump.records import Call, Phase, Scalar, TensorRecord, Value
from telechat_moe.tools.align.explain.differences import close
from telechat_moe.tools.align.judge.divergent_call import DivergentCall
from telechat_moe.tools.align.judge.verdict import Explanation
from telechat_moe.tools.align.operators.approx import Approx, Array

_MOST_OTHERS = 256
_MOST_LEFT = 0.1
"""The share of the squared error that an explanation may leave."""
_CLEARLY = 4.0
"""How many times less a later explanation must leave than an earlier one to be preferred."""
_SMALL_AXIS = 16
_FEW = 4
_OPERATORS = ("relu", "gelu", "silu", "sigmoid", "tanh", "exp", "square", "sqrt", "softplus", "abs")
_STEPS = 12


def other_arguments(x: Array, divergent: DivergentCall) -> Explanation | None:
    """Return the arguments with which a wrong output would be right; None: none were found."""
    call = divergent.believed
    if call is None or divergent.number is None:
        return None
    best, answer = np.inf, None
    for changed, family, evidence in _variants(call, divergent):
        left = _left(x, divergent, changed)
        if left is not None and left < best:
            best, answer = left / _CLEARLY, (family, evidence)
        if best == 0:
            break
    return answer or _solved(x, divergent, call)


def _left(x: Array, divergent: DivergentCall, changed: Call) -> float | None:
    """Return the share of the error that other arguments leave; None: they do not explain all of the call's outputs."""
    with np.errstate(all="ignore"):
        expected = divergent.expected(changed)
        right = divergent.wanted()
    left = _unexplained(x, expected, divergent.dtype, right[0] if right else None)
    if left is None or divergent.call.phase is Phase.BACKWARD or len(divergent.call.outputs) < 2:
        return left
    for record, value in zip(divergent.call.outputs, divergent.all_expected(changed), strict=False):
        if not isinstance(record, TensorRecord) or record.read is None:
            continue
        if _unexplained(record.load(), value, record.dtype, None) is None:
            return None
    return left


def _unexplained(
    x: Array, expected: Approx | Array | None, dtype: str, right: Array | None
) -> float | None:
    """Return the share of the error that an explanation leaves; None: it does not explain the values.

    The values must be within the bound of the explanation, and far closer to it than to the right values.
    """
    if expected is None:
        return None
    if not isinstance(expected, Approx):
        return 0.0 if np.array_equal(x, np.reshape(expected, x.shape)) else None
    if expected.value.size != x.size:
        return None
    value = expected.value.reshape(x.shape)
    bound = 2 * expected.bound(dtype).reshape(x.shape)
    if not close(x, value, bound):
        return None
    if right is None or right.size != x.size:
        return 0.0
    golden = right.reshape(x.shape)
    finite = np.isfinite(x) & np.isfinite(value) & np.isfinite(golden) & np.isfinite(bound)
    equal = (x == value) | (np.isnan(x) & np.isnan(value))
    if not np.all(finite | equal):
        return None
    left = float(np.square(x[finite] - value[finite]).sum())
    error = float(np.square(x[finite] - golden[finite]).sum())
    if np.any(np.isfinite(x) != np.isfinite(golden)):
        return 0.0
    return left / error if error and left <= _MOST_LEFT * error else None


def _with(call: Call, changes: Mapping[str, Value]) -> Call:
    return call.changed(lambda place, value: changes.get(place, value))


def _name(place: str) -> str:
    name = place.removeprefix("input.")
    return f"argument {name}" if name[0].isdigit() else name


def _variants(call: Call, divergent: DivergentCall) -> Iterator[tuple[Call, str, str]]:
    """Yield calls with other arguments, each with its kind of fault and a description."""
    arguments = call.leaves()
    tensors = [(p, v) for p, v in arguments if isinstance(v, TensorRecord) and v.read and v.shape]
    scalars = [(place, v) for place, v in arguments if isinstance(v, Scalar)]
    for place, value in scalars:
        for other in _numbers(value.value):
            text = f"{_name(place)} {other}, not {value.value}"
            yield _with(call, {place: Scalar("", other)}), "wrong setting", text
    yield from _exchanged(call, tensors)
    floats = [s for s in scalars if type(s[1].value) is float]
    for (place, a), (other_place, b) in combinations(floats, 2):
        if a.value != b.value:
            text = f"{_name(place)} and {_name(other_place)} are exchanged"
            yield _with(call, {place: b, other_place: a}), "wrong setting", text
    for place, value in tensors:
        for values, family, text in _moves(value):
            yield _with(call, {place: _holding(value, values)}), family, f"{_name(place)} {text}"
    if len(tensors) == 1 and len(arguments) == 1:
        for name in _OPERATORS:
            yield replace(call, name=f"Torch.{name}"), "wrong operator", f"it is {name}"
    for place, value in tensors:
        for name, other in _others(value, divergent):
            kind = divergent.kind(place, name)
            yield _with(call, {place: other}), kind, f"{_name(place)} is {name}"


def _exchanged(
    call: Call, tensors: list[tuple[str, TensorRecord]]
) -> Iterator[tuple[Call, str, str]]:
    """Yield calls with two arguments exchanged, or with all but the first shifted."""
    for (place, a), (other_place, b) in combinations(tensors, 2):
        if a.shape == b.shape and a.dtype == b.dtype:
            text = f"{_name(place)} and {_name(other_place)} are exchanged"
            yield _with(call, {place: b, other_place: a}), "wrong argument order", text
    matrices = [(p, v) for p, v in tensors[1:] if is_float(v.dtype) and len(v.shape) > 1]
    for shift in (-1, 1) if len(matrices) > 1 else ():
        moved = {p: _holding(v, np.roll(v.load(), shift, 0)) for p, v in matrices}
        text = f"{', '.join(map(_name, moved))} are shifted by one"
        yield _with(call, moved), "permutation", text


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [v for v in (*range(-3, 4), value - 1, value + 1, 2 * value) if v != value]
    if isinstance(value, float) and np.isfinite(value):
        numbers = [0.0, 1.0, -value, 2 * value, value / 2, value * value, 1e6]
        numbers += [1 / value, abs(value) ** 0.5] if value else []
        return [v for v in numbers if v != value]
    return []


def _moves(record: TensorRecord) -> Iterator[tuple[Array, str, str]]:
    """Yield what a tensor may have been mistaken for."""
    x = record.load()
    if record.dtype == "bool":
        yield from _masks(x)
        return
    if x.ndim >= 2:
        swapped = np.swapaxes(x, -1, -2)
        misread = x.reshape(swapped.shape).swapaxes(-1, -2)
        yield misread, "transpose", "was read in the other order of its dimensions"
        if x.shape[-1] == x.shape[-2]:
            yield swapped, "transpose", "was transposed"
    if is_float(record.dtype):
        yield -x, "sign", "has the other sign"
        yield np.ones_like(x), "wrong tensor", "is all ones"
        yield np.zeros_like(x), "zero", "is all zeros"
    elif x.ndim == 1 and len(x) <= 4 * _SMALL_AXIS:
        yield from _counts(x)
    yield from _orders(x, is_float(record.dtype))


def _masks(x: Array) -> Iterator[tuple[Array, str, str]]:
    yield np.ones_like(x), "mask ignored", "lets everything pass"
    yield np.zeros_like(x), "mask ignored", "lets nothing pass"
    for axis in range(max(0, x.ndim - 2), x.ndim):
        for shift in (-1, 1):
            yield np.roll(x, shift, axis), "mask shift", f"is shifted by {shift}"
            yield _shifted(x, shift, axis), "mask shift", f"is shifted by {shift}"


def _counts(x: Array) -> Iterator[tuple[Array, str, str]]:
    for i in range(len(x)):
        for j in ((i + 1) % len(x), (i - 1) % len(x)):
            y = x.copy()
            y[i], y[j] = y[i] - 1, y[j] + 1
            if i != j and y.min() >= 0:
                yield y, "wrong index", f"has one of {i} counted to {j}"


def _orders(x: Array, floating: bool) -> Iterator[tuple[Array, str, str]]:
    for shift in (-1, 1) if x.ndim > 1 and floating else ():
        yield np.roll(x, shift), "permutation", f"is rolled by {shift} in memory"
    for axis, n in enumerate(x.shape):
        # The first dimension of a stack of matrices is the experts.
        family = "expert swap" if axis == 0 and x.ndim == 3 and floating else "permutation"
        for shift in range(1, n) if n <= _SMALL_AXIS else (1, n // 2, n - 1):
            yield np.roll(x, shift, axis), family, f"is rolled by {shift} in dimension {axis}"
        pairs = family == "expert swap" and n <= _SMALL_AXIS
        for i, j in combinations(range(n), 2) if pairs else ():
            order = np.arange(n)
            order[[i, j]] = j, i
            yield x[order], family, f"has {i} and {j} exchanged"


def _shifted(x: Array, shift: int, axis: int) -> Array:
    """Return a mask shifted by one, its edge repeated."""
    index = np.clip(np.arange(x.shape[axis]) - shift, 0, x.shape[axis] - 1)
    return x.take(index, axis)


def _others(record: TensorRecord, divergent: DivergentCall) -> Iterator[tuple[str, TensorRecord]]:
    """Yield other tensors of the same shape and type."""
    contents = {record.load().tobytes()}
    for name, tensor in divergent.tensors():
        if len(contents) > _MOST_OTHERS:
            return
        if tensor.shape == record.shape and tensor.dtype == record.dtype:
            content = tensor.load().tobytes()
            if content not in contents:
                contents.add(content)
                yield name, tensor


def _holding(record: TensorRecord, values: Array) -> TensorRecord:
    return replace(record, shape=values.shape, read=lambda: values)


def _solved(x: Array, divergent: DivergentCall, call: Call) -> Explanation | None:
    """Find the number with which the result would be right, by Gauss-Newton from a coarse grid.

    A free number explains nothing in a result of a few elements: there is always one that fits.
    """
    if x.size < _FEW:
        return None
    for place, value in call.leaves():
        number = value.value if isinstance(value, Scalar) else None
        if isinstance(number, float) and np.isfinite(number):
            right = _number(x, divergent, call, place, number)
            if right is not None:
                return "wrong setting", f"{_name(place)} {right:.6g}, not {number:g}"
    return None


def _number(
    x: Array, divergent: DivergentCall, call: Call, place: str, number: float
) -> float | None:
    def result_with(v: float) -> Array | None:
        with np.errstate(all="ignore"):
            output = divergent.expected(_with(call, {place: Scalar("", v)}))
        if not isinstance(output, Approx) or output.value.size != x.size:
            return None
        return output.value.reshape(x.shape)

    size = abs(number) or 1e-6
    grid = [number, *(s * size * 10.0**k for k in range(-4, 7) for s in (1, -1))]
    scored = [(float(np.square(x - y).sum()), v) for v in grid if (y := result_with(v)) is not None]
    v = min((pair for pair in scored if np.isfinite(pair[0])), default=(0.0, None))[1]
    if v is None:
        return None
    for _ in range(_STEPS):
        result, shifted = result_with(v), result_with(v * (1 + 1e-4) + 1e-12)
        if result is None or shifted is None:
            return None
        slope = (shifted - result) / (v * 1e-4 + 1e-12)
        square = float(np.square(slope).sum())
        if not square or not np.isfinite(square):
            return None
        v += float((slope * (x - result)).sum()) / square
        if not np.isfinite(v):
            return None
    return None if _left(x, divergent, _with(call, {place: Scalar("", v)})) is None else v
