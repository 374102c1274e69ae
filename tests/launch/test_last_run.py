"""How a run ended is read from its files, and `telechat-moe report` puts it into one file without data."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from test_faults import NOTIFY, TABLE

from telechat_moe.cli import main
from telechat_moe.launch.commands import LaunchNode, free_port
from telechat_moe.launch.host_processes import HostProcesses
from telechat_moe.launch.last_run import error_lines, first_error, rank_ends, without_secrets
from telechat_moe.processes import CONTROL, Control, RankDiedError

RECIPE = "telechat3_moe/pretrain_tiny.yaml"
PROGRAM = """\
import os, signal, sys, time
from pathlib import Path
from telechat_moe.launch.rank import is_scheduler, run_supervised
from telechat_moe.processes import CONTROL, SCHEDULER, Control

control = Control(Path(sys.argv[1]) / CONTROL)
if is_scheduler():
    control.begin(SCHEDULER)
    time.sleep(300)
rank = int(os.environ["RANK_ID"])

def work():
    control.set_position(rank, f"step {rank + 7}, in the graph")
    print("the model writes: a secret sentence of the corpus")
    while not all((control.folder / f"rank_{r}.at").exists() for r in (0, 1)):
        time.sleep(0.01)
    if sys.argv[2] == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "stop" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if sys.argv[2] in ("kill", "stop"):
        time.sleep(300)
    while rank == 0 and not (control.folder / "rank_1.failed").exists():
        time.sleep(0.01)  # msrun may end this process before it raises, never the other one
    raise RuntimeError(Path(sys.argv[3 + rank]).read_text())

run_supervised(control, rank, work)
"""


def failed_run(output: Path, *arguments: str, silence_s: float = 60.0) -> RankDiedError:
    """Run two processes under msrun that fail; return what the launcher raises."""
    job, logs = output / ".job", output / "log"
    program = output.parent / "program.py"
    program.write_text(PROGRAM)
    Control.fresh(job)
    node = LaunchNode(local=2, total=2, port=free_port())
    words = ["python", str(program), str(job), *arguments]
    with pytest.raises(RankDiedError) as error:
        HostProcesses(job, node, logs, words, out=None, silence_s=silence_s).run()
    return error.value


def test_a_run_whose_process_was_killed_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert "was killed by SIGKILL" in str(failed_run(output, "kill"))
    target = tmp_path / "report.json"
    assert main(["report", RECIPE, "--run", str(output), "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    ends = {entry["rank"]: entry for entry in report["run"]["ranks"]}
    assert ends[1]["end"] == "no word"
    assert ends[1]["position"] == "step 8, in the graph"
    assert report["recipe"]["resolved"]["telechat_moe"]["sample"]["prompts"] == "left out"
    assert report["versions"]["mindspore"]
    assert "a secret sentence" not in target.read_text()
    assert "no NPU" in capsys.readouterr().out


def test_faults_of_links_are_named_with_the_rank_that_has_the_cause(tmp_path: Path) -> None:
    (tmp_path / "echo").write_text(NOTIFY)
    (tmp_path / "cause").write_text(TABLE)
    output = tmp_path / "run"
    error = failed_run(output, "raise", str(tmp_path / "echo"), str(tmp_path / "cause"))
    assert not error.is_echo, "on several hosts a cause counts more than time-outs"
    message = str(error)
    assert "; rank 0: step 7, in the graph, rank 1: step 8, in the graph" in message
    assert "rank 1: HCCL refuses the rank table (EI0004): The ranktable config devId" in message
    job, logs = output / ".job", output / "log"
    first = first_error(job, logs, rank_ends(Control(job / CONTROL)))
    assert first is not None
    assert first.fault is not None
    assert first.fault_rank == 1
    texts = [text for _, text in first.lines]
    assert any(text.startswith("RuntimeError: ") for text in texts)
    assert not any("secret sentence" in text for text in texts)


def test_a_process_that_msrun_ended_is_not_the_cause(tmp_path: Path) -> None:
    job, logs = tmp_path / ".job", tmp_path / "log"
    Control.fresh(job)
    control = Control(job / CONTROL)
    logs.mkdir()
    for rank in (0, 1):
        control.begin(f"rank_{rank}")
    (logs / "worker_0.log").write_text("step 7\n")
    failure = {"message": "the table", "known": False, "time": 1.0, "exit_code": 1}
    control.write("rank_1.failed", json.dumps(failure))
    for text, rank in ((TABLE, 1), (NOTIFY, 0)):  # an echo tells of another's end
        (logs / "worker_1.log").write_text(f"RuntimeError: {text}")
        first = first_error(job, logs, rank_ends(control))
        assert first is not None
        assert first.rank == rank


def test_a_process_that_stands_still_in_a_collective_is_named_on_any_target(tmp_path: Path) -> None:
    """The other one waits and gives signs of life; nothing that watches them knows what they run on."""
    message = str(failed_run(tmp_path / "run", "stop", silence_s=3.0))
    assert re.search(r"rank 1 \(process \d+\) hangs.*its state is stopped", message)
    assert "rank 0: step 7, in the graph, rank 1: step 8, in the graph" in message


def test_time_outs_alone_are_echoes(tmp_path: Path) -> None:
    (tmp_path / "echo").write_text(NOTIFY)
    error = failed_run(tmp_path / "run", "raise", *2 * [str(tmp_path / "echo")])
    assert error.is_echo
    assert "device 0 of 10.90.55.95, AllReduce (EI0002)" in str(error)


def test_only_lines_of_errors_are_read_out() -> None:
    log = (
        "step 1 loss 2.0\n[WARNING] ME(1,a): b\nTraceback (most recent call last):\n  File \"x.py\", line 1\nmy.room.OddError: no\n"
        "sample: tokens 1 2 3\n[ERROR] DEVICE(5,x) failed, password=abc and https://me:abc@host/x\nsample: more\n"
    )  # fmt: skip
    assert error_lines(log) == [
        (3, "Traceback (most recent call last):"),
        (4, '  File "x.py", line 1'),
        (5, "my.room.OddError: no"),
        (7, "[ERROR] DEVICE(5,x) failed, password=(left out) and https://me:(left out)@host/x"),
    ]
    assert without_secrets("bos_token: <s>, tokenizer=a") == "bos_token: <s>, tokenizer=a"


def test_without_a_run_there_is_still_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 0
    assert "all of it: telechat-moe-report.json" in capsys.readouterr().out
    report = json.loads(Path("telechat-moe-report.json").read_text())
    assert report["run"] is None
    assert report["recipe"] is None
    assert "environ" not in report


def test_the_figures_of_a_dry_run_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = {
        "stage": 0,
        "rank": 0,
        "memory": {"total": 3 << 30},
        "calls": 4,
        "sent": 5,
        "order": [],
    }
    moments = [{"stage": 1, "graph": "step", "total": 4 << 30}]
    whole_run = {"graphs": [], "largest_moment": moments, "batch": 7, "save": None}
    about = dict.fromkeys(("recipe", "layout", "devices"), "x")
    for figures, text in (
        ({"stages": [stage]}, "stage 0 3.00 GiB"),
        (whole_run, "stage 1 4.00 GiB"),
    ):
        Path("dry.json").write_text(json.dumps({**about, **figures}))
        assert main(["report", "--dryrun", "dry.json"]) == 0
        assert f"memory of a device: {text}" in capsys.readouterr().out
    Path("dry.json").write_text('{"stages": [{}]}')
    assert main(["report", "--dryrun", "dry.json"]) == 3
    assert (
        "expected what `telechat-moe dryrun RECIPE --json FILE` writes" in capsys.readouterr().err
    )
