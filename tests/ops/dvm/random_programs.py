"""Random programs and inputs for them, and how far the machine may be from the oracle."""

import math

import numpy as np
from dvm_interpreter import from_bits, interpret, to_bits

import telechat_moe.ops.dvm as dvm

UNARY = ("neg", "abs", "exp", "tanh", "sigmoid", "sin", "erf", "floor", "round")
BINARY = ("add", "sub", "mul", "maximum", "minimum", "add", "mul")
SYMBOLS = ("A", "B", "C")


class Bounded:
    """A value and a bound of its size, so that nothing overflows."""

    def __init__(self, value, size):
        self.value, self.size = value, size


def random_program(rng):
    """Return ``(program, arrays)``."""
    extents = {s: int(rng.choice((1, 2, 3, 5, 17, 64, 200))) for s in SYMBOLS}
    if rng.random() < 0.05:
        extents["B"] = int(rng.choice((0, 3000, 70000)))
        extents["A"] = min(extents["A"], 3)
        extents["C"] = 1
    k = dvm.Builder("random")
    arrays = []
    pool = [_load(k, rng, extents, arrays, full=i == 0) for i in range(rng.integers(1, 4))]
    for _ in range(rng.integers(1, 14)):
        made = _operation(k, rng, pool)
        if made is not None:
            pool.append(made)
    for _ in range(rng.integers(0, 3)):
        k.store(pool[rng.integers(len(pool))].value)
    k.store(pool[-1].value, rng.choice(("float32", "float32", "float32", "bfloat16", "float16")))
    return k.finish(), arrays


def _load(k, rng, extents, arrays, full):
    shape = [s if full or rng.random() < 0.6 else 1 for s in SYMBOLS[: rng.integers(1, 4)]]
    if rng.random() < 0.3 and not full:
        shape = shape[-1:]
    dtype = str(rng.choice(("float32", "float32", "float32", "float16", "bfloat16")))
    array = rng.uniform(-2, 2, [extents.get(s, 1) for s in shape]).astype(np.float32)
    stored = {"float32": array, "float16": array.astype(np.float16)}.get(dtype)
    arrays.append(to_bits(array) if stored is None else stored)
    return Bounded(k.load(shape, dtype), 2.0)


def _operation(k, rng, pool):
    x = pool[rng.integers(len(pool))]
    kind = rng.integers(10)
    if kind < 3:
        name = str(rng.choice(UNARY))
        if name == "exp" and x.size > 8:
            return None
        if name in ("floor", "round"):  # a rounding error before would become a whole one
            x = pool[0]
        size = np.exp(x.size) if name == "exp" else max(x.size, 1.0)
        return Bounded(getattr(k, name)(x.value), size)
    if kind < 7:
        return _binary(k, rng, pool, x)
    if kind < 9 and x.value.dims:
        return _reduction(k, rng, x)
    if x.value.dims and len(x.value.dims) > 1 and rng.random() < 0.5:
        names = [d if d >= 0 else list(k.symbols)[-1 - d] for d in x.value.dims]
        return Bounded(k.reshape(x.value, names[::-1]), x.size)
    return (
        Bounded(k.select(pool[0].value > 0.25, x.value, 0.5), max(x.size, 0.5))
        if _fits(pool[0].value, x.value)
        else None
    )


def _fits(x, y):
    pairs = zip(x.dims[::-1], y.dims[::-1], strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def _binary(k, rng, pool, x):
    y = pool[rng.integers(len(pool))]
    if rng.random() < 0.3:
        y = Bounded(float(rng.uniform(-2, 2)), 2.0)
    elif not _fits(x.value, y.value):
        return None
    name = str(rng.choice(BINARY))
    size = x.size * y.size if name == "mul" else x.size + y.size
    return Bounded(getattr(k, name)(x.value, y.value), max(size, 1.0)) if size < 1e6 else None


def _reduction(k, rng, x):
    rank = len(x.value.dims)
    cut = int(rng.integers(1, rank + 1))
    dims = tuple(range(cut)) if rng.random() < 0.4 else tuple(range(rank - cut, rank))
    name = str(rng.choice(("sum", "sum", "max", "min")))
    keep = bool(rng.random() < 0.7)
    y = getattr(k, name)(x.value, dims, keepdims=keep)
    if name == "sum":
        y, size = y * 1e-3, x.size * 100
        return Bounded(y, size) if size < 1e6 else None
    return None if rng.random() < 0.5 else Bounded(y, x.size)


def largest(program, arrays):
    """Return how many elements the largest value has."""
    extents = {}
    for i, array in enumerate(arrays):
        extents.update(zip(program.load_of(i).dims, array.shape, strict=True))
    return max(math.prod(extents.get(d, d) for d in node.dims) for node in program.nodes)


TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}


def worst(program, arrays, found):
    """Return the largest ``error / tolerance`` over the outputs; above 1 is wrong.

    The scale of an error is the largest value of the output, or of what it was computed from: sums of
    large terms that cancel keep the error of the terms.
    """
    with np.errstate(all="ignore"):
        exact = interpret(program, arrays)
        single = interpret(program, arrays, np.float32)
    ratio = 0.0
    for i, (got, want, near) in enumerate(zip(found, exact, single, strict=True)):
        dtype = program.store_of(i).dtype
        got = from_bits(got) if dtype == "bfloat16" else got
        if got.shape != want.shape:
            return float("inf")
        if not want.size:
            continue
        got, want = got.astype(np.float64), want.astype(np.float64)
        same = np.isclose(got, want, rtol=0, atol=0, equal_nan=True) | ~np.isfinite(want)
        if not np.array_equal(np.isnan(got), np.isnan(want)):
            return float("inf")
        scale = max(float(np.abs(np.where(np.isfinite(want), want, 0)).max()), 1.0)
        near = np.where(np.isfinite(near) & np.isfinite(want), near, 0).astype(np.float64)
        noise = np.abs(near - np.where(near == 0, 0, want)).max()
        allowed = TOLERANCE[dtype] * scale + 20 * noise
        if dtype == "float16":
            same |= np.abs(want) > 60000
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0.0, np.abs(np.nan_to_num(got - want, nan=np.inf)))
        ratio = max(ratio, float(error.max()) / allowed)
    return ratio
