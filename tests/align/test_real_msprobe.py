"""Dumps that the real msprobe writes of transformers' models: clean runs are no alarm, planted faults are named.

The dumps are made in the session (some seconds each); `benchmarks/align_faults/msprobe_pairs.py` has all pairs.
"""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
# Looked for, not imported: MindSpore's import would then fail in this process.
if find_spec("msprobe") is None:
    pytest.skip("mindstudio-probe is not installed (make test-torch)", allow_module_level=True)
pytestmark = pytest.mark.torch

from benchmarks.align_faults.msprobe_faults import FAULTS
from benchmarks.align_faults.msprobe_pairs import (
    CLEAN,
    FAULTY,
    SINGLE,
    Pair,
    answer_of,
    dumps_of,
    outcome_of,
    wrong_calls,
)
from benchmarks.align_faults.msprobe_runs import TorchRun
from telechat_moe.cli import main

SPLIT = [name for name, fault in FAULTS.items() if "tensor_parallel" in fault.models]
RUN = TorchRun()
ADAMW = TorchRun(optimizer="adamw")
TENSOR_PARALLEL = TorchRun("tensor_parallel", ranks=2)
FOUR = replace(TENSOR_PARALLEL, ranks=4)
QWEN = TorchRun("qwen3_moe")
EXPERTS = TorchRun("sparse_experts")
FLOAT8 = TorchRun("sparse_experts_float8", level="mix")
STATISTICS = TorchRun(task="statistics")
RUNS = [
    RUN,
    ADAMW,
    replace(ADAMW, threads=2),
    replace(RUN, dtype="bfloat16"),
    replace(RUN, attention="sdpa", optimizer="adamw_foreach"),
    replace(RUN, threads=2, fault="linear element"),
    TENSOR_PARALLEL,
    replace(TENSOR_PARALLEL, ranks=1),
    FOUR,
    *(replace(TENSOR_PARALLEL, fault=fault) for fault in SPLIT),
    QWEN,
    replace(QWEN, dtype="bfloat16"),
    replace(RUN, level="L0"),
    replace(RUN, level="L0", threads=2),
    EXPERTS,
    FLOAT8,
    STATISTICS,
    replace(STATISTICS, dtype="bfloat16"),
    replace(STATISTICS, threads=2, fault="weight scaled"),
    replace(ADAMW, dtype="bfloat16", fault="weight decay"),
    replace(RUN, attention="sdpa", fault="silu scaled"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("msprobe")


@pytest.fixture(scope="module")
def answer(folder):
    """Return a function to the outcome for two runs, or for one alone."""
    dumps = dumps_of(folder, [Pair("", run, None) for run in RUNS])

    def judge(reference, target=None):
        return outcome_of(dumps[reference], target and dumps[target])

    judge.dumps = dumps
    return judge


@pytest.mark.parametrize(
    "run",
    [ADAMW, replace(RUN, dtype="bfloat16"), TENSOR_PARALLEL, EXPERTS, FLOAT8],
    ids=str,
)
def test_one_right_dump_passes(run, answer):
    outcome = answer(run)
    assert outcome.findings == []
    assert outcome.verdict == "pass", outcome.reason


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        (ADAMW, replace(ADAMW, threads=2)),
        (RUN, replace(RUN, dtype="bfloat16")),
        (replace(RUN, dtype="bfloat16"), RUN),
        (ADAMW, replace(RUN, attention="sdpa", optimizer="adamw_foreach")),
        (replace(RUN, attention="sdpa", optimizer="adamw_foreach"), ADAMW),
        (replace(TENSOR_PARALLEL, ranks=1), TENSOR_PARALLEL),
        (TENSOR_PARALLEL, replace(TENSOR_PARALLEL, ranks=1)),
        (TENSOR_PARALLEL, FOUR),
        (FOUR, TENSOR_PARALLEL),
    ],
    ids=str,
)
def test_clean_pairs_are_no_alarm(reference, target, answer):
    outcome = answer(reference, target)
    assert outcome.findings == []
    if reference.dtype == target.dtype:  # what bf16 rounds away depends on the processor's kernels
        assert outcome.verdict == "pass", outcome.reason


def test_what_experts_without_tokens_make_is_judged(folder, answer):
    outcome = answer(EXPERTS, EXPERTS)
    assert not any("not dumped" in reason for reason in outcome.coverage.reasons)
    entries = json.loads(next((folder / "sparse_experts").rglob("dump.json")).read_text())["data"]
    tensors = [t for call in entries.values() for t in call.get("input_args", [])]
    assert any(t and t.get("shape") == [0, 32] and "data_name" not in t for t in tensors)


@pytest.mark.parametrize("pair", [(RUN, STATISTICS), (STATISTICS, RUN)], ids=str)
def test_values_and_statistics_compare(pair, answer):
    assert answer(*pair).findings == []


def test_weights_are_compared_by_their_statistics(answer):
    wrong = answer(STATISTICS, replace(STATISTICS, threads=2, fault="weight scaled"))
    (first,) = wrong.findings
    assert (first.verdict.key, first.verdict.place) == ("Functional.linear.12.forward", "input.1")
    assert answer(STATISTICS, replace(STATISTICS, dtype="bfloat16")).findings == []


@pytest.mark.parametrize(
    ("reference", "target"),
    [
        (QWEN, replace(QWEN, dtype="bfloat16")),  # tokens choose other experts
        (replace(QWEN, dtype="bfloat16"), QWEN),
        (replace(RUN, level="L0"), replace(RUN, level="L0", threads=2)),
    ],
    ids=str,
)
def test_what_views_make_and_modules_without_gradient_do_not_prevent_a_pass(
    reference, target, answer
):
    outcome = answer(reference, target)
    assert (outcome.verdict, outcome.findings) == ("pass", []), outcome.reason


def test_what_only_one_dump_has_of_the_optimizer_is_said(answer):
    outcome = answer(ADAMW, replace(RUN, attention="sdpa", optimizer="adamw_foreach"))
    assert any("dump ends before it" in text for text in outcome.unknown)


def test_a_wrong_element_is_named(answer):
    first = answer(RUN, replace(RUN, threads=2, fault="linear element")).findings[0]
    assert first.verdict.key == "Functional.linear.6.forward"


def test_another_weight_decay_is_found_where_bfloat16_rounds_it_away(answer):
    first = answer(ADAMW, replace(ADAMW, dtype="bfloat16", fault="weight decay")).findings[0]
    assert (first.verdict.key, first.family) == ("Tensor.mul_.0.forward", "wrong setting")
    assert "other is 0.9997, the reference's 0.9999" in first.verdict.reason


def test_beside_a_fault_another_attention_is_no_missing_call(answer):
    first = answer(RUN, replace(RUN, attention="sdpa", fault="silu scaled")).findings[0]
    assert first.verdict.key == "Functional.silu.1.forward"


def test_tensor_parallel_dumps_go_through_the_command(answer, folder, capsys):
    names = [str(folder / name) for name in ("tensor_parallel", "tensor_parallel_ranks-2")]
    assert main(["align", *names]) == 0, capsys.readouterr()
    assert main(["align", *names[::-1]]) == 0, capsys.readouterr()


@pytest.mark.parametrize("fault", SPLIT)
@pytest.mark.parametrize("ranks", [1, 4])
def test_faults_of_a_split_model_are_named_across_layouts(fault, ranks, answer):
    reference = replace(TENSOR_PARALLEL, ranks=ranks)
    pair = Pair("", reference, replace(TENSOR_PARALLEL, fault=fault))
    assert answer_of(pair, answer.dumps)[0] == "right call"


@pytest.mark.parametrize(
    ("fault", "call"),
    [
        ("linear element", "Functional.linear.6.forward"),
        ("silu scaled", "Functional.silu.1.forward"),
    ],
)
def test_the_call_to_name_is_the_first_that_is_otherwise(fault, call, answer):
    run = next(r for r in RUNS if r.fault == fault)
    clean = answer.dumps[replace(run, fault="")]
    assert wrong_calls(clean, answer.dumps[run]) == {call}
    assert wrong_calls(clean, clean) == set()


@pytest.mark.slow
@pytest.mark.mindspore
def test_our_model_on_mindspore(tmp_path):
    """Two dumps of our own model, and of three faults in it."""
    calls = {"": "", "norm": "add_eps", "router": "scale.Mul", "experts": "cast_gate"}
    command = [sys.executable, "-m", "benchmarks.align_faults.msprobe_mindspore"]
    folders = {name: tmp_path / (name or "again") for name in calls} | {"reference": tmp_path / "0"}
    for name, folder in folders.items():
        subprocess.run([*command, str(folder), name.removeprefix("reference")], check=True)
    for name, call in calls.items():
        outcome = outcome_of(folders["reference"] / "dump", folders[name] / "dump")
        keys = [finding.verdict.key for finding in outcome.findings[:1]]
        assert all(call in key for key in keys), name
        assert bool(keys) == bool(name), keys


@pytest.mark.slow
def test_all_pairs(tmp_path):
    """See the README of the benchmark: a tenth of its pairs."""
    clean, faulty = [*SINGLE, *CLEAN][::10], FAULTY[::10]
    dumps = dumps_of(tmp_path, [*clean, *faulty])
    answers = [answer_of(pair, dumps)[0] for pair in clean]
    assert "diverged" not in answers
    able = [a for a, p in zip(answers, clean, strict=True) if p.reference.task == "tensor"]
    assert able.count("pass") >= 0.8 * len(able)  # statistics cannot show a pass
    answers = [answer_of(pair, dumps)[0] for pair in faulty]
    shown = [a for a in answers if a != "no effect"]
    assert sum("call" in a for a in shown) >= 0.85 * len(shown)
