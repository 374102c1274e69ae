"""`telechat-moe ls`, `show`, `check`, `cp`, through main and as a process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from yaml_edit import RECIPES, recipe_text

from telechat_moe import __version__
from telechat_moe.cli import COMMAND, main
from telechat_moe.cli.recipes import describe
from telechat_moe.cli.verb import Verb
from telechat_moe.recipe import load, loads

TINY = "telechat3_moe/pretrain_tiny.yaml"
LARGE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
NAMES = sorted(p.relative_to(RECIPES).as_posix() for p in RECIPES.glob("*/*.yaml"))
DRYRUN = ("--for", "dryrun")
Capture = pytest.CaptureFixture[str]


def run_json(capsys: Capture, *args: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = main([*args, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_version_and_usage(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"telechat-moe {__version__}\n"
    assert main([]) == 2
    assert main(["fly"]) == 2
    assert main(["check"]) == 2
    assert "usage" in capsys.readouterr().err


def verbs(verb: Verb = COMMAND, *above: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every verb and sub-verb."""
    for inner in verb.subverbs:
        yield (*above, inner.name)
        yield from verbs(inner, *above, inner.name)


@pytest.mark.parametrize("words", list(verbs()), ids=" ".join)
def test_help_ends_with_example_and_exit_codes(words: tuple[str, ...], capsys: Capture) -> None:
    assert main([*words, "--help"]) == 0
    text = capsys.readouterr().out
    example, codes = text.split("\nexample:\n  ")[-1].split("\nexit codes: 0 ")
    codes = codes.replace("\n", " ")
    assert "telechat-moe" in example or "msrun" in example
    assert "; 2 " in codes
    assert "; 3 " in codes
    assert ("--json FILE" in text) == ("VERB ..." not in text)


@pytest.mark.parametrize("words", list(verbs()), ids=" ".join)
def test_a_help_text_is_short_and_has_at_most_two_examples(words: tuple[str, ...]) -> None:
    """Details belong into docs; tables, such as the columns of a file, do not count."""
    verb = COMMAND
    for word in words:
        (verb,) = [inner for inner in verb.subverbs if inner.name == word]
    notes = verb.notes if isinstance(verb.notes, str) else verb.notes()
    prose = [text for text in notes.split("\n\n") if "\n " not in text]
    assert sum(len(textwrap.wrap(text, 110)) for text in prose) <= 10
    assert len(verb.examples.replace("\\\n", "").strip().splitlines()) <= 2


def test_ls_lists_every_file(capsys: Capture) -> None:
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == NAMES
    (large,) = [line for line in lines if LARGE in line]
    assert "102.3B" in large
    assert "4.68B" in large
    assert "256" in large


def test_ls_json(capsys: Capture) -> None:
    code, report = run_json(capsys, "ls")
    assert code == 0
    assert [e["name"] for e in report["recipes"]] == NAMES
    for entry in report["recipes"]:
        assert set(entry) == {
            "name", "model_type", "total", "total_without_mtp", "active", "active_without_mtp",
            "devices", "description",
        }  # fmt: skip
        assert entry["description"]


def test_description_is_the_first_sentence() -> None:
    text = "# schema\n#\n# What:   a small\n#         model: really. And more.\n# Devices: 2\n"
    assert describe(text) == "a small model"
    assert describe("seed: 1\n") == ""


def test_show_is_yaml_that_loads_to_the_same(capsys: Capture) -> None:
    assert main(["show", TINY, "--set", "seed=9"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["seed"] == 9
    reloaded = loads(text)
    assert reloaded.model_config == load(TINY).model_config
    assert reloaded.seed == 9


def test_show_105b(capsys: Capture) -> None:
    assert main(["show", LARGE, "--devices", "256"]) == 0
    text = capsys.readouterr().out
    assert "# parameters:      102.3B without MTP, 104.6B with" in text
    assert "# active:          4.68B without MTP" in text
    assert "# devices:         256" in text
    assert "FLOPs per token" in text
    code, report = run_json(capsys, "show", LARGE)
    assert code == 0
    counts = report["parameters"]
    assert round(counts["total_without_mtp"] / 1e9, 1) == 102.3
    assert round(counts["total"] / 1e9, 1) == 104.6
    assert sum(part["total"] for part in counts["parts"]) == counts["total"]
    assert report["recipe"] == load(LARGE).to_dict()
    flops = report["flops_per_token"]
    assert flops["training"] == 3 * flops["forward"]
    assert "causal" in flops["convention"]
    assert report["state_bytes"]["total"] == 16 * counts["total"]
    assert (report["devices"], report["global_batch"], report["train_steps"]) == (256, 32, 250)


def test_show_of_a_model_type_that_is_only_checked(tmp_path: Path, capsys: Capture) -> None:
    text = recipe_text(TINY).replace('"telechat3_moe"\n    arch', '"qwen3_moe"\n    arch')
    path = tmp_path / "other.yaml"
    path.write_text(text, encoding="utf-8")
    assert main(["show", str(path)]) == 0
    assert "not counted for model type qwen3_moe" in capsys.readouterr().out
    assert run_json(capsys, "show", str(path))[1]["parameters"] is None


def test_show_refuses_a_broken_recipe(capsys: Capture) -> None:
    assert main(["show", TINY, "--set", "optimizer.eps=1e-8"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: --set optimizer.eps=1e-8: optimizer.eps: ")
    assert "Traceback" not in captured.err


def test_check_exit_codes_and_all_problems(tmp_path: Path, capsys: Capture) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(
        recipe_text(TINY).replace("eps: 1.e-8", "eps: 1e-8").replace("seed: 42", "sead: 42"),
        encoding="utf-8",
    )
    assert main(["check", TINY, LARGE, *DRYRUN]) == 0
    assert capsys.readouterr().out == f"{TINY}: ok for dryrun\n{LARGE}: ok for dryrun\n"
    assert main(["check", TINY, str(broken), *DRYRUN]) == 1
    out = capsys.readouterr().out
    assert f"{TINY}: ok" in out
    assert f"{broken}:" in out
    assert "sead" in out
    assert "optimizer.eps" in out
    assert "problems: 2, in 1 of 2 recipes" in out
    assert main(["check", str(tmp_path / "absent.yaml"), str(broken)]) == 3
    assert f"{tmp_path}/absent.yaml: not found; expected" in capsys.readouterr().out
    assert main(["check", LARGE, "--devices", "128"]) == 1
    assert "128 devices" in capsys.readouterr().out


def test_check_for_training_looks_at_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", TINY]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"pretrain_tiny\.yaml:\d+: train_dataset\.data_loader\.config\.data_path\.1: .*train\.idx",
        out,
    )
    assert "data build" in out
    assert "telechat_moe.evaluation.data_path.1" in out


def test_check_for_training_looks_at_the_schedule(capsys: Capture) -> None:
    changes = {
        "use_parallel": True,
        "parallel.parallel_mode": 1,
        "parallel.full_batch": True,
        "parallel_config.pipeline_stage": 2,
        "parallel_config.micro_batch_num": 4,
        "callbacks.1.micro_batch_num": 4,
    }
    printed: dict[str, str] = {}
    for name in ("zb-h1", "zb-v", "zigzag"):
        changes["telechat_moe.sharding.pipeline_schedule"] = name
        words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        main(["check", TINY, *words])
        printed[name] = capsys.readouterr().out
    assert "pipeline_schedule" not in printed["zb-h1"]
    assert "pipeline_schedule: zb-v: schedule zb-v: 1 chunks a stage; 2" in printed["zb-v"]
    assert "pipeline_schedule: zigzag: no such schedule; one of gpipe" in printed["zigzag"]


def test_check_json(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, report = run_json(capsys, "check", TINY, "--set", "seed=-1")
    assert code == 1
    assert report["problems"] == 3  # the data are not built, either
    (entry,) = report["recipes"]
    assert entry["ok"] is False
    assert set(entry["problems"][0]) == {"file", "line", "key", "found", "expected", "suggestion"}
    target = tmp_path / "report.json"
    assert main(["check", TINY, *DRYRUN, "--json", str(target)]) == 0
    assert json.loads(target.read_text(encoding="utf-8"))["problems"] == 0
    assert main(["check", TINY, "--json", str(tmp_path / "no" / "report.json")]) == 2


def test_cp(tmp_path: Path, capsys: Capture) -> None:
    dest = tmp_path / "mine.yaml"
    assert main(["cp", TINY, str(dest)]) == 0
    assert load(dest).model_config == load(TINY).model_config
    first, rest = dest.read_text(encoding="utf-8").split("\n", 1)
    assert rest == recipe_text(TINY).split("\n", 1)[1]
    assert Path(first.partition("$schema=")[2]).is_file()
    dest.write_text("seed: 1\n", encoding="utf-8")
    assert main(["cp", TINY, str(dest)]) == 2
    assert dest.read_text(encoding="utf-8") == "seed: 1\n"
    assert "--force" in capsys.readouterr().err
    assert main(["cp", TINY, str(dest), "--force"]) == 0
    assert load(dest).seed == 42
    folder = tmp_path / "folder"
    folder.mkdir()
    code, report = run_json(capsys, "cp", TINY, str(folder))
    assert code == 0
    assert report["destination"] == str(folder / "pretrain_tiny.yaml")
    assert main(["cp", TINY, str(tmp_path / "no" / "x.yaml")]) == 2
    assert main(["cp", "nothing", str(tmp_path / "x.yaml")]) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "mine.yaml"]


def test_a_closed_pipe_is_no_error() -> None:
    command = (
        f"{sys.executable} -m telechat_moe.cli show {LARGE} | head -1; echo ${{PIPESTATUS[0]}}"
    )
    process = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert process.stderr == ""
    assert process.stdout.splitlines()[-1] == "0"


@pytest.mark.parametrize(
    "words",
    [("-c", "import telechat_moe.recipe"), ("-m", "telechat_moe.cli", "--help")],
    ids=["recipes", "help"],
)
def test_what_takes_long_to_import_is_not_imported(words: tuple[str, ...]) -> None:
    """Recipes load, and help appears, without what would keep the user waiting."""
    command = [sys.executable, "-X", "importtime", *words]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {line.split("|")[-1].strip() for line in process.stderr.splitlines()}
    assert found & {"telechat_moe.recipe", "telechat_moe.cli.train"}
    heavy = {"mindspore", "mindformers", "torch", "rich", "matplotlib", "scipy", "numpy"}
    assert not found & heavy


def test_an_interval_of_0_turns_evaluation_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)  # where the recipe's data are not built
    off = "telechat_moe.evaluation.interval=0"
    words = ["check", TINY, "--for", "train"]
    for more, named in ([], True), (["--set", off], False):
        assert main([*words, *more]) == 1
        printed = capsys.readouterr().out
        assert "data_loader.config.data_path" in printed
        assert ("evaluation" in printed) == named
    alone = tmp_path / "alone.yaml"
    text = recipe_text(TINY)
    assert "    interval: 100" in text
    alone.write_text(text.replace("    interval: 100", "    #"), encoding="utf-8")
    assert main(["check", str(alone), "--for", "train"]) == 1
    assert "evaluation.batches: 16 without an interval" in capsys.readouterr().out


def test_a_key_that_must_be_written_is_not_to_be_removed(capsys: Capture) -> None:
    assert main(["check", TINY, "--set", "run_mode=predict"]) == 1
    assert "does not have; train\n" in capsys.readouterr().out


def test_a_recipe_that_a_device_cannot_hold_is_refused_with_figures(capsys: Capture) -> None:
    """`plan memory` puts the fullest stage of 105B at 31.83 GiB (docs/plan_memory.md)."""
    check = ("check", LARGE, "--for", "mindformers", "--set")
    assert run_json(capsys, *check, "context.max_device_memory=32GB")[0] == 0
    code, report = run_json(capsys, *check, "context.max_device_memory=31GB")
    assert code == 1
    (problem,) = report["recipes"][0]["problems"]
    assert problem["key"] == "context.max_device_memory"
    assert problem["found"].startswith("31GB, but a step takes 31.83 GiB on a device of stage 7")
    assert "plan memory" in problem["expected"]
