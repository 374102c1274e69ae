"""The model against transformers' DeepseekV3ForCausalLM with the same weights, in float32."""

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
pytest.importorskip("torch", reason="compares with torch: pip install torch==2.13.0")
pytest.importorskip("transformers", reason="compares with transformers (pip install '.[test]')")

import hf_models
from tiny_models import Probe, random_batch, random_weights, tiny_config

from telechat_moe.model import CausalLM

pytestmark = [pytest.mark.mindspore, pytest.mark.torch]

# Transformers ranks a group by its best 2 experts, we by the best K / topk_group: K = 2 topk_group.
ONE_MOE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
CONFIGS = {
    "plain": {},
    "groups": {
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_routed_experts": 12,
        "first_k_dense_replace": 0,
    },
    "one_group_of_two": {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0},
    # With one expert per token transformers normalises its weight to 1, we as MindFormers do not.
    "no_shared_top_1": {
        "n_shared_experts": 0,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
    },
    "two_shared_top_4": {"n_shared_experts": 2, "num_experts_per_tok": 4, **ONE_MOE_LAYER},
    "two_dense_first": {
        "first_k_dense_replace": 2,
        "num_hidden_layers": 3,
        "routed_scaling_factor": 2.8,
    },
    "all_dense": {"first_k_dense_replace": 2},
    "no_query_compression": {"q_lora_rank": None},
    "weights_not_normalised": {"norm_topk_prob": False, "num_experts_per_tok": 3, **ONE_MOE_LAYER},
    "tied": {"tie_word_embeddings": True, "num_experts_per_tok": 8},
    "halves_rotated": {"rope_interleave": False, "rope_theta": 500.0, **ONE_MOE_LAYER},
    "one_head": {
        "fp32_residual_connection": False,
        "num_attention_heads": 1,
        "qk_rope_head_dim": 2,
        **ONE_MOE_LAYER,
    },
}

LOGITS, LOSS, GRADIENT = 2e-5, 1e-6, 2e-5  # at most ten times what docs/performance.md says


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    """A model of ours, Hugging Face's with the same weights, and a batch."""
    config = tiny_config(**CONFIGS[request.param])
    model = CausalLM(config)
    weights = random_weights(model, seed=len(request.param))
    folder = tmp_path_factory.mktemp(request.param)
    reference, unexpected = hf_models.through_convert(folder, config, weights)
    assert not unexpected
    batch = random_batch(config, seed=1)
    ours = Probe(model.set_train()).run(batch)
    return config, ours, hf_models.gradients(reference, batch)


def test_logits(case, record_property):
    _, (_, logits, _), (_, expected, _) = case
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    record_property("logits", float(error))
    assert error < LOGITS


def test_loss(case, record_property):
    _, ((lm, mtp, aux), _, _), (expected, _, _) = case
    error = abs(lm - expected) / expected
    record_property("loss", float(error))
    assert error < LOSS
    assert (mtp, aux) == (0, 0)


def test_gradients(case, record_property):
    config, (_, _, ours), (_, _, expected) = case
    found = hf_models.to_hf_names(config, ours)
    # The experts' share of the selection bias is the only tensor without a gradient.
    assert set(found) == {n for n, g in expected.items() if g.size}
    errors = {n: _distance(g, expected[n]) for n, g in found.items()}
    worst = max(errors, key=errors.__getitem__)
    record_property("gradient", float(errors[worst]))
    assert errors[worst] < GRADIENT, f"{worst}: relative L2 {errors[worst]:.1e}"


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(found - expected) / scale) if scale else float(np.abs(found).max())
