"""The portable backends against NumPy in float64: values, and gradients by differences of the same definitions."""

import importlib.util

import numpy as np
import pytest

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
RNG = np.random.default_rng(5)
EPSILON = 1e-3  # large enough to be seen
ENDS = np.array([2, 2, 7, 9])  # an empty group


@pytest.fixture(autouse=True)
def _eager():
    """Differentiate lambdas, which graph mode cannot; other tests leave it on."""
    import mindspore as ms

    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=before)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, gamma):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * gamma


def swiglu(axis):
    def compute(x):
        gate, up = np.split(x, 2, axis)
        return gate * sigmoid(gate) * up

    return compute


def attention(scale, causal, mask):
    def compute(q, k, v):
        length = q.shape[2]
        hidden = np.triu(np.ones((length, length)), 1) if causal else mask
        score = np.einsum("bnqd,bnkd->bnqk", q, k) * scale
        weight = np.exp(score - score.max(-1, keepdims=True)) * (hidden == 0)
        return np.einsum("bnqk,bnkd->bnqd", weight / weight.sum(-1, keepdims=True), v)

    return compute


def grouped_matmul(x, weight):
    starts = [0, *ENDS[:-1]]
    return np.concatenate([x[a:b] @ w for a, b, w in zip(starts, ENDS, weight, strict=True)])


def cases():
    """Return ``name: (the backend as a function of float tensors, NumPy's definition, inputs)``."""
    import mindspore as ms
    import upstream_backends as backends
    from mindspore import Tensor

    def flash(sparse_mode, mask):
        given = {"keep_prob": 1.0, "input_layout": "BNSD", "next_tokens": 0, "scale_value": 0.3}
        backend = backends.Attention(**given, sparse_mode=sparse_mode)
        given_mask = Tensor(mask.astype(np.uint8))
        return lambda q, k, v: backend(q, k, v, None, None, None, given_mask)[3]

    mask = (RNG.random((2, 1, 5, 5)) < 0.4) & ~np.eye(5, dtype=bool)
    norm, swi = backends.RmsNorm(EPSILON), backends.Swiglu()
    index = np.array([3, 0, 3, 2])
    ends = Tensor(ENDS, ms.int64)
    gmm = backends.grouped_matmul(split_item=3, group_type=0)
    heads = [RNG.standard_normal((2, 3, 5, d)) for d in (4, 4, 6)]
    one = RNG.standard_normal((4, 6))
    return {
        "RmsNorm": (lambda x, g: norm(x, g)[0], rms_norm, [one, RNG.standard_normal(6)]),
        "Outer": (backends.Outer(), np.outer, [RNG.standard_normal(4), RNG.standard_normal(3)]),
        "Swiglu": (lambda x: swi(x, -1), swiglu(-1), [one]),
        "Swiglu -2": (lambda x: swi(x, -2), swiglu(-2), [RNG.standard_normal((2, 3, 2, 5))]),
        "attention, mask": (flash(0, mask), attention(0.3, False, mask), heads),
        "attention, causal": (flash(2, mask), attention(0.3, True, None), heads),
        "IndexSelect": (
            lambda x: backends.index_select()(x, 0, Tensor(index)),
            lambda x: x[index],
            [one],
        ),
        "CumsumExt": (lambda x: backends.cumsum_ext()(x, 0), lambda x: x.cumsum(0), [one]),
        "GroupedMatmul": (
            lambda x, w: gmm([x], [w], None, None, None, None, None, ends)[0],
            grouped_matmul,
            [RNG.standard_normal((9, 3)), RNG.standard_normal((4, 3, 5))],
        ),
        "embedding": (
            lambda table: backends.embedding(Tensor(index), table),
            lambda table: table[index],
            [one],
        ),
        "MoveTo": (lambda x: backends.MoveTo()(x, "CPU", True), lambda x: x, [one]),
    }


def test_values_and_gradients():
    """The derivative along a random direction is that of the definition, to the error of the difference."""
    import mindspore as ms
    from mindspore import Tensor

    for name, (backend, definition, inputs) in cases().items():
        tensors = [Tensor(x.astype(np.float32)) for x in inputs]
        expected = definition(*inputs)
        found = backend(*tensors).asnumpy()
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6, err_msg=name)

        weight = RNG.standard_normal(expected.shape)
        given = Tensor(weight.astype(np.float32))
        places = tuple(range(len(inputs)))
        # bound: the loop calls it before the names change
        gradients = ms.grad(lambda *x: (backend(*x) * given).sum(), places)(*tensors)  # noqa: B023
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        directions = [RNG.standard_normal(x.shape) for x in inputs]
        step = 1e-5
        ends = [
            (
                weight * definition(*[x + s * d for x, d in zip(inputs, directions, strict=True)])
            ).sum()
            for s in (step, -step)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        own = sum((g.asnumpy() * d).sum() for g, d in zip(gradients, directions, strict=True))
        np.testing.assert_allclose(own, slope, rtol=1e-4, atol=1e-4, err_msg=name)


def test_choices():
    """Sorting, the highest of a row, remainders: whole numbers, no gradients."""
    import upstream_backends as backends
    from mindspore import Tensor

    x = RNG.permutation(24).reshape(4, 6).astype(np.float32)
    values, places = backends.TopkExt()(Tensor(x), 3)
    np.testing.assert_array_equal(places.asnumpy(), np.argsort(-x, -1)[:, :3])
    np.testing.assert_array_equal(values.asnumpy(), -np.sort(-x, -1)[:, :3])
    ties = np.array([[1, 0, 1, 0, 2, 0, 1]], np.float32)
    values, places = backends.sort_ext()(Tensor(ties), 1)
    np.testing.assert_array_equal(values.asnumpy(), np.sort(ties))
    np.testing.assert_array_equal(np.take_along_axis(ties, places.asnumpy(), 1), np.sort(ties))
    np.testing.assert_array_equal(np.sort(places.asnumpy()), [np.arange(7)])
    numbers = np.arange(20, dtype=np.int32)
    np.testing.assert_array_equal(backends.fmod_scalar()(Tensor(numbers), 6).asnumpy(), numbers % 6)


def test_names_are_put_back():
    """Inside, MindFormers' modules see the backends; afterwards, and outside of them, nothing has changed."""
    import upstream_backends as backends
    from mindformers.parallel_core.training_graph.transformer import flash_attention
    from mindformers.parallel_core.training_graph.transformer.moe import ffn
    from mindspore.ops import auto_generate

    before = ffn.GroupedMatmul
    with backends.replaced() as names:
        assert ffn.GroupedMatmul is backends.grouped_matmul
        assert flash_attention.FlashAttentionScore is backends.Attention
    assert names == {value.__name__ for value in backends.BACKENDS}
    assert ffn.GroupedMatmul is before is auto_generate.GroupedMatmul


def test_other_attention_is_refused():
    import upstream_backends as backends

    given = {"keep_prob": 0.9, "input_layout": "BNSD", "next_tokens": 0, "sparse_mode": 0}
    with pytest.raises(NotImplementedError, match="keep_prob"):
        backends.Attention(**given, scale_value=1.0)
