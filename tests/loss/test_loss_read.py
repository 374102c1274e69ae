"""Loss curves out of files, and `telechat-moe align loss` from the command line."""

import gzip
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import loss_pairs as pairs
import numpy as np
import pytest

from telechat_moe.errors import BadInputError
from telechat_moe.tools.loss.curve import LossCurve
from telechat_moe.tools.loss.read import is_mindformers_log, read, step_seconds

RUNS = Path(__file__).parents[1] / "fixtures" / "align_loss"

MINDFORMERS = """\
2026-11-20 10:00:00,000 - mindformers[core/callback/callback.py:700] - INFO - { Epoch:[  1/  2], step:[    1/    3], \
loss: 10.512345, per_step_time: 9000ms, lr: 1e-05, overflow cond: False, loss_scale: 1.0, global_norm: [2.5], \
train_throughput_per_npu: 1.000T
2026-11-20 10:00:00,000 - mindformers[core/callback/callback.py:712] - INFO -   16.7% |████  | 0.1 samples/s/p  0:00:01 }
2026-11-20 10:00:01,000 - mindformers[core/callback/callback.py:700] - INFO - { Epoch:[  1/  2], step:[    3/    3], \
loss:[9.250000/9.881172], lm_loss: 9.000000, mtp_loss: 0.250000, per_step_time: 90ms, overflow cond: False, \
loss_scale: unavailable, global_norm: None
[WARNING] something else that was printed in between
[INFO] 2026-11-20 10:00:02,000 [callback.py:700] - { Epoch:[  2/  2], step:[    2/    3], loss: nan, \
per_step_time: 90ms, lr: 1e-05, overflow cond: True, loss_scale: 1.0, global_norm: inf
"""


def write(folder: Path, text: str | bytes, name: str = "run.txt") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def same(curve: LossCurve, steps: list[int], loss: list[float], norm: list[float]) -> None:
    assert curve.steps.tolist() == steps
    np.testing.assert_array_equal(curve.loss, loss)
    np.testing.assert_array_equal(curve.norm, norm)


# ------------------------------------------------------------------------------------------- formats
def test_metrics_jsonl(tmp_path: Path):
    from telechat_moe.train.metrics import encode

    lines = [
        encode("step", 1, {"loss": 9.5, "lm_loss": 7.0, "grad_norm": 1.5}),
        encode("evaluation", 1, {"loss": 3.0}),
        encode("step", 2, {"loss": math.nan, "lm_loss": math.inf, "grad_norm": math.inf}),
    ]
    path = write(tmp_path, b"".join(lines) + lines[0][:20], "metrics.jsonl")
    same(read(path), [1, 2], [9.5, math.nan], [1.5, math.inf])
    same(read(tmp_path, "lm_loss"), [1, 2], [7.0, math.inf], [1.5, math.inf])


def test_log_of_mindformers(tmp_path: Path):
    curve = read(write(tmp_path, MINDFORMERS))
    assert curve.kind == "MindFormers log"
    same(curve, [1, 3, 5], [10.512345, 9.25, math.nan], [2.5, math.nan, math.inf])
    assert (
        read(write(tmp_path, MINDFORMERS[: MINDFORMERS.index("[INFO]")])).loss.tolist()[-1] == 9.25
    )


def test_a_restarted_log_counts_the_last_of_each_step(tmp_path: Path):
    line = MINDFORMERS.splitlines()[0]
    repeated = line.replace("10.512345", "10.4")
    curve = read(write(tmp_path, "\n".join([line, repeated]) + "\n"))
    assert curve.loss.tolist() == [10.4]
    assert "more than once" in curve.notes[0]
    assert "1 had another loss before, first step 1" in curve.notes[0]


@pytest.mark.mindformers
def test_lines_of_the_real_monitor(tmp_path: Path):
    """What MFLossMonitor of the installed MindFormers prints is what the reader reads."""
    pytest.importorskip("mindformers", reason="mindformers is not installed")
    code = """
import types
from mindformers.core.callback import MFLossMonitor
import mindformers.core.callback.callback as module
monitor = MFLossMonitor(learning_rate=1e-3, global_batch_size=4)
monitor.mf_calculated, monitor.tensor_writer = False, None
monitor.loss_list = [9.0, 8.0]
for sink in (True, False):
    for step, loss, norm in ((7, 9.123456789, "[1.25]"), (8, float("nan"), None)):
        params = types.SimpleNamespace(dataset_sink_mode=sink)
        monitor.print_output_info(params, 1 + sink, 2, 1.0, step, 10, loss, 100.0, "False", 1.0, 5, 10.0, norm,
                                  None, None, None, None)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]
    lines = [line for line in (process.stdout + process.stderr).splitlines() if "Epoch:[" in line]
    assert len(lines) == 4, process.stdout + process.stderr
    curve = read(write(tmp_path, "\n".join(lines[2:] + lines[:2]) + "\n"))
    same(curve, [7, 8, 17, 18], [9.123457, math.nan] * 2, [1.25, math.nan] * 2)


MODE_1 = """\
2026-11-20 10:00:00,000 - mindformers[pynative/callback/loss_callback.py:340] - INFO - { step:[    1/    3], \
consumed_samples: 8, global_batch_size: 8, loss:  10.512345, per_step_time:   9000ms, load_balancing_loss:   0.010000, \
mtp_1_loss:   9.750000, lr: 1.000000e-05, grad_norm:   2.500000, throughput:   1.23T }
something else that was printed in between
2026-11-20 10:00:01,000 - mindformers[pynative/callback/loss_callback.py:340] - INFO - { step:[    2/    3], \
consumed_samples: 16, global_batch_size: 8, loss:        nan, per_step_time:     90ms, grad_norm: NaN }
"""
"""Two steps of MindFormers 2's dynamic mode."""


def test_log_of_mode_1(tmp_path: Path):
    path = write(tmp_path, MODE_1)
    same(read(path), [1, 2], [10.512345, math.nan], [2.5, math.nan])
    assert read(write(tmp_path, MODE_1.split("something")[0]), "mtp_1_loss").loss == [9.75]
    assert step_seconds(write(tmp_path, MODE_1)) == {1: 9.0, 2: 0.09}
    stage = MODE_1.replace("loss:  10.512345", "loss: N/A (non-last PP stage, refer to last stage)")
    with pytest.raises(BadInputError, match=r"run.txt:1: the log of a pipeline stage"):
        read(write(tmp_path, stage))


@pytest.mark.parametrize("log", [MINDFORMERS, MODE_1], ids=["mode 0", "mode 1"])
def test_what_stands_around_the_lines_of_a_log(tmp_path: Path, log: str):
    """Messages in another encoding, colours, ends of lines, and a process that went on where another was."""
    expected = read(write(tmp_path, log))
    coloured = "".join(f"\x1b[32m{line}\x1b[0m\n" for line in log.splitlines())
    for changed in (
        "错误\n".encode("gbk") + log.encode(),
        log.encode() + "█".encode()[:2],
        coloured,
        log.replace("\n", "\r\n"),
        log.replace("\n", "", 1),
        log + "x" * (2 << 20) + "\n",
    ):
        path = write(tmp_path, changed)
        curve = read(path)
        same(curve, expected.steps.tolist(), expected.loss.tolist(), expected.norm.tolist())
        assert curve.notes == ()
        assert is_mindformers_log(path)
    with pytest.raises(BadInputError, match=r"run.txt: compressed by gzip; unpack it first"):
        read(write(tmp_path, gzip.compress(log.encode())))


@pytest.mark.parametrize(
    ("log", "end"), [(MINDFORMERS.split("[WARN")[0], "]"), (MODE_1, "}")], ids=["mode 0", "mode 1"]
)
def test_a_line_torn_anywhere_is_left_out_and_named(tmp_path: Path, log: str, end: str):
    """At no byte of it does a part of a number count as the number; the next writer may go on in the same line."""
    head = log.split("\n")[0]
    first = log[: head.index(end, head.index("norm: "))]
    expected = read(write(tmp_path, head + "\n"))
    step = head.index("{")
    for i in range(first.index("loss:"), len(first)):
        path = write(tmp_path, f"{log}{first[step:i]}")
        torn = f"line {len(log.splitlines()) + 1} is torn off"
        assert any(note.startswith(torn) for note in read(path).notes), first[step:i]
        curve = read(write(tmp_path, f"{first[:i]}{head}\n"))
        same(curve, [1], expected.loss.tolist(), expected.norm.tolist())
        assert curve.notes == ("line 1 is torn off and left out",)


@pytest.mark.mindformers
def test_lines_of_the_real_monitor_of_mode_1(tmp_path: Path):
    pytest.importorskip("mindformers", reason="mindformers is not installed")
    code = """
from mindformers.pynative.callback.loss_callback import LossCallback
for step, loss, norm in ((7, 9.123456789, 1.25), (8, float("nan"), None)):
    LossCallback()._print_log({"cur_step": step, "max_steps": 10, "consumed_samples": 8 * step, "global_batch_size": 8,
        "loss": loss, "step_time": 90, "learning_rate": 1e-5, "grad_norm": norm, "throughput": 1.0})
"""
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]
    lines = [line for line in (process.stdout + process.stderr).splitlines() if "{ step:[" in line]
    path = write(tmp_path, "\n".join(lines) + "\n")
    same(read(path), [7, 8], [9.123457, math.nan], [1.25, math.nan])
    assert step_seconds(path) == {7: 0.09, 8: 0.09}


def test_values_of_megatron(tmp_path: Path):
    content = {
        "iteration-time": {
            "start_step": 1,
            "end_step": 9,
            "step_interval": 4,
            "values": {"1": 9.0, "5": 1, "9": 1},
        },
        "lm loss": {
            "start_step": 1,
            "end_step": 9,
            "step_interval": 4,
            "values": {"1": 10.5, "5": "nan", "9": 9.25},
        },
        "grad-norm": {
            "start_step": 1,
            "end_step": 9,
            "step_interval": 4,
            "values": {"1": 2.5, "5": 2, "9": 1},
        },
    }
    for indent in (None, 4):
        curve = read(write(tmp_path, json.dumps(content, indent=indent)))
        assert (curve.kind, curve.metric) == ("Megatron-LM values", "lm loss")
        same(curve, [1, 5, 9], [10.5, math.nan, 9.25], [2.5, 2, 1])
    same(
        read(write(tmp_path, json.dumps(content)), "iteration-time"),
        [1, 5, 9],
        [9, 1, 1],
        [2.5, 2, 1],
    )


@pytest.mark.parametrize(
    "text",
    [
        "step,loss,grad_norm\n1,9.5,2\n2,nan,\n",
        "Iteration; lr; lm loss; Grad Norm\n1;0;9.5;2\n2;0;nan;\n",
        "\ufeffstep\tloss\tglobal_norm\r\n1\t9.5\t2\r\n2\tNaN\t\r\n",
        "1,9.5,2\n2,nan,\n3,8",
    ],
)
def test_csv(tmp_path: Path, text: str):
    same(read(write(tmp_path, text)), [1, 2], [9.5, math.nan], [2, math.nan])


# -------------------------------------------------------------------------------------- broken input
STEP = '{"event": "step", "step": 1, "loss": 9.5}\n'
GOLDEN = '{"lm loss": {"start_step": 1, "end_step": 2, "step_interval": 1, "values": '


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (STEP + "{broken\n" + STEP, 2, "expected a JSON object"),
        (STEP + '{"event": "step", "step": 2}\n', 2, "no loss"),
        (STEP + '{"event": "step", "step": 2, "loss": "x"}\n', 2, "loss is 'x'"),
        (STEP + '{"event": "step", "step": 2, "loss": true}\n', 2, "loss is True"),
        (STEP + STEP, 2, "step 1 after step 1"),
        (STEP + '{"event": "step", "step": true, "loss": 1}\n', 2, "expected a JSON object"),
        (MINDFORMERS.replace("step:[    3/", "step:[  ", 1), 3, "MindFormers' monitor"),
        (MINDFORMERS.replace("loss: nan", "loss: much"), 5, "loss is 'much'"),
        (GOLDEN + '{"1": 9.5}}}', 1, "2 is missing"),
        (GOLDEN + '{"1": 9.5, "two": 9}}}', 1, "step 'two'"),
        (GOLDEN + '{"1": 9.5, "2": []}}}', 1, "expected a number"),
        (GOLDEN + "[1, 2]}}", 1, "no object `values`"),
        ('{\n"lm loss": {\n"values": {"1": 9.5,}}}', 3, "no JSON"),
        ('{"loss of pigs": {"values": {}}}', 1, "no metric"),
        ("{" * 100_000, 1, "no JSON"),
        ('{"lm loss": {"values": {}}}', None, "without a single step"),
        ("step,loss\n1,9.5\n2,x\n", 3, "loss is 'x'"),
        ("step,loss\n1,9.5\n2\n", 3, "1 columns; expected 2"),
        ("step,loss\n1,9.5\n1.5,9\n", 3, "whole number"),
        ("step,loss\n2,9.5\n1,9\n", 3, "step 1 after step 2"),
        ("step,price\n1,9.5\n", 1, "no loss curve"),
        ("step,loss\n", None, "without a single step"),
        ("some words\n", 1, "no loss curve"),
        (b"step,loss\n1,\xff\xfe\n", 2, "not text"),
        ("", None, "empty"),
        (" \n\n", None, "empty"),
    ],
)
def test_broken_files_are_refused_with_their_line(
    tmp_path: Path, text: str | bytes, line: int | None, said: str
):
    path = write(tmp_path, text)
    with pytest.raises(BadInputError) as caught:
        read(path)
    assert said in str(caught.value)
    assert str(path) + (f":{line}:" if line else "") in str(caught.value)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(BadInputError, match="No such file"):
        read(tmp_path / "nothing.csv")


def test_bytes_by_chance_are_read_or_refused(tmp_path: Path):
    """Thousands of mutations of good files: no other error than BadInputError."""
    rng = np.random.default_rng(1)
    golden = json.dumps(
        {
            "lm loss": {
                "start_step": 1,
                "end_step": 3,
                "step_interval": 1,
                "values": {"1": 3, "2": 2, "3": 1},
            }
        }
    )
    sources = [
        STEP * 1 + STEP.replace(": 1,", ": 2,"),
        MINDFORMERS,
        golden,
        "step,loss\n1,2\n2,3\n",
    ]
    refused = 0
    for i in range(2000):
        data = bytearray(sources[i % 4].encode())
        for _ in range(rng.integers(1, 6)):
            at = int(rng.integers(0, len(data)))
            what = rng.integers(0, 3)
            if what == 0:
                data[at] = int(rng.integers(0, 256))
            elif what == 1:
                del data[at : at + int(rng.integers(1, 30))]
            else:
                data[at:at] = data[: int(rng.integers(1, 40))]
            if not data:
                break
        try:
            curve = read(write(tmp_path, bytes(data)))
            assert len(curve.steps) == len(curve.loss) == len(curve.norm) > 0
            assert (np.diff(curve.steps) > 0).all()
        except BadInputError:
            refused += 1
    assert 200 < refused < 2000


# --------------------------------------------------------------------------------------- command line
def align(folder: Path, *args: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; from telechat_moe.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "align", "loss", *map(str, args)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


class Page(HTMLParser):
    """Collects what a page loads, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.words = ""
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.words += data


def test_a_divergence_from_the_command_line(tmp_path: Path):
    process = align(
        tmp_path, RUNS / "fused.csv", RUNS / "plain.csv", RUNS / "lr3.csv",
        "--html", "page.html", "--junit", "junit.xml", "--json", "report.json",
    )  # fmt: skip
    assert process.returncode == 1, process.stderr
    assert "Diverged: before rounding errors have grown" in process.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "diverged"
    assert {f["kind"] for f in report["findings"]} == {"early departure", "lasting difference"}
    assert report["steps"] == {"compared": 1200, "first": 1, "last": 1200}
    page = Page()
    page.feed((tmp_path / "page.html").read_text())
    assert page.loads == []
    assert page.tags.count("svg") == 3
    assert "diverged" in page.words
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    cases = suite.findall("testcase")
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert len(failed) == int(suite.get("failures") or 0) > 0
    assert "verdict" in failed
    assert int(suite.get("tests") or 0) == len(cases)


def test_a_pass_and_a_base_by_option(tmp_path: Path):
    bases = [RUNS / "fused.csv", RUNS / "plain.csv"]
    process = align(
        tmp_path, *bases, RUNS / "accumulated.csv", "--base", RUNS / "mixed.csv", "--json", "-"
    )
    assert process.returncode == 0, process.stdout
    report = json.loads(process.stdout)
    assert report["verdict"] == "pass"
    assert [i["steps"] for i in report["inputs"]] == [1200] * 4


def test_not_judged_is_skipped_in_junit_and_exits_with_4(tmp_path: Path):
    base, target = pairs.make(
        np.random.default_rng(2), pairs.Kind(300, 0.02, 0.05, 0.0, False, False, 1)
    )
    for name, loss in (("a.csv", base[0]), ("b.csv", target)):
        write(tmp_path, "\n".join(f"{i},{x:.6f}" for i, x in enumerate(loss, start=1)) + "\n", name)
    process = align(tmp_path, "a.csv", "b.csv", "--junit", "junit.xml")
    assert process.returncode == 4, process.stdout + process.stderr
    assert "300 steps; a verdict needs 1,000" in process.stdout
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    (verdict,) = [case for case in suite if case.get("name") == "verdict"]
    skipped = verdict.find("skipped")
    assert skipped is not None
    assert "300 steps" in (skipped.get("message") or "")
    assert align(tmp_path, "a.csv", "b.csv", "--min-steps", 300).returncode == 0


def test_usage_and_bad_input(tmp_path: Path):
    assert align(tmp_path, RUNS / "fused.csv").returncode == 2
    assert align(tmp_path, RUNS / "fused.csv", RUNS / "plain.csv", "--margin", "x").returncode == 2
    path = write(tmp_path, "step,loss\n1,2\n2,oops\n", "broken.csv")
    process = align(tmp_path, RUNS / "fused.csv", path)
    assert process.returncode == 3
    assert f"{path}:3: loss is 'oops'" in process.stderr
    process = align(
        tmp_path, RUNS / "fused.csv", RUNS / "plain.csv", "--html", tmp_path / "no" / "x.html"
    )
    assert process.returncode == 2


def test_paths_are_escaped_in_pages(tmp_path: Path):
    from telechat_moe.tools.loss import page as loss_page
    from telechat_moe.tools.loss.verdict import judge

    base, target = pairs.make(
        np.random.default_rng(2), pairs.Kind(300, 0.02, 0.05, 0.0, False, False, 1)
    )
    report = judge([pairs.curve(base[0], "<script>&\"'")], pairs.curve(target, "a<b>\"&'"))
    assert "<script>" not in loss_page.page(report)
    ElementTree.fromstring(loss_page.junit(report))


@pytest.mark.parametrize("steps", [1, 2, 40, 300])
@pytest.mark.parametrize("what", ["alike", "nan", "equal", "zero"])
def test_every_report_has_a_page(steps: int, what: str):
    from telechat_moe.tools.loss import page as loss_page
    from telechat_moe.tools.loss.verdict import judge

    kind = pairs.Kind(300, 0.02, 0.05, 0.0, False, False, 2)
    bases, target = pairs.make(np.random.default_rng(3), kind)
    if what != "alike":
        target = {"nan": np.full(300, np.nan), "equal": bases[0], "zero": np.zeros(300)}[what]
    curves = [pairs.curve(x[:steps]) for x in (*bases, target)]
    report = judge(curves[:-1], curves[-1])
    page = Page()
    page.feed(loss_page.page(report))
    assert report.verdict in page.words
    ElementTree.fromstring(loss_page.junit(report))
    json.dumps(report.plain(), allow_nan=False)


def test_nothing_heavy_is_imported():
    code = (
        "import sys; from telechat_moe.tools.loss import page, read, verdict; "
        "sys.exit(any(m in sys.modules for m in ('mindspore', 'torch', 'scipy', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
