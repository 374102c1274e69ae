"""The same recipe through MindFormers' Trainer and through ours: the same numbers."""

import importlib.util
from pathlib import Path

import mindformers_runs as runs
import numpy as np
import pytest

from telechat_moe.checkpoint import checkpoint
from telechat_moe.checkpoint.weights import own_weights
from telechat_moe.cli import main
from telechat_moe.interop.mindformers_checkpoint import read
from telechat_moe.model import CausalLM
from telechat_moe.recipe import load
from telechat_moe.train.parameters import load_weights

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]


def assert_equal_curves(upstream: runs.Curve, our_run: runs.Curve) -> None:
    assert len(upstream.loss) == len(our_run.loss) == runs.STEPS
    assert our_run.loss[-10:].mean() < our_run.loss[:10].mean() - 0.2  # something is learned
    for name in runs.Curve._fields:
        a, b = getattr(upstream, name), getattr(our_run, name)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9, err_msg=name)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, runs.Curve]:
    recipe = runs.write_recipe(tmp_path_factory.mktemp("one"))
    return recipe, runs.mean(runs.through_mindformers(recipe))


@pytest.fixture(scope="module")
def ours(one: tuple[Path, runs.Curve]) -> tuple[Path, runs.Curve]:
    output = one[0].parent / "ours"
    return output, runs.through_ours(one[0], output)


@pytest.mark.slow
def test_one_process(one: tuple[Path, runs.Curve], ours: tuple[Path, runs.Curve]) -> None:
    assert_equal_curves(one[1], ours[1])
    assert not (one[0].parent / "output").exists()  # where MindFormers writes when not told


@pytest.mark.slow
def test_a_step_counts_its_own_tokens(tmp_path: Path) -> None:
    """``gbs_aux_loss`` without a bias, whose update would clear what was counted; MindFormers' monitor does."""
    section = "model__model_config__"
    changes = {
        section + "moe_router_load_balancing_type": "gbs_aux_loss",
        section + "moe_aux_loss_coeff": 0.1,
        section + "moe_router_enable_expert_bias": False,
        "callbacks__1__balance_via_topk_bias": False,
    }
    recipe = runs.write_recipe(tmp_path, **changes)
    theirs = runs.mean(runs.through_mindformers(recipe))
    assert_equal_curves(theirs, runs.through_ours(recipe, tmp_path / "ours"))


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, processes=2)
    theirs = runs.mean(runs.through_mindformers(recipe, 2))
    assert_equal_curves(theirs, runs.through_ours(recipe, tmp_path / "ours"))


# ------------------------------------------------------------------------------ checkpoints


def assert_same_tensors(a, b) -> None:
    assert a.keys() == b.keys() == {"model", "optimizer"}
    for group in a:
        assert a[group].keys() == b[group].keys()
        for name, tensor in a[group].items():
            assert tensor.dtype == b[group][name].dtype
            np.testing.assert_array_equal(tensor, b[group][name], err_msg=name)


def half_way(one: tuple[Path, runs.Curve]) -> Path:
    return one[0].parent / f"trained/checkpoint/iteration_{runs.STEPS // 2:08d}"


def assert_goes_on(after: runs.Curve, whole: runs.Curve) -> None:
    """The second half of the run, from the checkpoint of its middle."""
    for name in runs.Curve._fields:
        a, b = getattr(after, name), getattr(whole, name)[runs.STEPS // 2 :]
        np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_their_checkpoint_in_our_trainer_and_back(one, tmp_path: Path) -> None:
    recipe, theirs = one
    output = tmp_path / "ours"
    sets = ["--recipe", str(recipe), "--set", f"output_dir={output}"]
    assert main(["ckpt", "from-mindformers", str(half_way(one)), *sets]) == 0
    ours = checkpoint.load(output / f"checkpoints/step-{runs.STEPS // 2:08d}")
    loaded = load(recipe)
    before = read(half_way(one), loaded)
    assert (ours.step, ours.state["updates"]) == (before.step, before.updates) == (25, 25)
    assert_same_tensors(ours.tensors, before.tensors)

    back = tmp_path / "back"
    assert main(["ckpt", "to-mindformers", str(ours.path), str(back), *sets]) == 0
    assert_same_tensors(read(back, loaded).tensors, before.tensors)
    assert_goes_on(runs.through_ours(recipe, output, "--resume"), theirs)


@pytest.mark.slow
def test_our_checkpoint_in_their_trainer(one, ours, tmp_path: Path, capfd) -> None:
    recipe, theirs = one
    saved = ours[0] / f"checkpoints/step-{runs.STEPS // 2:08d}"
    moved = tmp_path / "moved"
    capfd.readouterr()
    assert main(["ckpt", "to-mindformers", str(saved), str(moved), "--recipe", str(recipe)]) == 0
    settings = capfd.readouterr().out.split()
    sets = [x for setting in (*settings, f"output_dir={tmp_path}/out") for x in ("--set", setting)]
    assert_goes_on(runs.mean(runs.through_mindformers(recipe, 1, *sets)), theirs)


@pytest.mark.slow
def test_their_own_resume_repeats_every_digit(one) -> None:
    recipe, theirs = one
    root = half_way(one).parent
    root.joinpath("latest_checkpointed_iteration.txt").write_text(str(runs.STEPS // 2))
    after = runs.mean(runs.through_mindformers(recipe, 1, "--resume"))
    assert len(after.loss) == runs.STEPS // 2
    for name in runs.Curve._fields:
        np.testing.assert_array_equal(
            getattr(after, name), getattr(theirs, name)[runs.STEPS // 2 :]
        )


@pytest.mark.slow
def test_their_file_as_initial_weights_of_ours(one) -> None:
    """`load_checkpoint` names MindFormers' model file: weights only, a new run."""
    recipe, _ = one
    (file,) = half_way(one).glob("*-model-*.safetensors")
    recipe = load(one[0])
    model = CausalLM(recipe.model_config)
    load_weights(model, own_weights(file, recipe.model_config), file)
    saved = read(half_way(one), recipe).tensors["model"]
    for parameter in model.trainable_params():
        np.testing.assert_array_equal(parameter.asnumpy(), saved[parameter.name])


@pytest.mark.slow
def test_two_processes_resume_and_move(tmp_path: Path) -> None:
    """Their old format: one whole file a process; on in their trainer, and in ours."""
    recipe = runs.write_recipe(tmp_path, processes=2)
    whole = runs.mean(runs.through_mindformers(recipe, 2))
    root = tmp_path / "trained/checkpoint"
    for path in root.glob(f"rank_*/*_{runs.STEPS}.safetensors"):
        path.unlink()
    sets = ["--recipe", str(recipe), "--set", f"output_dir={tmp_path}/ours"]
    assert main(["ckpt", "from-mindformers", str(root), *sets]) == 0
    assert_goes_on(runs.through_ours(recipe, tmp_path / "ours", "--resume"), whole)
    after = runs.mean(runs.through_mindformers(recipe, 2, "--resume"))
    for name in runs.Curve._fields:
        np.testing.assert_array_equal(getattr(after, name), getattr(whole, name)[runs.STEPS // 2 :])
