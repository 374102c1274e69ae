"""What transformers' model lacks, against the formulas in NumPy float64 (`float64.py`)."""

import dataclasses

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import itertools

import float64
import numpy as np
from tiny_models import Batch, Probe, random_batch, random_weights, tiny_config

from telechat_moe.model import CausalLM

pytestmark = pytest.mark.mindspore

BALANCED = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
MICRO_BATCH = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
ONE_MOE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}

CASES = {
    "mtp_1_no_latent_norm": dict(
        num_nextn_predict_layers=1, mtp_loss_factor=0.3, qk_layernorm=False, **ONE_MOE_LAYER
    ),
    "mtp_2_all_losses": dict(
        num_nextn_predict_layers=2, mtp_loss_factor=0.5, moe_z_loss_coeff=0.02, **BALANCED
    ),
    "mtp_dense_tied": {
        "num_nextn_predict_layers": 1,
        "mtp_loss_factor": 0.2,
        "tie_word_embeddings": True,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
    },
    "micro_batch_balance": dict(**MICRO_BATCH, **ONE_MOE_LAYER),
    "sequence_balance_all_experts": dict(num_experts_per_tok=8, **BALANCED, **ONE_MOE_LAYER),
    "z_loss": dict(moe_z_loss_coeff=0.05, n_shared_experts=0, **ONE_MOE_LAYER),
    "drop_least_probable": dict(
        moe_token_drop_policy="probs", moe_expert_capacity_factor=0.7, **BALANCED, **ONE_MOE_LAYER
    ),
    "drop_last": dict(
        moe_token_drop_policy="position",
        moe_expert_capacity_factor=0.7,
        num_experts_per_tok=3,
        **MICRO_BATCH,
        **ONE_MOE_LAYER,
    ),
    "no_bias_top_1": dict(
        moe_router_enable_expert_bias=False, num_experts_per_tok=1, **ONE_MOE_LAYER
    ),
}

LOSS, LOGITS, GRADIENT = 1e-6, 2e-5, 1e-4


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """Configuration, weights, batch, cell, and what both sides make of them."""
    config = tiny_config(**CASES[request.param])
    model = CausalLM(config)
    weights = random_weights(model, seed=3)
    probe = Probe(model.set_train(), with_logits=False)
    batch = random_batch(config, seed=4)
    losses, _, gradients = probe.run(batch)
    counters = {n: p.asnumpy().copy() for n, p in model.parameters_and_names()}
    return (
        config,
        weights,
        batch,
        (losses, gradients, counters),
        float64.forward(config, weights, batch),
    )


def test_losses(case):
    config, _, _, (losses, _, _), expected = case
    for name, found in zip(("lm", "mtp", "aux"), losses, strict=True):
        assert found == pytest.approx(getattr(expected, name), rel=LOSS, abs=1e-8), name
    assert (expected.mtp > 0) == (config.num_nextn_predict_layers > 0)


def test_loads_and_drops(case):
    config, _, _, (_, _, counters), expected = case
    found = {n: v for n, v in counters.items() if n.endswith("expert_load")}
    assert len(found) == len(expected.counts.load)
    for layer, load in expected.counts.load.items():
        np.testing.assert_array_equal(found[f"{layer}.router.expert_load"], load)
        if config.moe_token_drop_policy:
            dropped = counters[f"{layer}.dispatch.dropped"][0]
            assert dropped == expected.counts.dropped[layer] > 0
        else:
            assert not [n for n in counters if n.endswith("dropped")]


def test_gradients_by_finite_differences(case, record_property):
    """Each parameter's gradient along a random direction and along itself."""
    config, weights, batch, (_, gradients, _), _ = case
    rng = np.random.default_rng(5)
    errors = {}
    for name, gradient in gradients.items():
        g = gradient.astype(np.float64)
        direction = g + np.linalg.norm(g) * rng.standard_normal(g.shape) / np.sqrt(g.size)
        step = 1e-6 / max(np.linalg.norm(direction), 1e-30)
        slope = _slope(config, weights, batch, name, step * direction) / step
        errors[name] = abs(slope - (g * direction).sum()) / ((g**2).sum() or 1.0)
    worst = max(errors, key=errors.__getitem__)
    record_property("finite differences", float(errors[worst]))
    assert errors[worst] < GRADIENT, f"{worst}: relative error {errors[worst]:.1e}"


def _slope(config, weights, batch, name, change):
    def total(sign):
        moved = weights[name].astype(np.float64) + sign * change
        return float64.forward(config, {**weights, name: moved}, batch).total

    return (total(1) - total(-1)) / 2


def test_documents_do_not_see_each_other():
    """An EoD mask with restarted positions: each document's loss is its loss when it is alone."""
    config = tiny_config(num_nextn_predict_layers=0, **ONE_MOE_LAYER)
    model = CausalLM(config)
    weights = random_weights(model, seed=6)
    batch, starts = _documents(config)
    (lm, _, _), _, _ = Probe(model.set_train(), with_logits=False).run(batch)
    assert lm == pytest.approx(float64.forward(config, weights, batch).lm, rel=LOSS)
    alone = []
    for b, (i, j) in starts:
        part = Batch(*(a[b : b + 1, i:j] for a in dataclasses.astuple(batch)[:4]))
        alone.append((float64.forward(config, weights, part).lm, part.loss_mask.sum()))
    mean = sum(loss * n for loss, n in alone) / sum(n for _, n in alone)
    assert lm == pytest.approx(mean, rel=LOSS)


def _documents(config):
    """Two sequences of 16 tokens, cut into documents at different places."""
    plain = random_batch(config, seed=7)
    cuts = [(0, 5, 16), (0, 9, 12, 16)]
    hidden = np.ones((2, 1, 16, 16), np.uint8)
    position, keep = plain.position_ids.copy(), plain.loss_mask.copy()
    spans = []
    for b, ends in enumerate(cuts):
        for i, j in itertools.pairwise(ends):
            hidden[b, 0, i:j, i:j] = np.triu(np.ones((j - i, j - i), np.uint8), 1)
            position[b, i:j] = np.arange(j - i)
            keep[b, j - 1] = 0
            spans.append((b, (i, j)))
    return Batch(plain.input_ids, plain.labels, keep, position, hidden), spans


def test_a_batch_without_labels_has_loss_zero():
    config = tiny_config(**ONE_MOE_LAYER)
    model = CausalLM(config)
    random_weights(model, seed=8)
    batch = random_batch(config, seed=9)
    nothing = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    losses, _, gradients = Probe(model.set_train(), with_logits=False).run(nothing)
    assert losses == [0, 0, 0]
    assert not any(g.any() for g in gradients.values())
