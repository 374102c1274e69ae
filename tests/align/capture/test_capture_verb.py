"""`align capture --torch` around the process that runs the script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from telechat_moe.cli import main


@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("modules", [False, True])
def test_the_script_is_run_and_its_exit_code_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    modules: bool,
):
    script, out = tmp_path / "train.py", tmp_path / "dump"
    script.write_text("")
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command, **_: calls.append(command) or code)
    words = ["align", "capture", "--torch", str(script), "--out", str(out), "--steps", "2-5"]
    words += ["--json", "-", *["--modules"] * modules, "--", "--lr", "0.1"]
    assert main(words) == code
    program = "telechat_moe.tools.align.capture.torch_functions"
    expected = [sys.executable, "-m", program, *["--modules"] * modules]
    assert calls == [[*expected, str(out), "2", "5", str(script), "--lr", "0.1"]]
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "exit_code": code}


def test_a_script_that_is_not_there_or_a_folder_that_is_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(subprocess, "call", lambda command, **_: pytest.fail("started"))
    script, words = tmp_path / "train.py", ["align", "capture", "--torch"]
    assert main([*words, str(script), "--out", str(tmp_path / "dump")]) == 3
    script.write_text("")
    assert main([*words, str(script), "--out", str(tmp_path)]) == 2
    assert main([*words, str(script), "--out", str(tmp_path / "dump"), "--layers", "1"]) == 2
    errors = capsys.readouterr().err
    assert "there is no such file" in errors
    assert "it exists" in errors
