"""`plan layout` with settings that lead nowhere: what it says, and its exit code."""

import json
from pathlib import Path

import pytest

from telechat_moe.cli import main

TINY, LARGE = "telechat3_moe/pretrain_tiny.yaml", "telechat3_moe/pretrain_105b_a4b_4k.yaml"
NOWHERE = "/no/such/folder/out.yaml"


@pytest.mark.parametrize(
    ("recipe", "options", "code", "said"),
    [
        (TINY, "--devices 0", 2, "--devices 0"),
        (
            TINY,
            "--devices 4 --set model.model_config.attention_dropout=0.1",
            3,
            "dropout: 0.1, a set",
        ),
        (TINY, "--devices 4 --top 0", 2, "--top 0"),
        (TINY, "--devices 4 --pick 0", 2, "--pick 0"),
        (TINY, "--devices 4 --pick 999 --out out.yaml", 2, "layouts were found"),
        (TINY, "--devices 4 --limit 0", 2, "--limit 0"),
        (TINY, "--devices 4 --limit nan", 2, "--limit nan"),
        (TINY, "--devices 4 --global-batch 0", 2, "--global-batch 0: expected at least 1"),
        (TINY, "--devices 4 --global-batch 3", 0, "3 sequences a step"),
        (TINY, "--devices 4 --memory 55", 2, "expected a size such as 55GB"),
        (TINY, "--devices 4 --device abacus", 3, "no such description; there are a100"),
        (TINY, "--devices 4 --fix tp=3", 2, "no layout has this tp; it can be 1, 2, 4"),
        (TINY, "--devices 4 --fix tp=two", 2, "expected a number"),
        (TINY, "--devices 4 --fix tq=2", 2, "with a name of dp, tp"),
        (TINY, "--devices 4 --fix tp=2 --fix tp=4", 2, "tp is fixed twice"),
        (
            TINY,
            "--devices 4 --fix pp=1 --fix vpp=2",
            2,
            "each of pp, vpp can be so, but not together",
        ),
        (
            TINY,
            "--devices 4 --fix recompute=swap",
            2,
            "norm+activation (more with --beyond-recipes)",
        ),
        (
            TINY,
            "--devices 4 --beyond-recipes --fix ends=mtp-before --out out.yaml",
            3,
            "MTP before",
        ),
        (TINY, f"--devices 4 --out {NOWHERE}", 2, "its folder does not exist"),
        (TINY, "--devices 4 --html .", 2, "cannot be written"),
        (TINY, "--devices 4 --json .", 2, "cannot be written"),
        (TINY, "--devices 1013", 2, "no layout has 1013 devices and 4 sequences a step"),
        (LARGE, "--devices 7", 1, "the nearest lacks at least"),
        (LARGE, "--devices 4 --memory 60GiB --limit 1e-9", 1, "the nearest lacks at least"),
        (
            LARGE,
            "--devices 64 --limit 1e-9",
            4,
            "time limit was reached before any layout was placed",
        ),
        ("nothing.yaml", "--devices 4", 3, "not found"),
        ("list.yaml", "--devices 4", 3, "a recipe is a YAML map"),
        ("empty.yaml", "--devices 4", 3, "model.model_config: is missing"),
        (TINY, "--devices 4 --set model.model_config.tie_word_embeddings=True", 0, "pp1"),
        (TINY, "--devices 4 --set model.model_config.first_k_dense_replace=4", 0, "optimal"),
    ],
)
def test_what_is_said(
    recipe: str, options: str, code: int, said: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("- 1\n")
    Path("empty.yaml").write_text("model: {}\n")
    assert main(["plan", "layout", recipe, "--draws", "0", *options.split()]) == code
    out, err = capsys.readouterr()
    if said == "pp1":  # tied embeddings stand on one stage
        assert " pp" not in out
        return
    assert said in (err if code in (2, 3) else out)
    assert "Traceback" not in err


def test_what_was_found_is_printed_where_a_recipe_cannot_say_it(capsys) -> None:
    words = "--devices 4 --beyond-recipes --fix ends=mtp-before --top 1 --out out.yaml"
    assert main(["plan", "layout", TINY, "--draws", "0", *words.split()]) == 3
    out, err = capsys.readouterr()
    assert "m|L'" in out
    assert "MindSpeed: layout" in out
    assert "recipes cannot place MTP before its head" in err


@pytest.mark.parametrize(("memory", "more"), [("16GiB", True), ("24GiB", False)])
def test_a_plan_that_needs_more_when_it_is_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], memory: str, more: bool
) -> None:
    fixed = ("tp=2", "cp=4", "pp=4", "vpp=3", "ep=64", "sp=true", "zero=1", "recompute=full")
    words = [a for f in fixed for a in ("--fix", f)]
    out = str(tmp_path / "planned.yaml")
    words += ["--memory", memory, "--limit", "4", "--top", "1", "--out", out]
    assert main(["plan", "layout", LARGE, "--devices", "256", "--draws", "0", *words]) in (0, 4)
    said = capsys.readouterr().out
    assert ("run operation by operation, layout 1 of the table needs more" in said) == more
    main(["plan", "simulate", out, "--device", "ascend-910b", "--json", "-"])
    stages = json.loads(capsys.readouterr().out)["stages"]
    peak = max(stage["peak_bytes"] for stage in stages)
    assert (peak > float(memory.removesuffix("GiB")) * 2**30) == more
