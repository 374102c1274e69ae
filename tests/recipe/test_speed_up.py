"""The file of `parallel_speed_up_json_path` is checked with its line, and refused where it does nothing."""

from pathlib import Path
from typing import Any

import pytest

from telechat_moe.recipe import RecipeError, load, shipped_names
from telechat_moe.recipe.speed_up import KEY, overlapped, path_of, switches
from telechat_moe.recipe.uses import Use

LARGE = "pangu_ultra_moe/pretrain_718b.yaml"
SCHEDULER = "parallel.pipeline_config.pipeline_scheduler"
V_SHAPE = [f"{SCHEDULER}=zero_bubble_v"]
SPREAD = [
    "use_parallel=True",
    "parallel.parallel_mode=1",
    "parallel.full_batch=True",
    "parallel_config.data_parallel=2",
]


def said(tmp_path: Path, text: str, *overrides: str, use: Use = "dryrun") -> list[str]:
    """Return what is said of a file, one text a problem."""
    (tmp_path / "switches.json").write_text(text)
    with pytest.raises(RecipeError) as error:
        load(LARGE, [f"{KEY}={tmp_path}/switches.json", *V_SHAPE, *overrides], use=use)
    assert {p.key for p in error.value.problems} == {KEY}
    return [f"{p.found}; {p.expected}" for p in error.value.problems]


@pytest.mark.parametrize("use", ["dryrun", "written"])
def test_each_problem_names_its_line_and_a_remedy(tmp_path: Path, use: Use) -> None:
    text = """{
  "pp_1f1b_ovrlap": "AlltoAllV",
  "recompute_comm_overlap": "AlltoAl",
  "recomputation_communication_overlap": true,
  "dataset_broadcast_opt_level": true,
  "computation_communication_fusion_level": 4,
  "interleaved_matmul_comm": 1
}"""
    found = said(tmp_path, text, use=use)
    assert [line.split(": ")[0] for line in found] == [f"switches.json:{n}" for n in range(2, 8)]
    assert "'pp_1f1b_overlap'" in found[0]
    assert "'AlltoAll'" in found[1]
    assert "recompute_comm_overlap" in found[2]
    assert "0 to 3" in found[3]
    assert "0 to 3" in found[4]
    assert "true or false" in found[5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{\n'a': 1}", "switches.json:2: not JSON"),
        ("[1]", "not an object"),
        ("{}", "no switch, so it has no effect"),
    ],
)
def test_a_file_that_is_no_object_with_switches(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in said(tmp_path, text)[0]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load(LARGE, [f"{KEY}={tmp_path}/none.json"], use="dryrun")


def test_overlap_needs_a_scheduler_that_pairs_passes(tmp_path: Path) -> None:
    scheduler = "parallel.pipeline_config.pipeline_scheduler=gpipe"
    assert "zero_bubble_v" in said(tmp_path, '{"pp_1f1b_overlap": "AlltoAllV"}', scheduler)[0]


def test_old_names_are_read_and_the_file_beside_the_recipe_is_found(tmp_path: Path) -> None:
    recipe = load(LARGE, [f"{KEY}=overlap.json", *V_SHAPE], use="dryrun")
    path = path_of(recipe)
    assert path is not None
    assert path.parent == recipe.source.parent.resolve()
    assert overlapped(recipe) == ("AlltoAllV",)
    (tmp_path / "old.json").write_text('{"enable_task_opt": true}')
    old = load(LARGE, [f"{KEY}={tmp_path}/old.json"], use="dryrun")
    assert switches(old) == {"enable_communication_fusion": True}


@pytest.mark.parametrize("name", [name for name in shipped_names() if "_overlap" in name])
def test_a_recipe_with_overlap_differs_from_its_base_in_the_pipeline_alone(name: str) -> None:
    """MindFormers reads one whole file, so the recipe repeats its base; this holds the two together."""
    base = load(name.replace("_overlap", ""))
    recipe = load(name, use="dryrun")
    assert overlapped(recipe) == ("AlltoAllV",)
    ours, theirs = flat(recipe.given), flat(base.given)
    differ = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    interleaved = base.parallel.pipeline_config is not None
    expected = {KEY, SCHEDULER, "model.model_config.offset"}
    if not interleaved:
        expected |= {
            "parallel.pipeline_config.pipeline_interleave",
            "model.model_config.pp_interleave_num",
        }
    if base.parallel_config.micro_batch_num < 2 * base.parallel_config.pipeline_stage:
        expected |= {"parallel_config.micro_batch_num", "callbacks.1.micro_batch_num"}
    assert differ == expected


def test_three_recipes_have_overlap() -> None:
    assert len([name for name in shipped_names() if "_overlap" in name]) == 3


def flat(sections: Any, path: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted key; offsets stay whole."""
    if isinstance(sections, dict):
        items = sections.items()
    elif isinstance(sections, list) and any(isinstance(item, dict) for item in sections):
        items = enumerate(sections)
    else:
        return {path.lstrip("."): sections}
    found: dict[str, Any] = {}
    for key, value in items:
        found |= flat(value, f"{path}.{key}")
    return found


@pytest.mark.parametrize(("use", "extra"), [("train", SPREAD), ("dryrun", [])])
def test_it_is_refused_where_it_does_nothing(tmp_path: Path, use: Use, extra: list[str]) -> None:
    """On CPU processes nothing reads the switches, and one device has no communication."""
    (tmp_path / "s.json").write_text('{"enable_communication_fusion": true}')
    with pytest.raises(RecipeError, match=r"without effect on (CPU processes|one device)"):
        load("telechat3_moe/pretrain_tiny.yaml", [f"{KEY}={tmp_path}/s.json", *extra], use=use)
