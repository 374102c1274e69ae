"""AdamW over all tensors at once and the norm of gradients: float64, torch, backends, threads, refusals."""

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mindspore as ms
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, ParameterTuple, Tensor

from telechat_moe.ops import native
from telechat_moe.ops.adamw import adamw_reference
from telechat_moe.ops.native import Kernel, NativeError
from telechat_moe.ops.select import using
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import GlobalNorm

pytestmark = pytest.mark.mindspore

BETAS = (0.9, 0.999)
SHAPES = [(3,), (17, 5), (1,), (40000,), (2, 3, 4), (256, 129)]


def tensors(seed, shapes=SHAPES, scale=1.0):
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal(s)).astype(np.float32) for s in shapes]


def update(w, m, v, g, decayed, rate=1e-3, epsilon=1e-8, decay=0.1, clip=1.0, betas=BETAS):
    """Run the native operator; changes ``w``, ``m`` and ``v``."""
    attributes = {"beta1": betas[0], "beta2": betas[1], "decayed": decayed}
    attributes |= {"new1": 1 - betas[0], "new2": 1 - betas[1]}
    scalars = [np.float32([x]) for x in (rate, epsilon, decay, clip)]
    Kernel("AdamW", attributes)([*w, *m, *v, *g, *scalars], [np.empty(1, np.float32)])


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    betas=st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.95, 0.999])),
    clip=st.sampled_from([1.0, 0.01]),
    seed=st.integers(0, 2**16),
)
def test_update_of_any_tensors(shapes, betas, clip, seed):
    w, m, g = (tensors(seed + i, shapes) for i in range(3))
    v = [np.square(x) for x in tensors(seed + 3, shapes)]
    decayed = [i % 2 for i in range(len(shapes))]
    expected = [
        adamw_reference(*four, betas, 1e-2, 1e-8, 0.1 * flag, clip)
        for *four, flag in zip(w, m, v, g, decayed, strict=True)
    ]
    update(w, m, v, g, decayed, rate=1e-2, clip=clip, betas=betas)
    for found, wanted in zip(zip(w, m, v, strict=True), expected, strict=True):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)


def test_a_misaligned_tensor_gets_the_same_update():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 1000)).astype(np.float32) ** 2
    results = []
    for offset in range(5):
        four = []
        for row in values:
            room = np.empty(1005, np.float32)
            room[offset : offset + 1000] = row
            four.append(room[offset : offset + 1000])
        update(*[[x] for x in four], [1])
        results.append([x.copy() for x in four[:3]])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a == b).all()


def run_cell(backend, steps, shapes=SHAPES, max_norm=1.0):
    """Train on given gradients; returns the parameters after each step, and the cell."""
    params = [Parameter(Tensor(w), name=f"w{i}") for i, w in enumerate(tensors(0, shapes))]
    with using(operators={"adamw": backend}):
        cell = AdamW(params, BETAS, 1e-8, 0.1, no_decay=["w1$", "w4$"])
        norm = GlobalNorm(len(params))
    history = []
    for step in range(1, steps + 1):
        gradients = tuple(Tensor(g) for g in tensors(step, shapes, 0.1 * step))
        total = float(norm(gradients)[0].asnumpy())
        clip = Tensor(np.float32(max_norm / max(total, max_norm)))
        assert bool(cell(gradients, *cell.scalars(step, 1e-2 / step), clip)) is True
        history.append([p.asnumpy().copy() for p in params])
    return history, cell


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_torch_agrees_over_steps(backend):
    torch = pytest.importorskip("torch")
    history, _ = run_cell(backend, 5)
    params = [torch.nn.Parameter(torch.tensor(w)) for w in tensors(0)]
    groups = [
        {"params": [p for i, p in enumerate(params) if i not in (1, 4)], "weight_decay": 0.1},
        {"params": [params[1], params[4]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=BETAS, eps=1e-8)
    for step in range(1, 6):
        for p, g in zip(params, tensors(step, scale=0.1 * step), strict=True):
            p.grad = torch.tensor(g)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / step
        optimizer.step()
        for ours, theirs in zip(history[step - 1], params, strict=True):
            np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_hundreds_of_tensors_in_one_operator():
    shapes = [(7,)] * 250
    history, cell = run_cell("fused", 1, shapes)
    rate, epsilon, decay = (float(x.asnumpy()) for x in cell.scalars(1, 1e-2))
    gradients = tensors(1, shapes, 0.1)
    clip = 1 / max(1, np.sqrt(sum(np.square(g).sum() for g in gradients)))
    for i, w, g, found in zip(range(250), tensors(0, shapes), gradients, history[0], strict=True):
        zero = np.zeros_like(w)
        flag = 0.0 if f"w{i}".endswith(("w1", "w4")) else decay
        expected, _, _ = adamw_reference(w, zero, zero, g, BETAS, rate, epsilon, flag, clip)
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


def test_the_states_are_named_alike_on_both_backends():
    names = []
    for backend in ("fused", "plain"):
        params = [Parameter(Tensor(w), name=f"layer.w{i}") for i, w in enumerate(tensors(0))]
        with using(operators={"adamw": backend}):
            cell = AdamW(params, BETAS, 1e-8, 0.1)
        names.append([p.name for p in (*cell.moment1, *cell.moment2)])
    assert names[0] == names[1]
    assert names[0][0] == "adam_m.layer.w0"


@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_norm_of_large_gradients(backend):
    arrays = tensors(5, [(3_000_000,), (1,), (1000, 33)])
    arrays[0] += 3
    with using(operators={"adamw": backend}):
        norm, squares = GlobalNorm(3)(tuple(Tensor(a) for a in arrays))
    expected = [np.square(a.astype(np.float64)).sum() for a in arrays]
    assert norm.shape == ()
    assert norm.asnumpy() == pytest.approx(np.sqrt(sum(expected)), rel=1e-6)
    np.testing.assert_allclose(squares.asnumpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_norm_names_the_tensor_that_is_not_finite(value):
    arrays = tensors(6)
    arrays[3][39999] = value
    norm, squares = GlobalNorm(len(arrays))(tuple(Tensor(a) for a in arrays))
    assert not np.isfinite(norm.asnumpy())
    assert list(np.isfinite(squares.asnumpy())) == [True, True, True, False, True, True]


def test_the_number_of_threads_changes_no_bit():
    before = native.threads()
    results = []
    try:
        for threads in (1, 2, 5):
            native.set_threads(threads)
            w, m, g = tensors(0), tensors(1), tensors(2)
            v = [np.square(x) for x in tensors(3)]
            update(w, m, v, g, [1] * len(w))
            norm, squares = np.empty(1, np.float32), np.empty(len(g), np.float32)
            Kernel("SquareSums", {"tensors": len(g)})(g, [norm, squares])
            results.append([*w, *m, *v, norm, squares])
    finally:
        native.set_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert (a == b).all()


def test_tensors_that_do_not_fit_are_refused():
    w, m, v, g = (tensors(i) for i in range(4))
    with pytest.raises(NativeError, match=r"29 arguments for 5 tensors, expected 25"):
        update(w, m, v, g, [1] * 5)
    g[2] = np.zeros(2, np.float32)
    with pytest.raises(NativeError, match=r"tensor 2: weight, moments and gradient differ in size"):
        update(w, m, v, g, [1] * 6)
    g[2] = np.zeros(1)
    with pytest.raises(NativeError, match=r"gradient is float64, expected float32"):
        update(w, m, v, g, [1] * 6)


def test_only_the_parameters_given_are_changed():
    params = ParameterTuple([Parameter(Tensor(np.ones(5, np.float32)), name="kept")])
    cell = AdamW(params, BETAS, 1e-8, 0.0)
    copy = Tensor(params[0].asnumpy().copy())
    gradients = (Tensor(np.ones(5, np.float32)),)
    cell(gradients, *cell.scalars(1, 0.5), Tensor(1.0, ms.float32))
    np.testing.assert_allclose(params[0].asnumpy(), 0.5, rtol=1e-6)
    assert (copy.asnumpy() == 1).all()
    assert (gradients[0].asnumpy() == 1).all()
