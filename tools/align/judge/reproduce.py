"""Isolate a divergent call: the calls involved, as two small dumps, and a script that fails as long as it is wrong.

``reference`` and ``target`` in the folder are dumps in msprobe's format; the reference has arguments without values.
``reproduce.py`` judges one by the other, prints observed error over bound, and exits with 1 while the call is wrong and
with 0 once it is right (for example after the file of its output in ``target`` was replaced by the output of a repaired
operator). It needs NumPy and this package.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump import msprobe, msprobe_write
from telechat_moe.tools.align.dump.records import (
    Array,
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    TensorRecord,
    Value,
)
from telechat_moe.tools.align.judge.collectives import ExchangeContext
from telechat_moe.tools.align.judge.comparison import compare
from telechat_moe.tools.align.judge.divergent_call import DivergentCall
from telechat_moe.tools.align.judge.edges import origin
from telechat_moe.tools.align.judge.outcome import Finding
from telechat_moe.tools.align.judge.pairing import split
from telechat_moe.tools.align.judge.verdict import Verdict, not_judged

SCRIPT = "reproduce.py"
_RUNS = "reference", "target"
_NEIGHBOURS = 4
_TEXT = '''"""{title}

{said}

Judges the dump in `target` by that in `reference`; exit code 1: still wrong, 0: right.
"""

import sys
from pathlib import Path

from telechat_moe.tools.align.judge.reproduce import run

sys.exit(run(Path(__file__).parent))
'''

_Place = tuple[int, int, Call]
"""A call with its step and rank."""


def write(finding: Finding, folder: Path) -> Path:
    """Write the reproducer of the first divergent call of a rank; return the script.

    Raises:
        BadInputError: The folder cannot be made or is not empty, or the dumps lack the call's surroundings.
    """
    if finding.about is None or finding.verdict.basis == "other run":
        problem = "it was not found by replay or data flow"
        raise BadInputError(f"{folder}: no reproducer of {finding.verdict.key}: {problem}")
    description, *runs = _involved(finding, finding.about)
    title = f"{finding.verdict.key}, step {finding.step}, rank {finding.rank}: {finding.family}"
    title, description = (t.replace("\\", "/").replace('"""', "'''") for t in (title, description))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadInputError(f"{folder}: not empty; name a folder to make")
        for name, calls in zip(_RUNS, runs, strict=True):
            msprobe_write.write(_dump(folder / name, calls), folder / name)
        script = folder / SCRIPT
        script.write_text(_TEXT.format(title=title, said=description), encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{folder}: cannot be written: {error.strerror}") from None
    return script


def run(folder: Path) -> int:
    """Judge and print; return 1 while the call is wrong, 0 once it is right, 4 if it cannot be judged."""
    verdict = check(folder)
    ratio = "must be equal" if np.isinf(verdict.ratio) else f"{verdict.ratio:.4g}"
    sys.stdout.write(f"{verdict.status}: observed / bound {ratio}; {verdict.reason}\n")
    return {"pass": 0, "diverged": 1}.get(verdict.status, 4)


def check(folder: Path) -> Verdict:
    """Return the current verdict on a reproducer: the first finding, or else that of the call last judged.

    Raises:
        BadInputError: A dump is missing or broken.
    """
    target = msprobe.read(folder / "target")
    outcome = compare(msprobe.read(folder / "reference"), target)
    if outcome.findings:
        return outcome.findings[0].verdict
    calls = [c for rank in target.ranks.values() for c in rank.calls.values()]
    if outcome.judged.get("pass") or not any(t.read for c in calls for _, t in c.tensors()):
        ratio = max((ratio for *_, ratio in outcome.calls), default=0.0)
        return Verdict(calls[-1].key, "", "pass", ratio, "nothing is beyond its bound")
    return not_judged(calls[-1].key, "; ".join(outcome.unknown) or outcome.reason)


def _dump(root: Path, calls: list[_Place]) -> Dump:
    """Return a dump of some calls. An additional call has a number, as the format demands."""
    calls_by_rank: dict[tuple[int, int], dict[str, Call]] = {}
    for step, rank, call in calls:
        key = re.sub(r"(\d+)\+", r"9\1", call.key)
        copy = _copied(replace(call, key=key), lambda record: record.read)
        calls_by_rank.setdefault((step, rank), {})[key] = copy
    ranks = {k: RankDump(*k, "", "", "", c) for k, c in calls_by_rank.items()}
    return Dump(root, ranks)


def _involved(
    finding: Finding, about: DivergentCall | ExchangeContext
) -> tuple[str, list[_Place], list[_Place]]:
    """Return what is wrong in words, and the calls of the reference and of the target that show it."""
    description = finding.verdict.reason
    if isinstance(about, ExchangeContext):
        keys, step = about.received.meeting.keys.items(), finding.step
        runs = about.reference
        shared = [(r, k) for r, k in keys if r in runs and k in runs[r].calls]
        reference_calls = [(step, r, _bare(runs[r].calls[k])) for r, k in shared]
        return description, reference_calls, [(step, r, about.target[r].calls[k]) for r, k in keys]
    place = about.verdict.place
    if place and not place.startswith("output"):
        description, target_calls = _relation(about, finding.step)
        reference_calls = [(step, rank, _bare(call)) for step, rank, call in target_calls]
        return description, reference_calls, target_calls
    runs, key = (about.reference.dump.calls, about.target.dump.calls), about.call.key
    if place:
        keys = about.call.forward_key, key
        calls = [{k: run[k] for k in keys if k in run} for run in runs]
        calls[0] = {k: _bare(call) for k, call in calls[0].items()}
    elif all(key in run for run in runs):  # it takes other tensors than in the reference
        tensors = dict(runs[1][key].tensors())
        mixed = runs[0][key].changed(lambda name, value: tensors.get(name, value))
        calls = [{key: replace(mixed, outputs=_bare(mixed).outputs)}, {key: runs[1][key]}]
    else:
        calls = [{k: _bare(run[k]) for k in _neighbours(key, *runs) if k in run} for run in runs]
    return description, [*_placed(calls[0], about)], [*_placed(calls[1], about)]


def _relation(about: DivergentCall, step: int) -> tuple[str, list[_Place]]:
    """Return what a wrong input should be, in words, and calls that make it of that.

    A sum is an all-reduce with a rank for each term: both may be computed in any order, in the tensors' own type.
    """
    place = about.call.key, about.verdict.place
    description, parts = origin(place, about.reference, about.target)
    record = about.target.tensors[place]
    name = "Tensor.clone" if len(parts) == 1 else "Distributed.all_reduce"
    key, group = f"{name}.0.forward", Scalar("ProcessGroup", {"group_ranks": [*range(len(parts))]})
    calls_made: list[_Place] = []
    for rank, part in enumerate(parts):
        values = part.load()
        fits = values.size == np.prod(record.shape)
        values = values.reshape(record.shape) if fits else values
        term = replace(part, shape=values.shape, read=lambda x=values: x)
        named = {"group": group} if len(parts) > 1 else {}
        outputs: list[Value] = [record] if rank == 0 else []
        call = Call(key, "api", name, 0, Phase.FORWARD, [term], named, outputs)
        calls_made.append((step, rank, call))
    return f"{place[1]} of {place[0]} must be {description}; {name} makes it of that", calls_made


def _placed(calls: Mapping[str, Call], about: DivergentCall) -> Iterator[_Place]:
    """Yield calls of a rank with their own steps and keys."""
    dump = about.target.dump
    for name, call in calls.items():
        step, key = split(name, dump.step)
        yield step, dump.rank, replace(call, key=key)


def _neighbours(key: str, *runs: Mapping[str, Call]) -> list[str]:
    """Return a call that only one run makes, and the calls before and after it that both make."""
    calls = next(run for run in runs if key in run)
    both = {k for k, c in calls.items() if c.kind == "api" and all(k in run for run in runs)}
    keys = [k for k in calls if k == key or k in both]
    position = keys.index(key)
    return keys[max(0, position - _NEIGHBOURS) : position + _NEIGHBOURS + 1]


def _bare(call: Call) -> Call:
    return _copied(call, lambda record: None)


def _copied(call: Call, read: Callable[[TensorRecord], Callable[[], Array] | None]) -> Call:
    """Return a call with records of nothing but type, shape and, where there is a reader, values."""

    def copied(place: str, value: Value) -> Value:
        if not isinstance(value, TensorRecord):
            return value
        grad = value.requires_grad
        return TensorRecord(value.dtype, value.shape, requires_grad=grad, read=read(value))

    return replace(call.changed(copied, results=True), parameters={})
