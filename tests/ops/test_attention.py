"""Flash attention, MLA's assembly and rotary positions, on arrays and in MindSpore."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.ops import native
from telechat_moe.ops.native import Kernel, NativeError

rng = np.random.default_rng(0)


def reference(q, k, v, start, scale):
    """Attention in float64 on ``[B, S, N, D]``."""
    S = q.shape[1]
    query, key = np.arange(S)[:, None], np.arange(S)[None, :]
    visible = (key <= query) & (key >= start[:, :, None])
    scores = np.einsum("bind,bjnd->bnij", q.astype(np.float64), k.astype(np.float64)) * scale
    scores = np.where(visible[:, None], scores, -np.inf)
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return np.einsum("bnij,bjnd->bind", weight, v.astype(np.float64)), weight


def log_sums(q, k, start, scale):
    """The logarithms of the sums of exponentials ``[B, N, S]`` in float64."""
    key, query = np.arange(k.shape[1])[None, :], np.arange(q.shape[1])[:, None]
    scores = np.einsum("bind,bjnd->bnij", q.astype(np.float64), k.astype(np.float64)) * scale
    hidden = (key > query) | (key < start[:, :, None])
    scores = np.where(hidden[:, None], -np.inf, scores)
    top = scores.max(-1)
    return top + np.log(np.exp(scores - top[..., None]).sum(-1))


def reference_gradients(q, k, v, start, scale, do):
    """The gradients of q, k, v in float64."""
    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    _, p = reference(q, k, v, start, scale)
    dp = np.einsum("bind,bjnd->bnij", do, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return (
        np.einsum("bnij,bjnd->bind", ds, k),
        np.einsum("bnij,bind->bjnd", ds, q),
        np.einsum("bnij,bind->bjnd", p, do),
    )


def truncated(*arrays):
    """Return the arrays with the values of bfloat16, so that it rounds none of them."""
    return [(x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for x in arrays]


def bounds(q, k, v, start, scale, do):
    """Return what rounding the weights and the scores' gradients to bfloat16 can change in o, dq, dk, dv."""
    unit = 2**-8
    _, p = reference(q, k, v, start, scale)
    dp = np.einsum("bind,bjnd->bnij", do.astype(np.float64), v.astype(np.float64))
    weighted = p * abs(dp)
    ds = unit * scale * (abs(p * dp - p * (p * dp).sum(-1, keepdims=True)))
    ds += unit * scale * p * weighted.sum(-1, keepdims=True)
    return (
        unit * np.einsum("bnij,bjnd->bind", p, abs(v)),
        np.einsum("bnij,bjnd->bind", ds, abs(k)),
        np.einsum("bnij,bind->bjnd", ds, abs(q)),
        unit * np.einsum("bnij,bind->bjnd", p, abs(do)),
    )


def documents(B, S, mean):
    """Return the first key of each query for random documents."""
    start = np.zeros((B, S), np.int32)
    for b in range(B):
        at = 0
        for i in range(S):
            if mean and i and rng.random() < 1 / mean:
                at = i
            start[b, i] = at
    return start


def inputs(B, S, N, D, Dv, mean=0):
    q, k = (rng.standard_normal((B, S, N, D)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((B, S, N, Dv)).astype(np.float32)
    return q, k, v, documents(B, S, mean)


def run(q, k, v, start, do, bf16=False):
    B, S, N, D = q.shape
    attributes = {"scale": D**-0.5, "bf16": bf16}
    o, lse = np.full_like(v, np.nan), np.full((B, N, S), np.nan, np.float32)
    Kernel("FlashAttention", attributes)([q, k, v, start], [o, lse])
    grads = [np.full_like(x, np.nan) for x in (q, k, v)]
    Kernel("FlashAttentionGrad", attributes)([q, k, v, start, o, lse, do], grads)
    return [o, *grads]


SHAPES = [
    (1, 1, 1, 4, 4, 0),
    (1, 33, 2, 1, 1, 0),
    (2, 5, 3, 12, 10, 2),
    (1, 64, 2, 16, 8, 0),
    (2, 65, 1, 48, 32, 20),
    (1, 700, 2, 24, 16, 0),
    (1, 1100, 1, 8, 8, 300),
    (1, 1100, 1, 8, 8, 0),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape):
    q, k, v, start = inputs(*shape)
    do = rng.standard_normal(v.shape).astype(np.float32)
    found = run(q, k, v, start, do)
    scale = shape[3] ** -0.5
    expected = [
        reference(q, k, v, start, scale)[0],
        *reference_gradients(q, k, v, start, scale, do),
    ]
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        assert np.abs(a - b).max() < 3e-6 * max(1, np.abs(b).max()), name


@pytest.mark.parametrize("shape", SHAPES[1:5])
def test_bf16_operands(shape):
    q, k, v, start = inputs(*shape)
    do = rng.standard_normal(v.shape).astype(np.float32)
    found = run(q, k, v, start, do, bf16=True)
    scale = shape[3] ** -0.5
    expected = [
        reference(q, k, v, start, scale)[0],
        *reference_gradients(q, k, v, start, scale, do),
    ]
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        error = np.linalg.norm(a - b) / max(np.linalg.norm(b), np.linalg.norm(do))
        assert 1e-5 < error < 2**-7, f"{name}: {error:.1e}"  # rounded, and not by more


EDGES = [1, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 49, 127, 128, 129, 255, 256, 257, 300]
"""Lengths about those of tiles, panels of queries, blocks and chunks of keys."""
WIDTHS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 49]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_width_and_length(data):
    """Strips, panels and vectors end anywhere; what lies behind the arrays is not touched."""
    S, D, Dv = (data.draw(st.sampled_from(x)) for x in (EDGES, WIDTHS, WIDTHS))
    N, mean = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 3, 40]))
    q, k, v, start = inputs(1, S, N, D, Dv, mean)
    do, bf16 = rng.standard_normal(v.shape).astype(np.float32), data.draw(st.booleans())
    rounding = [0.0] * 4
    if bf16:
        q, k, v, do = truncated(q, k, v, do)
        rounding = bounds(q, k, v, start, D**-0.5, do)
    rounding = (rounding[0], 0.0, *rounding[1:])
    names = ("o", "lse", "dq", "dk", "dv")
    shapes = (v.shape, (1, N, S), q.shape, k.shape, v.shape)
    memory = [np.full(np.prod(x) + 64, 7e7, np.float32) for x in shapes]
    o, lse, *grads = (m[:-64].reshape(x) for m, x in zip(memory, shapes, strict=True))
    attributes = {"scale": D**-0.5, "bf16": bf16}
    Kernel("FlashAttention", attributes)([q, k, v, start], [o, lse])
    Kernel("FlashAttentionGrad", attributes)([q, k, v, start, o, lse, do], grads)
    expected = [
        reference(q, k, v, start, D**-0.5)[0],
        log_sums(q, k, start, D**-0.5),
        *reference_gradients(q, k, v, start, D**-0.5, do),
    ]
    for name, a, b, r, m in zip(names, (o, lse, *grads), expected, rounding, memory, strict=True):
        assert (np.abs(a - b) < 3e-6 * max(1, np.abs(b).max()) + r).all(), name
        assert (m[-64:] == 7e7).all(), name


@pytest.mark.parametrize("low", [-1e5, 1e5])
def test_scores_far_from_zero(low):
    """The highest score is far below or above zero, and rises or falls from chunk to chunk of keys."""
    S = 600
    q, k, v, start = inputs(1, S, 1, 4, 8)
    q[..., 0], k[0, :, 0, 0] = 1, low * np.linspace(1, 2, S)
    o, lse = np.empty_like(v), np.empty((1, 1, S), np.float32)
    Kernel("FlashAttention", {"scale": 0.01, "bf16": False})([q, k, v, start], [o, lse])
    np.testing.assert_allclose(o, reference(q, k, v, start, 0.01)[0], atol=2e-3)
    np.testing.assert_allclose(lse, log_sums(q, k, start, 0.01), rtol=1e-6)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_query_that_is_no_number_spoils_its_own_row_only(bf16):
    q, k, v, start = inputs(1, 200, 1, 8, 8)
    q[0, 100, 0, 3] = np.nan
    o = run(q, k, v, start, np.ones_like(v), bf16)[0]
    assert np.isnan(o[0, 100]).all()
    assert np.isfinite(np.delete(o, 100, axis=1)).all()


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_what_no_query_sees_changes_nothing(data):
    """Any first keys, even falling ones, and a part of the queries: equal to the whole square in float64."""
    S = data.draw(st.integers(1, 1300))
    first = data.draw(st.integers(0, S - 1))
    count = data.draw(st.integers(1, S - first))
    numbers = np.random.default_rng(data.draw(st.integers(0, 99)))
    start = numbers.integers(0, np.arange(S) + 1)
    if data.draw(st.booleans()):
        cuts = np.append(0, numbers.choice(S, data.draw(st.integers(0, 9))))
        start = np.array([cuts[cuts <= i].max() for i in range(S)])
    start = start.astype(np.int32)[None]
    q, k, v, _ = inputs(1, S, 2, 12, 8)
    do = numbers.standard_normal(v.shape).astype(np.float32)
    bf16, rounding = data.draw(st.booleans()), [np.zeros(1)] * 4
    if bf16:
        q, k, v, do = truncated(q, k, v, do)
    do[:, :first] = do[:, first + count :] = (
        0  # the gradients of keys come from these queries alone
    )
    here = slice(first, first + count)
    expected = [
        reference(q, k, v, start, 12**-0.5)[0][:, here],
        *reference_gradients(q, k, v, start, 12**-0.5, do),
    ]
    expected[1] = expected[1][:, here]
    if bf16:
        rounding = list(bounds(q, k, v, start, 12**-0.5, do))
        rounding[:2] = (x[:, here] for x in rounding[:2])
    attributes = {"scale": 12**-0.5, "bf16": bf16, "first": first}
    part = [np.ascontiguousarray(x[:, here]) for x in (q, start, do)]
    o, lse = np.full((1, count, 2, 8), np.nan, np.float32), np.empty((1, 2, count), np.float32)
    Kernel("FlashAttention", attributes)([part[0], k, v, part[1]], [o, lse])
    grads = [np.full_like(x, np.nan) for x in (part[0], k, v)]
    Kernel("FlashAttentionGrad", attributes)([part[0], k, v, part[1], o, lse, part[2]], grads)
    for name, a, b, r in zip(("o", "dq", "dk", "dv"), [o, *grads], expected, rounding, strict=True):
        assert (np.abs(a - b) < 3e-6 * max(1, np.abs(b).max()) + r).all(), name


def test_large_scores():
    q, k, v, start = inputs(1, 130, 1, 8, 8)
    q *= 60
    found = run(q, k, v, start, np.ones_like(v))
    np.testing.assert_allclose(
        found[0], reference(q, k, v, start, 8**-0.5)[0], rtol=2e-5, atol=2e-5
    )
    assert all(np.isfinite(x).all() for x in found)


@pytest.mark.parametrize("bf16", [False, True])
def test_threads_change_no_bit(bf16):
    q, k, v, start = inputs(2, 1100, 3, 16, 8, 100)
    do = rng.standard_normal(v.shape).astype(np.float32)
    before = native.threads()
    try:
        native.set_threads(1)
        one = run(q, k, v, start, do, bf16)
        for count in (2, 3):
            native.set_threads(count)
            for a, b in zip(one, run(q, k, v, start, do, bf16), strict=True):
                assert a.tobytes() == b.tobytes()
    finally:
        native.set_threads(before)


def test_no_scores_in_memory():
    """A sequence of 16,384: its scores would be 1 GiB a head; only one block of rows exists, and one gradient of each."""
    import resource

    q, k, v, start = inputs(1, 16384, 1, 8, 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(q, k, v, start, np.ones_like(v))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda a: a.__setitem__(3, a[3] + 9), "the first key of query 0 of sequence 0 is 9"),
        (lambda a: a.__setitem__(3, a[3] - 1), "the first key of query 0 of sequence 0 is -1"),
        (
            lambda a: a.__setitem__(1, a[1][..., :3].copy()),
            "q and k differ in dimension 3: 4 and 3",
        ),
        (lambda a: a.__setitem__(0, np.tile(a[0], (1, 2, 1, 1))), "queries 0 to 11 have 6 keys"),
        (lambda a: a.__setitem__(2, a[2][:, :4].copy()), "k and v differ in dimension 1: 6 and 4"),
        (lambda a: a.__setitem__(0, a[0].astype(np.float64)), "q is float64, expected float32"),
    ],
)
def test_bad_inputs_are_refused(spoil, says):
    arrays = list(inputs(1, 6, 2, 4, 4))
    spoil(arrays)
    count = arrays[0].shape[1]
    o, lse = np.empty((1, count, 2, 4), np.float32), np.empty((1, 2, count), np.float32)
    with pytest.raises(NativeError, match=says):
        Kernel("FlashAttention", {"scale": 0.5, "bf16": False})(arrays, [o, lse])


def test_a_mask_becomes_the_first_key():
    S, start = 50, documents(3, 50, 9)
    key, query = np.arange(S)[None, :], np.arange(S)[:, None]
    hidden = ~((key <= query) & (key >= start[:, :, None]))
    found = np.empty((3, S), np.int32)
    Kernel("AttentionStart")([hidden[:, None].astype(np.uint8)], [found])
    np.testing.assert_array_equal(found, start)
    part = np.empty((3, 20), np.int32)
    Kernel("AttentionStart", {"first": 30})([hidden[:, None, 30:].astype(np.uint8)], [part])
    np.testing.assert_array_equal(part, start[:, 30:])
    hidden[1, 30, 45] = False
    with pytest.raises(NativeError, match=r"query 30 of sequence 1 .*attention to plain"):
        Kernel("AttentionStart")([hidden[:, None].astype(np.uint8)], [found])


# ---------------------------------------------------------------------- assembly and rotary positions


def rotated(x, angle, interleaved):
    """Rotate the last dimension as complex numbers, float64."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (first + 1j * second) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rope", [2, 8, 64])
def test_assembly_and_its_gradient(interleaved, rope):
    B, S, N, nope, Dv = 2, 5, 3, 6, 7
    T, half = B * S, rope // 2
    angle = rng.uniform(-3, 3, (T, half))
    cos, sin = (f(angle).astype(np.float32).reshape(B, S, 1, half) for f in (np.cos, np.sin))
    q = rng.standard_normal((T, N * (nope + rope))).astype(np.float32)
    kv = rng.standard_normal((T, N * (nope + Dv))).astype(np.float32)
    shared = rng.standard_normal((T, rope)).astype(np.float32)
    attributes = {"heads": N, "nope": nope, "interleaved": interleaved}
    forward, backward = Kernel("MlaAssemble", attributes), Kernel("MlaAssembleGrad", attributes)
    shapes = forward.shapes([q, kv, shared, cos, sin], 3)
    Q, K, V = (np.empty(s, np.float32) for s in shapes)
    forward([q, kv, shared, cos, sin], [Q, K, V])

    def expected(q, kv, shared):
        q, kv = q.reshape(T, N, -1), kv.reshape(T, N, -1)
        turned = rotated(q[..., nope:], angle[:, None], interleaved)
        key = np.broadcast_to(rotated(shared, angle, interleaved)[:, None], (T, N, rope))
        return (
            np.concatenate([q[..., :nope], turned], -1),
            np.concatenate([kv[..., :nope], key], -1),
            kv[..., nope:],
        )

    want = expected(q, kv, shared)
    for a, b in zip((Q, K, V), want, strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, atol=1e-6)
    # It is linear: its gradient is the transposed map, <assemble(x), y> = <x, gradient(y)>.
    dQ, dK, dV = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    grads = [np.empty_like(x) for x in (q, kv, shared)]
    assert backward.shapes([dQ, dK, dV, cos, sin], 3) == [g.shape for g in grads]
    backward([dQ, dK, dV, cos, sin], grads)
    basis = [rng.standard_normal(x.shape) for x in (q, kv, shared)]
    left = sum(
        (y * d.reshape(y.shape)).sum() for y, d in zip(expected(*basis), (dQ, dK, dV), strict=True)
    )
    right = sum((x * g).sum() for x, g in zip(basis, grads, strict=True))
    assert abs(left - right) < 1e-4 * max(1, abs(left))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_and_back(interleaved):
    x = rng.standard_normal((2, 3, 4, 10)).astype(np.float32)
    angle = rng.uniform(-3, 3, (2, 3, 1, 5))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    y, back = np.empty_like(x), np.empty_like(x)
    Kernel("Rope", {"interleaved": interleaved})([x, cos, sin], [y])
    np.testing.assert_allclose(y, rotated(x, angle, interleaved), atol=1e-6)
    Kernel("RopeGrad", {"interleaved": interleaved})([y, cos, sin], [back])
    np.testing.assert_allclose(back, x, atol=1e-6)  # a rotation's transpose undoes it


@pytest.mark.mindspore
def test_attention_cells_in_a_graph():
    ms = pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
    from mindspore import Tensor

    from telechat_moe.ops import select
    from telechat_moe.ops.attention import AttentionMask, FlashAttention, SoftmaxAttention

    q, k, v, start = inputs(2, 40, 2, 12, 8, 10)
    key, query = np.arange(40)[None, :], np.arange(40)[:, None]
    hidden = ~((key <= query) & (key >= start[:, :, None]))
    mask = Tensor(hidden[:, None].astype(np.uint8))
    do = Tensor(rng.standard_normal(v.shape).astype(np.float32))

    def gradients(backend):
        with select.using(backend):
            make = AttentionMask(2)
        core = (FlashAttention if backend == "fused" else SoftmaxAttention)(12**-0.5)
        turn = (0, 2, 1, 3) if backend == "plain" else (0, 1, 2, 3)

        def loss(q, k, v):
            visible = make(2, 40, mask)
            o, _ = core(*[x.transpose(turn) for x in (q, k, v)], visible)
            return (o.transpose(turn) * do).sum()

        return ms.value_and_grad(loss, (0, 1, 2))(*[Tensor(x) for x in (q, k, v)])

    (plain, d_plain), (fused, d_fused) = gradients("plain"), gradients("fused")
    np.testing.assert_allclose(fused.asnumpy(), plain.asnumpy(), rtol=1e-5)
    for a, b in zip(d_plain, d_fused, strict=True):
        np.testing.assert_allclose(b.asnumpy(), a.asnumpy(), atol=1e-5)
