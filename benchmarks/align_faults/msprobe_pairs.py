"""How does `align bisect` answer for dumps of the real msprobe? `python -m benchmarks.align_faults.msprobe_pairs FOLDER`.

Clean pairs and single dumps, and faults planted in the same programs (:mod:`.msprobe_runs`). Prints a line for each pair
and a table of verdicts by kind. Dumps that are in the folder already are not made again.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.align_faults.msprobe_runs import TorchRun, dump
from telechat_moe.cli.output import show_table
from telechat_moe.tools.align import across_layouts
from telechat_moe.tools.align.bisect import bisect
from telechat_moe.tools.align.dump import summary
from telechat_moe.tools.align.judge.collectives import with_groups
from telechat_moe.tools.align.judge.outcome import Outcome
from telechat_moe.tools.align.judge.pairing import differ_in_layout

R = TorchRun


class Pair(NamedTuple):
    """Two runs, or one alone, and the call that is wrong in the second: empty if none is."""

    kind: str
    reference: TorchRun
    target: TorchRun | None
    call: str = ""  # part of the key that must be named first


def _pairs(kind: str, *pairs: tuple[TorchRun, TorchRun]) -> Iterable[Pair]:
    return (Pair(kind, a, b) for a, b in pairs)


_TWO = {"threads": 2}
_MEGATRON: list[TorchRun] = []
if find_spec("megatron") is not None:  # else these pairs are left out
    _MEGATRON = [R("megatron_tp"), R("megatron_tp", ranks=2), R("megatron_ep", ranks=2)]
_TP = {ranks: R("tensor_parallel", ranks=ranks) for ranks in (1, 2, 4)}
_MODELS = "deepseek", "qwen3_moe", "glm4_moe", "gpt_oss"
SINGLE = [
    *(Pair("one dump", R(model), None) for model in _MODELS),
    Pair("one dump", R(level="mix", optimizer="adamw"), None),
    Pair("one dump", R(dtype="bfloat16", attention="sdpa"), None),
    Pair("one dump", R(recompute=True, optimizer="sgd"), None),
    Pair("one dump", R("tensor_parallel", ranks=2), None),
    Pair("one dump", R("sparse_experts"), None),
    Pair("one dump", R("sparse_experts_float8", level="mix"), None),
]
CLEAN = [
    *_pairs("threads", *((R(m), R(m, **_TWO)) for m in _MODELS)),
    *_pairs("threads", (R(level="mix"), R(level="mix", **_TWO))),
    *_pairs("threads, modules", (R(level="L0"), R(level="L0", **_TWO))),
    *_pairs(
        "threads, optimizer",
        *((R(optimizer=o), R(optimizer=o, **_TWO)) for o in ("adamw", "adamw_foreach", "sgd")),
    ),
    *_pairs("optimizer's kernels", (R(optimizer="adamw"), R(optimizer="adamw_foreach"))),
    *_pairs("optimizer's kernels", (R(optimizer="adamw_foreach"), R(optimizer="adamw"))),
    *_pairs("attention", *((R(m), R(m, attention="sdpa")) for m in _MODELS[:3])),
    *_pairs("attention", *((R(m, attention="sdpa"), R(m)) for m in _MODELS[:3])),
    *_pairs("precision", *((R(m), R(m, dtype="bfloat16")) for m in _MODELS)),
    *_pairs("precision", *((R(m, dtype="bfloat16"), R(m)) for m in _MODELS)),
    *_pairs("precision", (R(tokens=96), R(tokens=96, dtype="bfloat16"))),
    *_pairs("precision", (R(optimizer="adamw"), R(optimizer="adamw", dtype="bfloat16"))),
    *_pairs("threads, bfloat16", (R(dtype="bfloat16"), R(dtype="bfloat16", **_TWO))),
    *_pairs("statistics", (R(task="statistics"), R(task="statistics", **_TWO))),
    *_pairs("statistics", (R(task="statistics"), R(task="statistics", dtype="bfloat16"))),
    *_pairs("statistics", (R(task="statistics"), R(task="statistics", attention="sdpa"))),
    *_pairs("empty experts", (R("sparse_experts"), R("sparse_experts", **_TWO))),
    *_pairs(
        "float8",
        (
            R("sparse_experts_float8", level="mix"),
            R("sparse_experts_float8", level="mix", dtype="bfloat16"),
        ),
    ),
    *_pairs("recomputation", (R(), R(recompute=True)), (R(recompute=True), R())),
    *_pairs(
        "recomputation",
        (R(optimizer="adamw"), R(optimizer="adamw", recompute=True)),
        (R(optimizer="adamw", recompute=True), R(optimizer="adamw")),
    ),
    *_pairs("late step", (R(steps=3, dumped=(2,)), R(steps=3, dumped=(2,), **_TWO))),
    *_pairs(
        "steps with a gap",
        (
            R(steps=3, dumped=(0, 2), optimizer="adamw_foreach"),
            R(steps=3, dumped=(0, 2), optimizer="adamw_foreach", **_TWO),
        ),
    ),
    *_pairs(
        "two steps",
        (
            R(steps=2, dumped=(0, 1), optimizer="adamw"),
            R(steps=2, dumped=(0, 1), optimizer="adamw", **_TWO),
        ),
    ),
    *_pairs("accumulation", (R(micro_batches=4), R(micro_batches=4, **_TWO))),
    *_pairs("Megatron-Core, layout", *((a, b) for a in _MEGATRON for b in _MEGATRON[:1] if a != b)),
    *_pairs("Megatron-Core, layout", *((b, a) for a in _MEGATRON for b in _MEGATRON[:1] if a != b)),
    *_pairs("Megatron-Core, threads", *((a, replace(a, **_TWO)) for a in _MEGATRON)),
    *_pairs("layout", *((_TP[a], _TP[b]) for a in _TP for b in _TP if a != b)),
    *_pairs(
        "layout",
        (
            R("tensor_parallel", optimizer="adamw"),
            R("tensor_parallel", ranks=2, optimizer="adamw"),
        ),
    ),
]
_BASES = {
    "fault": R(),
    "fault, two threads": R(threads=2),
    "fault, bfloat16": R(dtype="bfloat16"),
    "fault, sdpa": R(attention="sdpa"),
}
_WHERE = {
    "silu scaled": "Functional.silu.1.",
    "linear rows moved": "Functional.linear.9.",
    "linear element": "Functional.linear.6.",
    "softmax narrow": "Functional.softmax.1.",
    "sum scaled": "Tensor.index_add_.2.",
    "epsilon": "Tensor.__add__.",
}
FAULTY = [
    Pair(kind, R(), TorchRun(**{**vars(base), "fault": fault}), call)
    for kind, base in _BASES.items()
    for fault, call in _WHERE.items()
]
FAULTY += [
    Pair(
        "fault, statistics",
        R(task="statistics"),
        R(task="statistics", threads=2, fault="weight loaded"),
        "Functional.linear.12.",
    ),
    Pair(
        "fault, rounded away",
        R(optimizer="adamw"),
        R(optimizer="adamw", dtype="bfloat16", fault="weight decay"),
        "Tensor.mul_.0",
    ),
]
FAULTY += [
    Pair(
        "fault of the optimizer",
        R(optimizer="adamw"),
        R(optimizer="adamw", threads=2, fault=fault),
        call,
    )
    for fault, call in {
        "weight skipped": "forward",
        "weight decay": "Tensor.mul_.0",
        "gradient doubled": "forward",
    }.items()
]
SPLIT = {
    "sum over ranks missing": ("all_reduce.1.", "Tensor.__add__.1."),
    "sum over ranks twice": ("all_reduce.0.", "Tensor.__add__.0."),
    "sum of gradients missing": ("all_reduce.3.", "Functional.embedding.0.backward"),
    "mean over ranks": ("Tensor.__truediv__.0.", "Tensor.__add__.1."),
    "slice of another rank": ("Functional.linear.2.", "Functional.linear.2."),
    "halves of a slice exchanged": ("Functional.linear.0.", "Functional.linear.0."),
}
"""Faults of a split model: the call to name where both runs are split alike, and across layouts."""
FAULTY += [
    Pair("fault, layout", _TP[a], replace(_TP[b], fault=fault), keys[a != b])
    for fault, keys in SPLIT.items()
    for a, b in ((2, 2), (1, 2), (2, 4), (4, 2))
]


def outcome_of(reference: Path, target: Path | None) -> Outcome:
    """Return the answer of `align bisect REFERENCE [TARGET]`."""
    golden = summary.read(reference)
    if target is None:
        return bisect(with_groups(golden), golden, itself=True)
    judged = summary.read(target)
    if differ_in_layout(golden, judged):
        return across_layouts.across(golden, judged)
    return bisect(golden, judged)


def name_of(run: TorchRun) -> str:
    """Return the name of the folder of a run: its settings that are not usual, in letters that msprobe accepts."""
    usual = vars(TorchRun(model=run.model))
    settings = [f"{k}-{v}" for k, v in vars(run).items() if v != usual[k]]
    return re.sub(r"[^\w-]+", "-", "_".join([run.model, *settings]))


def dumps_of(folder: Path, pairs: Iterable[Pair]) -> Mapping[TorchRun, Path]:
    """Return the folders of the dumps of pairs, made where they are not there yet."""
    runs = dict.fromkeys(run for p in pairs for run in (p.reference, p.target) if run is not None)
    lacking = {name_of(run): run for run in runs if not (folder / name_of(run)).exists()}
    if lacking:
        dump(folder, lacking)
    return {run: folder / name_of(run) for run in runs}


def main(folder: Path) -> int:
    """Judge all pairs and print; return 1 if a clean one has a finding."""
    pairs = [*SINGLE, *CLEAN, *FAULTY]
    dumps = dumps_of(folder, pairs)
    count: dict[str, Counter[str]] = {}
    alarms = 0
    for pair in pairs:
        outcome = outcome_of(dumps[pair.reference], pair.target and dumps[pair.target])
        first = outcome.findings[0] if outcome.findings else None
        answer = outcome.verdict
        if pair.call and first is not None:
            answer = "right call" if pair.call in first.verdict.key else "other call"
        alarms += not pair.call and bool(outcome.findings)
        count.setdefault(pair.kind, Counter())[answer] += 1
        names = " | ".join(name_of(run) for run in pair[1:3] if run)
        print(f"{answer}: {names}", flush=True)
        if first is not None:
            print(f"    {first.verdict.key} {first.family}: {first.verdict.reason[:200]}")
        for reason, (calls, _) in sorted(outcome.coverage.reasons.items())[
            : 3 * (answer != "pass")
        ]:
            print(f"    not judged, {calls} calls: {reason[:160]}")
    answers = ["pass", "inconclusive", "diverged", "right call", "other call"]
    rows = [[kind, *(counter[a] for a in answers)] for kind, counter in count.items()]
    show_table(["pairs", *answers], rows)
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
