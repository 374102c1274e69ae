"""One step in full: against closed forms, and what the page and the trace show."""

import json
import re

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import make_program, simulate_step
from telechat_moe.tools.plan.cost.step import evaluate
from telechat_moe.tools.plan.report import step as step_report
from telechat_moe.tools.plan.report.timeline import (
    MemoryCurve,
    PipelineTimeline,
    TimelineBox,
    chrome_trace,
    page,
)

PANGU = "pangu_ultra_moe/pretrain_718b.yaml"
TELECHAT = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


@pytest.fixture(scope="module")
def device():
    return load_device("ascend-910b")


def model(layers=16):
    return Architecture(
        hidden=4096, layers=("dense",) * layers, heads=32, seq=2048, vocab=32000, gated=False
    )


def test_pangu_schedule(device):
    """16 stages, 64 micro-batches, 2 chunks: 7.5 / 71.5 (Pangu Ultra MoE report)."""
    step = step_report.of_recipe(load(PANGU, []), "ascend-910b")
    assert step.bubble.ideal == pytest.approx(7.5 / 71.5, abs=1e-9)
    b = step.bubble
    assert b.ideal + b.imbalance + b.recompute + b.neighbours == pytest.approx(b.total)
    assert b.total == pytest.approx(step.result.bubble)


def test_bubble_by_cause(device):
    """Recomputation that is the same everywhere adds no bubble; on one stage only, it does."""
    equal = Layout(tp=8, pp=4, micro_batches=8, recompute="full")
    b = simulate_step(model(), equal, device).bubble
    assert b.recompute == pytest.approx(0, abs=1e-12)
    assert b.imbalance > 0  # the head
    uneven = equal.with_changes(recompute_layers=(0, 4, 0, 0))
    assert simulate_step(model(), uneven, device).bubble.recompute > 0.01


def test_one_stage_is_the_sum_of_its_micro_batches(device):
    layout = Layout(dp=2, micro_batches=5)
    step = simulate_step(model(), layout, device)
    micro_s = step.times.forward.sum() + step.times.dx.sum() + step.times.dw.sum()
    assert step.result.makespan == pytest.approx(5 * micro_s)
    assert step.bubble.total == pytest.approx(0)
    assert step.step_s == pytest.approx(
        float(evaluate(model(), [layout], device).step_s[0]), rel=1e-6
    )


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=8, pp=4, micro_batches=8),
        Layout(tp=8, pp=4, micro_batches=8, recompute="full"),
        Layout(tp=8, pp=4, vpp=2, micro_batches=8, schedule="interleaved"),
        Layout(tp=8, pp=4, vpp=2, micro_batches=8, schedule="zb-v"),
    ],
)
def test_chunks_add_up_to_stages(layout, device):
    """Chunk times are the cost model's stage times, cut finer."""
    step = simulate_step(model(), layout, device)
    stages = evaluate(model(), [layout], device).stages
    for s, chunks in enumerate(step.program.chunks_of_stage):
        chunks = list(chunks)
        assert step.times.forward[chunks].sum() == pytest.approx(stages.forward[0, s])
        backward = (step.times.dx + step.times.dw)[chunks].sum()
        assert backward == pytest.approx(stages.backward[0, s])
        assert step.recompute_s[chunks].sum() == pytest.approx(stages.recompute[0, s])
    assert (step.times.dw > 0).all()
    assert (step.times.dx > step.recompute_s).all()


def test_better_schedules_are_shorter(device):
    def took(**changes):
        return simulate_step(
            model(32), Layout(tp=8, pp=4, micro_batches=16, **changes), device
        ).result

    plain_, gpipe = took(), took(schedule="gpipe")
    assert took(schedule="zb-h1").makespan < plain_.makespan
    assert took(schedule="interleaved", vpp=2).makespan < plain_.makespan
    assert plain_.peak[0] == pytest.approx(4 / 16 * gpipe.peak[0])  # P of m micro-batches


def test_memory_over_time_peaks_where_the_table_says(device):
    step = simulate_step(model(), Layout(tp=8, pp=4, micro_batches=8), device)
    shown = step_report.timeline(step)
    for curve in shown.memory:
        assert max(curve.bytes) == pytest.approx(step.peak_bytes[curve.row])
        assert curve.bytes[0] == curve.bytes[-1] == pytest.approx(step.fixed_bytes[curve.row])
        assert list(curve.start_s) == sorted(curve.start_s)
    closed = evaluate(model(), [step.layout], device).memory.peak[0]
    np.testing.assert_allclose(step.peak_bytes, closed, rtol=1e-6)


def test_utilisation_by_hand(device):
    """A dense model: 6 N, and 12 L h s per token for the whole square of attention."""
    a = model(8)
    step = simulate_step(a, Layout(micro_batches=2), device)
    shares = {name: flops for name, flops, _ in step_report.utilisations(step)}
    tokens = 2 * a.seq
    assert shares["six_n"] == pytest.approx(6 * a.parameters * tokens)
    square = 12 * 8 * a.hidden * a.seq * tokens
    assert shares["full_attention"] - shares["model"] == pytest.approx(square / 2, rel=1e-3)
    assert shares["hardware"] == pytest.approx(shares["model"])
    recompute = simulate_step(a, Layout(micro_batches=2, recompute="full"), device)
    more = {name: flops for name, flops, _ in step_report.utilisations(recompute)}
    assert more["model"] == pytest.approx(shares["model"])
    assert 1.2 < more["hardware"] / more["model"] <= 4 / 3
    _, flops, share = step_report.utilisations(step)[0]
    assert share == pytest.approx(flops / (step.step_s * device.peak("bf16")))


def test_more_micro_batches_less_bubble(device):
    shares = [
        simulate_step(model(), Layout(tp=8, pp=4, micro_batches=m), device).bubble.total
        for m in (4, 8, 16, 32)
    ]
    assert shares == sorted(shares, reverse=True)


def test_program_needs_its_chunks():
    with pytest.raises(Exception, match="has 1 chunk"):
        make_program(Layout(pp=4, vpp=2, micro_batches=8, schedule="1f1b"))
    with pytest.raises(Exception, match="has 2 chunk"):
        make_program(Layout(pp=4, micro_batches=8, schedule="zb-v"))


def test_page_and_trace(tmp_path, capsys):
    html, trace = tmp_path / "s.html", tmp_path / "s.json"
    code = main(
        [
            "plan",
            "simulate",
            TELECHAT,
            "--device",
            "ascend-910b",
            "--html",
            str(html),
            "--trace",
            str(trace),
        ]
    )
    said = capsys.readouterr().out
    assert code == 0
    assert "idle share of the makespan" in said
    text = html.read_text()
    assert not re.search(r"https?://", text)
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.S).group(1))
    step = step_report.of_recipe(load(TELECHAT, []), "ascend-910b")
    passes = sum(len(ops) for ops in step.program.ops)
    drawn = [b for row in data["boxes"] for b in row if b[2] in "FBDW"]
    assert len(drawn) == passes
    assert len(data["rows"]) == len(data["memory"]) == 8
    last = max(b[0] + b[1] for row in data["boxes"] for b in row)
    assert last == pytest.approx(step.step_s, rel=1e-5)
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(e["ph"] == "X" and e["cat"] in ("forward", "backward") for e in events) == passes
    counters = [e for e in events if e["ph"] == "C"]
    assert max(e["args"]["bytes"] for e in counters) == pytest.approx(step.peak_bytes.max())


def test_figures(capsys):
    assert main(["plan", "simulate", TELECHAT, "--device", "ascend-910b", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    parts = (
        figures["pipeline_s"]
        + figures["data_parallel_s"]
        + figures["optimizer_s"]
        + figures["host_s"]
    )
    assert figures["step_s"] == pytest.approx(parts)
    assert len(figures["stages"]) == 8
    assert figures["fits"] is True


def test_too_little_memory_is_an_exit_code(tmp_path, capsys):
    small = tmp_path / "small.yaml"
    small.write_text(
        "peak_flops: {bf16: 3.0e+14}\nmemory_bytes: 8589934592\nmemory_bandwidth: 1.6e+12\nnode_devices: 8\n"
        "intra_bandwidth: 2.0e+11\ninter_bandwidth: 2.5e+10\n"
    )
    assert main(["plan", "simulate", TELECHAT, "--device", str(small)]) == 1
    assert "too much" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--device", "abacus"], 3, "no such description"),
        (["--device", "h100", "--schedule", "best"], 2, "there are gpipe"),
        (["--device", "h100", "--schedule", "zb-v"], 3, "set vpp accordingly"),
    ],
)
def test_errors_say_what_to_do(options, code, said, capsys):
    assert main(["plan", "simulate", TELECHAT, *options]) == code
    assert said in capsys.readouterr().err


def test_text_cannot_leave_the_page():
    evil = "</script><b>"
    shown = PipelineTimeline(
        evil,
        [evil],
        [TimelineBox(0, 0.0, 1.0, "F", evil, evil)],
        memory=[MemoryCurve(0, [0.0], [1.0])],
    )
    text = page(shown)
    assert evil not in text
    assert json.loads(chrome_trace(shown))["traceEvents"][-2]["args"]["what"] == evil
