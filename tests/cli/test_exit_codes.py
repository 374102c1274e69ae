"""One kind of mistake has one exit code in every verb: 2 for what the command line asks, 3 for what a file holds."""

from pathlib import Path

import numpy as np
import pytest
from test_random_lines import LEAVES

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main

Capture = pytest.CaptureFixture[str]
TINY = "telechat3_moe/pretrain_tiny.yaml"
NEEDED = {
    "run-sharded": ["--processes", "2"],
    "cp": ["copy.yaml"],
    "plan": ["--device", "ascend-910b"],
    "plan layout": ["--device", "ascend-910b", "--devices", "8"],
    "align phases": ["--out", "new"],
}
"""What a verb demands beside its recipe."""
OF_RECIPES = [words for words, verb in LEAVES if verb.recipe]


@pytest.mark.parametrize("words", OF_RECIPES, ids=" ".join)
@pytest.mark.parametrize("text", [None, "- 1\n", "seed: [\n", "sead: 1\n"], ids=repr)
def test_a_recipe_that_is_absent_or_broken_is_bad_input(
    words: tuple[str, ...],
    text: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("mine.yaml").write_text(text)
    code = main([*words, "mine.yaml", *NEEDED.get(" ".join(words), NEEDED.get(words[0], []))])
    output = capsys.readouterr()
    if words == ("cp",) and text is not None:
        assert code == 0  # copies any file
        return
    assert code == 3, output.err
    assert "mine.yaml" in output.err
    assert len(output.err.splitlines()) < 40


@pytest.mark.parametrize(
    "line",
    [
        f"layouts {TINY} --rank 1",
        f"layouts {TINY} --rank -1",
        f"dryrun {TINY} --rank 1",
        f"dryrun {TINY} --check-rank 1",
        f"dryrun {TINY} --check-rank 0",
        f"dryrun {TINY} --target CPU --mindformers",
        f"launch {TINY} --restart -1",
        f"align capture {TINY} --steps x --out new",
        f"align capture {TINY} --layers x --out new",
        f"cp {TINY} there",
        f"align capture {TINY} --out there",
        f"ckpt reshard run/step-00000001 there --recipe {TINY}",
        "ckpt merge run/step-00000001 run",
        "ckpt average run/step-00000001 --out there",
        "ckpt average run/step-00000001 --out new --weights 1 2",
        f"ckpt to-mindformers run/step-00000001 there --recipe {TINY}",
        f"convert run/step-00000001 there --recipe {TINY} --to hf",
        "ckpt show --json=~/report run/step-00000001",
        "ckpt merge run/step-00000001 ~/merged",
    ],
)
def test_what_the_command_line_asks_is_usage(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(Path("run"), 1, {"model": {"x": np.ones(2, np.float32)}}, {})
    Path("there").mkdir()
    Path("there/pretrain_tiny.yaml").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(line.split()) == 2, capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "ckpt show run",
            "run is a folder of 1 checkpoint(s); name one, such as run/step-00000001",
        ),
        ("ckpt merge run new", "run is a folder of 1 checkpoint(s)"),
        (f"ckpt reshard run new --recipe {TINY}", "run is a folder of 1 checkpoint(s)"),
        ("ckpt show nothing", "there is no folder nothing"),
    ],
)
def test_what_is_read_is_bad_input(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(Path("run"), 1, {"model": {"x": np.ones(2, np.float32)}}, {})
    assert main(line.split()) == 3
    assert message in capsys.readouterr().err


def test_an_error_of_this_program_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("what nobody\nforesaw")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("telechat_moe.tools.align.dump.summary.read", fail)
    for words in (["align", "a", "b"], ["align", "bisect", "a"], ["align", "inspect", "a"]):
        for name in ("a", "b"):
            Path(name).mkdir(exist_ok=True)
        assert main(words) == 5
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert "KeyError" in error
        assert f"send {tmp_path}/telechat-moe-error.txt" in error
        text = Path("telechat-moe-error.txt").read_text()
        assert f"telechat-moe {' '.join(words)}" in text
        assert "test_exit_codes.py" in text


def test_an_error_is_told_where_no_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("telechat_moe.cli.command.build_parser", lambda: 1 / 0)
    Path("telechat-moe-error.txt").mkdir()
    assert main(["ls"]) == 5
    *above, last = capsys.readouterr().err.splitlines()
    assert "send the lines above" in last
    assert any("ZeroDivisionError" in line for line in above)
