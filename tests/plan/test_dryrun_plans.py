"""The real graph of planned recipes: MindSpore compiles them, and every stage has the parameters that were planned.

pytest -m slow tests/plan/test_dryrun_plans.py        about half a minute a stage
"""

import json

import pytest

from telechat_moe.cli import main
from telechat_moe.tools.plan.exact import stage_elements
from telechat_moe.tools.plan.planner import question

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "offset": 0,
}
SETTINGS = [f"model.model_config.{name}={value}" for name, value in SMALL.items()] + [
    "train_dataset.data_loader.config.seq_length=256",
    "parallel_config.pipeline_stage=1",
    "parallel_config.model_parallel=1",
    "parallel_config.use_seq_parallel=False",
    "parallel_config.micro_batch_num=1",
    "parallel.pipeline_config.pipeline_scheduler=1f1b",
    "parallel.pipeline_config.pipeline_interleave=False",
]
PLANS = [
    "pp=1 tp=2 sp=false",
    "pp=1 tp=2 sp=true recompute=full",
    "pp=1 tp=4 etp=4",
    "pp=1 cp=2 ep=4",
    "pp=2 tp=2 vpp=1 sp=true",
    "pp=2 tp=1 vpp=2 recompute=none",
    "pp=2 tp=1 vpp=1 recompute=full",
    "pp=2 tp=2 vpp=2 recompute=norm+activation",
]


@pytest.mark.slow
@pytest.mark.mindspore
@pytest.mark.parametrize("fixed", PLANS)
def test_stages_have_the_planned_parameters(fixed: str, tmp_path) -> None:
    recipe = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
    asked = question(recipe, SETTINGS, 4, "ascend-910b", None, 16, [*fixed.split(), "zero=0"])
    plan = asked.answer(top=1)
    assert plan.optimal
    file, report = tmp_path / "plan.yaml", tmp_path / "report.json"
    file.write_text(asked.recipe_text(plan))
    assert main(["check", str(file), "--devices", "4"]) == 0
    assert main(["dryrun", str(file), "--stage", "all", "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    trained = [stage["memory"]["gradients"] // 4 for stage in found["stages"]]
    assert trained == stage_elements(asked.architecture, plan.best[0].layout)
