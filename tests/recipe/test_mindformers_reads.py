"""What `check --for mindformers` says of all recipes that come with MindFormers is true and can be mended."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mindformers_recipes import graph_recipes, root

from telechat_moe.cli import main
from telechat_moe.recipe import Problem, RecipeError, load
from telechat_moe.recipe.reads import judge, table_of
from telechat_moe.versions import mindformers_version

pytestmark = [
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
OFFSET = [0, 1, 1, 1, 1, 1, 0, 0]
COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids"]
M = "model.model_config"
OLD = {"use_legacy": "written for MindFormers' old networks, which are not checked"}
GRAPH_KERNEL = {"context.enable_graph_kernel": "MindFormers warns that it did not take effect"}
COMPLAINTS: dict[str, dict[str, str]] = {
    "deepseek3/finetune_deepseek3_12b_16p_pp16.yaml": {f"{M}.scaling_factor": "not mapped"},
    "deepseek3/pretrain_deepseek3_12b_16p_pp16.yaml": {
        f"{M}.scaling_factor": "not mapped",
        f"{M}.moe_token_drop_policy": "never read",
    },
    "deepseek3/finetune_deepseek3_671b.yaml": {
        "train_dataset.input_columns": "PackingHandler makes five columns be split"
    },
    "deepseek3/predict_deepseek3_671b.yaml": {"context.affinity_cpu_list": "the text None"},
    "deepseek3/pretrain_deepseek3_671b.yaml": {
        "lr_schedule.lr_end": "not read by ConstantWarmUpLR",
        f"{M}.rotary_scaling_factor": "left out, so 40",
        f"{M}.use_fused_ops_topkrouter": "never read",
    },
    "general/run_general_task.yaml": OLD,
    "glm4/finetune_glm4_9b.yaml": OLD,
    "glm4/predict_glm4_9b_chat.yaml": OLD,
    "glm4/predict_glm4_9b_chat_800I_A2.yaml": OLD,
    "glm4/predict_glm4.yaml": GRAPH_KERNEL,
    "glm4_moe/predict_glm4_moe.yaml": {"use_parallel": "False with 8 devices", **GRAPH_KERNEL},
    "qwen2/predict_qwen2.yaml": GRAPH_KERNEL,
    "qwen3/predict_qwen3.yaml": GRAPH_KERNEL,
    "qwen3/pretrain_qwen3_32b_4k.yaml": {
        f"{M}.use_cache": "never read",
        f"{M}.untie_embeddings_and_output_weights": "never read",
    },
    "qwen3_moe/predict_qwen3_moe.yaml": GRAPH_KERNEL,
    "qwen3_moe/pretrain_qwen3_30b_a3b_4k.yaml": {
        f"{M}.moe_token_drop_policy": "never read",
        f"{M}.router_aux_loss_coef": "never read; moe_aux_loss_coeff is",
    },
    "telechat3/predict_telechat3_36b.yaml": GRAPH_KERNEL,
    "telechat3/pretrain_telechat3_36b.yaml": {
        "lr_schedule.lr_end": "not read by ConstantWarmUpLR",
        "train_dataset.construct_args_key": "drops loss_mask in silence",
        "parallel.dataset_strategy": "four entries for two columns",
        f"{M}.untie_embeddings_and_output_weights": "never read",
    },
    "telechat3_moe/pretrain_telechat3_105b_a4b_4k.yaml": {
        f"{M}.offset": "MindFormers refuses it, too",
        f"{M}.use_fused_ops_topkrouter": "never read",
        f"{M}.moe_z_loss_coeff": "never read",
    },
}
"""Why each complaint is true; recipes that are not here have none."""


RECIPES = graph_recipes()
VERSION = mindformers_version()


def test_all_recipes_are_here() -> None:
    assert len(RECIPES) == 24
    assert COMPLAINTS.keys() <= RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_complaints_are_those_and_end_when_mended(name: str, tmp_path: Path) -> None:
    data = yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))
    file, seen = tmp_path / "recipe.yaml", set[str]()
    for _ in range(4):  # keys are looked up when all values are right
        file.write_text(yaml.safe_dump(data), encoding="utf-8")
        try:
            load(file, use="mindformers")
            break
        except RecipeError as error:
            seen |= {problem.key for problem in error.problems}
            if "use_legacy" in seen:
                break
            for problem in error.problems:
                mend(data, problem)
    else:
        pytest.fail(f"not mended: {seen}")
    assert seen == set(COMPLAINTS.get(name, {}))


def mend(data: dict[str, Any], problem: Problem) -> None:
    """Do what a message says."""
    *above, last = problem.key.split(".")
    section: Any = data
    for part in above:
        section = section[part]
    if problem.found == "unknown key" or problem.expected == "remove it":
        del section[last]
    elif last == "offset":
        section[last] = json.loads(problem.expected.partition("such as ")[2])
        assert section[last] == OFFSET
    elif last == "construct_args_key":
        section[last] = COLUMNS
    elif last == "input_columns":
        section[last] = section["construct_args_key"] = [*COLUMNS, "attention_mask"]
        data["train_dataset_task"]["dataset_config"] = section
    elif last == "rotary_scaling_factor":
        section[last] = 1.0
    elif last == "affinity_cpu_list":
        section[last] = None
    elif last == "use_parallel":
        section[last] = True
    else:
        assert last == "dataset_strategy", str(problem)  # counted with construct_args_key


@functools.cache
def loaded_names() -> frozenset[str]:
    """Return what MindFormers loads from some object by name, where networks are built and trained (no text search)."""
    names: set[str] = set()
    folders = (
        "parallel_core/training_graph",
        "trainer",
        "core",
        "wrapper",
        "dataset",
        "checkpoint",
    )
    paths = [path for folder in folders for path in (root() / "mindformers" / folder).rglob("*.py")]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.Call):
                names |= {
                    a.value
                    for a in node.args
                    if isinstance(a, ast.Constant) and isinstance(a.value, str)
                }
    return frozenset(names)


def test_keys_that_are_never_read_are_nowhere_in_the_source() -> None:
    found: set[str] = set()
    for name in RECIPES:
        sections = yaml.safe_load(RECIPES[name].read_text(encoding="utf-8"))
        kind = ((sections.get("model") or {}).get("model_config") or {}).get("model_type")
        found |= {one.key for one in judge(sections, kind, VERSION) if one.verdict == "never"}
    assert f"{M}.use_fused_ops_topkrouter" in found
    # Loaded by that name in MoE networks where the converter calls it otherwise (`router_dense_type`), of `self`, or
    # of a data loader of dynamic mode (`use_cache` in 2.1).
    elsewhere = {"router_dense_type", "type", "config", "use_cache"}
    for key in found:
        assert key.rpartition(".")[2] not in loaded_names() - elsewhere, key


def test_a_key_under_another_condition_is_not_judged() -> None:
    given = {
        "run_mode": "train",
        "profile_memory": False,
        "exclude_cann_cpu": True,
        "x": 1,
        "seed": 1,
    }
    said = {one.key: one for one in judge(given, "qwen3", VERSION)}
    assert [said[key].verdict for key in given] == [
        *("read", "not judged", "never", "not judged", "read")
    ]
    assert re.search(r"mindformers/trainer/trainer.py", said["profile_memory"].place)
    predicted = {
        one.key: one.verdict for one in judge({**given, "run_mode": "predict"}, "qwen3", VERSION)
    }
    assert predicted["exclude_cann_cpu"] == "not judged"
    (other,) = judge({"model": {"model_config": {"hidden_size": 1}}}, "nothing_like_it", VERSION)
    assert other.verdict == "not judged"


def test_a_key_that_is_read_and_dropped(tmp_path: Path) -> None:
    """MindFormers' trainer puts `stop_step` into the section of a callback, of which it makes nothing."""
    trainer = ast.parse(
        (root() / "mindformers" / "trainer/base_trainer.py").read_text(encoding="utf-8")
    )
    made = [n for n in ast.walk(trainer) if isinstance(n, ast.Name) and n.id == "stop_step_dict"]
    filled = [n.value for n in ast.walk(trainer) if isinstance(n, ast.Subscript)]
    assert made
    assert all(isinstance(n.ctx, ast.Store) or n in filled for n in made)
    data = yaml.safe_load(RECIPES["general/llm_pretrain_dense_template.yaml"].read_text())
    data["runner_config"]["stop_step"] = 5
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(RecipeError, match=r"stop_step: 5, read by .* and then dropped") as error:
        load(file, use="mindformers")
    (problem,) = error.value.problems
    callback = yaml.safe_load(re.findall(r"{.*}", problem.expected)[0])
    data["runner_config"]["stop_step"] = 0
    data["callbacks"].append(callback)
    file.write_text(yaml.safe_dump(data))
    assert load(file, use="mindformers").callbacks[-1].stop_step == 5


def test_check_names_keys_that_it_does_not_judge(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES["general/llm_pretrain_moe_template.yaml"])
    assert main(["check", recipe, "--for", "mindformers"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"not judged: .*norm_topk_prob.*: model type None was not observed", printed)


@pytest.mark.slow(group="mindformers")
def test_the_table_is_what_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m benchmarks.dryrun_mindformers.reads` writes it, for the installed version."""
    from benchmarks.dryrun_mindformers import reads

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)  # MindFormers compiles with the python3 that is first in it
    assert reads.table(reads.observe(list(reads.RECIPES))) == table_of(VERSION)
