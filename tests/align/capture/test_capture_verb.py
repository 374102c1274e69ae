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


def environment(folder: Path, *lines: str) -> str:
    """Make an environment whose Python does what lines of a shell say."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    python.chmod(0o755)
    return str(folder)


def test_mindtorch_wants_an_environment_and_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script, words = tmp_path / "train.py", ["align", "capture", "--out", str(tmp_path / "dump")]
    there = environment(tmp_path / "there")
    assert main([*words, "--mindtorch", there, "mine.yaml"]) == 2
    assert main([*words, "--mindtorch", there, "--torch", str(script)]) == 3
    script.write_text("")
    assert main([*words, "--mindtorch", str(tmp_path / "none"), "--torch", str(script)]) == 2
    errors = capsys.readouterr().err
    assert "--mindtorch is for --torch SCRIPT" in errors
    assert "there is no such file" in errors
    assert f"sh benchmarks/peers/mindtorch.sh {tmp_path / 'none'}" in errors
    assert main([*words, "--mindtorch", there, "--torch"]) == 2


def test_a_script_that_fails_on_mindspore_ends_with_3_and_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fails = environment(tmp_path / "fails", "seq 20 | sed 's/^/line /' >&2", "exit 7")
    script, words = tmp_path / "train.py", ["align", "capture", "--out", str(tmp_path / "dump")]
    script.write_text("")
    assert main([*words, "--torch", str(script), "--mindtorch", fails]) == 3
    error = capsys.readouterr().err
    assert f"{script}: exit code 7 with mindtorch" in error
    assert "line 9\n" in error
    assert "line 20" in error
    assert "line 8\n" not in error


def test_the_recorder_begins_in_an_environment_without_this_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """There is no mindtorch here, so the recorder's import of it is the first that fails."""
    pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
    alone = environment(tmp_path / "alone", f'exec {sys.executable} "$@"')
    script, out = tmp_path / "train.py", tmp_path / "dump"
    script.write_text("")
    words = ["align", "capture", "--torch", str(script), "--out", str(out), "--json", "-"]
    assert main([*words, "--mindtorch", alone]) == 3
    assert "No module named 'mindtorch'" in capsys.readouterr().err
    assert not out.exists()
