"""Checkpoints in the names and layouts of MindFormers' own class, without MindFormers."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from telechat_moe import files
from telechat_moe.checkpoint import checkpoint
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.interop import names, upstream_names
from telechat_moe.interop.mindformers_checkpoint import (
    newest,
    read,
    resume_settings,
    step_of,
    to_mindformers,
)
from telechat_moe.recipe import Recipe, load
from telechat_moe.tensor_files import parse

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
        "model": {p.ours: bits(p.shape) for p in pairs},
        "optimizer": {
            f"{m}.{p.ours}": bits(p.shape)
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
    back = read(tmp_path / "out", recipe)
    assert (back.step, back.updates, back.global_batch) == (300, 298, recipe.global_batch)
    for group, tensors in checkpoint.load(saved).tensors.items():
        assert back.tensors[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert back.tensors[group][name].tobytes() == tensor.tobytes(), name


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
    with pytest.raises(BadInputError, match=r"-opt-.*do not fit"):
        read(out, recipe)
    to_mindformers(saved, tmp_path / "two", recipe_of(*TWO))
    with pytest.raises(BadInputError, match="cannot resume one process"):
        resume_settings(tmp_path / "two", recipe)
