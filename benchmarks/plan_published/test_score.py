"""Reading published tables, refusing rows, scoring, fitting."""

import csv
import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plan_published.__main__ import WHOLE_STEPS, main
from benchmarks.plan_published.cells import Cells
from benchmarks.plan_published.fit import TYPICAL, Problem, fit, free_constants, held_out
from benchmarks.plan_published.freeze import rows_of, write
from benchmarks.plan_published.models import published
from benchmarks.plan_published.tables import FORMATS, read_table
from benchmarks.plan_published.validate import checked, implausible
from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.device import Constants, load_device
from telechat_moe.tools.plan.cost.flops import keys_per_token, model_flops
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.score import MeasuredStep, score, statistics
from telechat_moe.tools.plan.cost.step import evaluate

TABLES = Path(__file__).parent / "data"
STEPS = [
    f for f in sorted(TABLES.glob("*.csv")) if "allreduce" not in f.name and "kernels" not in f.name
]


@pytest.mark.parametrize("file", [*STEPS, TABLES / "published_steps.yaml"], ids=lambda f: f.stem)
def test_every_row_is_read_or_has_a_reason_of_a_known_kind(file):
    rows = checked(read_table(file), "a100")
    if file.suffix == ".csv":
        with file.open() as stream:
            assert len(rows) == sum(1 for _ in csv.DictReader(stream))
    for row in rows:
        if row.reason:
            assert row.reason.startswith(KINDS), row
        else:
            assert row.architecture is not None
            assert row.layout is not None
            assert row.step_s or row.memory_bytes or row.out_of_memory


ODD = ["", "abc", "-1", "0", "1e9", "1e400", "nan", "8 (4)", "3.5", "[1,2", "FP4", "8GB"]
WORDS = {
    "family", "optimizer", "recompute", "select_recompute", "recompute-granularity", "recompute-method", "recompute-modules",
    "attention-backend", "transformer-impl", "data-parallel-sharding-strategy", "fp8-format", "moe-token-dispatcher-type",
    "precision", "Precision", "MP Mode", "Sharding Strategy", "schedule", "compute", "stack",
}  # fmt: skip
"""Columns of words: an unknown one there is an error (`test_words.py`)."""
KINDS = ("missing: ", "device without a description", "impossible: ")


@pytest.mark.parametrize("file", STEPS, ids=lambda f: f.stem)
def test_odd_missing_and_additional_cells_are_refused_with_a_reason(file, tmp_path):
    random = np.random.default_rng(7)
    with file.open() as stream:
        header, *lines = csv.reader(stream)
    changed = [list(lines[i]) for i in random.integers(0, len(lines), 120)]
    for line in changed:
        for at in random.integers(0, len(header), 2):
            if header[at] not in WORDS:
                line[at] = str(random.choice(ODD))
        if random.random() < 0.1:
            del line[-3:]
        line += ["more"] * int(random.random() < 0.1)
    table = tmp_path / "table.csv"
    with table.open("w", newline="") as stream:
        csv.writer(stream).writerows([[*header, "another"], *changed])
    scored = score(checked(read_table(table), "h100"), "h100")
    assert len(scored) == len(changed)
    for one in scored:
        if one.row.reason:
            assert one.row.reason.startswith(KINDS), one.row
        else:
            assert one.step_s is None or 0 < one.step_s < np.inf, one.row
    assert any(one.row.reason for one in scored)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", ""),
        ("a.csv", "one,two\n1,2\n"),
        ("a.csv", "\xff\xfe\x00"),
        ("a.yaml", ""),
        ("a.yaml", "sets: [1]"),
        ("a.yaml", "sets: [{id: x, rows: [3]}"),
    ],
)
def test_files_that_are_no_table_are_refused(name, text, tmp_path, capsys):
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(BadInputError, match=name):
        read_table(tmp_path / name)
    assert main([str(tmp_path / name)]) == 3
    assert name in capsys.readouterr().err


def test_impossible_values_of_a_set_are_reasons(tmp_path):
    file = tmp_path / "sets.yaml"
    start = "sets: [{id: h100_set, common: {model: llama3 8b, seq: 8192}, rows: ["
    rows = [
        "3",
        "{gpus: 8, tp: 0, pp: many, gbs: 8, mbs: 1, step: 1}",
        "{gpus: 8, tp: 1, pp: 1, gbs: 8, mbs: 1, step: [1]}",
        "{gpus: 8, tp: 1, pp: 1, gbs: 8, mbs: 1, hidden: 64, heads: 128, layers: 2, step: 1}",
        "{gpus: 800, tp: 1, pp: 100, gbs: 8, mbs: 1, step: 1}",
        "{gpus: 8, tp: 1, pp: 1, gbs: 8, mbs: 1, step: 0.9}",
    ]
    file.write_text(start + ", ".join(rows) + "]}]")
    *bad, good = checked(read_table(file), "h100")
    assert all(row.reason.startswith("missing: ") for row in bad), bad
    assert not good.reason
    for step, reason in ((0.0, "impossible: a step of 0 s"), (None, "missing: a measured time")):
        (row,) = checked([replace(good, step_s=step)], "h100")
        assert row.reason.startswith(reason)


def _line(name: str, /, **cells: str) -> MeasuredStep:
    """Read one row that gives these cells of a table, and no other."""
    with (TABLES / f"{name}.csv").open() as stream:
        header = set(next(csv.reader(stream)))
    parse = next(parse for needed, parse in FORMATS if needed <= header)
    return parse(Cells(cells), name, 1)


GOLDEN = {
    "family": "moe", "case": "a_test", "hw": "dev_dgx_h100", "hidden-size": "1024", "num-layers": "16",
    "num-attention-heads": "16", "seq-length": "1024", "micro-batch-size": "1", "global-batch-size": "32",
    "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "2", "mem_max_alloc_bytes": "5e9",
}  # fmt: skip


def test_functional_tests_by_their_names_and_defaults():
    plain = _line("megatron_functional_golden", **GOLDEN)
    assert plain.layout
    assert (plain.layout.dp, plain.layout.etp) == (2, 1)  # eight devices
    moe = {"num-experts": "8", "moe-router-topk": "2", "expert-model-parallel-size": "4"}
    experts = _line("megatron_functional_golden", **GOLDEN, **moe).layout
    # experts' width is sharded like the rest unless the row says otherwise, so that a stage needs 4 x 2 devices
    assert experts
    assert (experts.ep, experts.etp, experts.dp) == (4, 2, 4)
    split = {
        "num-virtual-stages-per-pipeline-rank": "4",
        "pipeline-model-parallel-layout": "Et*3|(tt|)*6tL",
    }
    cut = _line("megatron_functional_golden", **GOLDEN, **split).layout
    assert cut
    assert cut.chunks == (3, 2, 2, 2, 2, 2, 2, 1)
    with pytest.raises(Exception, match="16 layers in 8 chunks"):
        _line(
            "megatron_functional_golden",
            **GOLDEN,
            **{**split, "pipeline-model-parallel-layout": "Et*3|tL"},
        )
    copies = {
        "gpus": "16",
        "num-distributed-optimizer-instances": "2",
        "recompute-granularity": "full",
    }
    wide = _line("megatron_functional_golden", **GOLDEN, **copies).layout
    assert wide
    assert (wide.dp, wide.opt_shards, wide.recompute) == (4, 2, "full")
    bert = _line("megatron_functional_golden", **{**GOLDEN, "family": "bert"})
    assert bert.architecture
    # every token sees every other: half as many pairs again as causal ones, and one more on the diagonal
    assert keys_per_token(bert.architecture) == 1024
    assert bert.architecture.vocab == 30720
    for cells, word in (
        ({"optimizer": "dist_muon"}, "optimizer"),
        ({"perform-rl-step": "True"}, "rollouts"),
        ({"family": "multimodal-llava"}, "multimodal"),
    ):
        row = _line("megatron_functional_golden", **{**GOLDEN, **cells})
        assert word in row.reason
    # the name of a case says nothing
    named = "multi_dist_optimizer_frozen_muon_grpo_distill_1node_reshard"
    assert _line("megatron_functional_golden", **{**GOLDEN, "case": named}).layout == plain.layout


BRIDGE = {
    "container": "26.04 NeMo", "model": "Qwen3_30B_a3B", "system": "DGX-GB300", "gpus": "8", "precision": "MXFP8",
    "gbs": "512", "mbs": "8", "seq": "4096", "tp": "1", "pp": "1", "cp": "1", "vp": "n/a", "ep": "8",
    "tok_s_gpu": "31000",
}  # fmt: skip


def test_recipes_of_a_container_and_a_precision():
    def layout(**cells: str) -> Layout:
        found = _line("megatron_bridge_perf", **{**BRIDGE, **cells}).layout
        assert found
        return found

    early, late = layout(), layout(container="26.06.01 NeMo")
    assert not early.stack.graphs
    assert not early.stack.fused_experts
    assert late.stack.graphs
    assert late.stack.fused_experts
    assert late.stack.ep_overlap
    assert not layout(container="26.08 NeMo", system="DGX-H100", precision="FP8").stack.graphs
    assert layout(precision="NVFP4").compute == "fp4"
    deep = layout(model="DeepSeekV3", gpus="256", gbs="2048", mbs="1", pp="16", vp="1")
    assert deep.chunks == (*[4] * 15, 1)  # the published `Et*4|(t*4|)*14tmL`
    assert layout(model="DeepSeekV3", gpus="256", mbs="1", pp="8", vp="4").chunks == (
        1,
        *[2] * 30,
        0,
    )


def test_a_recipe_for_smaller_devices_is_not_the_layout_of_this_one():
    with (TABLES / "mindformers_ascend.csv").open() as stream:
        given = next(r for r in csv.DictReader(stream) if r["name"] == "gpt2_13b")
    assert "32 GB" in _line("mindformers_ascend", **given).reason
    assert not _line("mindformers_ascend", **{**given, "max_device_memory": "59GB"}).reason


def test_a_row_of_each_table_by_hand():
    """Global batch, devices and step time, worked out from the line itself."""
    vtrain = read_table(TABLES / "vtrain_a100_multi.csv")[0]
    assert (vtrain.layout.global_batch, vtrain.layout.devices) == (1536, 512)
    assert vtrain.step_s == pytest.approx(21.8904)
    foundry = read_table(TABLES / "llmfoundry_fsdp.csv")[0]
    assert (foundry.layout.global_batch, foundry.layout.devices) == (4096, 512)
    assert foundry.step_s == pytest.approx(8388608 / 1083366)
    dgxc = next(
        r
        for r in read_table(TABLES / "nvidia_dgxc_steps.csv")
        if "3.1 70b" in r.model and not r.reason
    )
    assert (dgxc.layout.tp, dgxc.layout.pp, dgxc.layout.cp, dgxc.layout.vpp) == (4, 4, 2, 5)
    assert (dgxc.architecture.seq, dgxc.layout.micro_batches) == (8192, 64)
    bridge = next(
        r
        for r in read_table(TABLES / "megatron_bridge_perf.csv")
        if "405B" in r.model and "H100" in r.device
    )
    assert (
        bridge.layout.chunks[0] == bridge.layout.chunks[-1] == 1
    )  # embedding and loss count as layers
    assert sum(bridge.layout.chunks) == 126
    assert bridge.step_s == pytest.approx(1536 * 8192 / (326 * 1024))
    titan = [r for r in read_table(TABLES / "published_steps.yaml") if "torchtitan_2024" in r.table]
    assert titan[0].step_s == pytest.approx(2 * 8192 / 5762)
    assert titan[0].memory_bytes == pytest.approx(82.4 * 2**30)


def test_impossible_rows_are_refused():
    a, device = published("llama2 7b"), load_device("ascend-910b")
    layout = Layout(dp=8, micro_batch=1, recompute="full", zero=1)
    honest = evaluate(a, [layout], device).step_s[0]
    assert not implausible(a, layout, honest, device)
    assert "of the peak" in implausible(a, layout, honest / 8, device)  # the 305 % kind
    assert "of the peak" in implausible(a, layout, honest * 12, device)
    assert "step of" in implausible(a, layout, 0.0, device)
    tiny = replace(
        a, hidden=256, ffn=512, layers=("dense",) * 2, heads=4, kv_heads=4, head_dim=64, seq=128
    )
    assert not implausible(tiny, layout, 1.0, device)  # launch times explain slow small work
    # one sequence of a mixture is little work for a B200, and much for an A100
    mixture, one = published("qwen3 30b", seq=4096), Layout(dp=8, ep=8, micro_batches=64)
    work = one.global_batch * mixture.seq * model_flops(mixture).training / one.devices
    for name, refused in (("b200", False), ("a100", True)):
        device = load_device(name)
        slow = work / (0.09 * device.peak("bf16"))
        assert bool(implausible(mixture, one, slow, device)) == refused


def test_synthetic_measurements_give_their_constants_back():
    device = load_device("a100")
    measured = {name: getattr(device.constants, name) for name in device.measured}
    assert measured, "the A100's links are measured by themselves"
    truth = Constants(matmul_share=0.61, layer_host_s=4e-4, memory_share=0.7, **measured)
    rows = list(read_table(TABLES / "vtrain_a100_single.csv"))[::30]
    predicted = evaluate(
        [r.architecture for r in rows], [r.layout for r in rows], replace(device, constants=truth)
    ).step_s
    rows = [replace(r, step_s=float(t)) for r, t in zip(rows, predicted, strict=True)]
    problem = Problem(rows, device)
    found = fit(problem)
    np.testing.assert_allclose(problem.predict(found), predicted, rtol=0.02)
    assert found.layer_host_s == pytest.approx(4e-4, rel=0.1)
    assert not {"fp8_share", *measured} & set(free_constants(rows, device))


def test_a_heavy_prior_holds_constants_to_what_is_typical():
    device = load_device("a100")
    rows = list(read_table(TABLES / "vtrain_a100_single.csv"))[::60]
    free, held = (fit(Problem(rows, replace(device, prior_weight=w))) for w in (0.0, 20.0))
    for name in ("matmul_half", "inter_share", "eager_share"):
        off = [abs(np.log(getattr(c, name) / TYPICAL[name])) for c in (held, free)]
        assert off[0] < 0.2, name
        assert off[0] <= off[1] + 1e-6, name


def test_held_out_rows_are_not_seen_by_their_fit():
    """A group whose times are all doubled is predicted as if it were not."""
    device = load_device("a100")
    rows = list(read_table(TABLES / "vtrain_a100_single.csv"))[::24]
    groups = [r.model for r in rows]
    odd = groups[0]
    plain = held_out(Problem(rows, device), groups)
    twisted = [replace(r, step_s=r.step_s * (2 if r.model == odd else 1)) for r in rows]
    other = held_out(Problem(twisted, device), groups)
    here = np.array(groups) == odd
    assert np.abs(other[here] / plain[here] - 1).max() < 0.3
    with pytest.raises(BadInputError, match="one group only"):
        held_out(Problem(rows, device), ["same"] * len(rows))


def test_accuracy_of_the_frozen_constants():
    """Test the error of the fitted rows, not the held-out one, to catch a change of the model without a new fit."""
    files = [f for f in STEPS if f.stem != "layout_sweeps"]  # its rows are not fitted
    rows = checked([r for f in files for r in read_table(f)], "a100")
    scored = list(score(rows, "a100"))
    step = statistics([s.error for s in scored if s.error is not None])
    memory = statistics([s.memory_error for s in scored if s.memory_error is not None])
    assert step["rows"] > 1000
    assert step["mape"] < 0.06
    assert memory["mape"] < 0.055


def test_command_line(tmp_path, capsys):
    target = tmp_path / "score.json"
    table = tmp_path / "part.csv"
    lines = (TABLES / "mindformers_ascend.csv").read_text().splitlines()
    table.write_text("\n".join(lines[:12]) + "\n")
    assert main([str(table), "--device", "ascend-910b", "--json", str(target), "--rows"]) == 0
    report = json.loads(target.read_text())
    rows = report["rows"]
    assert len(rows) == 11
    assert sum(report["rejected"].values()) == sum(bool(r["rejected"]) for r in rows)
    timed = [abs(r["error"]) for r in rows if r["error"] is not None]
    assert report["overall"]["mape"] == pytest.approx(np.mean(timed))
    for r in rows:
        if r["error"] is not None:
            assert r["error"] == pytest.approx(r["predicted_s"] / r["measured_s"] - 1)
    out = capsys.readouterr().out
    assert "MAPE" in out
    assert "impossible" in out
    assert main([str(tmp_path / "none.csv")]) == 3
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert main([str(other)]) == 3
    assert "fit no known table" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a100", "h100", "b200"])
def test_shipped_constants_are_what_the_tables_yield(name, tmp_path):
    """910B's file was fitted to two rows that are refused since; the claim plan-refit says what that changes."""
    tables = [str(TABLES / table) for table in WHOLE_STEPS]
    out = write(name, rows_of(tables, name), tmp_path / "fitted.yaml")
    fitted, shipped = load_device(out).constants, load_device(name).constants
    for field in fields(shipped):
        value = getattr(shipped, field.name)
        assert getattr(fitted, field.name) == pytest.approx(value, rel=0.01), field.name
