"""Every operator over random shapes and values: MERE < T and MARE < 10 T against float64.

MERE is the mean, MARE the largest of ``|found - exact| / (|exact| + 1e-7)`` (Ascend's operator standard); T is 2^-13 for
float32, 2^-10 for float16, 2^-7 for bfloat16. Values that are sums are drawn without a sign, because a relative bound has
no meaning for a sum that cancels. 500 cases an operator here, 30,000 under the slow marker, with a histogram.
"""

import sys

import numpy as np
import pytest
from dvm_interpreter import from_bits, interpret, to_bits

import telechat_moe.ops.dvm as dvm
from telechat_moe.ops.native import Kernel

T = {"float32": 2.0**-13, "float16": 2.0**-10, "bfloat16": 2.0**-7}
CASES, LONG = 500, 30_000


def positive(rng, *shape):
    return rng.uniform(0.1, 2, shape).astype(np.float32)


def programs():
    def rms_norm(k, x, w):
        k.store(x * k.rsqrt(k.sum(x * x, -1) * 0.01 + 1e-6) * w, k.out)

    def swiglu(k, gate, up):
        k.store(gate * k.sigmoid(gate) * up, k.out)

    def softmax(k, x):
        e = k.exp(x - k.max(x, -1))
        k.store(e / k.sum(e, -1), k.out)

    rows = ("T", "H")
    return {
        "rms_norm": (rms_norm, [rows, ("H",)]),
        "swiglu": (swiglu, [rows] * 2),
        "softmax": (softmax, [rows]),
    }


def vector_cases(name, dtype, count, rng):
    body, shapes = programs()[name]
    dvm.Builder.out = dtype
    try:
        run = dvm.Compiled(dvm.build(body, *[(s, dtype) for s in shapes]))
    finally:
        del dvm.Builder.out
    for _ in range(count):
        extents = {"T": rng.integers(1, 40), "H": rng.integers(1, 300)}
        inputs = [rng.normal(0, 2, [extents[d] for d in s]).astype(np.float32) for s in shapes]
        stored = [_stored(x, dtype) for x in inputs]
        found = run(*stored)[0]
        exact = interpret(run.program, stored)[0]
        yield from_bits(found) if dtype == "bfloat16" else found, exact


def _stored(x, dtype):
    return to_bits(x) if dtype == "bfloat16" else x.astype(dtype)


def matmul(rng, bf16):
    t, i, o = rng.integers(1, 60, 3)
    x, w, y = positive(rng, t, i), positive(rng, o, i), np.empty((t, o), np.float32)
    Kernel("Matmul", {"bf16": bf16})([x, w], [y])
    yield y, x.astype(np.float64) @ w.T
    dy, dx, dw = positive(rng, t, o), np.empty_like(x), np.empty_like(w)
    Kernel("MatmulGrad", {"bf16": bf16})([x, w, dy], [dx, dw])
    yield dx, dy.astype(np.float64) @ w
    yield dw, dy.T.astype(np.float64) @ x


def grouped_matmul(rng, bf16):
    e, i, o = rng.integers(1, 7), rng.integers(1, 40), rng.integers(1, 40)
    size = rng.integers(0, 20, e).astype(np.int32)
    of_row = np.repeat(np.arange(e), size)
    x, w = positive(rng, len(of_row), i), positive(rng, e, i, o)
    dy, y = positive(rng, len(of_row), o), np.empty((len(of_row), o), np.float32)
    Kernel("GroupedMatmul", {"bf16": bf16})([x, w, size], [y])
    yield y, np.einsum("pi,pio->po", x.astype(np.float64), w[of_row])
    dx, dw = np.empty_like(x), np.empty_like(w)
    Kernel("GroupedMatmulGrad", {"bf16": bf16})([x, w, size, dy], [dx, dw])
    yield dx, np.einsum("po,pio->pi", dy.astype(np.float64), w[of_row])
    exact = np.zeros(w.shape)
    np.add.at(exact, of_row, np.einsum("pi,po->pio", x.astype(np.float64), dy))
    yield dw, exact


def attention(rng, bf16):
    B, S, N, D, V = rng.integers(1, 3), rng.integers(1, 40), *rng.integers(1, 10, 3)
    q, k = (rng.normal(0, 1, (B, S, N, D)).astype(np.float32) for _ in range(2))
    v, start = positive(rng, B, S, N, V), np.zeros((B, S), np.int32)
    o, lse = np.empty_like(v), np.empty((B, N, S), np.float32)
    Kernel("FlashAttention", {"scale": D**-0.5, "bf16": bf16})([q, k, v, start], [o, lse])
    score = np.einsum("bind,bjnd->bnij", q.astype(np.float64), k) * D**-0.5
    score = np.where(np.tri(S, dtype=bool), score, -np.inf)
    p = np.exp(score - score.max(-1, keepdims=True))
    yield o, np.einsum("bnij,bjnd->bind", p / p.sum(-1, keepdims=True), v)


def cross_entropy(rng, bf16):
    t, v = rng.integers(1, 30), rng.integers(2, 400)
    x = rng.normal(0, 2, (t, v)).astype(np.float32)
    label, mask = rng.integers(0, v, t).astype(np.int32), np.ones(t, np.float32)
    loss, lse, dx = np.empty(1, np.float32), np.empty((t, 2), np.float32), np.empty_like(x)
    z = {"z_loss": 0.0}
    Kernel("CrossEntropy", z)([x, label, mask], [loss, lse])
    Kernel("CrossEntropyGrad", z)([x, label, mask, lse, np.ones(1, np.float32)], [dx])
    p = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    at = (np.arange(t), label)
    yield loss, np.array([-np.log(p[at]).mean()])
    exact = p.copy()
    exact[at] -= 1
    yield (
        np.delete(dx.ravel(), np.ravel_multi_index(at, x.shape)),
        np.delete(exact.ravel() / t, np.ravel_multi_index(at, x.shape)),
    )


def adamw(rng, bf16):
    sizes = rng.integers(1, 300, 3)
    w, m, v, g = ([positive(rng, n) for n in sizes] for _ in range(4))
    before = [[x.astype(np.float64) for x in group] for group in (w, m, v, g)]
    rate, epsilon, decay, clip = 1e-3, 1e-8, 0.1, 0.5
    scalars = [np.array(x, np.float32) for x in (rate, epsilon, decay, clip)]
    attributes = {"beta1": 0.9, "beta2": 0.95, "new1": 0.1, "new2": 0.05, "decayed": [1, 0, 1]}
    Kernel("AdamW", attributes)([*w, *m, *v, *g, *scalars], [np.empty(1, np.float32)])
    for i, keep in enumerate((1, 0, 1)):
        w0, m0, v0, g0 = (group[i] for group in before)
        m1, v1 = 0.9 * m0 + 0.1 * clip * g0, 0.95 * v0 + 0.05 * (clip * g0) ** 2
        yield m[i], m1
        yield v[i], v1
        yield w[i], w0 - rate * (m1 / (np.sqrt(v1) + epsilon) + keep * decay * w0)


LARGER = {f.__name__: f for f in (matmul, grouped_matmul, attention, cross_entropy, adamw)}
ALL = [(n, d) for n in programs() for d in T] + [(n, "float32") for n in LARGER]
ALL += [(n, "bfloat16") for n in ("matmul", "grouped_matmul", "attention")]


def errors(name, dtype, count):
    """Yield ``(MERE, MARE)`` of each result of ``count`` cases."""
    rng = np.random.default_rng(sum(map(ord, name + dtype)))
    if name in LARGER:
        pairs = (p for _ in range(count) for p in LARGER[name](rng, dtype == "bfloat16"))
    else:
        pairs = vector_cases(name, dtype, count, rng)
    for found, exact in pairs:
        if exact.size:
            relative = np.abs(found - exact) / (np.abs(exact) + 1e-7)
            if dtype == "float16":  # below the smallest normal number digits are lost by design
                relative = np.where(np.abs(exact) < 2.0**-14, 0, relative)
            yield float(relative.mean()), float(relative.max())


def check(name, dtype, count):
    rows = np.array(list(errors(name, dtype, count)))
    bins = [0, *(T[dtype] * 2.0 ** np.arange(-8, 5)), np.inf]
    histogram = np.histogram(rows[:, 1], bins)[0].tolist()
    report = f"{name} {dtype}: worst MERE {rows[:, 0].max():.2e}, MARE {rows[:, 1].max():.2e}; {histogram}"
    sys.stdout.write(report + "\n")
    assert rows[:, 0].max() < T[dtype], report
    assert rows[:, 1].max() < 10 * T[dtype], report


@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_within_the_standard(name, dtype):
    check(name, dtype, CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), ALL)
def test_within_the_standard_long(name, dtype):
    check(name, dtype, LONG)
