"""`telechat-moe diagnose`: from the files of ranks to the sentence, the table, JSON, the page and the exit code."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from clusters import alike, pulses

from benchmarks.diagnose.files import write
from telechat_moe import timings
from telechat_moe.cli import main
from telechat_moe.tools.diagnose.read import read_runs
from telechat_moe.tools.diagnose.records import Records

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Timings of a run whose rank 6 is slow and whose rank 9 collects garbage."""
    records = alike(stages=2)
    records.columns["compute"][6] += 0.2
    records.columns["gc"][9] += pulses(0.5)
    records.columns["host"][9] += pulses(0.5)
    write(records, tmp_path / "run")
    return tmp_path / "run"


def test_records_come_back_as_they_were(tmp_path: Path):
    records = alike(stages=2)
    write(records, tmp_path / "run")
    read = read_runs([tmp_path / "run"])
    assert read.columns.keys() == records.columns.keys()
    for name, x in records.columns.items():
        np.testing.assert_array_equal(read.columns[name], x, name)
    for name in ("ranks", "steps", "stage", "host"):
        np.testing.assert_array_equal(getattr(read, name), getattr(records, name), name)
    for axis, numbers in records.groups.items():
        np.testing.assert_array_equal(read.groups[axis], numbers)
    assert list(read.hosts) == list(records.hosts)
    assert read.inside
    assert not read.problems


def test_the_answer_comes_first_then_the_table(slow: Path, capsys: Capture):
    assert main(["diagnose", str(slow)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "rank 6 on node1 computes more slowly than its peers at the same clock with the same work: "
    )
    assert "which costs the run 1" in lines[0]
    assert "run the device's own check on it" in lines[0]
    assert [line.split("  ")[0] for line in lines[2:5]] == [
        "who",
        "rank 6 on node1",
        "rank 9 on node2",
    ]
    assert "garbage collection" in lines[4]


def test_json_has_all_of_it(slow: Path, capsys: Capture):
    assert main(["diagnose", str(slow), "--json", "-"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "fail"
    assert [(c["kinds"], c["ranks"]) for c in data["causes"]] == [
        [["slow_rank"], [6]],
        [["garbage_collection"], [9]],
    ] or [
        (["slow_rank"], [6]),
        (["garbage_collection"], [9]),
    ]
    assert data["bounds"][0]["bound"] == "device"
    assert data["steps"] == [10, 89]


def test_the_page_shows_it_and_fetches_nothing(slow: Path, tmp_path: Path, capsys: Capture):
    page = tmp_path / "page.html"
    assert main(["diagnose", str(slow), "--html", str(page)]) == 1
    text = page.read_text(encoding="utf-8")
    assert capsys.readouterr().out.splitlines()[0].replace("'", "&#x27;") in text
    assert "data:image/png;base64," in text
    heat = text[text.index("Who is late") : text.index("The latest rank")]
    places = [float(y) for y in re.findall(r"y=([\d.]+) text-anchor=end>\d+</text>", heat)]
    assert len(places) == 6
    assert places == sorted(places)
    assert places[0] < 40
    assert places[-1] > 280  # rank 15 is below
    (mark, *_) = re.findall(r"<text class=mark x=[\d.]+ y=([\d.]+)", heat)
    assert 120 < float(mark) < 150  # rank 6 of 16
    assert "http://" not in text
    assert "https://" not in text


def test_a_run_in_which_nothing_stands_out_passes(tmp_path: Path, capsys: Capture):
    write(alike(), tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(
        "no rank, host or link stands out in 80 steps of 16 ranks: a step takes "
    )


def test_the_folders_of_several_hosts_are_one_run(slow: Path, tmp_path: Path, capsys: Capture):
    other = tmp_path / "other" / timings.FOLDER
    other.mkdir(parents=True)
    for rank in range(8, 16):
        timings.file_of(slow, rank).rename(other / f"rank_{rank}.bin")
    assert main(["diagnose", str(slow), str(other.parent), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["ranks"] == 16


def test_ranks_without_timings_are_named(slow: Path, capsys: Capture):
    timings.file_of(slow, 3).unlink()
    assert main(["diagnose", str(slow)]) == 1
    assert "not judged: rank 3: no times were read" in capsys.readouterr().out


def test_a_killed_rank_shortens_the_run_to_its_steps(slow: Path, capsys: Capture):
    path = timings.file_of(slow, 5)
    header, rows = timings.read(path)
    width = 4 * len(header["columns"])
    path.write_bytes(path.read_bytes()[: -30 * width - 3])
    assert len(rows) == 80
    assert main(["diagnose", str(slow), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["steps"] == [10, 58]


def test_the_graph_of_cpu_processes_is_split_in_computing_and_waiting(tmp_path: Path):
    """A rank that computes waits less; the CPU time of its threads says how much."""
    columns = {name: np.zeros((2, 30), np.float32) for name in timings.COLUMNS if name != "step"}
    columns["graph"][:] = 1.0
    columns["cpu"][0], columns["cpu"][1] = 1.2, 2.0  # two threads
    two = np.arange(2)
    write(
        Records(source="", ranks=two, steps=np.arange(30), columns=columns, stage=0 * two, host=0 * two, hosts=["a"]),
        tmp_path,
    )  # fmt: skip
    records = read_runs([tmp_path])
    np.testing.assert_allclose(records.columns["compute"].mean(1), [0.6, 1.0], rtol=1e-6)
    np.testing.assert_allclose(records.columns["comm.all"].mean(1), [0.4, 0.0], atol=1e-6)
    assert not records.inside


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("empty", "no such file or folder"),
        ("few", "all ranks have 3 steps in common after the first; expected 8 or more"),
        ("text", "begins with no line of JSON"),
        ("twice", "rank 0 is there twice"),
    ],
)
def test_bad_input_is_said_in_one_sentence(tmp_path: Path, capsys: Capture, damage: str, said: str):
    runs = [tmp_path / "run"]
    if damage != "empty":
        records = alike(4)
        if damage == "few":
            records.steps = records.steps[:3]
            records.columns = {name: x[:, :3] for name, x in records.columns.items()}
        write(records, runs[0])
    if damage == "text":
        timings.file_of(runs[0], 2).write_text("rank 2\n")
    if damage == "twice":
        runs.append(tmp_path / "copy")
        write(alike(4), runs[1])
    assert main(["diagnose", *map(str, runs)]) == 3
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
