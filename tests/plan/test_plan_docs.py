"""The commands of the planner's pages run as they stand there."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.plan_published.__main__ import main as score_published
from telechat_moe.cli import main

ROOT = Path(__file__).parents[2]
PAGES = (
    "plan",
    "plan_layout",
    "plan_memory",
    "plan_proof",
    "plan_schedules",
    "plan_timeline",
    "long_sequences",
)
ELSEWHERE = ("plan calibrate", "dryrun", "this-machine.yaml", "proof.json", "my_recipe.yaml")
"""What takes minutes, or its output: `tests/plan/test_this_machine.py`, `test_certificate.py` and the tests of the dry run;
`my_recipe.yaml` is what plan.md plans."""


def commands(page: str) -> list[str]:
    """Return the command lines in the code blocks of a page."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = (line.strip() for line in text.splitlines())
    start = ("telechat-moe ", "python -m telechat_moe.tools", "python -m benchmarks.")
    return [re.split(r"\s+#", line)[0] for line in lines if line.startswith(start)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    lines = [line for line in commands(page) if not any(word in line for word in ELSEWHERE)]
    assert lines or page in ("plan_layout", "plan_proof")
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "python":
            assert subprocess.run([sys.executable, *arguments], check=False).returncode == 0, line
            continue
        # 1: a stage does not fit, which is what the page is about
        fits = not ("pangu" in line or page == "plan_memory")
        assert main(arguments) in ((0,) if fits else (0, 1)), line


def test_errors_of_the_accuracy_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "plan_accuracy.md").read_text(encoding="utf-8")
    out = tmp_path / "score.json"
    assert score_published(["--json", str(out)]) == 0
    found = json.loads(out.read_text())["overall"]
    printed = re.search(r"the error of all rows is ([\d.]+) %, and ([\d.]+) % in the median", page)
    assert printed, "the page does not say the error of all rows"
    assert f"| **{found['rows']:,}** |" in page
    assert [f"{x}%" for x in printed.groups()] == [f"{found['mape']:.1%}", f"{found['median']:.1%}"]
