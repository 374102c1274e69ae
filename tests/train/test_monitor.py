"""What the user sees: metrics.jsonl, plain lines, the live line, TensorBoard, loss.png."""

import fcntl
import io
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.launch.host_processes import LogTail
from telechat_moe.train import metrics
from telechat_moe.train import monitor as monitor_module
from telechat_moe.train.monitor import Monitor

NAN = float("nan")


@pytest.fixture(autouse=True)
def _no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw only in the tests of pictures: drawing takes most of a second."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("telechat_moe.train.plot.plot", lambda *_: None)


def report(monitor: Monitor, step: int, **changes: Any) -> None:
    values: dict[str, Any] = {
        "loss": 4.6 - step / 100,
        "lm_loss": 4.0 - step / 100,
        "mtp_loss": 0.5,
        "aux_loss": 0.1,
        "grad_norm": 1.25,
        "learning_rate": 1e-3,
        "seconds": 0.5,
        "expert_load_max_over_mean": 1.5,
        "expert_load_by_layer": [1.2, 1.5],
    }
    monitor.step(step, **values | changes)


def run(folder: Path, steps: range, **options: Any) -> str:
    """Report some steps to a monitor; returns what it printed."""
    stream = io.StringIO()
    with Monitor(folder, 20, 1000, stream=stream, tensorboard=False, **options) as monitor:
        for step in steps:
            report(monitor, step)
            if step % 5 == 0:
                monitor.evaluation(step, 3.5 - step / 100)
    return stream.getvalue()


def strict(line: str) -> dict[str, Any]:
    """Parse JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --------------------------------------------------------------------------------- metrics.jsonl


def test_metrics_are_valid_json_with_the_same_bits(tmp_path: Path) -> None:
    loss = np.float32(1) / np.float32(3)
    with Monitor(tmp_path, 9, 1000, stream=io.StringIO(), tensorboard=False) as monitor:
        report(monitor, 1, loss=loss, lm_loss=float(loss), data_seconds=0.01, drop_rate=0.25, x=7)
        monitor.evaluation(1, np.float64(0.1) + 0.2)
    step, evaluation = lines_of(tmp_path)
    assert np.float32(step["loss"]).tobytes() == loss.tobytes()
    assert step == {
        "event": "step",
        "step": 1,
        "loss": float(loss),
        "lm_loss": float(loss),
        "mtp_loss": 0.5,
        "aux_loss": 0.1,
        "grad_norm": 1.25,
        "learning_rate": 1e-3,
        "seconds": 0.5,
        "tokens": 1000,
        "tokens_per_second": 2000.0,
        "skipped": False,
        "data_seconds": 0.01,
        "drop_rate": 0.25,
        "expert_load_max_over_mean": 1.5,
        "expert_load_by_layer": [1.2, 1.5],
        "x": 7.0,
    }
    assert evaluation == {"event": "evaluation", "step": 1, "loss": 0.1 + 0.2}


def test_nan_is_null_with_a_flag(tmp_path: Path) -> None:
    with Monitor(tmp_path, 9, 1000, stream=io.StringIO(), tensorboard=False) as monitor:
        report(
            monitor, 1, loss=NAN, grad_norm=np.inf, skipped=True, expert_load_by_layer=[1.0, NAN]
        )
        monitor.evaluation(1, -np.inf, {"a": 1.0, "b": NAN})
    step, evaluation = lines_of(tmp_path)
    assert step["loss"] is None
    assert step["grad_norm"] is None
    assert step["expert_load_by_layer"] == [1.0, None]
    assert step["skipped"] is True
    assert step["not_finite"] == {
        "loss": "nan",
        "grad_norm": "inf",
        "expert_load_by_layer[1]": "nan",
    }
    assert evaluation["loss"] is None
    assert evaluation["loss_by_source"] == {"a": 1.0, "b": None}
    assert evaluation["not_finite"] == {"loss": "-inf", "loss_by_source.b": "nan"}


@pytest.mark.parametrize("torn", [b"", b'{"event": "step", "st', b"\xff\x00"])
def test_resume_continues_without_repeating_a_step(tmp_path: Path, torn: bytes) -> None:
    run(tmp_path / "whole", range(1, 16))
    run(tmp_path / "two", range(1, 11))
    with (tmp_path / "two" / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    printed = run(tmp_path / "two", range(7, 16), resume_step=6)
    assert ("removed 1 damaged line" in printed) == bool(torn)
    whole, two = ((tmp_path / x / "metrics.jsonl").read_bytes() for x in ("whole", "two"))
    assert whole == two
    assert not list((tmp_path / "two").glob(".*"))


def test_a_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    run(tmp_path, range(4, 5), resume_step=3)
    assert [r["step"] for r in lines_of(tmp_path)] == [1, 2, 3, 4]


def test_a_new_run_keeps_the_old_file_under_another_name(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4))
    old = (tmp_path / "metrics.jsonl").read_bytes()
    run(tmp_path, range(1, 2))
    assert (tmp_path / "metrics.previous.jsonl").read_bytes() == old
    assert [r["step"] for r in lines_of(tmp_path)] == [1]


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        "import sys; from itertools import count; from telechat_moe.train.monitor import Monitor\n"
        "m = Monitor(sys.argv[1], 10**9, 1, int(sys.argv[2]), tensorboard=False)\n"
        "for s in count(int(sys.argv[2]) + 1):\n"
        " m.step(s, loss=1, lm_loss=1, mtp_loss=0, aux_loss=0, grad_norm=1, learning_rate=1,"
        " seconds=1)\n"
        " if s % 100 == 0: print(s, flush=True)\n"
    )
    rng, resume = random.Random(0), 0
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(resume)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child.pid, signal.SIGKILL)
        seen = [int(x) for x in child.stdout.read().split()]
        child.wait()
        child.stdout.close()
        steps = [r["step"] for r in metrics.read(tmp_path / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= max([resume, *seen])
        resume = len(steps) - 50


def test_read_names_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"event": "step", "step": 1}\n[1]\n{"event": "step", "step": 2}\n{"eve')
    with pytest.raises(BadInputError, match=r"m\.jsonl:2: expected a JSON object"):
        metrics.read(path)
    with pytest.raises(BadInputError, match="cannot read the metrics"):
        metrics.read(tmp_path / "none")


def test_metrics_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match=r"cannot write the metrics .*file/metrics\.jsonl"):
        Monitor(tmp_path / "file", 9, 1, stream=io.StringIO())


# -------------------------------------------------------------------------------- not a terminal


def test_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "LOG_EVERY", 4)
    printed = run(tmp_path, range(1, 21))
    assert "\x1b" not in printed
    assert "\r" not in printed
    lines = [line for line in printed.splitlines() if line.startswith("step=")]
    parsed = [dict(pair.split("=") for pair in line.split()) for line in lines]
    assert [int(p["step"]) for p in parsed] == [1, 4, 8, 12, 16, 20]
    assert parsed[2] == {
        "step": "8",
        "total_steps": "20",
        "loss": "4.5200",
        "lm_loss": "3.9200",
        "mtp_loss": "0.5000",
        "aux_loss": "0.10000",
        "grad_norm": "1.250",
        "learning_rate": "1.000e-03",
        "step_ms": "500",
        "tokens_per_s": "2000",
        "expert_load_max_over_mean": "1.5",
        "skipped_steps": "0",
        "eta_s": "6",
    }
    assert "evaluation step=5 validation_loss=3.4500\n" in printed


def test_speed_leaves_out_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles the graph."""
    monkeypatch.setattr(monitor_module, "LOG_EVERY", 1)
    stream = io.StringIO()
    with Monitor(tmp_path, 100, 1000, stream=stream, tensorboard=False) as monitor:
        for step, seconds in enumerate([20.0, 0.5, 0.5], start=1):
            report(monitor, step, seconds=seconds)
    first, second, _ = stream.getvalue().splitlines()
    assert "tokens_per_s=50 " in first
    assert "tokens_per_s=2000 " in second
    assert "eta_s=49" in second


def test_skipped_steps_are_counted_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor_module, "LOG_EVERY", 1)
    for resume, steps in ((0, (1, 2, 3, 4)), (3, (4, 5))):
        stream = io.StringIO()
        with Monitor(tmp_path, 9, 1, resume, stream=stream, tensorboard=False) as monitor:
            for step in steps:
                report(monitor, step, skipped=step in (2, 4))
    assert re.findall(r"skipped_steps=(\d)", stream.getvalue()) == ["2", "2"]


def test_line_and_picture_of_a_model_without_experts(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Monitor(tmp_path, 9, 1, stream=stream, tensorboard=False) as monitor:
        report(monitor, 1, expert_load_max_over_mean=None, expert_load_by_layer=None)
    assert "expert_load" not in stream.getvalue()
    assert "expert_load_max_over_mean" not in lines_of(tmp_path)[0]
    assert (tmp_path / "loss.png").stat().st_size > 1000


# --------------------------------------------------------------------------------- on a terminal

LIVE = """
import sys, time
sys.modules["matplotlib"] = None  # starts faster
from telechat_moe.train.monitor import Monitor
with Monitor(sys.argv[1], 60, 1000, tensorboard=False) as monitor:
    for step in range(1, 61):
        time.sleep(0.01)
        monitor.step(step, loss=4.6, lm_loss=4.0, mtp_loss=0.5, aux_loss=0.1, grad_norm=1.25,
                     learning_rate=1e-3, seconds=0.5, expert_load_max_over_mean=1.5)
        if step == 20:
            monitor.evaluation(step, 3.5)
        if step == 30:
            monitor.message("saved [step 30]")
"""


def on_terminal(arguments: list[str], width: int) -> str:
    """Run Python on a terminal of its own; returns all that it wrote to it."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "CI")}
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm-256color"},
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        written += piece
    os.close(ours)
    assert child.wait() == 0, written.decode()
    return written.decode()


def screen_of(written: str) -> tuple[list[str], list[str]]:
    """Play terminal output; returns the lines left on the screen and all drawn frames."""
    screen, frames, row, column = [""], [], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            if row == len(screen):
                screen.append("")
        elif token == "\x1b[2K":
            frames.append(screen[row])
            screen[row] = ""
        elif token.startswith("\x1b"):
            assert token[-1] in "mlh", f"the cursor is moved by {token!r}"
        else:
            screen[row] = screen[row][:column] + token + screen[row][column + len(token) :]
            column += len(token)
    return screen, frames


@pytest.mark.parametrize("width", [160, 80, 30])
def test_live_line(tmp_path: Path, width: int) -> None:
    screen, frames = screen_of(on_terminal(["-c", LIVE, str(tmp_path)], width))
    message, last, *rest = screen
    assert message == "saved [step 30]"
    assert rest == ["no loss.png: matplotlib is not installed", ""]
    assert last.startswith("step 60/60  ")
    assert len(frames) > 3  # one line, drawn again and again
    assert all(len(frame) <= width for frame in [*frames, last])
    parts = {
        160: "loss 4.600|(lm 4.000 mtp 0.500 aux 0.1000)|val 3.500|grad 1.25|lr 1.0e-03|"
        "2.0k tok/s|load 1.50x|ETA 00:00",
        80: "loss 4.600|val 3.500|2.0k tok/s|load 1.50x|ETA 00:00",
        30: "loss 4.600",
    }
    assert all(part in last for part in parts[width].split("|"))


def test_quiet_on_a_terminal_and_dumb_terminals_have_no_escape_codes(tmp_path: Path) -> None:
    quiet = LIVE.replace("tensorboard=False", "tensorboard=False, quiet=True")
    assert "\x1b" not in on_terminal(["-c", quiet, str(tmp_path)], 80)
    dumb = "import os; os.environ['TERM'] = 'dumb'\n" + LIVE
    assert "\x1b" not in on_terminal(["-c", dumb, str(tmp_path)], 80)


# ------------------------------------------------------------------------------------ TensorBoard


def events_in(folder: Path) -> list[Any]:
    """Read TensorBoard's event files: length (8), checksum (4), event, checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.iterdir()):
        raw = path.read_bytes()
        while raw:
            (length,) = struct.unpack("<Q", raw[:8])
            events.append(Event.FromString(raw[12 : 12 + length]))
            raw = raw[16 + length :]
    return events


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    with Monitor(tmp_path, 9, 1000, resume_step=4, stream=io.StringIO()) as monitor:
        report(monitor, 5, by_source={"data/web": (2.5, 64), "data/code": (4.5, 16)})
        monitor.evaluation(5, 3.5)
    events = events_in(tmp_path / "tensorboard")
    found = {(v.tag, e.step): v.simple_value for e in events for v in e.summary.value}
    assert found["train/loss", 5] == pytest.approx(4.55)
    assert found["train/expert_load_max_over_mean", 5] == 1.5
    assert found["expert_load/moe_layer_1", 5] == 1.5
    assert found["validation/loss", 5] == 3.5
    assert (found["train_loss/data/web", 5], found["train_loss/data/code", 5]) == (2.5, 4.5)
    # tells TensorBoard to forget what a killed run wrote from this step on
    assert [e.step for e in events if e.HasField("session_log")] == [5]


def test_without_tensorboardx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    stream = io.StringIO()
    with Monitor(tmp_path, 9, 1000, stream=stream) as monitor:
        report(monitor, 1)
    assert "no TensorBoard events: tensorboardX is not installed" in stream.getvalue()
    assert len(lines_of(tmp_path)) == 1


# --------------------------------------------------------------------------------------- loss.png


def test_picture_is_made_from_the_metrics_alone(tmp_path: Path) -> None:
    run(tmp_path, range(1, 21))
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"torn')
    again = tmp_path / "again.png"
    command = [sys.executable, "-m", "telechat_moe.train.plot", str(tmp_path / "metrics.jsonl")]
    subprocess.run([*command, str(again)], check=True)
    assert again.read_bytes() == picture


def test_picture_says_what_it_shows(tmp_path: Path) -> None:
    from telechat_moe.train.plot import plot

    with Monitor(tmp_path, 400, 1000, stream=io.StringIO(), tensorboard=False) as monitor:
        monitor.evaluation(0, 7.6)
        for step in range(1, 41):
            report(monitor, step, lm_loss=NAN if step == 20 else 4.0, skipped=step == 20)
        monitor.evaluation(40, 4.1)
    plot(tmp_path / "metrics.jsonl", tmp_path / "loss.svg")
    texts = re.findall(r"<!-- (.*?) -->", (tmp_path / "loss.svg").read_text(), re.DOTALL)
    assert "Validation loss 7.60 → 4.10 in 40 steps" in texts
    assert "0.04 million tokens in 0.3 minutes of steps, median 2,000 tokens/s, 1 skipped" in texts
    for text in ("step", "next-token loss (nats)", "validation", "NaN or Inf", "perfect balance"):
        assert text in texts
    assert "spread over 2 MoE layers" in texts


def test_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "empty", range(0))
    assert not (tmp_path / "empty" / "loss.png").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "telechat_moe.train.plot", raising=False)
    assert "no loss.png: matplotlib is not installed" in run(tmp_path / "without", range(1, 3))


def test_command_without_a_step_to_make_a_picture_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from telechat_moe.train import plot

    (tmp_path / "metrics.jsonl").write_text("")
    assert plot.main([str(tmp_path / "metrics.jsonl"), str(tmp_path / "out.png")]) == 3
    assert re.match("error: .* has no finished step", capsys.readouterr().err)
    assert not (tmp_path / "out.png").exists()


def test_smooth() -> None:
    from telechat_moe.train.plot import smooth

    line = np.linspace(7.0, 4.0, 200)
    assert np.allclose(smooth(line), line)
    holes = line.copy()
    holes[[0, 50, 51, 199]] = NAN
    assert np.allclose(smooth(holes), line, atol=0.02)
    noise = np.random.default_rng(0).normal(size=1000)
    assert smooth(noise).std() < 0.25  # about 1 / sqrt(41)
    assert np.isnan(smooth(np.full(50, NAN))).all()
    assert smooth(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_a_run_goes_on_without_a_reader_of_its_lines(tmp_path: Path) -> None:
    """Ctrl-C at `train 2>&1 | tee log` ends tee first; the step is to be saved nevertheless."""
    read, write = os.pipe()
    os.close(read)
    with suppress(BrokenPipeError), os.fdopen(write, "w") as stream:
        monitor = Monitor(tmp_path, 2, 1, quiet=True, tensorboard=False, stream=stream)
        monitor.message("interrupted: saved step 1")
        tail = LogTail(tmp_path / "worker_0.log", stream)
        tail.path.write_text("interrupted: saved step 1\n")
        tail.show()
        monitor.close()
        assert tail.shown == 26
