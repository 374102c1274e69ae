"""Predictions of what is published of parts of a step: all-reduces, dispatch bandwidths, kernel lists."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plan_published.__main__ import main
from benchmarks.plan_published.partial_steps import read_partial_steps
from telechat_moe.tools.plan.cost.collectives import all_reduce
from telechat_moe.tools.plan.cost.device import load_device

PUBLISHED = Path(__file__).parent / "data"


def test_an_all_reduce_is_a_ring(tmp_path) -> None:
    file = tmp_path / "ring.csv"
    file.write_text("device,gpus,bytes,time_us\na100,8,1073741824,8400\na100,2,1024,20\n")
    large, small = read_partial_steps(file)
    d = load_device("a100")
    seconds = 2 * 7 / 8 * 2**30 / (d.intra_bandwidth * d.constants.intra_share)
    assert large.predicted == pytest.approx(seconds, rel=0.02)  # the start of the ring besides
    assert large.error == pytest.approx(seconds / 8.4e-3 - 1, abs=0.02)
    # a small one is its start: a reduce-scatter and an all-gather of a ring of two
    assert small.predicted == pytest.approx(2 * 1.5 * d.constants.collective_host_s, rel=0.01)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("a100,8,x,10", "readable numbers"),
        ("a100,8,,10", "readable numbers"),
        ("a100,1,1024,10", "two devices"),
        ("a100,2,0,10", "two devices or more and some bytes"),
        ("tpu,2,1024,10", "device without a description: tpu"),
        ("a100,2,1024,0", "impossible"),
        ("a100,2,1024,nan", "impossible"),
        ("a100,2,1024,-3", "impossible"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(tmp_path, capsys, cells: str, said: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(f"device,gpus,bytes,time_us\n{cells}\na100,4,1048576,40\n")
    bad, good = read_partial_steps(file)
    assert said in bad.reason
    assert bad.predicted is None
    assert good.predicted
    assert main([str(file)]) == 0
    assert said in capsys.readouterr().out


def test_published_parts_are_rows_of_their_own(capsys) -> None:
    names = ("deepseek_v3_dualpipe_kernels.csv", "published_steps.yaml", "vtrain_allreduce_lut.csv")
    assert main(["--json", "-", *(str(PUBLISHED / n) for n in names)]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {(r["table"].split("/")[-1], r["part"]): r for r in result["parts"]["rows"]}
    chunk = rows["deepseek_v3_dualpipe_trace", "chunk, as the host sees it"]
    assert chunk["measured"] == pytest.approx(0.112168)
    assert abs(chunk["error"]) < 0.03
    hidden = rows["deepseek_v3_dualpipe_trace", "communication hidden"]
    assert abs(hidden["predicted"] - 0.963) < 0.01
    tables = result["parts"]["tables"]
    assert tables["vtrain_allreduce_lut"]["of"] == 952
    assert tables["vtrain_allreduce_lut"]["mape"] < 0.10
    # none of them is in the error of step times
    assert not any("kernel" in name or "allreduce" in name for name in result["tables"])
    assert not any(r["table"].endswith(("trace", "bandwidth")) for r in result["rows"])


def test_a_kernel_list_that_is_not_there(tmp_path, capsys) -> None:
    text = "sets:\n- id: deepseek_v3_dualpipe_trace\n  prov: A\n  file: gone.csv\n  summary: {gpu_span_ms: 3}\n"
    (tmp_path / "sets.yaml").write_text(text)
    (part,) = read_partial_steps(tmp_path / "sets.yaml")
    assert "missing: the kernel list" in part.reason
    assert main([str(tmp_path / "sets.yaml")]) == 3
    assert "no row could be scored" in capsys.readouterr().err


def test_an_all_reduce_takes_what_was_measured():
    """Against vtrain_allreduce_lut, whose figures the A100's description holds but is not fitted to row by row."""
    file = PUBLISHED / "vtrain_allreduce_lut.csv"
    with file.open() as stream:
        rows = [r for r in csv.DictReader(stream) if r["device"] == "a100"]
    device = load_device("a100")
    size, members, measured = (
        np.array([float(r[key]) for r in rows]) for key in ("bytes", "gpus", "time_us")
    )
    predicted = all_reduce(size, members, np.ones_like(size), device) * 1e6
    off = np.abs(predicted / measured - 1)
    assert np.median(off) < 0.10
    assert off[size >= 2**28].max() < 0.20
