"""Fusing the plain model's own cells into programs of the virtual machine."""

import numpy as np
import pytest

ms = pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

from mindspore import ParameterTuple, Tensor
from tiny_models import random_weights, tiny_config

from telechat_moe.model import CausalLM
from telechat_moe.model.gradient import ForwardBackward
from telechat_moe.ops import rewrite, select

pytestmark = pytest.mark.mindspore


def run(fuse):
    with select.using("plain"):
        model = CausalLM(tiny_config(num_nextn_predict_layers=1, mtp_loss_factor=0.3))
    regions = rewrite.fuse_cells(model) if fuse else []
    random_weights(model, 0)
    model.set_train()
    params = model.trainable_params()
    step = ForwardBackward(model, ParameterTuple(params))
    ids = np.random.default_rng(0).integers(0, 96, (2, 17)).astype(np.int32)
    position = np.tile(np.arange(16, dtype=np.int32), (2, 1))
    arrays = (ids[:, :-1].copy(), ids[:, 1:].copy(), np.ones((2, 16), np.float32), position)
    losses, gradients = step(*[Tensor(x) for x in arrays])
    named = {p.name: g.asnumpy().copy() for p, g in zip(params, gradients, strict=True)}
    return losses.asnumpy().copy(), named, regions


@pytest.mark.slow
def test_the_fused_model_is_the_plain_one():
    losses, gradients, _ = run(fuse=False)
    fused_losses, fused_gradients, regions = run(fuse=True)
    np.testing.assert_allclose(fused_losses, losses, rtol=1e-6)
    assert fused_gradients.keys() == gradients.keys()
    for name, g in gradients.items():
        error = np.abs(fused_gradients[name] - g).max() / np.abs(g).max()
        assert error < 1e-5, f"{name}: {error:.1e}"
    fused = {r.name: r for r in regions if r.program is not None}
    assert {r.cell for r in fused.values()} == {"RMSNorm", "SwiGLU", "AddRMSNorm"}
    assert "layers.0.attention.q_norm" in fused
    text = rewrite.explain(regions)
    assert "fused layers.1.moe.experts.products.act (SwiGLU): 3 operations in 1 stage" in text
    assert "kept Linear: MatMul is no operation of the machine" in text


def test_softmax_and_reductions_with_a_parameter():
    from mindspore import Parameter, nn, ops

    class Scores(nn.Cell):
        def __init__(self):
            super().__init__()
            self.bias = Parameter(Tensor(np.linspace(-1, 1, 24), ms.float32), name="bias")
            self.add, self.softmax = ops.Add(), ops.Softmax(-1)
            self.log, self.sum, self.mul = ops.Log(), ops.ReduceSum(keep_dims=True), ops.Mul()

        def construct(self, x_TH):
            p = self.softmax(self.add(x_TH, self.bias))
            return self.sum(self.mul(p, self.log(p)), -1)

    class Holder(nn.Cell):
        def __init__(self):
            super().__init__()
            self.scores = Scores()

        def construct(self, x_TH):
            return self.scores(x_TH)

    x = np.random.default_rng(0).standard_normal((7, 24)).astype(np.float32)
    holder = Holder()
    regions = rewrite.fuse_cells(holder)
    assert [r.program is not None for r in regions] == [True]
    y = x.astype(np.float64) + np.linspace(-1, 1, 24)
    p = np.exp(y) / np.exp(y).sum(-1, keepdims=True)
    expected = (p * np.log(p)).sum(-1, keepdims=True)
    np.testing.assert_allclose(holder(Tensor(x)).asnumpy(), expected, rtol=1e-5)
