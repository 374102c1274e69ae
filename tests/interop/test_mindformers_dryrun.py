"""MindFormers' own models compile for Ascend ranks here, from its recipes."""

import importlib.util
import json
import re
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.interop.mindformers_dryrun import (
    _batch,
    compile_mindformers,
    devices_of,
    sections_of,
    subject_of,
)
from telechat_moe.recipe import load

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]

TELECHAT = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
OFFICIAL = "telechat3_moe/pretrain_telechat3_105b_a4b_4k.yaml"
DEEPSEEK = "deepseek3/pretrain_deepseek3_671b.yaml"
QWEN3_MOE = "qwen3_moe/pretrain_qwen3_30b_a3b_4k.yaml"
MODEL = "model.model_config"
SMALL = [
    f"{MODEL}.{item}"
    for item in (
        "num_hidden_layers=2",
        "first_k_dense_replace=1",
        "offset=0",
        "pp_interleave_num=1",
        "hidden_size=64",
        "intermediate_size=128",
        "moe_intermediate_size=32",
        "n_routed_experts=16",
        "num_attention_heads=4",
        "num_key_value_heads=4",
        "vocab_size=256",
    )
]


DEEPSEEK_FOLDER = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    **{"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "vocab_size": 256},
    **{"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "n_routed_experts": 16, "n_group": 4, "topk_group": 2},
    **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
    **{"v_head_dim": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "rope_theta": 10000},
}
COLUMNS = "[input_ids,labels,loss_mask,position_ids,attention_mask]"
GPT = "{type: BlendedMegatronDatasetDataLoader, sizes: [9,0,0], config: {seq_length: 4096}}"
SEQUENCE = "parallel_config.use_seq_parallel=True"
MTP_FACTOR = (f"{MODEL}.mtp_loss_factor", "0.3")
# Recipes of MindFormers that it refuses in words without a key: (overrides, (key named, value that mends) ...).
NAMED = {
    "deepseek3/finetune_deepseek3_671b.yaml": (
        [f"{MODEL}.offset=0", f"{MODEL}.pp_interleave_num=1"],
        ("train_dataset.input_columns", COLUMNS),
    ),
    "general/llm_finetune_moe_template.yaml": ([], MTP_FACTOR),
    "general/llm_pretrain_moe_template.yaml": ([], MTP_FACTOR),
    "general/run_general_task.yaml": (
        ["use_legacy=False", f"{MODEL}.moe_grouped_gemm=True", SEQUENCE],
        ("use_parallel", "True"),
        ("parallel.parallel_mode", "1"),
        ("train_dataset.data_loader", GPT),
        MTP_FACTOR,
    ),
}


def layout(dp, tp, pp, ep, micro=1):
    keys = ("data_parallel", "model_parallel", "pipeline_stage", "expert_parallel")
    degrees = dict(zip(keys, (dp, tp, pp, ep), strict=True), micro_batch_num=micro)
    return [f"parallel_config.{key}={value}" for key, value in degrees.items()]


def operators(graph):
    from telechat_moe.graph.mindir import MindIR

    return list(MindIR(graph.mindir).operations())


@pytest.mark.slow
def test_telechat3_on_four_devices():
    shared = f"{MODEL}.moe_shared_expert_intermediate_size=32"
    (graph,) = compile_mindformers(TELECHAT, [3], overrides=[*SMALL, *layout(2, 2, 1, 2), shared])
    assert (graph.rank, graph.devices) == (3, 4)
    assert graph.groups["hccl_world_group"] == [0, 1, 2, 3]
    assert [1, 3] in graph.groups.values()  # data parallel
    assert [2, 3] in graph.groups.values()  # tensor parallel
    calls = operators(graph)
    kinds = Counter(op.kind for op in calls)
    assert kinds["FlashAttentionScore"] == 2 * 3  # two layers and MTP, and once more recomputed
    assert kinds["FlashAttentionScoreGrad"] == 3
    assert kinds["AllFinite"] == 1  # overflow as on the Ascend 910B
    assert kinds["AlltoAllV"] > 0
    gathers = Counter(
        tuple(graph.groups[op.attribute("group")]) for op in calls if op.kind == "AllGather"
    )
    assert gathers[2, 3] > 0  # sequence parallel
    assert gathers[1, 3] > 0  # weights from the sharded optimizer
    entry = graph.layouts["decoder.layers.1.mlp.experts.weight1"]
    assert (entry.device_matrix, entry.tensor_map) == ([2, 2], [0, -1])
    assert entry.shard_view == [16 * 64 // 2, 64]  # halved over dp x tp's inner axis
    assert graph.groups[entry.shard_group] == [1, 3]


@pytest.mark.slow
def test_deepseek_v3_pipeline():
    """Two stages, four micro-batches: the stages' context is the recipe's, not ours."""
    sharded = "parallel.parallel_optimizer_config.optimizer_weight_shard_size=-1"
    overrides = [*SMALL, *layout(1, 2, 2, 2, micro=4), sharded]
    (graph,) = compile_mindformers(DEEPSEEK, [0], overrides=overrides)
    sent = [op for op in operators(graph) if op.kind == "Send"]
    activations = [op for op in sent if op.attribute("shape") == (4096 // 2, 1, 64)]
    assert [op.attribute("sr_tag") for op in activations] == [0, 1, 2, 3]  # the micro-batches
    assert {op.attribute("dst_global_rank") for op in sent} == {2}
    assert [0, 2] in graph.groups.values()


@pytest.mark.slow
def test_official_recipe_is_refused_in_mindformers_words():
    with pytest.raises(
        BadInputError, match=r"sum of `offset` \(0\) should equal to remainder"
    ) as e:
        compile_mindformers(OFFICIAL, [0])
    assert "rank 0 of 256" in str(e.value)


@pytest.mark.slow
def test_refused_layouts():
    with pytest.raises(
        BadInputError, match=r"num_attention_heads \(32\) must be a multiple of .* \(3\)"
    ):
        compile_mindformers(TELECHAT, [0], overrides=layout(1, 3, 1, 1))
    with pytest.raises(
        BadInputError, match="optimizer_weight_shard_size 256 should not exceed the device"
    ):
        compile_mindformers(DEEPSEEK, [0], overrides=[*SMALL, *layout(2, 2, 1, 2)])


@pytest.mark.slow
def test_recipe_without_a_length_in_the_model_section():
    """MindFormers' Qwen3-MoE recipe, which names ``seq_length`` in its data section only."""
    overrides = [*SMALL[:2], *(o for o in SMALL if "n_routed" not in o), *layout(1, 2, 1, 2)]
    small = [*overrides, f"{MODEL}.num_experts=16", f"{MODEL}.head_dim=16"]
    (graph,) = compile_mindformers(QWEN3_MOE, [0], overrides=small)
    assert Counter(op.kind for op in operators(graph))["FlashAttentionScoreGrad"] == 2


def test_a_batch_for_the_compiler_takes_no_memory():
    before = psutil.Process().memory_info().rss
    loader = SimpleNamespace(config=None, compressed_eod_mask_length=None)
    data = SimpleNamespace(data_loader=loader, input_columns=["input_ids", "attention_mask"])
    config = SimpleNamespace(train_dataset=data, runner_config=SimpleNamespace(batch_size=64))
    ids, mask = _batch(config, 4096)
    assert (ids.shape, mask.shape) == ((64, 4096), (64, 1, 4096, 4096))  # 4 GiB of int32
    assert psutil.Process().memory_info().rss - before < 2**30  # `import mindspore` is in it


def test_no_such_rank():
    with pytest.raises(BadInputError, match="no rank 256: its layout has 256 devices"):
        compile_mindformers(TELECHAT, [0, 256])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("use_parallel=False", "use_parallel is False"),
        ("parallel.parallel_mode=0", "parallel_mode 0"),
        ("parallel_config.data_parallel=a", "data_parallel is a, expected an integer"),
        ("parallel=3", "parallel is 3, expected a section"),
        ("run_mode=predict", "run_mode is predict, and a training step is compiled"),
    ],
)
def test_recipes_without_ranks(override, message):
    name, given = sections_of(TELECHAT, [override])
    with pytest.raises(BadInputError, match=message):
        devices_of(name, given)


def test_what_a_report_needs_of_the_model_section():
    """The data section has a sample's length, too; a Hugging Face folder may have the dimensions."""
    subject = subject_of(*sections_of(QWEN3_MOE))
    assert subject.expected == (4096 // 4 * 8 * 2048, 4096 // 4 * 8)
    dense = subject_of(*sections_of("qwen3/pretrain_qwen3_32b_4k.yaml"))
    assert dense.expected == (0, 0)
    with pytest.raises(BadInputError, match=r"hidden_size is not written, expected an integer"):
        subject_of(*sections_of(QWEN3_MOE, [f"{MODEL}.hidden_size=null"]))
    with pytest.raises(BadInputError, match=r"says how long a sample is; write one"):
        subject_of(*sections_of(QWEN3_MOE, ["train_dataset.data_loader.config.seq_length=null"]))


def test_hugging_face_folder(tmp_path):
    name, here = "general/llm_pretrain_moe_template.yaml", f"pretrained_model_dir={tmp_path}"
    with pytest.raises(BadInputError, match=r"no config.json can be read"):
        subject_of(*sections_of(name, [here]))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "hidden_size": 64}')
    said = subject_of(*sections_of(name, [here, f"{MODEL}.num_experts_per_tok=2"])).expected
    assert said.elements == said.rows * 64


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_FOLDER))
    return f"pretrained_model_dir={tmp_path}"


@pytest.mark.parametrize("name", NAMED)
def test_messages_name_the_key_that_mends(name, folder):
    overrides, *steps = NAMED[name]
    overrides = [*overrides, folder]
    for key, value in steps:
        with pytest.raises(BadInputError, match=re.escape(key)):
            compile_mindformers(name, [0], overrides=overrides)
        overrides.append(f"{key}={value}")


def test_a_form_without_a_model():
    with pytest.raises(BadInputError, match=r"names no model: neither .*model_type nor"):
        compile_mindformers("general/run_general_task.yaml", [0])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_what_messages_say_mends(name, folder):
    overrides, *steps = NAMED[name]
    overrides = [*overrides, folder, *layout(1, 2, 2, 2, micro=2)]
    overrides += ["parallel.parallel_optimizer_config.optimizer_weight_shard_size=-1"]
    overrides += [f"{key}={value}" for key, value in steps]
    columns = [value for key, value in steps if key == "train_dataset.input_columns"]
    overrides += [f"train_dataset.construct_args_key={value}" for value in columns]
    (graph,) = compile_mindformers(name, [2], overrides=overrides)
    # Of four layers the second stage has two, and MTP's.
    assert Counter(op.kind for op in operators(graph))["FlashAttentionScoreGrad"] == 3


def test_loaded_recipe_keeps_its_overrides():
    recipe = load(TELECHAT, ["parallel_config.micro_batch_num=16"])
    _, given = sections_of(recipe, ["parallel_config.pipeline_stage=1"])
    assert given["parallel_config"]["micro_batch_num"] == 16
    assert devices_of("", given) == 32
