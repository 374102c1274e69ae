"""`plan calibrate --from`: the update of the posterior, its sources, and the files that every verb takes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.tools.loss.read import step_seconds
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.calibration import Measurements, prior_of, read_sources, update
from telechat_moe.tools.plan.cost.device import files_of, load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.measured_steps import median_step
from telechat_moe.tools.plan.cost.posterior import load_posterior, posterior_file
from telechat_moe.tools.plan.cost.score import MeasuredStep
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.cost.step import evaluate

DENSE = Architecture(
    hidden=4096, layers=("dense",) * 32, heads=32, vocab=32000, seq=4096, ffn=11008
)
MIXTURE = Architecture(
    hidden=2048, layers=("moe",) * 16, heads=16, vocab=32000, seq=4096, experts=64, top_k=6, moe_ffn=1024
)  # fmt: skip
LAYOUTS = [
    Layout(dp=8, micro_batches=4),
    Layout(dp=4, tp=2, micro_batches=8, zero=1),
    Layout(dp=2, tp=4, pp=4, micro_batches=16, recompute="full"),
    Layout(dp=8, pp=2, vpp=2, micro_batches=4, schedule="interleaved"),
    Layout(dp=64, zero=3, micro_batches=1),
]
FIXTURES = Path(__file__).parents[2] / "fixtures" / "collectives"
TABLE = """\
model,hidden,layers,heads,ffn,vocab,seq,dp,tp,micro_batches,step_s
7b,4096,32,32,11008,32000,4096,8,1,4,5.2
7b,4096,32,32,11008,32000,4096,4,2,8,5.9
"""


def step(layout: Layout, seconds: float, architecture: Architecture = DENSE) -> MeasuredStep:
    return MeasuredStep(
        table="t", line=1, model="m", device="", architecture=architecture, layout=layout, step_s=seconds
    )  # fmt: skip


@pytest.mark.parametrize("architecture", [DENSE, MIXTURE], ids=["dense", "experts"])
def test_a_factor_lengthens_every_step_by_itself(architecture: Architecture):
    device = load_device("ascend-910b")
    slower = replace(device, constants=device.constants.slowed(1.3))
    layouts = [
        replace(x, ep=8 if architecture.experts and x.dp * x.tp >= 8 else 1) for x in LAYOUTS
    ]
    for x in layouts:
        both = [float(evaluate([architecture], [x], d).step_s[0]) for d in (device, slower)]
        assert both[1] == pytest.approx(1.3 * both[0], rel=1e-9)
        if x.zero < 3:
            both = [simulate_step(architecture, x, d).step_s for d in (device, slower)]
            assert both[1] == pytest.approx(1.3 * both[0], rel=1e-9)


def test_a_row_moves_a_factor_alone_by_the_share_of_its_variance():
    """With known constants the update is that of one normal variable, which has a closed form."""
    prior, device = prior_of("ascend-910b"), load_device("ascend-910b")
    shipped = load_posterior("ascend-910b")
    assert shipped
    spread = shipped.stack_spread
    sure = replace(prior, covariance=np.diag([1e-10] * (len(prior.names) - 1) + [spread**2]))
    centre = replace(device, constants=prior.constants(device.constants, np.exp(prior.mean)))
    predicted = float(evaluate([DENSE], [LAYOUTS[0]], centre).step_s[0])
    after = update(sure, device, Measurements([step(LAYOUTS[0], predicted * np.exp(0.3))]))
    noise = prior.row_spread**2 + 0.01**2
    share = spread**2 / (spread**2 + noise)
    assert after.names[-1] == "stack_factor"
    assert after.mean[-1] == pytest.approx(0.3 * share, rel=1e-3)
    assert after.covariance[-1, -1] == pytest.approx(spread**2 * (1 - share), rel=1e-3)
    assert after.mean[:-1] == pytest.approx(prior.mean[:-1], abs=1e-5)
    assert after.stack_spread == 0


def test_one_run_of_a_slow_stack_corrects_its_other_layouts():
    prior, device = prior_of("a100"), load_device("a100")
    truth = replace(
        device, constants=prior.constants(device.constants, np.exp(prior.mean)).slowed(1.4)
    )
    seconds = [float(evaluate([DENSE], [x], truth).step_s[0]) for x in LAYOUTS]
    after = update(prior, device, Measurements([step(LAYOUTS[0], seconds[0])]))
    calibrated = replace(device, constants=after.constants(device.constants, np.exp(after.mean)))
    errors = [
        float(evaluate([DENSE], [x], calibrated).step_s[0]) / s - 1
        for x, s in zip(LAYOUTS, seconds, strict=True)
    ]
    assert max(map(abs, errors)) < 0.2  # 29 % too fast without it
    several = update(prior, device, Measurements(list(map(step, LAYOUTS, seconds))))
    for posterior in (after, several):
        assert posterior.interval("stack_factor")[1] > 1
    i = after.names.index("stack_factor")
    assert several.covariance[i, i] < after.covariance[i, i] < prior.covariance[i, i]
    assert after.features["rows"] == prior.features["rows"] + 1
    assert after.features["tensor parallelism"] == prior.features["tensor parallelism"]


def test_collectives_narrow_the_links_that_they_use_and_no_factor():
    rows = read_sources([str(FIXTURES / "nccl_a100.txt")], "a100", None)
    first = rows.collectives[0]
    assert (first.operation, first.ranks, first.ranks_of_node) == ("allreduce", 16, 8)
    assert [(x.line, x.size, x.seconds) for x in rows.collectives] == [
        (14, 2**30, 10908.0 / 1e6), (15, 2**31, 21500.1 / 1e6), (16, 2**32, 42721.7 / 1e6),
    ]  # fmt: skip
    prior, device = prior_of("a100"), load_device("a100")
    after = update(prior, device, rows)
    assert after.interval("stack_factor") == pytest.approx(prior.interval("stack_factor"))
    # busbw of eight ports of 25 GB/s: 188.5 of 200 GB/s
    assert after.interval("inter_share")[0] == pytest.approx(0.9425, abs=0.03)
    variance = dict(zip(prior.names, zip(prior.covariance.diagonal(), after.covariance.diagonal(), strict=True), strict=True))  # fmt: skip
    assert variance["inter_share"][1] < variance["inter_share"][0] / 5
    assert variance["matmul_share"][1] == pytest.approx(variance["matmul_share"][0], rel=0.02)


def test_a_table_of_hccl_test_is_read_in_either_unit(tmp_path: Path):
    text = (FIXTURES / "hccl_910b.txt").read_text()
    rows = read_sources([str(FIXTURES / "hccl_910b.txt")], "ascend-910b", None).collectives
    assert len(rows) == 10
    assert (rows[0].operation, rows[0].ranks, rows[0].ranks_of_node) == ("allreduce", 8, 8)
    assert (rows[-1].line, rows[-1].size, rows[-1].seconds) == (13, 2**22, 1.80175e-3)
    two = tmp_path / "two_nodes.txt"
    two.write_text(text.replace("-n 8", "-f hosts \\\n -n 16").replace("avg_time", "aveg_time"))
    [row, *_] = read_sources([str(two)], "ascend-910b", None).collectives
    assert (row.ranks, row.ranks_of_node) == (16, 8)


@pytest.mark.parametrize(
    ("fixture", "old", "new", "says"),
    [
        ("hccl_910b.txt", "0.06782        | success", "0.06782        | failed", r":7: column check: failed"),
        ("hccl_910b.txt", "1801.75", "18.0175", r":13: column algbw: 2\.16803 GB/s, expected size / time"),
        ("hccl_910b.txt", "858.80", "nan", r":5: column time: nan, expected a number above 0"),
        ("hccl_910b.txt", "# mpirun -n 8 ./bin/all_reduce_test", "#", r":1: the name of the collective not found"),
        ("hccl_910b.txt", "-n 8 ", "", r":1: at least two ranks not found"),
        ("hccl_910b.txt", "|       2.16803        | success", "", r":13: column algbw: None, expected a number"),
        ("nccl_a100.txt", "184.57       0", "184.57       7", r":14: column check: 7"),
    ],
)  # fmt: skip
def test_a_table_of_collectives_that_cannot_be_used(tmp_path, fixture, old, new, says):
    text = (FIXTURES / fixture).read_text()
    assert old in text
    file = tmp_path / fixture
    file.write_text(text.replace(old, new))
    with pytest.raises(BadInputError, match=f"{fixture}{says}"):
        read_sources([str(file)], "ascend-910b", None)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("8,5.9", "8,", r"mine.csv:3: column step_s: empty"),
        ("8,5.9", "8,fast", r"mine.csv:3: expected a readable step_s \(fast\)"),
        ("4,2,8,5.9", "4,2,,5.9\n7b,4096,,32,11008,32000,4096,4,2,8,5.9", r"mine.csv:4: expected a recipe, or layers"),
        ("model,", "device,", r"mine.csv:2: device without a description: 7b"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_used_is_an_error(tmp_path, old, new, says):
    file = tmp_path / "mine.csv"
    file.write_text(TABLE.replace(old, new))
    with pytest.raises(BadInputError, match=says):
        read_sources([str(file)], "ascend-910b", None)


def test_rows_of_another_device_are_an_error(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(
        TABLE.replace("model,", "device,").replace("7b,", "a2,", 1).replace("7b,", "h100,")
    )
    with pytest.raises(
        BadInputError, match=r"mine.csv:3: column device: h100, expected rows of ascend-910b only"
    ):
        read_sources([str(file)], "ascend-910b", None)


def test_a_log_needs_its_recipe_and_counts_after_ten_steps(tmp_path):
    log = tmp_path / "metrics.jsonl"
    seconds = [9.0] * 10 + [2.0, 2.5, 3.0]
    log.write_text("".join(json.dumps({"event": "step", "step": i + 1, "loss": 1.0, "seconds": s}) + "\n" for i, s in enumerate(seconds)))  # fmt: skip
    with pytest.raises(
        BadInputError, match=r"metrics.jsonl: a run or its log, expected with the recipe"
    ):
        read_sources([str(log)], "ascend-910b", None)
    for source in (log, tmp_path):
        rows = read_sources([str(source)], "ascend-910b", "telechat3_moe/pretrain_19m.yaml")
        assert [x.step_s for x in rows.steps] == [2.5]


def test_lines_of_megatron_are_means_of_the_steps_before(tmp_path):
    log = tmp_path / "megatron.log"
    line = " iteration {:8d}/     500 | consumed samples: 960 | elapsed time per iteration (ms): {} | lm loss: 1.1E+01 | number of skipped iterations:   0 |\n"
    log.write_text("".join(line.format(*x) for x in [(10, 900.0), (20, 500.5), (30, 510.5), (40, 505.5)]))  # fmt: skip
    assert step_seconds(log) == {10: 0.9, 20: 0.5005, 30: 0.5105, 40: 0.5055}
    assert median_step(str(log)) == 0.5055
    log.write_text(line.format(10, 900.0))
    with pytest.raises(BadInputError, match="expected more than 10"):
        median_step(str(log))


def test_every_verb_takes_the_file_and_a_second_calibration_narrows_it(tmp_path, capsys):
    table, out = tmp_path / "steps.csv", tmp_path / "ours.yaml"
    table.write_text(TABLE)
    calibrate = ["plan", "calibrate", "--from", str(table), "--device"]
    assert (
        main([*calibrate, "ascend-910b", "--out", str(out), "--json", str(tmp_path / "c.json")])
        == 0
    )
    report = json.loads((tmp_path / "c.json").read_text())
    assert posterior_file(out) == tmp_path / "ours.posterior.json"
    assert files_of(out)[1] == files_of("ascend-910b")[0]
    assert (
        main(
            ["plan", "score", str(table), "--device", str(out), "--json", str(tmp_path / "s.json")]
        )
        == 0
    )
    scored = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert [x["error"] for x in scored] == pytest.approx(
        [x["after"] for x in report["rows"]], abs=1e-6
    )
    before = np.abs([x["before"] for x in report["rows"]])
    assert np.abs([x["after"] for x in report["rows"]]).mean() < before.mean() / 2
    capsys.readouterr()
    assert main(["plan", "device", str(out)]) == 0
    assert "44 measured steps stand behind them" in capsys.readouterr().out
    recipe = "telechat3_moe/pretrain_19m.yaml"
    for verb in ("simulate", "memory"):
        assert main(["plan", verb, recipe, "--device", str(out)]) == 0
    assert (
        main(["plan", "layout", recipe, "--devices", "2", "--device", str(out), "--draws", "1"])
        == 0
    )
    assert "optimal under the event simulation" in capsys.readouterr().out
    (tmp_path / "more").mkdir()
    second_file = tmp_path / "more" / "second.yaml"
    assert main([*calibrate, str(out), "--out", str(second_file)]) == 0
    first, second = load_posterior(out), load_posterior(second_file)
    assert first
    assert second
    assert second.names == first.names
    assert second.covariance[-1, -1] < first.covariance[-1, -1]
    assert load_device(second_file).peak_flops == load_device("ascend-910b").peak_flops
    assert main([*calibrate, str(out), "--out", str(out)]) == 3
    assert "has the name of its base" in capsys.readouterr().err


def test_device_and_sources_go_together(capsys):
    assert main(["plan", "calibrate", "--device", "a100"]) == 2
    assert main(["plan", "calibrate", "--from", "x.csv"]) == 2
    assert main(["plan", "calibrate", "telechat3_moe/pretrain_19m.yaml"]) == 2
    assert "expected both or neither" in capsys.readouterr().err


def test_the_example_of_the_page(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "plan_step.md").read_text(encoding="utf-8")
    [command] = re.findall(r"(?m)^telechat-moe (plan calibrate .*--from .*)$", page)
    monkeypatch.chdir(tmp_path)
    Path("steps.csv").write_text(TABLE)
    Path("hccl_test.log").write_text((FIXTURES / "hccl_910b.txt").read_text())
    assert main(command.split()) == 0
    assert "mean error of 12 rows" in capsys.readouterr().out
    assert load_device("ours.yaml").stack_factor != 1
