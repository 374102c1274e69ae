"""Checkpoints in the names and layouts of MindFormers' own class, without MindFormers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import mini_recipe as mini

from telechat_moe import files
from telechat_moe.checkpoint import checkpoint
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.interop import data_record, names, upstream_names
from telechat_moe.interop.mindformers_checkpoint import (
    newest,
    open_data,
    read,
    resume_settings,
    step_of,
    to_mindformers,
    to_ours,
)
from telechat_moe.recipe import Recipe, load
from telechat_moe.tensor_files import parse
from telechat_moe.train.preflight import open_loader

TINY = "telechat3_moe/pretrain_tiny.yaml"
UPSTREAM = ["trainer.type=CausalLanguageModelingTrainer"]
TWO = [
    "use_parallel=True",
    "parallel.parallel_mode=0",
    "parallel.gradients_mean=True",
    "parallel_config.data_parallel=2",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random bits, NaN among them."""
    generator = np.random.default_rng(0)

    def bits(shape: tuple[int, ...]) -> np.ndarray:
        return generator.integers(0, 2**32, shape, np.uint32).view(np.float32)

    pairs = names.pairs(load(TINY).model_config)
    tensors = {
        "model": {p.name: bits(p.shape) for p in pairs},
        "optimizer": {
            f"{m}.{p.name}": bits(p.shape)
            for m in ("adam_m", "adam_v")
            for p in pairs
            if not p.is_bias
        },
    }
    root = tmp_path_factory.mktemp("saved")
    return checkpoint.save(root, 300, tensors, {"updates": 298})


def recipe_of(*overrides: str) -> Recipe:
    return load(TINY, list(overrides))


@pytest.mark.parametrize("devices", [[], TWO], ids=["one", "two"])
@pytest.mark.parametrize("whose", [[], UPSTREAM], ids=["ours", "upstream"])
def test_round_trip_keeps_every_bit(saved: Path, tmp_path: Path, devices, whose) -> None:
    recipe = recipe_of(*devices, *whose)
    to_mindformers(saved, tmp_path / "out", recipe)
    restored = read(tmp_path / "out", recipe)
    assert (restored.step, restored.updates, restored.global_batch) == (
        300,
        298,
        recipe.global_batch,
    )
    for group, tensors in checkpoint.load(saved).tensors.items():
        assert restored.tensors[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert restored.tensors[group][name].tobytes() == tensor.tobytes(), name


def test_names_of_upstream(saved: Path, tmp_path: Path) -> None:
    recipe = recipe_of(*UPSTREAM)
    to_mindformers(saved, tmp_path / "out", recipe)
    (file,) = tmp_path.glob("out/iteration_00000300/*-model-*.safetensors")
    found = parse(files.read(file, keep=True).data)
    table = {p.upstream: p.shape for p in upstream_names.pairs(recipe.model_config)}
    weights = {n: t.shape for n, t in found.items() if not n.endswith("expert_load")}
    assert weights == table


def test_epoch_and_step_in_it(saved: Path, tmp_path: Path) -> None:
    """Step 300 of a run with 250 steps an epoch is step 50 of the second."""
    recipe = recipe_of(*TWO, "train_dataset.data_loader.sizes=[2000,0,0]", "runner_config.epochs=2")
    to_mindformers(saved, tmp_path / "out", recipe)
    file = tmp_path / "out/rank_1/CKP_rank_1-2_50.safetensors"
    assert json.loads((file.parent / "meta.json").read_text())["last_ckpt_file"] == file.name
    assert read(file, recipe).step == 300
    assert step_of(file, recipe) == 300
    settings = resume_settings(tmp_path / "out", recipe)
    assert settings["resume_training"] == "CKP_rank_0-2_50.safetensors"


def test_newest_is_what_all_ranks_finished(saved: Path, tmp_path: Path) -> None:
    recipe = recipe_of(*TWO)
    out = tmp_path / "out"
    to_mindformers(saved, out, recipe)
    (out / "rank_0/CKP_rank_0-1_400.safetensors").write_bytes(b"half")
    found = newest(out)
    assert found is not None
    assert found.name == "CKP_rank_0-1_300.safetensors"
    assert newest(tmp_path) is None
    shutil.rmtree(out / "rank_1")  # killed before it made its folder
    assert newest(out, 2) is None
    with pytest.raises(BadInputError, match="no finished checkpoint"):
        resume_settings(out, recipe)


def test_a_place_that_mindformers_has_not_is_refused(saved: Path, tmp_path: Path) -> None:
    """It goes on at steps times batch: 300 steps of 4 samples."""
    state = {"updates": 298, "data": {"next_sample": 1200, "samples_per_epoch": 4000}}
    tensors = checkpoint.load(saved).tensors
    to_mindformers(
        checkpoint.save(tmp_path / "a", 300, tensors, state), tmp_path / "out", recipe_of()
    )
    state["data"]["next_sample"] = 1240
    path = checkpoint.save(tmp_path / "b", 300, tensors, state)
    with pytest.raises(BadInputError, match=r"goes on at sample 1240, MindFormers at 1200"):
        to_mindformers(path, tmp_path / "no", recipe_of())
    # In epochs of 250 steps of 4 of 1002 samples, step 300 is at sample 200 of the second.
    state["data"] = {"next_sample": 1202, "samples_per_epoch": 1002}
    path = checkpoint.save(tmp_path / "c", 300, tensors, state)
    to_mindformers(path, tmp_path / "epochs", recipe_of())


@pytest.mark.parametrize("common_keys", [{}, {"consumed_samples": None}, {"consumed_samples": 20}])
def test_samples_that_mindformers_consumed(
    tmp_path: Path, common_keys: dict[str, int | None]
) -> None:
    """Six steps of 4, also where MindFormers 2 says null in graph mode, or what it says in mode 1."""
    data = mini.write_data(tmp_path)

    def recipe(batch: int) -> Recipe:
        sizes = {"runner_config__batch_size": batch, "model__model_config__batch_size": batch}
        words = mini.arguments(data, tmp_path / "ours", **sizes)
        return load(words[1], words[4::2])

    tensors = random_tensors(recipe(4))
    path = checkpoint.save(tmp_path / "theirs", 6, tensors, {"updates": 5})
    to_mindformers(path, tmp_path / "out", recipe(4))
    (common,) = tmp_path.glob("out/*/common.json")
    common.write_text(json.dumps(json.loads(common.read_text()) | common_keys))
    state = checkpoint.load(to_ours(tmp_path / "out", recipe(2))).state
    assert state["data"]["next_sample"] == state["samples"]
    assert state["samples"] == (common_keys.get("consumed_samples") or 24)
    assert (state["lr_batches"], state["applied_samples"]) == ([[[0, 4]], 4], 20)


def random_tensors(recipe: Recipe) -> dict[str, dict[str, np.ndarray]]:
    pairs, dice = names.pairs(recipe.model_config), np.random.default_rng(0)
    return {
        "model": {p.name: dice.random(p.shape, np.float32) for p in pairs},
        "optimizer": {
            f"{m}.{p.name}": dice.random(p.shape, np.float32)
            for m in ("adam_m", "adam_v")
            for p in pairs
            if not p.is_bias
        },
    }


@pytest.mark.parametrize("devices", [1, 2])
def test_a_place_that_only_our_loader_has_goes_there_and_back(tmp_path: Path, devices: int) -> None:
    """After a run that left five samples out: twelve of three steps, and the next one is the 17th."""
    (tmp_path / "other").mkdir()
    data, other = mini.write_data(tmp_path), mini.write_data(tmp_path / "other", seed=1)

    def recipe(name: str, *overrides: str, **changes: object) -> Recipe:
        layout = [*TWO, "runner_config.batch_size=2", "model.model_config.batch_size=2"]
        kind = {"train_dataset__data_loader__type": "TelechatDataLoader", **changes}
        words = mini.arguments(data, tmp_path / name, **kind)
        return load(words[1], [*words[4::2], *(layout if devices > 1 else []), *overrides])

    before = recipe("before")
    loader = open_loader(before)
    loader.seek(17)
    state = {"updates": 2, "samples": 12, "data": loader.state()}
    path = checkpoint.save(tmp_path / "ours", 3, random_tensors(before), state)
    to_mindformers(path, tmp_path / "out", before)
    sets = [f"{k}={v}" for k, v in resume_settings(tmp_path / "out", before).items()]
    for turn in range(2):  # from what was handed over, then from what the first start recorded
        loader, step = open_data(recipe("theirs", *sets), rank=0)
        assert (loader.next_sample, step) == (17, 3), turn
        (tmp_path / "theirs/checkpoint" / data_record.FILE).rename(
            tmp_path / "out" / data_record.FILE
        )
    elsewhere = f"['1', '{other}/train']"
    changed = {"train_dataset__data_loader__config__data_path": elsewhere}
    with pytest.raises(BadInputError, match="made with other training data"):
        open_data(recipe("no", *sets, **changed), rank=0)
    loader, step = open_data(
        recipe("new", *sets, **changed, telechat_moe__resume_data="new"), rank=0
    )
    assert (loader.next_sample, loader.earlier_samples, step) == (0, 17, 3)
    state = checkpoint.load(to_ours(tmp_path / "out", recipe("back"))).state
    assert (state["data"]["next_sample"], state["samples"]) == (17, 12)
    (tmp_path / "out" / data_record.FILE).write_text("[{}]")
    with pytest.raises(BadInputError, match=r"telechat_data.json: cannot be read .*remove it"):
        open_data(recipe("no", *sets), rank=0)


def test_refused(saved: Path, tmp_path: Path) -> None:
    recipe = recipe_of()
    out = tmp_path / "out"
    to_mindformers(saved, out, recipe)
    with pytest.raises(UsageError, match="exists"):
        to_mindformers(saved, out, recipe)
    with pytest.raises(BadInputError, match="no checkpoint of MindFormers"):
        read(tmp_path, recipe)
    (file,) = out.glob("iteration_00000300/*-opt-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadInputError, match=r"(?s)-opt-.*do not fit"):
        read(out, recipe)
    to_mindformers(saved, tmp_path / "two", recipe_of(*TWO))
    with pytest.raises(BadInputError, match="cannot resume one process"):
        resume_settings(tmp_path / "two", recipe)
