"""Traces in the forms of Ascend's profilers and of Chrome: files made here, against a count of microseconds one by one."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from microseconds import step_parts

from telechat_moe.cli import main
from telechat_moe.tools.diagnose.chrome import rank_of
from telechat_moe.tools.diagnose.traces import read_traces, traces_of

Capture = pytest.CaptureFixture[str]
Events = list[dict[str, Any]]
HOST, OVERLAP, HARDWARE = 77, 3254509280, 3254508960
STEP_US = 1000
BASE = 1736412474000000
"""Microseconds since 1970, as in Ascend's traces."""


def named(pid: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}, "ph": "M"}


def row(pid: int, name: str, begin: float, lasts: float, **more: Any) -> dict[str, Any]:
    """Return a complete event; times are text, as torch_npu and MindSpore write them."""
    return {"ph": "X", "name": name, "pid": pid, "tid": 0, "ts": f"{BASE + begin:.3f}", "dur": lasts, **more}  # fmt: skip


def ascend(works: list[Any], moves: list[Any], reads: list[Any] = (), steps: int = 1) -> Events:  # type: ignore[assignment]
    """Return a trace_view.json: the profiler's own analysis, and kernels that say something else and must not count."""
    events = [named(HOST, "Python"), named(HARDWARE, "Ascend Hardware"), named(OVERLAP, "Overlap Analysis")]  # fmt: skip
    events += [row(HOST, f"ProfilerStep#{i}", i * STEP_US, STEP_US, cat="cpu_op") for i in range(steps)]  # fmt: skip
    events += [row(OVERLAP, "Computing", *span) for span in works]
    events += [row(OVERLAP, "Communication(Not Overlapped)", *span) for span in moves]
    events += [row(OVERLAP, "Communication", 0, STEP_US), row(OVERLAP, "Free", 0, STEP_US)]
    events += [row(HOST, "enumerate(DataLoader)#_Iter.__next__", *span) for span in reads]
    others = [row(HARDWARE, "EVENT_WAIT", 0, STEP_US), row(HOST, "Computing", 0, STEP_US)]
    return [*events, *others]


def one_by_one(works: list[Any], moves: list[Any], reads: list[Any]) -> dict[str, float]:
    """Return the parts of step 0, microsecond by microsecond."""
    masks = [np.zeros(STEP_US, bool) for _ in range(3)]
    for mask, spans in zip(masks, (works, moves, reads), strict=True):
        for begin, lasts in spans:
            mask[max(begin, 0) : max(begin + lasts, 0)] = True
    return step_parts(*masks)


SPANS = st.tuples(st.integers(-200, STEP_US + 200), st.integers(0, 400))


@settings(deadline=None, max_examples=30)
@given(st.lists(SPANS, max_size=8), st.lists(SPANS, max_size=5), st.lists(SPANS, max_size=4))
def test_parts_of_an_ascend_step_are_those_of_its_microseconds(
    tmp_path_factory: pytest.TempPathFactory, works: list[Any], moves: list[Any], reads: list[Any]
):
    works = [(500, 1), *works]
    output = tmp_path_factory.mktemp("a_ascend_ms") / "ASCEND_PROFILER_OUTPUT"
    output.mkdir()
    (output.parent / "profiler_info_5.json").write_text("{}")
    (output / "trace_view.json").write_text(json.dumps(ascend(works, moves, reads)))
    (output / "communication.json").write_text("{}")  # not the trace
    records = read_traces(traces_of(output.parent))
    assert (records.ranks.tolist(), records.steps.tolist()) == ([5], [0])
    for name, seconds in one_by_one(works, moves, reads).items():
        assert records.columns[name][0, 0] == pytest.approx(seconds, rel=1e-5, abs=2e-6), name


def test_a_slow_rank_of_ascend_traces_is_named(tmp_path: Path, capsys: Capture):
    rng = np.random.default_rng(1)
    for rank in range(6):
        output = tmp_path / f"host_{rank}_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
        output.mkdir(parents=True)
        (output.parent / f"profiler_info_{rank}.json").write_text("{}")
        lasts = (620 if rank == 2 else 560) + rng.integers(-5, 6, 24)
        works = [(STEP_US * i + 50, int(x)) for i, x in enumerate(lasts)]
        moves = [(STEP_US * i + 50 + int(x), 800 - int(x)) for i, x in enumerate(lasts)]
        (output / "trace_view.json").write_text(json.dumps(ascend(works, moves, steps=24)))
    assert main(["diagnose", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("rank 2 computes more slowly than its peers")


def msprof(iteration: int, lasts: float, gap: float) -> Events:
    """Return an msprof_*.json of one iteration: numbers, the gap before it in an event of its own."""
    begin = 100_000.0 * iteration
    return [
        named(9, "Overlap Analysis"),
        {"ph": "X", "pid": 9, "tid": 0, "name": "Computing", "ts": begin, "dur": lasts / 2},
        {"ph": "X", "pid": 9, "tid": 2, "name": "Communication(Not Overlapped)", "ts": begin + lasts / 2, "dur": lasts / 4},
        {"ph": "X", "pid": 3, "tid": 8, "name": f"Iteration {iteration}", "cat": "Iteration Time", "ts": begin, "dur": lasts},
        {"ph": "t", "pid": 3, "tid": 8, "name": f"Data_aug Bound {iteration}", "cat": "Data_aug Bound", "ts": begin,
         "args": {"Data_aug Bound(us)": gap}},
    ]  # fmt: skip


def test_iterations_of_msprof_are_steps_of_one_rank(tmp_path: Path, capsys: Capture):
    folder = tmp_path / "PROF_1" / "device_3" / "timeline"
    folder.mkdir(parents=True)
    for iteration in (1, 2, 10):
        events = msprof(iteration, 400.0, 900.0)
        (folder / f"msprof_3_0_{iteration}.json").write_text(json.dumps(events))
        (folder / f"hccl_3_0_{iteration}.json").write_text(json.dumps([named(1, "HCCL")]))
    records = read_traces(traces_of(tmp_path))
    assert (records.ranks.tolist(), records.steps.tolist()) == ([3], [1, 2, 10])
    for name, micro in {"compute": 200, "comm.all": 100, "host": 100, "data": 900}.items():
        np.testing.assert_allclose(records.columns[name], [[micro * 1e-6] * 3], rtol=1e-6)
    assert main(["diagnose", str(tmp_path)]) == 4
    assert "bound by the data (69% of the latest rank's time)" in capsys.readouterr().out


def kineto(*more: dict[str, Any]) -> Events:
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "ts": 0, "dur": 100}
    return [step, {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": 30}, *more]


def test_pairs_of_begin_and_end_are_events(tmp_path: Path):
    pairs = [
        {"ph": "B", "pid": 1, "tid": 1, "cat": "kernel", "name": "gemm", "ts": 10},
        {"ph": "B", "pid": 1, "tid": 2, "cat": "kernel", "name": "ncclDevKernel", "ts": 60},
        {"ph": "B", "pid": 1, "tid": 1, "cat": "kernel", "name": "inner", "ts": 12},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 15},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 40},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 80},
        {"ph": "E", "pid": 1, "tid": 7, "ts": 90},  # never begun
        {"ph": "B", "pid": 1, "tid": 7, "cat": "kernel", "name": "never ended", "ts": 90},
    ]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [kineto()[0], *pairs]}))
    records = read_traces([path])
    for name, micro in {"compute": 30, "comm.all": 20, "host": 50, "data": 0}.items():
        assert records.columns[name][0, 0] == pytest.approx(micro * 1e-6), name


@pytest.mark.parametrize("end", ["", ",", "\n", ",\n"])
def test_an_array_without_its_last_bracket_is_a_trace(tmp_path: Path, end: str):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(kineto()).removesuffix("]") + end)
    assert read_traces([path]).columns["compute"][0, 0] == pytest.approx(30e-6)


def test_the_numbers_of_ranks_come_from_words_not_from_models_or_times(tmp_path: Path):
    for name, rank in {
        "worker3.1623143089861.pt.trace.json": 3,
        "mi250_bert-small__1016001.json": 0,
        "rank-12.Jul_15_10_52.json.gz": 12,
        "trace_7.json": 7,
        "device_2/msprof_20230919172305.json": 2,
    }.items():
        assert rank_of(tmp_path / "run" / name, {}) == rank, name


GPU = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"device": 1}}


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([*kineto(GPU), GPU | {"args": {"device": 0}}], "kernels of 2 devices (0, 1)"),
        (kineto(kineto()[0]), "step 4 is marked more than once"),
        ([kineto()[0], kineto()[1] | {"ts": 500}], "nothing runs on the device within the steps"),
        ([kineto()[0], kineto()[1] | {"ts": float("nan")}], "has ts nan and dur 30; expected microseconds"),
        (kineto()[1:], "no step: neither ProfilerStep#N nor Iteration N"),
        ([*ascend([(1, 2)], []), named(4, "Overlap Analysis")], "2 processes 'Overlap Analysis'"),
        ([named(1, "Ascend Hardware"), row(1, "MatMul", 0, 9)], "no rows Computing and Communication(Not Overlapped)"),
        ([named(1, "HCCL"), row(1, "hcom_allReduce", 0, 9)], "only HCCL of an Ascend profile; read trace_view.json or msprof_*.json"),
        # as MindSpore's profiler writes it for CPU
        ([named(2, "CPU OP"), row(2, "MatMul-op0", 0, 9, args={"type": "HostCpuOps"})], "name the output_dir of `telechat-moe train`"),
    ],
)  # fmt: skip
def test_what_a_trace_lacks_is_said(tmp_path: Path, capsys: Capture, events: Events, said: str):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(events))
    assert main(["diagnose", str(path)]) == 3
    error = capsys.readouterr().err
    assert said in error
    assert str(path) in error


def test_a_database_is_refused_with_what_to_do(tmp_path: Path, capsys: Capture):
    output = tmp_path / "a_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    base = sqlite3.connect(output / "ascend_pytorch_profiler_0.db")
    base.execute("create table STEP_TIME (id integer)")
    base.execute("insert into STEP_TIME values (?)", (b"\xff" * 9,))
    base.commit()
    base.close()
    assert main(["diagnose", str(tmp_path)]) == 3
    assert "an Ascend profiler's database (.db) as text" in capsys.readouterr().err


def test_torch_npu_counts_what_comes_before_the_first_operator_apart(tmp_path: Path):
    """Its Free is within the span of the device; MindSpore's is within the step, so there the column would count twice."""
    for folder, host in (("a_ascend_pt", 14e-6), ("b_ascend_ms", 5e-6)):
        output = tmp_path / folder / "ASCEND_PROFILER_OUTPUT"
        output.mkdir(parents=True)
        path = output / "step_trace_time.csv"
        path.write_text(
            "Step,Computing,Communication(Not Overlapped),Free,Preparing\n3,90,10,5,9\n"
        )
        records = read_traces([path])
        assert records.columns["host"][0, 0] == pytest.approx(host), folder
