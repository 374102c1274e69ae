"""The accuracy that docs/plan_accuracy.md states is what the benchmark computes."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.plan_published.__main__ import main as score_published

ROOT = Path(__file__).parents[2]


def test_errors_of_the_accuracy_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "plan_accuracy.md").read_text(encoding="utf-8")
    out = tmp_path / "score.json"
    assert score_published(["--json", str(out)]) == 0
    found = json.loads(out.read_text())["overall"]
    row = re.search(r"^\| \*\*all\*\* .*$", page, re.M)
    assert row, "the page has no row of all tables"
    cells = [cell.strip(" *") for cell in row[0].strip("|").split("|")]
    frozen = [f"{found['mape']:.1%}", f"{found['median']:.1%}"]
    assert cells[1] == f"{found['rows']:,}"
    assert [cell.replace(" %", "%") for cell in cells[-2:]] == frozen
