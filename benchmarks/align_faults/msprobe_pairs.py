"""How does `align bisect` answer for dumps of the real msprobe? `python -m benchmarks.align_faults.msprobe_pairs FOLDER`.

Clean pairs and single dumps, and faults planted in the same programs (:mod:`.msprobe_runs`, :mod:`.msprobe_faults`), as
products of axes. The call to name first is the first that is not, bit for bit, as in a run without the fault and
otherwise with the same settings. Prints a line for each pair and tables of verdicts by kind. Dumps that are in the
folder already are not made again.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import permutations, product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.align_faults.msprobe_faults import FAULTS
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
    """Two runs, or one alone; a fault is in the second."""

    kind: str
    reference: TorchRun
    target: TorchRun | None


MODELS = "deepseek", "qwen3_moe", "glm4_moe", "gpt_oss"
_SDPA = MODELS[:3]  # models that have this attention
_TWO = {"threads": 2}
_BF16 = {"dtype": "bfloat16"}
_SDPA_KERNEL = {"attention": "sdpa"}
_ADAMW = {"optimizer": "adamw"}
_FOREACH = {"optimizer": "adamw_foreach"}
_FORMS = [
    {"level": level, "task": task}
    for level in ("L1", "mix", "L0")
    for task in ("tensor", "statistics")
]
_TP = [R("tensor_parallel", ranks=ranks) for ranks in (1, 2, 4)]
# Without Megatron-Core these pairs are left out.
_MEGATRON = [R(f"megatron_{name}", ranks=n) for name, n in (("tp", 1), ("tp", 2), ("ep", 2))]
_A2A = [R("megatron_a2a")]  # msprobe 26.2.0 writes no calls of two ranks
if find_spec("megatron") is None:
    _MEGATRON, _A2A = [], []
_DATA = [replace(run, micro_batches=2, split=run.ranks > 1) for run in _MEGATRON[::2]]
_LATE = [
    {"steps": 3, "dumped": (2,)},
    {"steps": 3, "dumped": (0, 2), **_FOREACH},
    {"steps": 2, "dumped": (0, 1), **_ADAMW},
]


def _with(runs: Iterable[TorchRun], *settings: Mapping[str, Any]) -> list[TorchRun]:
    """Return each run with each group of settings."""
    return [replace(run, **dict(s)) for run, s in product(runs, settings)]


def _changed(
    kind: str, runs: Iterable[TorchRun], *changes: Mapping[str, Any], both: bool = False
) -> Iterator[Pair]:
    """Yield each run beside itself with each change; if ``both``, the other way too."""
    for run, change in product(runs, changes):
        other = replace(run, **dict(change))
        yield Pair(kind, run, other)
        if both:
            yield Pair(kind, other, run)


_HF = [R(model) for model in MODELS]
_HF_FORMS = _with(_HF, *_FORMS)
_TENSORS = [run for run in _HF_FORMS if run.task == "tensor"]
_FOR_SDPA = [run for run in _HF_FORMS if run.model in _SDPA]
CLEAN = [
    *_changed("threads", _HF_FORMS, _TWO),
    *_changed("threads, bfloat16", _with(_TENSORS, _BF16), _TWO),
    *_changed("attention", [r for r in _FOR_SDPA if r.task == "tensor"], _SDPA_KERNEL, both=True),
    *_changed("attention", [r for r in _FOR_SDPA if r.task != "tensor"], _SDPA_KERNEL),
    *_changed("precision", _TENSORS, _BF16, both=True),
    *_changed("precision", [r for r in _HF_FORMS if r.task != "tensor"], _BF16),
    *_changed("precision", _with(_HF, _ADAMW, {"tokens": 96}), _BF16),
    *_changed(
        "optimizer",
        _with(_HF, *({"optimizer": o} for o in ("adamw", "adamw_foreach", "adamw_fused", "sgd"))),
        _TWO,
    ),
    *_changed("optimizer", _with(_HF, _ADAMW), _FOREACH, both=True),
    *_changed("steps", _with(_HF, *_LATE), _TWO),
    *_changed("recomputation", [*_HF, *_with(_HF, _ADAMW)], {"recompute": True}, both=True),
    *_changed("accumulation", _with(_HF, {"micro_batches": 4}), _TWO, _BF16),
    *_changed("threads", [R("sparse_experts")], _TWO),
    *_changed("float8", [R("sparse_experts_float8", level="mix")], _BF16),
    *(
        Pair("layout", *_with(pair, more))
        for pair in permutations(_TP, 2)
        for more in ({}, _ADAMW, _BF16)
    ),
    *_changed("Megatron-Core, threads", _with([*_MEGATRON, *_A2A], {}, _ADAMW, _BF16), _TWO),
    *(
        Pair("Megatron-Core, layout", *_with(pair, more))
        for pair in permutations(_MEGATRON, 2)
        for more in ({}, _ADAMW)
    ),
    *(
        Pair("Megatron-Core, layout", *_with(pair, settings))
        for pair in permutations(_DATA, 2)
        for settings in ({}, _ADAMW)
    ),
]
SINGLE = [
    Pair("one dump", run, None)
    for run in dict.fromkeys(run for pair in CLEAN for run in pair[1:3] if run is not None)
    if run.threads == 1 and run.task == "tensor" and run.level != "L0"
]


def _faulty(kind: str, reference: TorchRun, target: TorchRun) -> Iterator[Pair]:
    """Yield a pair for each fault that the target's model can have."""
    for name, fault in FAULTS.items():
        if target.model.startswith(fault.models):
            settings = dict(fault.run)
            yield Pair(
                kind, replace(reference, **settings), replace(target, fault=name, **settings)
            )


def _planted(
    kind: str, models: Sequence[str], reference: Mapping[str, Any], target: Mapping[str, Any]
) -> Iterator[Pair]:
    for model in models:
        yield from _faulty(
            kind, replace(R(model), **dict(reference)), replace(R(model), **dict(target))
        )


_STATISTICS = {"task": "statistics"}
_MIX = {"level": "mix"}
FAULTY = [
    *_planted("fault, two threads", MODELS, {}, _TWO),
    *_planted("fault, bfloat16", MODELS[:2], {}, _BF16),
    *_planted("fault, statistics", MODELS[:2], _STATISTICS, _STATISTICS | _TWO),
    *_planted("fault, attention", MODELS[:1], {}, _SDPA_KERNEL),
    *_planted("fault, mix", MODELS[2:3], _MIX, _MIX | _TWO),
    *(
        pair
        for a, b in ((2, 2), (1, 2), (2, 4), (4, 2))
        for pair in _faulty("fault, layout", *(replace(_TP[0], ranks=n) for n in (a, b)))
    ),
    *(
        pair
        for runs in (_MEGATRON, _A2A)
        for a, b in product(runs, runs)
        if a == b or (a.ranks == 1 and b.ranks == 2)
        for pair in _faulty(f"fault, Megatron-Core, {'same layout' if a == b else 'layout'}", a, b)
    ),
]


# ---------------------------------------------------------------------------------------- answers


def outcome_of(reference: Path, target: Path | None) -> Outcome:
    """Return the answer of `align bisect REFERENCE [TARGET]`."""
    golden = summary.read(reference)
    if target is None:
        return bisect(with_groups(golden), golden, itself=True)
    judged = summary.read(target)
    if differ_in_layout(golden, judged):
        return across_layouts.across(golden, judged)
    return bisect(golden, judged)


def wrong_calls(clean: Path, faulty: Path) -> set[str]:
    """Return the calls of each rank that are the first which are not, bit for bit, as without the fault.

    These are the first in order (where a call is missing or there is one too many, in both runs), the one that is
    repeated, and the first of those that both runs have, which takes what the fault made.
    """
    calls: set[str] = set()
    ranks = {path.parent.name for path in faulty.glob("step*/rank*/dump.json")} or {"proc*"}
    for rank in ranks:  # one process has its number in place of a rank
        named = set[str]()
        steps = [sorted(run.glob(f"step*/{rank}/dump.json")) for run in (clean, faulty)]
        for beside, path in zip(*steps, strict=True):
            right, wrong = [*_calls(beside)], [*_calls(path)]
            pairs = enumerate(zip_longest(right, wrong))
            first = next((i for i, (a, b) in pairs if a is None or b is None or a != b), None)
            if first is None:
                continue
            if named:  # the step before ends with a call that is added
                calls.update(run[first][0] for run in (right, wrong) if first < len(run))
                break
            names = [run[first][0] for run in (right, wrong) if first < len(run)]
            if first and len({*names}) > 1:
                before = wrong[first - 1][0]
                names += [before] if before.split(".")[:2] == names[-1].split(".")[:2] else []
            both = dict(right)
            others = [key for key, content in wrong if both.get(key, content) != content][:1]
            named.update(names + others)
            if others:
                break
        calls |= named
    return calls


def _calls(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the calls of a dump with their results and settings."""
    data = json.loads(path.read_text())["data"]
    for key, entry in data.items():
        if "empty" not in key:  # uninitialised memory
            arguments = [entry.get("input_args", []), entry.get("input_kwargs", {})]
            made = entry.get("output", entry if "parameters_grad" in key else [])
            scalars = list(_parts(arguments, path, tensors=False))
            yield key, [scalars, list(_parts(made, path, tensors=True))]


def _parts(value: Any, path: Path, tensors: bool) -> Iterator[Any]:
    """Yield the scalars, and if ``tensors`` the bytes of tensors or their statistics, of an entry of msprobe."""
    if isinstance(value, list):
        for item in value:
            yield from _parts(item, path, tensors)
    elif isinstance(value, dict) and "type" in value and "shape" in value:
        if tensors:
            file = path.parent / "dump_tensor_data" / value.get("data_name", " ")
            yield file.read_bytes() if file.exists() else {**value, "data_name": ""}
    elif isinstance(value, dict) and "group_id" not in value:
        for item in value.values():
            yield from _parts(item, path, tensors)
    elif not isinstance(value, dict):
        yield value


def is_right(key: str, wrong: set[str]) -> bool:
    """Return whether a key names one of the calls that are wrong, in either of its steps."""
    return key.rpartition("|")[2] in wrong


def name_of(run: TorchRun) -> str:
    """Return the name of the folder of a run: its settings that are not usual, in letters that msprobe accepts."""
    usual = vars(TorchRun(model=run.model))
    settings = [f"{k}-{v}" for k, v in vars(run).items() if v != usual[k]]
    return re.sub(r"[^\w-]+", "-", "_".join([run.model, *settings]))


def dumps_of(folder: Path, pairs: Iterable[Pair]) -> Mapping[TorchRun, Path]:
    """Return the folders of the dumps of pairs, and of their targets without the fault, made where they are not there yet."""
    runs = dict.fromkeys(run for p in pairs for run in (p.reference, p.target) if run is not None)
    runs |= dict.fromkeys(replace(run, fault="") for run in runs)
    lacking = {name_of(run): run for run in runs if not (folder / name_of(run)).exists()}
    if lacking:
        dump(folder, lacking)
    return {run: folder / name_of(run) for run in runs}


def answer_of(pair: Pair, dumps: Mapping[TorchRun, Path]) -> tuple[str, Outcome | None]:
    """Return a word for the answer, and the outcome; none for a fault that changes nothing."""
    wrong: set[str] = set()
    if pair.target is not None and pair.target.fault:
        wrong = wrong_calls(dumps[replace(pair.target, fault="")], dumps[pair.target])
        if not wrong:
            return "no effect", None
    outcome = outcome_of(dumps[pair.reference], pair.target and dumps[pair.target])
    if not wrong or not outcome.findings:
        return outcome.verdict, outcome
    right = is_right(outcome.findings[0].verdict.key, wrong)
    return "right call" if right else f"other call, not {', '.join(sorted(wrong))}", outcome


def main(folder: Path, chosen: str = "") -> int:
    """Judge all pairs, or those with a word in their kind or names, and print; return 1 if a clean one has a finding."""
    pairs = [p for p in [*SINGLE, *CLEAN, *FAULTY] if chosen in f"{p.kind} {_names(p)}"]
    dumps = dumps_of(folder, pairs)
    count: dict[str, Counter[str]] = {}
    kinds, alarms = Counter[str](), 0
    for pair in pairs:
        answer, outcome = answer_of(pair, dumps)
        count.setdefault(pair.kind, Counter())[answer.partition(",")[0]] += 1
        print(f"{answer}: {_names(pair)}", flush=True)
        first = outcome.findings[0] if outcome is not None and outcome.findings else None
        if first is not None:
            alarms += not (pair.target and pair.target.fault)
            kinds[first.family] += bool(pair.target and pair.target.fault)
            print(f"    {first.verdict.key} {first.family}: {first.verdict.reason[:200]}")
        reasons = outcome.coverage.reasons if outcome is not None else {}
        for reason, (calls, _) in sorted(reasons.items())[: 3 * (answer != "pass")]:
            print(f"    not judged, {calls} calls: {reason[:160]}")
    answers = ["pass", "inconclusive", "diverged", "right call", "other call", "no effect"]
    rows = [[kind, *(counter[a] for a in answers)] for kind, counter in count.items()]
    show_table(["pairs", *answers], rows)
    show_table(["kind of fault", "first findings"], [[k, n] for k, n in kinds.most_common()])
    return int(alarms > 0)


def _names(pair: Pair) -> str:
    return " | ".join(name_of(run) for run in pair[1:3] if run)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
