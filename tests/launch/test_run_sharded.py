"""`telechat-moe run-sharded`: the graphs of all ranks beside one process."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini
from mini_recipe import DP2_EP2, PP2

from telechat_moe.cli import main
from telechat_moe.graph.mindir import kinds
from telechat_moe.launch import sharded_run
from telechat_moe.recipe import load
from telechat_moe.sharding.recipe import mesh_of

STEPS = 4
LENGTH = (
    "model__model_config__seq_length",
    "train_dataset__data_loader__config__seq_length",
    "model__model_config__max_position_embeddings",
)


def arguments(data: Path, output: Path, processes: int, **changes: object) -> list[str]:
    verb, recipe, _, *sets = mini.arguments(data, output, **changes)
    assert verb == "train"
    return ["run-sharded", recipe, *sets, "--processes", str(processes)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def report(folder: Path, data: Path) -> dict[str, Any]:
    given = arguments(data, folder / "run", 2, **DP2_EP2)
    more = ["--steps", str(STEPS), "--compare", "--keep", str(folder / "kept")]
    assert main([*given, *more, "--json", str(folder / "report.json")]) == 0
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow
def test_the_ranks_compute_what_one_process_does(report: dict[str, Any]) -> None:
    assert [s["step"] for s in report["steps"]] == [1, 2, 3, 4]
    assert report["layout"] == "dp2 ep2"
    assert report["steps"][-1]["loss"] < report["steps"][0]["loss"]
    worst = max(max(errors.values()) for errors in report["relative_errors"])
    assert 0 < worst < 1e-5
    assert all(s["aux_loss"] > 0 for s in report["single"])


@pytest.mark.slow
def test_the_report_says_what_differs_from_ascend(report: dict[str, Any]) -> None:
    found = report["differences"]
    swapped = {row["ascend"]: row for row in found["operators"]}
    for kernel in ("FlashAttentionScore", "GroupedMatmul", "RmsNorm", "Swiglu"):
        assert swapped[kernel]["count"] > 0, kernel
        assert swapped[kernel]["cpu"] != "other primitives", kernel
    rewritten = {row["ascend"]: row for row in found["collectives"]}
    assert rewritten["AlltoAll"]["count"] > 0
    assert "AllReduce" in rewritten["AlltoAll"]["cpu"]
    assert found["unchanged_collectives"]["AllReduce"] > 0
    assert "none is dropped" in found["dispatch"]


@pytest.mark.slow
def test_the_kept_graphs_are_those_that_ran(report: dict[str, Any], folder: Path) -> None:
    assert [Path(p).name for p in report["kept"]] == ["rank_0.mindir", "rank_1.mindir"]
    for path in map(Path, report["kept"]):
        assert path.read_bytes() == (folder / "run" / ".job" / path.name).read_bytes()
        found = kinds(path.read_bytes())
        assert found["AllReduce"] > 0
        assert not {"AllGather", "AlltoAll", "ReduceScatter"} & set(found)


@pytest.mark.slow
def test_nothing_is_left_but_graphs_and_logs(report: dict[str, Any], folder: Path) -> None:
    assert {p.name for p in (folder / "run").iterdir()} <= {".job", "log", ".pieces"}


DIFFERENCES = {
    "counted": "on rank 0",
    "operators": [{"ascend": "FlashAttentionScore", "count": 4, "cpu": "ours"}],
    "collectives": [],
    "unchanged_collectives": {"AllReduce": 3},
    "order": "as compiled",
    "dispatch": "none is dropped",
}


@pytest.mark.parametrize(
    ("key", "factor", "code"),
    [
        ("loss", 1.0, 0),
        ("loss", 1 + 9e-6, 0),
        ("loss", 1 + 5e-5, 1),
        ("grad_norm", 1 - 5e-5, 1),
        ("aux_loss", 1 + 5e-5, 1),
        ("loss", float("nan"), 1),
    ],
)
def test_losses_that_differ_fail(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: Path,
    tmp_path: Path,
    key: str,
    factor: float,
    code: int,
) -> None:
    """What compiles and what trains stand still; the comparison and the verb are real."""
    numbers = {name: 4.0 - 0.1 * place for place, name in enumerate(sharded_run.MEASURED)}
    single = [{"step": step, **numbers} for step in (1, 2, 3)]
    ranks = [dict(row) for row in single]
    ranks[1][key] *= factor
    monkeypatch.setattr(sharded_run, "write_job", lambda recipe, folder, orders: folder)
    monkeypatch.setattr(sharded_run, "run_ranks", lambda *args: ranks)
    monkeypatch.setattr(sharded_run, "single_process", lambda recipe, steps: single)
    monkeypatch.setattr(sharded_run, "differences", lambda recipe, folder: DIFFERENCES)
    more = ["--steps", "3", "--compare"]
    assert main([*arguments(data, tmp_path / "run", 2, **DP2_EP2), *more]) == code
    printed = capsys.readouterr()
    expected = "inf" if factor != factor else f"{abs(factor - 1):.1e}"
    assert (f"differs from one process by {expected}" in printed.err) == bool(code), printed.err
    assert "FlashAttentionScore" in printed.out
    assert f"{single[0]['loss']:.7f}" in printed.out


def test_the_number_of_processes_is_the_recipes(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(data, tmp_path / "run", 4, **DP2_EP2)) == 2
    printed = capsys.readouterr().err
    assert "--processes 4" in printed
    assert "2 device(s)" in printed
    assert "data 2 x tensor 1" in printed
    assert main(arguments(data, tmp_path / "run", 1)) == 2
    assert "set a layout" in capsys.readouterr().err


def test_what_cannot_run_is_refused_before_anything_is_compiled(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(code: int, *flags: str, **changes: object) -> str:
        given = arguments(data, tmp_path / "run", 2, **{**DP2_EP2, **changes})
        assert main([*given, *flags]) == code
        return capsys.readouterr().err

    nowhere = f"['1', '{tmp_path}/nothing']"
    said = refused(3, train_dataset__data_loader__config__data_path=nowhere)
    assert f"{tmp_path}/nothing" in said
    assert "telechat-moe data build --recipe" in said
    assert "device_target: Ascend" in refused(3, context__device_target="Ascend")
    assert "has 12 steps" in refused(2, "--steps", "13")
    assert "exists" in refused(2, "--keep", str(tmp_path))
    assert not (tmp_path / "run").exists()


def test_one_process_has_the_same_batches(data: Path, tmp_path: Path) -> None:
    for changes, micro in ((DP2_EP2, 1), (PP2, 2)):
        _, name, _, *sets = mini.arguments(data, tmp_path, **changes)
        recipe = load(name, sets[1::2])
        single = sharded_run.one_process(recipe)
        assert single.devices == 1
        assert mesh_of(single).describe() == "one device"
        assert (single.global_batch, single.train_steps) == (4, recipe.train_steps)
        assert single.runner_config.gradient_accumulation_steps == micro


@pytest.mark.slow
def test_two_stages_compute_what_one_process_does(data: Path, tmp_path: Path) -> None:
    given = arguments(data, tmp_path / "run", 2, **PP2)
    assert main([*given, "--steps", "8", "--compare"]) == 0


@pytest.mark.slow
def test_accumulation_without_stages_computes_what_one_process_does(
    data: Path, tmp_path: Path
) -> None:
    changes: dict[str, object] = {**DP2_EP2, "runner_config__gradient_accumulation_steps": 2}
    changes["callbacks__1__gradient_accumulation_steps"] = 2
    changes |= {"runner_config__batch_size": 1, "model__model_config__batch_size": 1}
    given = arguments(data, tmp_path / "run", 2, **changes)
    assert main([*given, "--steps", "4", "--compare"]) == 0


@pytest.mark.slow
def test_swapped_activations_are_told_and_may_be_too_many(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One process, which swaps nothing, computes the same; the pool has no name, and its size is judged before a step."""
    pool = tmp_path / "pool"
    changes: dict[str, object] = {
        **DP2_EP2,
        "runner_config__gradient_accumulation_steps": 2,
        "callbacks__1__gradient_accumulation_steps": 2,
        "runner_config__batch_size": 1,
        "model__model_config__batch_size": 1,
        **dict.fromkeys(LENGTH, 128),
        "model__model_config__hidden_size": 256,
        "swap_config__swap": True,
        "swap_config__layer_swap": "[{layers: True, backward_prefetch: 5}]",
        "telechat_moe__swap__pool_folder": str(pool),
        "telechat_moe__swap__pool_mib": 64,
    }
    given = arguments(data, tmp_path / "run", 2, **changes)
    assert main([*given, "--steps", "2", "--compare"]) == 3
    assert "pool, which is no folder that can be written" in capfd.readouterr().err
    pool.mkdir()
    assert main([*given, "--steps", "2", "--compare"]) == 0
    said = re.search(
        r"rank 0: (\d+) activations of (\S+) (.)iB go out of its memory .* (\S+) (.)iB at once; \S+ .iB are in it",
        capfd.readouterr().err,
    )
    assert said is not None
    assert not list(pool.iterdir())
    scale = {"K": 1 / 1024, "M": 1.0}
    most = float(said[4]) * scale[said[5]]
    assert float(said[2]) * scale[said[3]] >= most > 1
    given = arguments(data, tmp_path / "run", 2, **changes | {"telechat_moe__swap__pool_mib": 1})
    assert main([*given, "--steps", "2"]) == 3
    found = capfd.readouterr().err
    assert "compiled before" in found
    assert re.search(r"pool_mib: 1, and rank 0 swaps .* at once; .*\d+ at least", found), found


@pytest.mark.slow
def test_routed_rows_travel_alone(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dropless exchange as on Ascend: no padded buffers, and one process computes the same."""
    routed = {**DP2_EP2, "telechat_moe__sharding__dispatcher": "alltoallv"}
    given = arguments(data, tmp_path / "run", 2, **routed)
    more = ["--steps", "2", "--compare", "--json", str(tmp_path / "report.json")]
    assert main([*given, *more]) == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "report.json").read_text())["differences"]
    rewritten = {row["ascend"]: row["count"] for row in report["collectives"]}
    assert rewritten["AlltoAllV"] > 0
    assert "AlltoAll" not in rewritten
    assert "native library" in {r["ascend"]: r["cpu"] for r in report["operators"]}["GroupedMatmul"]
    assert "the rows that the routing says" in report["dispatch"]


@pytest.mark.parametrize(
    ("form", "capacity", "message"),
    [
        ("auto", False, "none is dropped."),
        ("auto", True, "buffers of the same size for every expert and a static all-to-all"),
        ("alltoall", False, "buffers of the same size for every expert and a static all-to-all"),
        ("allgather", True, "gathered by every device, on Ascend too. What does not fit"),
    ],
)
def test_a_report_says_how_rows_travel_and_whether_any_are_dropped(
    form: str, capacity: bool, message: str
) -> None:
    model = "model__model_config__moe_"
    drops = {f"{model}expert_capacity_factor": 1.5, f"{model}token_drop_policy": "probs"}
    given = {"telechat_moe__sharding__dispatcher": form} | (drops if capacity else {})
    values = {k.replace("__", "."): v for k, v in {**DP2_EP2, **given}.items()}
    recipe = load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in values.items()])
    text = sharded_run.dispatch_text(recipe)
    assert message in text
    assert text.endswith("capacity is dropped, on Ascend too.") == capacity
