"""What `check` and `train` say of files, folders, start and device before anything is compiled: the same, all at once."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import mini_recipe as mini
import numpy as np
import pytest

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.data import write_indexed
from telechat_moe.errors import UsageError
from telechat_moe.interop import hf
from telechat_moe.recipe import Problem, RecipeError, load
from telechat_moe.recipe.hugging_face import OtherModelError
from telechat_moe.recipe.weights import weights
from telechat_moe.train import preflight
from telechat_moe.train.start import STATE_VERSION
from telechat_moe.versions import cann_lines

CONFIG = "train_dataset.data_loader.config"


def recipe(data: Path, output: Path, **changes: object):
    arguments = mini.arguments(data, output, **changes)
    return load(arguments[1], arguments[4::2])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Data with a manifest and a tokenizer's numbers, and a checkpoint of the mini recipe at step 6."""
    mini.write_data(tmp_path)
    write_manifest(tmp_path, vocab_size=64, eod=0)
    r = recipe(tmp_path, tmp_path / "run")
    generator = np.random.default_rng(0)
    model = {w.name: generator.random(w.shape, np.float32) for w in weights(r.model_config)}
    loader = preflight.open_loader(r)
    loader.seek(24)
    state = {
        "version": STATE_VERSION,
        "model_config": asdict(r.model_config),
        "data": loader.state(),
    }
    checkpoint.save(tmp_path / "old/checkpoints", 6, {"model": model}, state)
    return tmp_path


def write_manifest(folder: Path, vocab_size: int, eod: int) -> None:
    sides = {"train": {}, "valid": {}}
    tokenizer = {"vocab_size": vocab_size, "eod": eod, "eod_token": "<|eod|>"}
    (folder / "manifest.json").write_text(json.dumps({"tokenizer": tokenizer, **sides}))


def problems(place: Path, **changes: object) -> list[Problem]:
    _, found = preflight.examine(recipe(place, place / "run", **changes), weights=hf.weights)
    return found


def only(place: Path, **changes: object) -> Problem:
    (found,) = problems(place, **changes)
    return found


def test_settings_beside_weights(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder's config.json and the recipe: `check` and `train` name the same keys, and what is not judged."""
    config = recipe(place, place / "run").model_config
    hf.convert(place / "old/checkpoints/step-00000006", place / "hf", config, "hf")
    notes: list[str] = []
    r = recipe(place, place / "run", load_checkpoint=place / "hf")
    assert preflight.examine(r, weights=hf.weights, notes=notes)[1] == []
    assert not [note for note in notes if "no config.json" in note]
    written = json.loads((place / "hf/config.json").read_text())
    five = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}
    five["rope_parameters"] = {"rope_theta": 50000.0, "rope_type": "default"}
    five |= {"topk_method": "greedy", "eos_token_id": 7}
    (place / "hf/config.json").write_text(json.dumps(five))
    found = problems(place, load_checkpoint=place / "hf")
    assert {p.key for p in found} == {"model.model_config.rope_theta", "load_checkpoint"}
    (theta,) = (p for p in found if p.key.endswith("rope_theta"))
    assert (
        theta.found == f"10000.0, but {place}/hf/config.json: rope_parameters.rope_theta is 50000.0"
    )
    assert (theta.expected, theta.line > 0) == ("set it to 50000.0", True)
    arguments = mini.arguments(place, place / "run", load_checkpoint=place / "hf")
    assert main(arguments) == 3
    said = capsys.readouterr().err
    assert main(["check", arguments[1], *arguments[3:]]) == 1
    checked = capsys.readouterr().out
    for problem in found:
        assert str(problem) in said
        assert str(problem) in checked
    five["rope_parameters"]["rope_theta"], five["topk_method"] = 10000.0, "noaux_tc"
    (place / "hf/config.json").write_text(json.dumps(five))
    notes = []
    assert preflight.examine(r, weights=hf.weights, notes=notes)[1] == []
    assert any("config.json has eos_token_id 7" in note for note in notes)
    (place / "hf/config.json").unlink()
    assert main(["check", arguments[1], *arguments[3:]]) == 0
    assert "not judged: load_checkpoint: " in (out := capsys.readouterr().out)
    assert "no config.json beside the weights" in out


def test_what_a_checkpoint_was_trained_with(place: Path) -> None:
    """A changed setting is said on loading (longer contexts change rope_theta); converting refuses it."""
    step = place / "old/checkpoints/step-00000006"
    r = recipe(place, place / "run", load_checkpoint=step, model__model_config__rope_theta=50000.0)
    notes: list[str] = []
    assert preflight.examine(r, weights=hf.weights, notes=notes)[1] == []
    (note,) = notes
    assert note.endswith("rope_theta is 50000.0, but the weights were trained with 10000.0")
    with pytest.raises(
        OtherModelError, match=r"rope_theta: 50000\.0, but the weights were trained"
    ):
        hf.convert(step, place / "hf", r.model_config, "hf")


def test_nothing_is_wrong_with_what_is_right(place: Path) -> None:
    assert problems(place, telechat_moe__evaluation__interval=4) == []
    step = place / "old/checkpoints/step-00000006"
    for given in (step, step.parent):
        for resume in (False, True):
            assert problems(place, load_checkpoint=given, resume_training=resume) == []


def test_all_at_once_with_line_and_key(place: Path) -> None:
    found = problems(
        place,
        train_dataset__data_loader__config__data_path=f"['1', '{place}/absent']",
        telechat_moe__evaluation__interval=4,
        telechat_moe__evaluation__data_path=f"['{place}/none']",
        telechat_moe__corpus__paths=f"['{place}/no_text']",
        telechat_moe__corpus__tokenizer=str(place / "no.json"),
        load_checkpoint=str(place / "nothing"),
        output_dir=str(place / "train.bin/x"),
        context__device_target="GPU",
    )
    keys = {p.key for p in found}
    assert keys == {
        *("context.device_target", "output_dir", f"{CONFIG}.data_path.1", "load_checkpoint"),
        *(
            "telechat_moe.evaluation.data_path.0",
            "telechat_moe.corpus.paths.0",
            "telechat_moe.corpus.tokenizer",
        ),
    }
    assert all(p.file.startswith("--set ") and p.expected and "\n" not in str(p) for p in found)


def test_a_key_that_is_not_written_has_the_line_of_its_section(place: Path) -> None:
    text = Path(load(mini.arguments(place, place)[1]).source).read_text()
    file = place / "mine.yaml"
    for name in ("train", "valid"):
        text = text.replace(f"./output/data/{name}", f"{place}/{name}")
    file.write_text(
        text.replace("eod: 0", "eod: 5").replace("load_checkpoint: ''", "load_checkpoint: 'x'")
    )
    _, found = preflight.examine(load(file))
    lines = {p.key: file.read_text().splitlines()[p.line - 1] for p in found if p.line}
    assert "eod: 5" in lines[f"{CONFIG}.eod"]
    assert "load_checkpoint" in lines["load_checkpoint"]
    assert "sample:" in lines["telechat_moe.sample"]


def test_data_of_others(place: Path) -> None:
    """Without a manifest some documents are looked at: tokens that the model lacks, ends without the end token."""
    config = "train_dataset__data_loader__config__"
    foreign = [np.array([5, 70, 9], np.uint16)] * 40
    write_indexed(place / "foreign", foreign, np.uint16)
    given = {f"{config}data_path": f"['1', '{place}/foreign']", f"{config}split": "'1, 0, 0'"}
    for manifest in place.glob("manifest.json"):
        manifest.unlink()
    (found,) = problems(place, **given)
    assert (found.key, "holds token 70" in found.found) == ("model.model_config.vocab_size", True)
    write_indexed(place / "foreign", [tokens % 64 for tokens in foreign], np.uint16)
    assert problems(place, **given) == []  # nothing asks for the end token
    (found,) = problems(place, **given, **{f"{config}eod_mask_loss": True})
    assert found.key == f"{CONFIG}.eod"
    assert "none of 40 documents" in found.found
    assert "9 ends some" in found.expected
    assert problems(place, **given, **{f"{config}eod_mask_loss": True, f"{config}eod": 9}) == []
    # Documents of many sequences: the end token is in the last one of a document.
    sequences = [
        np.array(tokens, np.uint16) for tokens in [[5, 6]] * 1499 + [[5, 0]] + [[5, 6]] * 1500
    ]
    write_indexed(place / "foreign", sequences, np.uint16)
    index = (place / "foreign.idx").read_bytes()
    head = index[:26] + (3).to_bytes(8, "little") + index[34 : -8 * 3001]
    (place / "foreign.idx").write_bytes(head + np.array([0, 1500, 3000], "<i8").tobytes())
    assert problems(place, **given, **{f"{config}eod_mask_loss": True}) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "a folder"])
def test_broken_data(place: Path, suffix: str, damage: str) -> None:
    for name in ("train", "valid"):
        file = place / f"{name}{suffix}"
        content = file.read_bytes()
        file.unlink()
        if damage == "truncated":
            file.write_bytes(content[:-20])
        elif damage == "a folder":
            file.mkdir()
    keys = [p.key for p in problems(place, telechat_moe__evaluation__interval=4)]
    assert keys == [f"{CONFIG}.data_path.1", "telechat_moe.evaluation.data_path.1"]


def test_validation_data_named_after_the_training_data(place: Path) -> None:
    shutil.copy(place / "train.bin", place / "text.bin")
    shutil.copy(place / "train.idx", place / "text.idx")
    changes = {
        "train_dataset__data_loader__config__data_path": f"['1', '{place}/text']",
        "telechat_moe__evaluation__data_path": "null",
    }
    assert problems(place, **changes) == []
    found = only(place, **changes, telechat_moe__evaluation__interval=4)
    assert found.key == "telechat_moe.evaluation.data_path"
    assert "does not contain 'train'" in found.found


def test_too_few_tokens(place: Path) -> None:
    write_indexed(place / "train", [np.zeros(0, np.uint16)], np.dtype(np.uint16))
    found = only(place)
    assert found.key == f"{CONFIG}.data_path"
    assert "seq_length" in found.expected


def test_the_manifest(place: Path) -> None:
    write_manifest(place, vocab_size=65, eod=0)
    found = only(place)
    assert (found.key, found.expected[:11]) == ("model.model_config.vocab_size", "at least 65")
    write_manifest(place, vocab_size=60, eod=3)
    found = only(place)
    assert (found.key, found.expected) == (f"{CONFIG}.eod", "3")
    assert problems(place, train_dataset__data_loader__config__eod=3) == []
    (place / "manifest.json").write_text("{" + (place / "manifest.json").read_text()[3:])
    assert "manifest.json: cannot be read" in only(place).found


@pytest.mark.parametrize(
    "key", ["load_checkpoint", "output_dir", "resume_training", "pretrained_model_dir"]
)
def test_names_that_no_file_can_have(place: Path, key: str) -> None:
    (place / "loop").symlink_to(place / "loop")
    for name in ("x" * 300, str(place / "loop")):
        assert only(place, **{key: name}).key == key


def test_the_tokenizer_that_the_sample_needs(place: Path) -> None:
    sample = {"telechat_moe__sample": "{prompts: [a]}"}
    assert only(place, **sample).key == "telechat_moe.sample"
    (place / "tokenizer.json").write_text("{}")
    assert "not a tokenizer.json" in only(place, **sample).found


def test_a_checkpoint_of_another_model(place: Path) -> None:
    step = place / "old/checkpoints/step-00000006"
    wider = {"model__model_config__moe_intermediate_size": 24}
    wider["model__model_config__moe_shared_expert_intermediate_size"] = 24
    found = only(place, load_checkpoint=step, **wider)
    assert found.key == "load_checkpoint"
    assert "layers.1.moe.experts.down is [8, 16, 32] instead of [8, 24, 32]" in found.found
    keys = {p.key for p in problems(place, load_checkpoint=step, resume_training=True, **wider)}
    section = "model.model_config."
    assert {f"{section}moe_intermediate_size"} <= keys
    assert all(key.startswith(section) for key in keys)


def test_a_damaged_checkpoint(place: Path) -> None:
    step = place / "old/checkpoints/step-00000006"
    file = next(step.glob("*.safetensors"))
    content = file.read_bytes()
    for damage in (content[:-4], None):
        file.unlink()
        if damage:
            file.write_bytes(damage)
        for resume in (False, True, "step-00000006"):
            folder = step.parent if isinstance(resume, str) else step
            found = only(place, load_checkpoint=folder, resume_training=resume)
            assert file.name in found.found
    file.write_bytes(content)
    text = (step / "checkpoint.json").read_text()
    (step / "checkpoint.json").write_text(text.replace('"step"', '"steq"', 1))
    assert "checkpoint.json" in only(place, load_checkpoint=step).found


def test_other_data_need_a_word(place: Path) -> None:
    changes: dict[str, object] = {
        "load_checkpoint": place / "old/checkpoints",
        "resume_training": True,
        "train_dataset__data_loader__config__seed": 7,
    }
    found = only(place, **changes)
    assert "other training data" in found.found
    assert "resume_data: new" in found.expected
    changes["telechat_moe__resume_data"] = "new"
    ready, _ = preflight.examine(recipe(place, place / "run", **changes))
    assert ready is not None
    assert ready.loader.next_sample == 0
    same = preflight.require(
        recipe(place, place / "run", **changes | {"train_dataset__data_loader__config__seed": 1234})
    )
    assert same.loader.next_sample == 24
    found = only(place, telechat_moe__resume_data="new")
    assert found.key == "telechat_moe.resume_data"


def test_data_that_are_fewer_than_the_recipe_asks_for(place: Path) -> None:
    """Sources without weights are read once; more samples would be those of another epoch."""
    paths = f"['{place}/train', '{place}/valid']"
    changes = {"train_dataset__data_loader__config__data_path": paths}
    found = only(place, **changes, train_dataset__data_loader__sizes="[1000,0,0]")
    assert "sizes asks for 1000" in found.found
    most = int(found.expected.split()[2])
    ready, _ = preflight.examine(
        recipe(place, place / "run", **changes, train_dataset__data_loader__sizes=f"[{most},0,0]")
    )
    assert ready is not None


def test_counts_of_steps_that_fit_the_batch_in_part_only(place: Path) -> None:
    """`check` says what is to be set, as `train` does."""
    state = json.loads((place / "old/checkpoints/step-00000006/checkpoint.json").read_bytes())[
        "state"
    ]
    training = {"global_batch": 4, "lr_schedule": {"warmup_steps": 2}}
    tensors = {"model": {"w": np.zeros(1, np.float32)}}
    more = {"training": training, "updates": 6}
    checkpoint.save(place / "next/checkpoints", 6, tensors, state | more)
    changes = {
        "runner_config__batch_size": 2,
        "model__model_config__batch_size": 2,
        "lr_schedule__decay_steps": 5,
        "load_checkpoint": place / "next/checkpoints",
        "resume_training": True,
    }
    found = only(place, **changes)
    assert found.key == "lr_schedule.warmup_steps"
    assert found.expected.startswith("4 steps of the batch now are the same 8 samples")


def test_a_run_with_all_its_steps_cannot_go_on_elsewhere(place: Path) -> None:
    changes = {"load_checkpoint": place / "old/checkpoints", "resume_training": True}
    found = only(
        place,
        **changes,
        train_dataset__data_loader__sizes="[24,0,0]",
        telechat_moe__resume_data="new",
    )
    assert "has done 6 steps" in found.found


def test_an_earlier_run_is_a_problem_of_check_and_a_usage_error_of_train(place: Path) -> None:
    r = recipe(place, place / "old")
    _, (found,) = preflight.examine(r)
    assert (found.key, "--resume" in found.expected) == ("output_dir", True)
    with pytest.raises(UsageError, match="--overwrite"):
        preflight.require(r)
    assert preflight.require(r, overwrite=True).start.kind == "random"
    assert preflight.require(r, resume=True).loader.next_sample == 24


def test_a_device_that_is_absent(place: Path) -> None:
    if list(Path("/dev").glob("davinci[0-9]*")):
        pytest.skip("this machine has an NPU")
    found = only(place, context__device_target="Ascend")
    assert "this machine has none" in found.found


@pytest.mark.skipif(
    not cann_lines(), reason="MindSpore, which names the lines of CANN, is not installed"
)
def test_a_cann_that_does_not_fit(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the device that is absent here."""
    info = tmp_path / "compiler" / "version.info"
    info.parent.mkdir()
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    for version, count in (("7.7.0", 1), (f"{cann_lines()[-1]}.0", 0)):
        info.write_text(f"Version={version}\n")
        listed = problems(place, context__device_target="Ascend")
        lines = [p.found for p in listed if "runs with CANN" in p.found]
        assert len(lines) == count
        assert all(f"found {version} in {tmp_path}" in line for line in lines)


def test_require_says_what_examine_found(place: Path) -> None:
    r = recipe(place, place / "run", load_checkpoint=place / "x", context__device_target="GPU")
    with pytest.raises(RecipeError) as error:
        preflight.require(r)
    assert sorted(map(str, error.value.problems)) == sorted(map(str, preflight.examine(r)[1]))


def test_it_does_not_need_mindspore() -> None:
    code = "import sys; import telechat_moe.train.preflight, telechat_moe.interop.hf; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.mindformers
def test_mindformers_loader_needs_pybind11_of_the_first_python3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `make` itself decides, in MindFormers' folder without a compiled helper."""
    pytest.importorskip("mindformers", reason="mindformers is not installed")
    import mindformers

    below = "dataset/blended_datasets"
    source, copy = Path(mindformers.__file__).parent / below, tmp_path / "mindformers" / below
    copy.mkdir(parents=True)
    for name in ("Makefile", "helpers.cpp"):
        shutil.copy(source / name, copy)
    (tmp_path / "mindformers/__init__.py").touch()
    other = tmp_path / "bin/python3"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without installed packages
    other.chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mindformers")
    path = os.environ["PATH"]
    r = load("telechat3_moe/pretrain_tiny.yaml")

    def refusals(*folders: Path) -> list[Problem]:
        monkeypatch.setenv("PATH", os.pathsep.join([*map(str, folders), path]))
        return preflight.machine(r)

    (problem,) = refusals(other.parent)
    assert problem.key == "train_dataset.data_loader.type"
    assert f"first python3 in PATH; {other} has none" in problem.found
    assert f"{Path(sys.executable).parent} first in PATH" in problem.expected
    make = ["make", "-C", str(copy)]
    assert subprocess.run(make, capture_output=True, check=False).returncode != 0
    assert refusals(Path(sys.executable).parent, other.parent) == []
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    (problem,) = preflight.machine(r)
    assert "PATH has no make" in problem.found
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{path}")
    subprocess.run(make, capture_output=True, check=True)
    assert refusals(other.parent) == []  # it is compiled
