"""Cross-entropy from logits: loss, gradient, z-loss, extreme values, refusals."""

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mindspore as ms
import numpy as np
from gradients import Gradient, close
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor

from telechat_moe.ops import native
from telechat_moe.ops.cross_entropy import (
    CrossEntropy,
    FusedCrossEntropy,
    cross_entropy_reference,
)
from telechat_moe.ops.custom import reason
from telechat_moe.ops.native import Kernel, NativeError
from telechat_moe.ops.select import using

pytestmark = pytest.mark.mindspore


def inputs(seed, t, v, scale=1.0, shift=0.0):
    rng = np.random.default_rng(seed)
    logits = (scale * rng.standard_normal((t, v)) + shift).astype(np.float32)
    label = rng.integers(0, v, t).astype(np.int32)
    mask = (rng.random(t) < 0.7).astype(np.float32)
    return logits, label, mask


def kernels(logits, label, mask, z_loss=0.0, dloss=1.0):
    """Return ``(loss, dlogits)`` of the native operators."""
    loss, lse = np.empty(1, np.float32), np.empty((len(logits), 2), np.float32)
    gradient = np.empty_like(logits)
    Kernel("CrossEntropy", {"z_loss": z_loss})([logits, label, mask], [loss, lse])
    upstream = np.float32([dloss])
    Kernel("CrossEntropyGrad", {"z_loss": z_loss})([logits, label, mask, lse, upstream], [gradient])
    return loss[0], gradient


def gradient_reference(logits, label, mask, z_loss=0.0):
    """Differentiate the reference by hand: ``(p (1 + 2 z lse) - onehot) mask / sum(mask)``."""
    x = logits.astype(np.float64)
    top = x.max(-1, keepdims=True)
    lse = top + np.log(np.exp(x - top).sum(-1, keepdims=True))
    p = np.exp(x - lse) * (1 + 2 * z_loss * lse)
    p[np.arange(len(x)), label] -= 1
    return p * (mask / (mask.sum() + 1e-8))[:, None]


@settings(max_examples=150, deadline=None)
@given(
    t=st.integers(1, 40),
    v=st.one_of(st.integers(1, 70), st.sampled_from([2047, 2048, 2049, 4097, 5000])),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    shift=st.sampled_from([0.0, -1e4, 300.0]),
    z_loss=st.sampled_from([0.0, 1e-4]),
    seed=st.integers(0, 2**16),
)
def test_loss_and_gradient_of_any_shape(t, v, scale, shift, z_loss, seed):
    logits, label, mask = inputs(seed, t, v, scale, shift)
    loss, gradient = kernels(logits, label, mask, z_loss)
    expected = cross_entropy_reference(logits, label, mask, z_loss)
    assert loss == pytest.approx(expected, rel=3e-6, abs=3e-7)
    wanted = gradient_reference(logits, label, mask, z_loss)
    rounding = 1e-7 / max(mask.sum(), 1)  # of p - 1
    assert np.abs(gradient - wanted).max() <= 3e-6 * np.abs(wanted).max() + rounding


@pytest.mark.parametrize("backend", ["plain", "auto"])
@pytest.mark.parametrize("sums", [False, True])
def test_tokens_add_up_and_give_no_gradient(backend, sums):
    logits, label, mask = inputs(3, 24, 130, 3.0, -1e4)
    arrays = [Tensor(x) for x in (logits, label, mask)]
    with using(backend):
        plain, by_token = CrossEntropy(sums).set_train(), CrossEntropy(sums).set_train()
    by_token.by_token = True

    def alone(x):
        return plain(x, *arrays[1:])

    def both(x):
        return by_token(x, *arrays[1:])

    mean, gradient = ms.value_and_grad(alone)(arrays[0])
    (mean_2, token_T), gradient_2 = ms.value_and_grad(both, has_aux=True)(arrays[0])
    assert mean.asnumpy().tobytes() == mean_2.asnumpy().tobytes()
    assert gradient.asnumpy().tobytes() == gradient_2.asnumpy().tobytes()
    each = [
        cross_entropy_reference(logits[i : i + 1], label[i : i + 1], np.ones(1)) * mask[i]
        for i in range(len(mask))
    ]
    np.testing.assert_allclose(token_T.asnumpy(), each, rtol=2e-5, atol=1e-6)


def test_a_gradient_larger_than_the_caches():
    """It is stored another way; rows of an odd length begin anywhere in a vector."""
    logits, label, mask = inputs(5, 257, 16411)
    before, found = native.threads(), []
    for threads in (1, 3):
        native.set_threads(threads)
        found.append(kernels(logits, label, mask)[1])
    native.set_threads(before)
    assert found[0].tobytes() == found[1].tobytes()
    for rows in np.split(np.arange(len(label)), range(100, len(label), 100)):
        wanted = gradient_reference(logits[rows], label[rows], mask[rows])
        wanted *= mask[rows].sum() / mask.sum()
        np.testing.assert_allclose(found[0][rows], wanted, rtol=3e-6, atol=1e-7 / mask.sum())


def test_accuracy_gate():
    """Mean relative error under 2^-13, the largest under ten times that (float32)."""
    logits, label, mask = inputs(0, 200, 1003, 5.0, 40.0)
    _, gradient = kernels(logits, label, mask)
    wanted = gradient_reference(logits, label, mask)
    error = np.abs(gradient - wanted) / (np.abs(wanted) + 1e-7)
    assert error.mean() < 2.0**-13
    assert error.max() < 10 * 2.0**-13


@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_in_a_graph(backend):
    logits, label, mask = inputs(3, 21, 37, 4.0)
    with using(operators={"cross_entropy": backend}):
        cell = CrossEntropy()
    loss, (gradient,) = Gradient(cell).run(np.ones(1, np.float32), logits, label, mask)
    assert loss.shape == (1,)
    close(loss[0], np.array(cross_entropy_reference(logits, label, mask)))
    close(gradient, gradient_reference(logits, label, mask))


def test_one_graph_serves_any_number_of_tokens():
    gradient = Gradient(CrossEntropy())
    gradient.set_inputs(
        Tensor(shape=[1], dtype=ms.float32),
        Tensor(shape=[None, 37], dtype=ms.float32),
        Tensor(shape=[None], dtype=ms.int32),
        Tensor(shape=[None], dtype=ms.float32),
    )
    for count in (21, 1, 300):
        logits, label, mask = inputs(count, count, 37, 4.0)
        mask[0] = 1
        loss, (d_logits,) = gradient.run(np.ones(1, np.float32), logits, label, mask)
        close(loss[0], np.array(cross_entropy_reference(logits, label, mask)))
        close(d_logits, gradient_reference(logits, label, mask))


def test_z_loss_in_a_graph():
    logits, label, mask = inputs(4, 9, 50, 4.0)
    loss, (gradient,) = Gradient(FusedCrossEntropy(0.01)).run(
        np.ones(1, np.float32), logits, label, mask
    )
    close(loss[0], np.array(cross_entropy_reference(logits, label, mask, 0.01)))
    close(gradient, gradient_reference(logits, label, mask, 0.01))


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_half_precision_logits_are_widened(dtype):
    logits, label, mask = inputs(5, 9, 50, 4.0)
    half = Tensor(logits).astype(dtype)
    loss = CrossEntropy()(half, Tensor(label), Tensor(mask)).asnumpy()
    widened = half.astype(ms.float32).asnumpy()
    assert loss[0] == pytest.approx(cross_entropy_reference(widened, label, mask), rel=3e-6)


def test_a_mask_of_zeros_gives_zero():
    logits, label, _ = inputs(6, 5, 11)
    loss, gradient = kernels(logits, label, np.zeros(5, np.float32))
    assert loss == 0
    assert (gradient == 0).all()


def test_hidden_tokens_take_no_part():
    # -inf hides a token; here it hides whole blocks of the online sum, the first ones too.
    logits, label, mask = inputs(7, 6, 5000)
    logits[:, :4100] = -np.inf
    label = (4100 + label % 900).astype(np.int32)
    loss, gradient = kernels(logits, label, mask)
    shorter = logits[:, 4100:], label - 4100, mask
    assert loss == pytest.approx(cross_entropy_reference(*shorter), rel=3e-6)
    assert (gradient[:, :4100] == 0).all()
    close(gradient[:, 4100:], gradient_reference(*shorter))


@pytest.mark.parametrize("at", [0, 2500, 4999])
def test_a_nan_is_not_lost(at):
    logits, label, mask = inputs(8, 4, 5000)
    mask[:] = 1
    logits[2, at] = np.nan
    loss, gradient = kernels(logits, label, mask)
    assert np.isnan(loss)
    assert np.isnan(gradient[2]).all()
    assert np.isfinite(gradient[[0, 1, 3]]).all()


@pytest.mark.parametrize("bad", [-1, 11, 2**31 - 1])
def test_a_label_out_of_range_is_refused_with_its_row(bad):
    logits, label, mask = inputs(9, 6, 11)
    label[4] = bad
    with pytest.raises(NativeError, match=rf"the label of row 4 is {bad}, expected 0 to 10"):
        kernels(logits, label, mask)


def test_the_sentence_reaches_the_user_of_a_graph():
    logits, label, mask = inputs(9, 6, 11)
    label[4] = 11
    with pytest.raises(RuntimeError) as error:
        CrossEntropy()(*(Tensor(a) for a in (logits, label, mask))).asnumpy()
    assert "the label of row 4 is 11, expected 0 to 10" in str(reason(error.value))


def test_the_number_of_threads_changes_no_bit():
    logits, label, mask = inputs(10, 300, 3001)
    before = native.threads()
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_threads(threads)
            results.append(kernels(logits, label, mask))
    finally:
        native.set_threads(before)
    for loss, gradient in results[1:]:
        assert loss == results[0][0]
        assert (gradient == results[0][1]).all()


@pytest.mark.torch
@pytest.mark.parametrize("shape", [(64, 4096), (33, 1001)])
def test_torch_agrees(shape):
    torch = pytest.importorskip("torch")
    logits, label, mask = inputs(11, *shape, 3.0)
    mask[:] = 1
    x = torch.tensor(logits, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(x, torch.tensor(label).long())
    loss.backward()
    found, gradient = kernels(logits, label, mask)
    assert found == pytest.approx(loss.item(), rel=1e-6)
    close(gradient, x.grad.numpy())
