"""Settings of ours that act in MindFormers' trainer, trained there and by `telechat-moe train`: the same losses, norms and rates."""

import functools
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mindformers_runs as runs
import mini_recipe as mini
import numpy as np
import pytest
from test_mindformers_train import assert_equal_curves

from telechat_moe.data import write_indexed
from telechat_moe.recipe import load
from telechat_moe.train.preflight import open_loader

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
CONFIG = "train_dataset__data_loader__config__"
LEARN = {"lr_schedule__learning_rate": 8.0e-3}
DECAY = {
    "lr_schedule__type": "WarmUpStableDecayLR",
    "lr_schedule__decay_start_ratio": 0.3,
    "telechat_moe__lr_wsd_decay_style": "minus_sqrt",
}
MIXTURE = "[{from_sample: 0, weights: [3, 1]}, {from_sample: 50, weights: [1, 2]}%s]"
OWN_DOCUMENTS = {
    f"{CONFIG}create_attention_mask": True,
    f"{CONFIG}reset_attention_mask": True,
    f"{CONFIG}reset_position_ids": True,
    "train_dataset__input_columns": "null",
    "train_dataset__construct_args_key": "null",
}
CONVERSATIONS = {
    "telechat_moe__conversations": "{message: '{role}:{content}'}",
    "telechat_moe__corpus__tokenizer": "tokenizer.json",
    **OWN_DOCUMENTS,
}


def write_recipe(folder: Path, processes: int = 1, **changes: object) -> Path:
    """Write a recipe of two sources and their data; of a mixture without their weights."""
    for name, seed in (("data", 0), ("other", 1)):
        if not (folder / name).exists():
            (folder / name).mkdir(parents=True)
            mini.write_data(folder / name, seed)
    paths = [f"{folder}/data/train", f"{folder}/other/train"]
    if "telechat_moe__mixture" not in changes:
        paths = ["2", paths[0], "1", paths[1]]
    changes.setdefault(f"{CONFIG}data_path", str(paths))
    return runs.write_recipe(folder, processes, **{**LEARN, **changes})


def assert_same_runs(recipe: Path, processes: int = 1) -> runs.Curve:
    """Train a recipe both ways; return MindFormers' curve."""
    curve = runs.mean(runs.through_mindformers(recipe, processes))
    assert_equal_curves(curve, runs.through_ours(recipe, recipe.parent / "ours"))
    return curve


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return what trains a mixture with a decay both ways on a number of processes, once, and returns the folder."""

    @functools.cache
    def trained(processes: int) -> Path:
        folder = tmp_path_factory.mktemp(f"on_{processes}")
        changes = {"telechat_moe__mixture": MIXTURE % "", **DECAY}
        curve = assert_same_runs(write_recipe(folder, processes, **changes), processes)
        assert np.ptp(curve.rate[5:15]) == 0 < curve.rate[30] < 0.5 * curve.rate[10]
        return folder

    return trained


@pytest.mark.parametrize("processes", [1, 2])
def test_a_mixture_and_a_decay(mixed: Callable[[int], Path], processes: int) -> None:
    assert_same_sources(mixed(processes))


def assert_same_sources(folder: Path) -> None:
    """The loss of each source in each step of both runs."""
    runs_ = [(folder / name / "metrics.jsonl").read_text() for name in ("trained", "ours")]
    steps = [[r for r in map(json.loads, x.splitlines()) if r["event"] == "step"] for x in runs_]
    assert len(steps[0]) == len(steps[1]) == runs.STEPS
    for expected, step in zip(*steps, strict=True):
        assert expected["tokens_by_source"] == step["tokens_by_source"]
        assert expected["loss_by_source"] == pytest.approx(step["loss_by_source"], rel=1e-5)
    assert {len(step["tokens_by_source"]) for step in steps[0]} >= {2}


def test_packed_documents(tmp_path: Path) -> None:
    assert_same_runs(write_recipe(tmp_path, telechat_moe__packing="{window: 4}", **OWN_DOCUMENTS))


def test_conversations(tmp_path: Path) -> None:
    """Tokens that are only read are stored as their complement."""
    generator, talks = np.random.default_rng(5), list[np.ndarray]()
    for _ in range(80):
        start, stride = generator.integers(1, 64), generator.integers(1, 4)
        tokens = (start + stride * np.arange(generator.integers(6, 15))) % 63 + 1
        half = len(tokens) // 2
        talks.append(np.concatenate([~tokens[:half], tokens[half:], [0]]).astype(np.int32))
    write_indexed(tmp_path / "talks", talks, np.dtype(np.int32))
    path = {f"{CONFIG}data_path": f"['{tmp_path}/talks']"}
    assert_same_runs(write_recipe(tmp_path, 1, **CONVERSATIONS, **path))


def test_two_processes_with_dealt_samples_of_unequal_padding(tmp_path: Path) -> None:
    """The loss is the mean over the tokens of all, though MindFormers averages what its processes have."""
    dealt = {"telechat_moe__balance_attention": True, "telechat_moe__packing": "{window: 4}"}
    depths = {"model__model_config__num_nextn_predict_layers": 2}
    recipe = write_recipe(tmp_path, 2, **dealt, **depths, **OWN_DOCUMENTS)
    with open_loader(load(recipe)) as loader:
        tokens = np.array([batch["loss_mask"].reshape(2, -1).sum(1) for batch in loader])
    assert len(tokens) == runs.STEPS
    assert (abs(tokens[:, 0] / tokens[:, 1] - 1) > 0.02).mean() > 0.5
    assert_same_runs(recipe, 2)


HALF = runs.STEPS // 2


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("change", ["another future", "new data"])
def test_resuming(
    mixed: Callable[[int], Path], tmp_path: Path, change: str, processes: int
) -> None:
    """From the middle of a run: what `telechat-moe train` does from its own checkpoint there."""
    before = mixed(processes)
    back_to_half(before, tmp_path)
    later = f", {{from_sample: {150 * processes}, weights: [0, 1]}}"
    changes = {
        "another future": {"telechat_moe__mixture": MIXTURE % later},
        "new data": {
            "telechat_moe__resume_data": "new",
            f"{CONFIG}data_path": f"['1', '{tmp_path}/other/train']",
        },
    }
    recipe = write_recipe(tmp_path, processes, **changes[change], **DECAY)
    upstream = runs.mean(runs.through_mindformers(recipe, processes, "--resume"))
    start = f"resume_training={before}/ours/checkpoints/step-{HALF:08d}"
    our_run = runs.through_ours(recipe, tmp_path / "ours", "--set", start)
    assert len(upstream.loss) == len(our_run.loss) == HALF
    for field in runs.Curve._fields:
        a, b = getattr(upstream, field), getattr(our_run, field)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9, err_msg=field)


@pytest.mark.parametrize("processes", [1, 2])
def test_another_past_is_refused(
    mixed: Callable[[int], Path], tmp_path: Path, processes: int
) -> None:
    back_to_half(mixed(processes), tmp_path)
    past = "[{from_sample: 0, weights: [1, 1]}]"
    recipe = write_recipe(tmp_path, processes, telechat_moe__mixture=past, **DECAY)
    text = refusal(recipe, processes)
    assert f"the checkpoint saw {HALF * 4 * processes} samples of another mixture" in text


def back_to_half(run: Path, folder: Path) -> None:
    """Copy what MindFormers wrote, with the middle of the run as the newest checkpoint."""
    shutil.copytree(run / "trained", folder / "trained")
    root = folder / "trained/checkpoint"
    for marker in root.glob("latest_checkpointed_iteration.txt"):
        marker.write_text(str(HALF))
    for path in root.glob(f"rank_*/*_{runs.STEPS}.safetensors"):
        path.unlink()


def refusal(recipe: Path, processes: int) -> str:
    """Return what a run that resumes says when it is refused."""
    command = ["python", "-m", "telechat_moe.run", str(recipe), "--through", "mindformers"]
    command.append("--resume")
    cwd = recipe.parent
    start = runs.msrun(processes, cwd) if processes > 1 else []
    text = runs.run([*start, *command], cwd, check=False)
    return text + "".join(log.read_text() for log in cwd.glob("log/worker_*.log"))
