"""Parameter names: what `telechat_moe.interop.names` lists is what the model has."""

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

from tiny_models import tiny_config

from telechat_moe.interop.names import pairs
from telechat_moe.model import CausalLM, Logits
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.step import TrainStep

pytestmark = pytest.mark.mindspore

CONFIGS = {
    "mtp": {"num_nextn_predict_layers": 2, "mtp_loss_factor": 0.3, "first_k_dense_replace": 0},
    "tied": {"tie_word_embeddings": True, "q_lora_rank": None, "n_shared_experts": 0},
    "dense_with_mtp": {
        "num_nextn_predict_layers": 1,
        "mtp_loss_factor": 0.3,
        "first_k_dense_replace": 2,
    },
    "wide_shared_expert": {"moe_shared_expert_intermediate_size": 72, "n_shared_experts": 1},
    "capacity": {"moe_token_drop_policy": "probs", "moe_expert_capacity_factor": 1.5},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes(name):
    config = tiny_config(**CONFIGS[name])
    model = CausalLM(config)
    counters = ("expert_load", "dropped")
    shapes = {
        p.name: tuple(p.shape) for p in model.get_parameters() if not p.name.endswith(counters)
    }
    assert shapes == {p.name: p.shape for p in pairs(config)}
    assert {p.name for p in pairs(config) if p.is_bias} == {
        p.name for p in model.get_parameters() if not p.requires_grad
    } - {p.name for p in model.get_parameters() if p.name.endswith(counters)}


def test_cells_around_the_model_keep_its_names():
    model = CausalLM(tiny_config(**CONFIGS["capacity"]))
    before = [p.name for p in model.get_parameters()]
    optimizer = AdamW(model.trainable_params(), (0.9, 0.95), 1e-8, 0.1)
    TrainStep(model, optimizer, micro_batches=2, bias_rate=0.001)
    Logits(model)
    after = [p.name for p in model.get_parameters() if not p.name.endswith(".main_grad")]
    assert after == before
