"""The planner reads a recipe of mode 1: FSDP's sharding is a level of its cost model, and what it cannot price it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from dynamic_recipe import TEXT
from yaml_edit import recipe_text

from telechat_moe.cli import main
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.report import memory

LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
STAGES = [
    "parallelism.pipeline_parallel=2",
    "parallelism.data_parallel_shard=2",
    "parallelism.expert_parallel=2",
]
LEVELS = {
    # policy, changes: level of sharding (2: gradients and states, 3: parameters too), as fsdp.py resolves the policy
    ("never", ()): 2,
    ("always", ()): 3,
    ("default", ()): 3,
    ("default", tuple(STAGES)): 2,
    ("always", tuple(STAGES)): 3,
    ("never", ("parallelism.data_parallel_shard=1", "parallelism.expert_parallel=2")): 0,
}
LACKS = {
    "model.params_dtype=bfloat16": "beside which mode 1 keeps weights and gradients in float32",
    "optimizer={type: Muon}": "Muon, of which the planner's cost model has no term",
    "lora_config={target_modules: '.*'}": "adapters, of which the planner's cost model has no term",
    "parallelism.cpu_offload=True": "True, of which the planner's cost model has no term",
    "parallelism.dense_fsdp_shard_size=2": "2, of which the planner's cost model has no term",
    "recompute={mode: select, select_module: {self_attention: ['0-3']}}": "parts of layers, of which",
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(TEXT, "utf-8")
    return str(file)


@pytest.mark.parametrize(("policy", "changes"), LEVELS)
def test_policies_are_levels(policy: str, changes: tuple[str, ...], path: str) -> None:
    overrides = [f"parallelism.reshard_after_forward_policy={policy}", *changes]
    layout = Layout.from_recipe(load(path, overrides, use="plan"))
    assert layout.zero == LEVELS[policy, changes]
    assert (layout.tp, layout.micro_batch) == (2, 1)
    assert layout.micro_batches * layout.dp * layout.micro_batch == 16


def test_the_forecast_is_that_of_mode_0_with_the_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dest, device = str(tmp_path / "there.yaml"), load_device("ascend-910b")
    assert main(["cp", LARGE, dest, "--to", "mindformers-2"]) == 0
    graph = tmp_path / "graph.yaml"
    text, line = recipe_text(LARGE), "    gradient_accumulation_shard: False\n"
    text = text.replace(line, line + "    optimizer_level: level2\n")
    graph.write_text(
        text.replace("fp32_residual_connection: True", "fp32_residual_connection: False"), "utf-8"
    )
    dynamic, static = (memory.answer(name, [], device) for name in (dest, str(graph)))
    assert dynamic.step.peak_bytes.tolist() == static.step.peak_bytes.tolist()
    assert dynamic.step.step_s == static.step.step_s
    assert [change.overrides for change in dynamic.changes] == [
        change.overrides for change in static.changes
    ]
    assert len(dynamic.changes) > 3
    changed = memory.answer(
        dest, dynamic.changes[0].overrides, device
    )  # settings of mode 0 on top of mode 1
    assert changed.step.step_s == dynamic.changes[0].step.step_s
    assert main(["plan", "simulate", dest, "--device", "ascend-910b"]) == 0
    assert "dp4 tp8 pp8 ep4 sp mbs1 m8 zero2 full on 256 x ascend-910b" in capsys.readouterr().out


def test_a_layout_is_not_searched_for_a_recipe_that_is_not_written(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telechat_moe.tools.plan.search.planner.find", None)  # it is not called
    dest = tmp_path / "dest.yaml"
    assert main(["plan", "layout", path, "--devices", "8", "--out", str(dest)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "a recipe of mode 1; --out writes recipes of mode 0: `telechat-moe cp" in line
    assert not dest.exists()


@pytest.mark.parametrize("change", LACKS)
def test_what_the_cost_model_lacks_is_a_line(
    change: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "memory", path, "--device", "ascend-910b", "--set", change]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert LACKS[change] in lines[0]
    assert len(lines) == 2


def test_a_problem_is_that_of_the_recipe(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "parallelism.data_parallel_shard=-1"]
    assert main(["plan", "memory", path, "--device", "ascend-910b", *changes]) == 3
    assert "does not say on how many devices" in capsys.readouterr().err
    assert (
        main(["plan", "memory", path, "--device", "ascend-910b", "--set", "training.step=3"]) == 3
    )
    assert "training.step: unknown key" in capsys.readouterr().err
