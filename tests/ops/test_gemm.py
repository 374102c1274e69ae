"""Matrix products of the native library: oneDNN, our own kernel and bfloat16, against float64."""

import ctypes
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.ops import native
from telechat_moe.ops.native import Kernel

BACKENDS = ("own", "onednn")
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 168, 169, 255, 257, 300]))


@contextmanager
def backend(name):
    """Compute matrix products with ``name``, then with that of before again."""
    library, before = native.load(), native.gemm_backend()
    library.telechat_use_gemm(name.encode())
    try:
        if native.gemm_backend() != name:
            pytest.skip(f"{name} is not here")
        yield
    finally:
        library.telechat_use_gemm(before.encode())


def round_bf16(x):
    """Round float32 to bfloat16, to nearest even, by arithmetic on the mantissa."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent).astype(np.float32)


def gemm(ta, tb, a, b, c, alpha, beta, shape):
    """Call ``telechat_gemm`` on matrices that may be parts of wider ones; changes ``c``."""
    m, n, k = shape
    function = native.load().telechat_gemm
    matrix = np.ctypeslib.ndpointer(np.float32)
    function.argtypes = [ctypes.c_bool] * 2 + [ctypes.c_int64] * 3
    function.argtypes += [ctypes.c_float, matrix, ctypes.c_int64, matrix, ctypes.c_int64]
    function.argtypes += [ctypes.c_float, matrix, ctypes.c_int64]
    sizes = [x.shape[1] for x in (a, b, c)]
    assert not function(ta, tb, m, n, k, alpha, a, sizes[0], b, sizes[1], beta, c, sizes[2])


def check_product(name, shape, transposed, wider, alpha, beta, seed=0):
    m, n, k = shape
    ta, tb = transposed
    rng = np.random.default_rng(seed)

    def matrix(rows, columns, extra):
        return rng.standard_normal((rows, max(columns + extra, 1))).astype(np.float32)

    a = matrix(k if ta else m, m if ta else k, wider[0])
    b = matrix(n if tb else k, k if tb else n, wider[1])
    c = matrix(m, n, wider[2])
    if beta == 0:
        c[:, :n] = np.nan  # must not be read
    A = a[:, :m].T if ta else a[:, :k]
    B = b[:, :k].T if tb else b[:, :n]
    expected = alpha * A.astype(np.float64) @ B.astype(np.float64)
    scale = abs(alpha) * np.abs(A).astype(np.float64) @ np.abs(B) + 1e-30
    if beta:
        expected += beta * c[:, :n].astype(np.float64)
        scale += np.abs(beta * c[:, :n])
    margin = c[:, n:].copy()
    with backend(name):
        gemm(ta, tb, a, b, c, alpha, beta, shape)
    # Error of a sum of k products in any order (Higham 2002, equation 3.5).
    assert (np.abs(c[:, :n] - expected) <= (k + 2) * 2.0**-24 * scale).all()
    assert (c[:, n:] == margin).all()


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(SIZES, SIZES, SIZES),
    transposed=st.tuples(st.booleans(), st.booleans()),
    wider=st.tuples(*[st.integers(0, 3)] * 3),
    alpha=st.sampled_from([1.0, -0.5]),
    beta=st.sampled_from([0.0, 1.0, 0.25]),
    seed=st.integers(0, 2**16),
)
def test_gemm_is_the_product(name, shape, transposed, wider, alpha, beta, seed):
    check_product(name, shape, transposed, wider, alpha, beta, seed)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("transposed", [(False, False), (True, False)])
@pytest.mark.parametrize(
    ("shape", "wider"), [((130, 1000, 600), 24), ((256, 1024, 255), 0), ((3, 7, 257), 505)]
)
def test_rows_that_collide_in_the_cache(name, shape, wider, transposed, beta):
    """They are 512 or 1,024 values apart: copied apart, a part of the sum at a time, where they would collide."""
    check_product(name, shape, transposed, (1, wider, 2), -0.5, beta)


N, T = False, True
OWN_SHAPES = [
    *((N, N, m, n, k) for m, n, k in ((1, 256, 3), (8, 256, 512), (9, 290, 513), (32, 273, 1030), (48, 600, 17), (49, 260, 300))),
    *((N, T, m, n, k) for m, n, k in ((8, 1, 1), (17, 9, 513), (32, 65, 512), (33, 130, 1025), (96, 40, 520), (97, 50, 90))),
    *((N, T, m, n, k) for m, n, k in ((512, 17, 512), (523, 530, 1029))),
    *((T, N, m, n, k) for m, n, k in ((257, 256, 1), (263, 513, 33), (1030, 300, 48), (270, 260, 49))),
]  # fmt: skip
"""Few rows, a few more than few, many rows with B transposed, short sums: at edges of tiles, strips and blocks."""


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (-0.5, 0.25)])
@pytest.mark.parametrize(("ta", "tb", "m", "n", "k"), OWN_SHAPES)
def test_shapes_of_our_own_product(name, ta, tb, m, n, k, alpha, beta):
    check_product(name, (m, n, k), (ta, tb), (3, 1, 2), alpha, beta)


@pytest.mark.skipif(native.isa() not in ("avx2", "avx512", "amx"), reason="measured with AVX only")
@pytest.mark.parametrize(
    ("ta", "tb", "m", "n", "k"), [(N, N, 32, 512, 700), (N, T, 32, 40, 700), (N, T, 512, 40, 700)]
)
def test_few_rows_are_not_left_to_onednn(ta, tb, m, n, k):
    """The same bits with either backend; with short sums oneDNN's are the same anyway."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((k, m) if ta else (m, k), np.float32)
    b = rng.standard_normal((n, k) if tb else (k, n), np.float32)
    found = [np.empty((m, n), np.float32) for _ in BACKENDS]
    for name, c in zip(BACKENDS, found, strict=True):
        with backend(name):
            gemm(ta, tb, a, b, c, 1, 0, (m, n, k))
    np.testing.assert_array_equal(*found)


def matmul(x, w, bf16):
    y = np.empty((len(x), len(w)), np.float32)
    Kernel("Matmul", {"bf16": bf16})([x, w], [y])
    return y


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**16))
def test_bf16_products_are_those_of_rounded_operands(name, t, i, o, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((t, i)).astype(np.float32)
    w = rng.standard_normal((o, i)).astype(np.float32)
    with backend(name):
        y = matmul(x, w, True)
    rounded = [round_bf16(a).astype(np.float64) for a in (x, w)]
    expected = rounded[0] @ rounded[1].T
    bound = (i + 2) * 2.0**-24 * (np.abs(rounded[0]) @ np.abs(rounded[1]).T)
    assert (np.abs(y - expected) <= bound).all()
    unrounded = x.astype(np.float64) @ w.T.astype(np.float64)
    if t * o > 100:
        assert np.abs(y - unrounded).max() > bound.mean()  # it did round
