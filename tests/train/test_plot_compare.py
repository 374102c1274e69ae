"""The picture of several runs."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `train`)")

from telechat_moe.errors import BadInputError
from telechat_moe.train.plot import compare, main


def write(path: Path, losses: list[float]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"event": "evaluation", "step": 0, "loss": 5.0}]
    rows += [{"event": "step", "step": i, "loss": x} for i, x in enumerate(losses, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_runs_over_each_other_and_their_distances(tmp_path: Path) -> None:
    one = write(tmp_path / "one" / "metrics.jsonl", [4.0, 3.0, 2.0])
    two = write(tmp_path / "two" / "metrics.jsonl", [4.0, 3.0003, 1.9999])
    errors = compare({"one": one, "two": two}, tmp_path / "both.png")
    np.testing.assert_allclose(errors["two"], [0, 1e-4, 5e-5], atol=1e-12)
    head = (tmp_path / "both.png").read_bytes()[:24]
    assert struct.unpack(">II", head[16:]) == (1275, 900)
    assert main([str(one), str(two), str(tmp_path / "both.svg")]) == 0
    assert "losses within 1e-04 in 3 steps" in (tmp_path / "both.svg").read_text()


def test_runs_of_other_lengths_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "one" / "metrics.jsonl", [4.0, 3.0, 2.0])
    two = write(tmp_path / "two" / "metrics.jsonl", [4.0, 3.0])
    with pytest.raises(BadInputError, match="3 and 2 steps"):
        compare({"one": one, "two": two}, tmp_path / "both.png")
    assert main([str(one), str(two), str(tmp_path / "both.png")]) == 3
