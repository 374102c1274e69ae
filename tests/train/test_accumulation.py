"""Gradients accumulated in place (GMMAdd) against plain operators and AssignAdd."""

import numpy as np
import pytest

ms = pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

from mindspore import Tensor
from tiny_models import random_weights, tiny_config

from telechat_moe.model import CausalLM
from telechat_moe.ops import select
from telechat_moe.train import parameters
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import TrainStep

pytestmark = pytest.mark.mindspore
MICRO_BATCHES, STEPS = 3, 3


def batch(ids):
    position = np.tile(np.arange(16, dtype=np.int32), (len(ids), 1))
    mask = np.ones(position.shape, np.float32)
    return [Tensor(x) for x in (ids[:, :-1].copy(), ids[:, 1:].copy(), mask, position)]


def run(backend, windows):
    with select.using(backend):
        model = CausalLM(tiny_config(num_nextn_predict_layers=1, mtp_loss_factor=0.3))
        random_weights(model, 0)
        model.set_train()
        optimizer = AdamW(model.trainable_params(), (0.9, 0.95), 1e-8, 0.1)
        step = TrainStep(model, optimizer, 1.0, MICRO_BATCHES)
        step.set_train()
    outputs = []
    for i in range(STEPS):
        *first, last = windows[i * MICRO_BATCHES : (i + 1) * MICRO_BATCHES]
        for ids in first:
            step.accumulate(*batch(ids))
        losses, norm, squares, *_ = step(*optimizer.scalars(i + 1, 1e-3), *batch(last))
        outputs.append((losses.asnumpy().copy(), float(norm.asnumpy()), squares.asnumpy().copy()))
    return model, optimizer, outputs


@pytest.mark.slow
def test_in_place_sums_are_those_of_plain_operators():
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, 96, (2, 17)).astype(np.int32) for _ in range(MICRO_BATCHES * STEPS)]
    plain, _, expected = run("plain", windows)
    fused, optimizer, found = run("auto", windows)
    for (losses, norm, squares), (losses_2, norm_2, squares_2) in zip(expected, found, strict=True):
        np.testing.assert_allclose(losses_2, losses, rtol=2e-6)
        np.testing.assert_allclose(norm_2, norm, rtol=2e-6)
        np.testing.assert_allclose(squares_2, squares, rtol=2e-5)
    for a, b in zip(plain.trainable_params(), fused.trainable_params(), strict=True):
        np.testing.assert_allclose(b.asnumpy(), a.asnumpy(), atol=1e-4, err_msg=a.name)
    # Nothing of it is in a checkpoint, and nothing is left for the next step.
    assert not [
        name for name in parameters.parameters(fused, optimizer)["model"] if "main_grad" in name
    ]
    left = [p for p in fused.get_parameters() if p.name.endswith("main_grad")]
    assert left
    assert all(not p.asnumpy().any() for p in left)
