"""The accuracy that benchmarks/plan_published/README.md states is what the benchmark computes."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.plan_published.__main__ import main as score_published

ROOT = Path(__file__).parents[2]


def test_errors_of_the_accuracy_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "benchmarks" / "plan_published" / "README.md").read_text(encoding="utf-8")
    out = tmp_path / "score.json"
    assert score_published(["--json", str(out)]) == 0
    errors = json.loads(out.read_text())["overall"]
    printed = re.search(r"the error of all rows is ([\d.]+) %, and ([\d.]+) % in the median", page)
    assert printed, "the page does not say the error of all rows"
    assert f"| **{errors['rows']:,}** |" in page
    assert [f"{x}%" for x in printed.groups()] == [
        f"{errors['mape']:.1%}",
        f"{errors['median']:.1%}",
    ]
