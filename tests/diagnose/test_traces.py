"""Traces of profilers, against a count of microseconds one by one, and against the headers that MindSpore's profiler writes.

`fixtures/kineto_rank*.json.gz` are the steps and device events (name, ts and dur only) of tests/data/trace_filter/sampled_rank-*.json.gz in
facebookresearch/HolisticTraceAnalysis, a trace of 128 ranks. MIT License, Copyright (c) Meta Platforms, Inc. and affiliates.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from microseconds import step_parts

from telechat_moe.cli import main
from telechat_moe.tools.diagnose import chrome, traces

Capture = pytest.CaptureFixture[str]
FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("kineto_rank*.json.gz"))


def event(name: str, begin: float, lasts: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": lasts}


def one_by_one(events: list[dict[str, Any]], begin: int, end: int) -> dict[str, float]:
    """Return the parts of a step, microsecond by microsecond."""
    computes, moves, reads = (np.zeros(end - begin, bool) for _ in range(3))
    for e in events:
        low = max(int(e["ts"]) - begin, 0)
        high = max(int(e["ts"]) + int(e["dur"]) - begin, 0)
        if e["cat"] not in chrome.DEVICE:
            if "DataLoader" in e["name"]:
                reads[low:high] = True
        elif any(word in e["name"].lower() for word in ("nccl", "hccl")):
            moves[low:high] = True
        else:
            computes[low:high] = True
    return step_parts(computes, moves, reads)


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.name)
def test_parts_of_a_public_trace_are_those_of_its_microseconds(path: Path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    records = traces.read_traces([path])
    assert records.ranks.tolist() == [int(path.name[11])]
    assert records.steps.tolist() == [551, 552]
    for at, step in enumerate(records.steps.tolist()):
        (mark,) = [e for e in events if e["name"] == f"ProfilerStep#{step}"]
        begin, lasts = int(mark["ts"]), int(mark["dur"])
        for name, seconds in one_by_one(events, begin, begin + lasts).items():
            assert records.columns[name][0, at] == pytest.approx(seconds, rel=1e-5, abs=1e-7), name


SPANS = st.tuples(st.integers(-20, 120), st.integers(0, 40))


@settings(deadline=None)
@given(
    st.lists(SPANS, min_size=1, max_size=8),
    st.lists(SPANS, max_size=5),
    st.lists(SPANS, max_size=4),
)
def test_parts_of_any_step_are_those_of_its_microseconds(
    tmp_path_factory: pytest.TempPathFactory, works: list[Any], moves: list[Any], reads: list[Any]
):
    events = [event("ProfilerStep#3", 0, 100, "user_annotation")]
    events += [event("gemm", 50, 1), *(event("gemm", *span) for span in works)]
    events += [event("ncclDevKernel_AllReduce", *span) for span in moves]
    events += [event("enumerate(DataLoader)", *span, cat="user_annotation") for span in reads]
    path = tmp_path_factory.mktemp("trace") / "rank7.json"
    path.write_text(json.dumps(events))
    records = traces.read_traces([path])
    assert (records.ranks.tolist(), records.steps.tolist()) == ([7], [3])
    for name, seconds in one_by_one(events[1:], 0, 100).items():
        assert records.columns[name][0, 0] == pytest.approx(seconds, rel=1e-5, abs=1e-9), name


def test_two_steps_are_said_to_be_too_few_to_compare_ranks(capsys: Capture):
    assert main(["diagnose", *map(str, FIXTURES)]) == 4
    out = capsys.readouterr().out
    assert out.startswith("nothing stands out in 2 steps of 2 ranks: a step takes ")
    assert "not judged: ranks: 2 steps; ranks are compared from 8 steps on" in out


HEADS = "Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble"


def test_the_table_of_an_ascend_profiler_names_the_slow_rank(tmp_path: Path, capsys: Capture):
    rng = np.random.default_rng(0)
    for rank in range(6):
        output = tmp_path / f"node_{rank}_ascend_ms" / "ASCEND_PROFILER_OUTPUT"
        output.mkdir(parents=True)
        (output.parent / f"profiler_info_{rank}.json").write_text("{}")
        rows = [f"Device_id,{HEADS}"]
        for step in range(1, 25):
            computing = (90_000 if rank == 4 else 80_000) * (1 + 0.005 * rng.standard_normal())
            waits = 100_000 - computing
            rows.append(f"{rank % 2},{step},{computing:.3f},{waits:.3f},0,{waits:.3f},500.0,0,0")
        (output / "step_trace_time.csv").write_text("\n".join(rows) + "\n")
    assert main(["diagnose", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("rank 4 computes more slowly than its peers")
    assert "or computes at a lower clock" in out  # a table has no clock


def test_the_table_of_a_cluster_has_all_ranks(tmp_path: Path):
    path = tmp_path / "cluster_step_trace_time.csv"
    rows = [f"{step},rank,{rank},{100 * rank},20,0,20,5,0,0" for rank in (0, 11) for step in (1, 2)]
    path.write_text(
        "\n".join(
            [HEADS.replace("Step,", "Step,Type,Index,"), *rows, '1,stage,"(0, 11)",9,9,9,9,9,9,9']
        )
        + "\n"
    )
    records = traces.read_traces([path])
    assert records.ranks.tolist() == [0, 11]
    np.testing.assert_allclose(records.columns["compute"], [[0, 0], [1.1e-3, 1.1e-3]], rtol=1e-6)
    np.testing.assert_allclose(records.columns["host"], 5e-6, rtol=1e-6)


@pytest.mark.mindspore
def test_the_columns_are_those_that_mindspore_writes():
    module = pytest.importorskip("mindspore.profiler.analysis.viewer.ascend_step_trace_time_viewer")
    written = {header.value for header in module.StepTraceTimeHeaders}
    assert {"Step", "Computing", "Communication(Not Overlapped)", "Free"} <= written
    assert module.AscendStepTraceTimeViewer.STEP_TRACE_TIME_FILE_NAME in traces.TABLES


STEP = event("ProfilerStep#1", 0, 100, "user_annotation")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"", "is no JSON"),
        ("a.json", b'{"traceEvents": [{"ph": "X"', "a trace that was cut off cannot be read"),
        ("a.json.gz", gzip.compress(b"{}" * 999, mtime=0)[:30], "cannot read the trace"),
        ("a.json", b'{"events": []}', "no list traceEvents"),
        ("a.json", b'[{"bs": 32}]', "no list traceEvents"),
        ("a.json", b'{"traceEvents": []}', "nothing runs on a device"),
        ("a.json", json.dumps([STEP]).encode(), "nothing runs on a device"),
        ("a.json", json.dumps([STEP, event("k", "x", 1)]).encode(), "has ts 'x' and dur 1; expected microseconds"),  # type: ignore[arg-type]
        ("a.csv", b"", "no column 'Step'"),
        ("a.csv", b"Step,Computing\n1,2\n", "no column 'Communication(Not Overlapped)'"),
        ("a.csv", HEADS.encode() + b"\n1,x,0,0,0,0,0,0\n", "a.csv:2: Computing is 'x'"),
        ("a.csv", HEADS.encode() + b"\n1,-1,0,0,0,0,0,0\n", "expected a number of 0 or more"),
        ("a.csv", HEADS.encode() + b"\n1\n", "a.csv:2: Computing is None"),
        ("a.csv", b"\xff\xfe", "cannot read the table"),
    ],
)  # fmt: skip
def test_bad_traces_are_said_in_one_sentence(
    tmp_path: Path, capsys: Capture, name: str, content: bytes, said: str
):
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["diagnose", str(path)]) == 3
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_two_traces_of_one_rank_are_refused(tmp_path: Path, capsys: Capture):
    copy = tmp_path / "copy.json.gz"
    copy.write_bytes(FIXTURES[0].read_bytes())
    assert main(["diagnose", str(FIXTURES[0]), str(copy)]) == 3
    assert "rank 0 is in another trace, too" in capsys.readouterr().err
