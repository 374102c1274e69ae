"""A hundred optimizer steps against torch.optim.AdamW on transformers' DeepseekV3ForCausalLM."""

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
pytest.importorskip("torch", reason="compares with torch: pip install torch==2.13.0")
pytest.importorskip("transformers", reason="compares with transformers (pip install '.[test]')")

import hf_models
import numpy as np
import torch
from tiny_models import random_batch, random_weights, tiny_config

from telechat_moe.model import CausalLM
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import TrainStep

pytestmark = [pytest.mark.mindspore, pytest.mark.torch]

STEPS, BATCHES = 100, 4
RATE, BETAS, EPS, DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-6, 0.1, 1.0
BIAS_RATE = 0.001
TRAINED = 1e-4  # of losses in 100 steps

CONFIGS = {
    "plain": {"num_hidden_layers": 2},
    "groups_tied": {
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "tie_word_embeddings": True,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_norms(name, tmp_path, record_property):
    config = tiny_config(**CONFIGS[name])
    model = CausalLM(config)
    weights = random_weights(model, seed=1)
    reference, _ = hf_models.through_convert(tmp_path, config, weights)
    batches = [random_batch(config, seed=i) for i in range(BATCHES)]
    losses, norms, bias = _ours(model, batches)
    expected_losses, expected_norms, expected_bias = _torch(reference, batches)
    errors = np.abs(losses / expected_losses - 1)
    assert expected_losses[-1] < 0.6 * expected_losses[0]
    assert (expected_norms > MAX_NORM).any()
    record_property("losses", float(errors.max()))
    record_property("norms", float(np.abs(norms / expected_norms - 1).max()))
    assert errors.max() < TRAINED, f"step {errors.argmax()}: {errors.max():.1e}"
    np.testing.assert_allclose(norms, expected_norms, rtol=5e-4)  # measured: 7.3e-5
    np.testing.assert_allclose(bias, expected_bias, atol=1e-6)


def _ours(model, batches):
    optimizer = AdamW(model.trainable_params(), BETAS, EPS, DECAY, no_decay=("norm",))
    step = TrainStep(model, optimizer, max_grad_norm=MAX_NORM, bias_rate=BIAS_RATE).set_train()
    losses, norms = [], []
    for i in range(STEPS):
        out = step(*optimizer.scalars(i + 1, RATE), *batches[i % BATCHES].tensors())
        losses.append(out[0].asnumpy()[0])
        norms.append(float(out[1].asnumpy()))
    bias = model.layers[-1].moe.router.expert_bias.asnumpy().copy()
    return np.array(losses, np.float64), np.array(norms), bias


def _torch(model, batches):
    chosen = {}

    def remember(gate, _, output):
        chosen[gate] = torch.bincount(output[0].reshape(-1), minlength=gate.n_routed_experts)

    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    for gate in gates:
        gate.register_forward_hook(remember)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "norm" not in n], "weight_decay": DECAY},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss, _ = hf_models.loss(model, batches[i % BATCHES])
        loss.backward()
        for (
            _,
            p,
        ) in named:  # torch skips a parameter without gradient, as of an expert without tokens
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
        for gate, load in chosen.items():  # DeepSeek-V3, section 2.1.2
            load = load.float()
            gate.e_score_correction_bias += BIAS_RATE * torch.sign(load.mean() - load)
    return np.array(losses), np.array(norms), gates[-1].e_score_correction_bias.numpy()
