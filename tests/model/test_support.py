"""Settings that the model would ignore are refused."""

import dataclasses

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from tiny_models import tiny_config

from telechat_moe.errors import BadInputError
from telechat_moe.model import CausalLM
from telechat_moe.model.support import check_supported

OTHER = {
    "apply_query_key_layer_scaling": True,
    "attention_bias": True,
    "attention_dropout": 0.5,
    "attention_softmax_in_fp32": False,
    "fp16_lm_cross_entropy": True,
    "hidden_dropout": 0.5,
    "moe_router_pre_softmax": True,
    "nope_layer_interval": 4,
    "window_size": 128,
    "rotary_percent": 0.5,
    "rotary_scaling_factor": 2.0,
    "rotary_seq_len_interpolation_factor": 2.0,
    "softmax_scale": 0.5,
    "position_embedding_type": "yarn",
    "topk_method": "greedy",
    "sandwich_norm": True,
    "param_init_std_rules": [{"target": "x", "init_method_std": 0.1}],
}


@pytest.mark.parametrize("key", sorted(OTHER))
def test_each_is_refused_by_name(key: str) -> None:
    config = dataclasses.replace(tiny_config(), **{key: OTHER[key]})
    with pytest.raises(BadInputError, match=rf"model_config\.{key}: found"):
        CausalLM(config)


def test_all_at_once() -> None:
    config = dataclasses.replace(
        tiny_config(),
        sandwich_norm=True,
        hidden_dropout=0.1,
    )
    with pytest.raises(BadInputError) as error:
        check_supported(config)
    lines = str(error.value).splitlines()
    assert [line.split(":")[0].split(".")[-1] for line in lines] == [
        "sandwich_norm",
        "hidden_dropout",
    ]
