"""Traces that are no JSON, as profilers write them: what is read, and what is said of the rest.

Names with control characters, backslashes, quotes and bytes that are no text are public reports of torch's profiler (pytorch/pytorch 98432, 136180,
146900; pytorch/kineto 80, 336, 1459).
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from telechat_moe import timings
from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.diagnose import traces

Capture = pytest.CaptureFixture[str]


def events(name: str, steps: int = 2) -> list[dict[str, Any]]:
    trace_events: list[dict[str, Any]] = []
    for step in range(steps):
        at = 100 * step
        trace_events += [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 100},
            {"ph": "X", "cat": "python_function", "name": name, "ts": at, "dur": 1},
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": at + 10, "dur": 50 + step},
        ]  # fmt: skip
    return trace_events


PLAIN = json.dumps({"traceEvents": events("NAME")})


def read(path: Path, raw: bytes) -> list[float]:
    path.write_bytes(raw)
    return traces.read_traces([path]).columns["compute"][0].tolist()


@settings(deadline=None)
@given(st.text(st.characters(max_codepoint=255, exclude_characters='"'), max_size=12))
@example("torch\\cuda\\__init__.py(219): _lazy_init")
@example("torch/_inductor/config.py(0): \x07\x00")
@example("C:\\new\\ultra\\u12")
def test_names_that_are_not_escaped_change_no_time(tmp_path_factory: pytest.TempPathFactory, name: str):  # fmt: skip
    if name.endswith("\\"):  # escapes the quote that ends it
        name += "."
    path = tmp_path_factory.mktemp("trace") / "rank0.json"
    plain = read(path, PLAIN.encode())
    assert plain == pytest.approx([5e-5, 5.1e-5])
    for encoding in ("utf-8", "latin-1"):
        assert read(path, PLAIN.replace("NAME", name).encode(encoding)) == plain
    assert read(path, b"\xef\xbb\xbf" + PLAIN.encode()) == plain


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(PLAIN) - 1), st.booleans())
def test_only_what_was_cut_off_is_said_to_be(
    tmp_path_factory: pytest.TempPathFactory, cut: int, array: bool
):
    path = tmp_path_factory.mktemp("trace") / "rank0.json"
    whole = json.dumps(events("NAME")) if array else PLAIN
    cut %= len(whole)
    path.write_text(whole[:cut])
    refused = ""
    try:
        traces.read_traces([path])
    except BadInputError as error:
        refused = str(error)
    if array and whole[:cut].rstrip().endswith(("}", "},")):  # it may lack its end
        assert "cut off" not in refused
    else:
        assert "cut off" in refused


@pytest.mark.parametrize("name", ['{"device": "cpu"}(12): run', 'say "x"', '"', '", "b'])
def test_quotes_are_named_with_their_place(tmp_path: Path, name: str, capsys: Capture):
    path = tmp_path / "rank0.json"
    whole = json.dumps({"traceEvents": events("NAME")}, indent=1).replace("NAME", name, 1)
    with pytest.raises(json.JSONDecodeError):
        json.loads(whole, strict=False)
    path.write_text(whole)
    assert main(["diagnose", str(path)]) == 3
    said = capsys.readouterr().err
    line = next(n for n, text in enumerate(whole.splitlines(), 1) if f': "{name}"' in text)
    assert f"{path}:{line}: is no JSON after " in said
    assert "quotes in a name must be escaped" in said
    assert "cut off" not in said


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[1, 2]", "no list traceEvents"),
        (b"[" * 100_000, "cannot be read"),
        (b'[{"ph": ' + b"9" * 5000 + b"}]", "cannot be read"),
        (b"", "is no JSON"),
        (gzip.compress(PLAIN.encode())[:-9], "cannot read the trace"),
        (gzip.compress(PLAIN.encode())[:30] + b"\xff" * 30, "cannot read the trace"),
    ],
    ids=["numbers", "deep", "digits", "empty", "half", "damaged"],
)
def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, raw: bytes, says: str, capsys: Capture
):
    path = tmp_path / "rank0.json"
    path.write_bytes(raw)
    assert main(["diagnose", str(path)]) == 3
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert str(path) in said


def kineto(folder: Path, ranks: list[int], world: int | None) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        about = {"rank": rank} | ({} if world is None else {"world_size": world})
        trace = {"distributedInfo": about, "traceEvents": events("f", steps=9)}
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    return folder


@pytest.mark.parametrize(
    ("ranks", "world", "code", "absent"),
    [
        ([0, 1, 2], 3, 0, None),
        ([0, 1, 2], 8, 4, "ranks 3-7"),
        ([0, 1, 3], None, 4, "rank 2"),
        ([1, 2], 3, 4, "rank 0"),
        ([500, 1000], None, 0, None),  # numbers of something else
    ],
)
def test_ranks_without_a_trace_are_not_judged(
    tmp_path: Path, ranks: list[int], world: int | None, code: int, absent: str | None, capsys: Capture
):  # fmt: skip
    assert main(["diagnose", str(kineto(tmp_path / "traces", ranks, world))]) == code
    out = capsys.readouterr().out
    assert (f"not judged: {absent}: no times were read" in out) == (absent is not None)
    assert ("no rank, host or link stands out" in out) == (absent is None)


def test_traces_of_two_worlds_are_refused(tmp_path: Path, capsys: Capture):
    kineto(tmp_path / "traces", [0, 1], 8)
    assert main(["diagnose", str(kineto(tmp_path / "traces", [2], 16))]) == 3
    assert "distributedInfo.world_size is 8 in " in capsys.readouterr().err


def test_ranks_without_timings_are_not_judged(tmp_path: Path, capsys: Capture):
    for rank in (0, 1, 3):
        about = {"rank": rank, "ranks": 4, "stage": 0}
        with timings.StepTimer(timings.file_of(tmp_path, rank), about, 0) as timer:
            for step in range(1, 12):
                timer.lap("graph")
                timer.finish(step, 0)
    code = main(["diagnose", str(tmp_path)])
    out = capsys.readouterr().out
    assert "not judged: rank 2: no times were read" in out
    assert code in (1, 4)
    assert "no rank, host or link stands out" not in out
