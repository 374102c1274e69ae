"""What `dryrun --run` says of a run before it starts, held against what the run does."""

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import mini_recipe as mini
import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from test_growing_runs import SETTINGS

from telechat_moe.cli import main
from telechat_moe.recipe import Recipe, load
from telechat_moe.recipe.weights import weights
from telechat_moe.train.run_graphs import save_of

GROWING = {**SETTINGS, **mini.DP2_EP2}


def words(data: Path, output: Path, **changes: object) -> list[str]:
    return mini.arguments(data, output, **changes)


def recipe(data: Path, output: Path, **changes: object) -> Recipe:
    arguments = words(data, output, **changes)
    return load(arguments[1], [b for a, b in pairwise(arguments) if a == "--set"])


def of_run(data: Path, folder: Path, **changes: object) -> dict[str, Any]:
    """Return what `dryrun --run --json` writes of a recipe."""
    arguments = words(data, folder / "run", **changes)[1:]
    arguments.remove("--plain")
    file = folder / "run.json"
    assert main(["dryrun", *arguments, "--run", "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_evaluation_and_moves_of_experts_are_compiled(data: Path, tmp_path: Path) -> None:
    """One all-to-all for each shape of a tensor, which holds the rows once more beside it."""
    changes = {
        **mini.DP2_EP2,
        "telechat_moe__moe__placement": "{every: 2}",
        "telechat_moe__evaluation__interval": 4,
        "telechat_moe__ema__decay": 0.9,
    }
    step, evaluation, averages, *moves = of_run(data, tmp_path, **changes)["graphs"]
    assert step["graph"] == "step of 1 micro-batch"
    assert evaluation["graph"] == "evaluation"
    # Only the forward pass: fewer operators, and none of its activations waits for a backward pass.
    assert evaluation["operators"] < step["operators"] / 2
    logits = 2 * 16 * 64 * 4
    assert logits <= evaluation["memory"]["activations"] < step["memory"]["total"]
    assert averages["graph"] == "averages of weights"
    shards = step["memory"]["parameters"]
    largest = max(4 * int(np.prod(w.shape)) for w in weights(recipe(data, tmp_path).model_config))
    assert averages["memory"]["activations"] < 6 * largest
    assert step["memory"]["other"] > shards
    assert {row["graph"] for row in moves} == {
        "moves of experts, [4, 32, 16] each",
        "moves of experts, [4, 16, 32] each",
    }
    for row in moves:
        assert row["collectives"] == 1
        assert row["memory"]["activations"] >= 4 * 32 * 16 * 4


def test_every_step_of_a_growing_batch_is_compiled(data: Path, tmp_path: Path) -> None:
    """Two batch sizes are two graphs; averages are updated by a third."""
    result = of_run(data, tmp_path, **GROWING)
    names = [row["graph"] for row in result["graphs"]]
    assert names == ["step of 2 micro-batches", "step of 1 micro-batch", "averages of weights"]
    assert {row["stage"] for row in result["graphs"]} == {0}
    model = recipe(data, tmp_path / "run", **GROWING).model_config
    split = [w for w in weights(model) if ".experts." in w.name]
    parameters = sum(np.prod(w.shape) for w in weights(model) if w.name.endswith(("weight", "gate", "up", "down")))  # fmt: skip
    local = 4 * (parameters - sum(np.prod(w.shape) for w in split) // 2)
    memory = result["graphs"][0]["memory"]
    assert memory["parameters"] >= local
    assert memory["parameters"] - local < 200  # biases of experts
    assert memory["other"] >= memory["parameters"]  # averages
    [moment] = result["largest_moment"]
    assert moment["total"] >= max(row["memory"]["total"] for row in result["graphs"])


def test_a_rank_has_the_graphs_of_its_stage(data: Path, tmp_path: Path) -> None:
    changes = {**mini.PP2, "telechat_moe__evaluation__interval": 0}
    output = tmp_path / "run"
    arguments = words(data, output, **changes)[1:]
    arguments.remove("--plain")
    file = tmp_path / "run.json"
    assert main(["dryrun", *arguments, "--run", "--rank", "1", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [(row["stage"], row["rank"]) for row in result["graphs"]] == [(1, 1)]
    [moment] = result["largest_moment"]
    assert moment["stage"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", [mini.DP2_EP2, mini.PP2, mini.TP2_PP2], ids=["dp2", "pp2", "tp2-pp2"])  # fmt: skip
def test_a_save_is_what_was_said(layout: dict[str, object], data: Path, tmp_path: Path) -> None:
    changes = {**layout, "callbacks__2__save_checkpoint_steps": 12}
    output = tmp_path / "run"
    assert main(words(data, output, **changes)) == 0
    [folder] = (output / "checkpoints").glob("step-*")
    files = list(folder.iterdir())
    save = save_of(recipe(data, output, **changes))
    assert save is not None
    assert save.files == len(files)
    tensors = [path for path in files if path.suffix == ".safetensors"]
    assert save.nbytes == sum(path.stat().st_size for path in tensors)
    by_rank = [sum(p.stat().st_size for p in folder.glob(f"*_rank{rank:05d}-*")) for rank in range(8)]  # fmt: skip
    assert save.largest == max(by_rank)


@pytest.mark.parametrize(
    "option", ["--html x.html", "--rank 256", "--confirm", "--target CPU", "--mindformers"]
)
def test_options_that_do_not_fit_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
    assert main(["dryrun", name, "--run", *option.split()]) == 2
    assert option.split()[0] in capsys.readouterr().err


def test_a_recipe_without_checkpoints_saves_nothing(data: Path, tmp_path: Path) -> None:
    saving = recipe(data, tmp_path)
    without = [c for c in saving.callbacks if c.type != "CheckpointMonitor"]
    assert save_of(saving) is not None
    assert save_of(replace(saving, callbacks=without)) is None


@pytest.mark.parametrize("averaged", [False, True])
def test_bytes_of_a_checkpoint_are_those_of_its_tensors(
    averaged: bool, data: Path, tmp_path: Path
) -> None:
    """Weights, two moments of what is trained, and an average: each once, whatever the layout."""
    for layout, zero in product((mini.DP2_EP2, mini.TP2_PP2), (False, True)):
        changes = {**layout, "parallel__enable_parallel_optimizer": zero}
        if averaged:
            changes["telechat_moe__ema__decay"] = 0.9
        of = recipe(data, tmp_path, **changes)
        save = save_of(of)
        assert save is not None
        copies = [1 + 2 * w.trained + averaged for w in weights(of.model_config)]
        sizes = [4 * int(np.prod(w.shape)) for w in weights(of.model_config)]
        tensors = sum(n * size for n, size in zip(copies, sizes, strict=True))
        headers = save.nbytes - tensors
        assert 0 < headers < 600 * len(sizes)


def test_waits_of_the_host_are_named(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those for sizes of all-to-alls are needed, any other one is a problem; the update has none."""
    arguments = words(data, tmp_path / "run", **mini.DP2_EP2)[1:]
    arguments.remove("--plain")
    dispatch = "--set", "telechat_moe.sharding.dispatcher=alltoallv"
    file = tmp_path / "check.json"
    check = ["check", *arguments, *dispatch, "--host-syncs"]
    assert main([*check, "--json", str(file)]) == 0
    (judged,) = json.loads(file.read_text())["recipes"]
    waits = judged["host_waits"]
    assert waits
    assert {(w["kind"], w["needed"]) for w in waits} == {("MoveTo", True)}
    waits.append({**waits[0], "kind": "Switch", "needed": False, "why": "it branches"})
    monkeypatch.setattr("telechat_moe.train.run_graphs.host_waits", lambda *_: waits)
    capsys.readouterr()
    assert main(check) == 1
    text = capsys.readouterr().out
    assert "problem: up to" in text
    assert "Switch: it branches" in text
    assert ": ok" not in text
    assert "HCCL takes the sizes" in text
