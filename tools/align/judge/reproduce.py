"""Isolate a divergent call: its tensors in one file, and a script that fails as long as the call is wrong.

``reproduce.py`` in the folder recomputes what the call should have made and prints observed error over bound. It
exits with 1 while the result is wrong and with 0 once it is right (for example after ``result.0`` in the file was
replaced by the output of a repaired operator). It needs NumPy and this package.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, Scalar, TensorRecord, Value
from telechat_moe.tools.align.judge.collectives import Exchange, judged_collectives
from telechat_moe.tools.align.judge.divergent_call import Wrong
from telechat_moe.tools.align.judge.edges import origin
from telechat_moe.tools.align.judge.replay import replay_call
from telechat_moe.tools.align.judge.verdict import Verdict, judge, not_judged, worst
from telechat_moe.tools.align.numerics import is_float
from telechat_moe.tools.align.operators.approx import Approx, Array

if TYPE_CHECKING:
    from telechat_moe.tools.align.judge.outcome import Finding

DATA, SCRIPT = "call.npz", "reproduce.py"
_NEIGHBOURS = 4
_TEXT = '''"""{title}

{said}

Recomputes it from the tensors in {data}, prints observed error over bound; exit code 1: still wrong, 0: right.
"""

import sys
from pathlib import Path

from telechat_moe.tools.align.judge.reproduce import run

sys.exit(run(Path(__file__).with_name("{data}")))
'''


def write(finding: "Finding", folder: Path) -> Path:
    """Write the reproducer of the first divergent call of a rank; return the script.

    Raises:
        BadInputError: The folder cannot be made or is not empty, or the dumps lack the call's surroundings.
    """
    if finding.about is None or finding.verdict.basis == "other run":
        said = f"no reproducer of {finding.verdict.key}: it was not found by replay or data flow"
        raise BadInputError(f"{folder}: {said}")
    tensors: dict[str, Array] = {}
    about = _described(finding, tensors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadInputError(f"{folder}: not empty; name a folder to make")
        np.savez(folder / DATA, about=np.array(json.dumps(about)), **tensors)
        script = folder / SCRIPT
        title = f"{finding.verdict.key}, step {finding.step}, rank {finding.rank}: {finding.family}"
        title, said = (
            text.replace("\\", "/").replace('"""', "'''") for text in (title, about["said"])
        )
        script.write_text(_TEXT.format(title=title, said=said, data=DATA), encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{folder}: cannot be written: {error.strerror}") from None
    return script


def run(data: Path) -> int:
    """Recompute and print; return 1 while the call is wrong, 0 once it is right, 4 if it cannot be judged."""
    about, verdict = check(data)
    ratio = "must be equal" if np.isinf(verdict.ratio) else f"{verdict.ratio:.4g}"
    sys.stdout.write(
        f"{about['said']}\n{verdict.status}: observed / bound {ratio}; {verdict.reason}\n"
    )
    return {"pass": 0, "diverged": 1}.get(verdict.status, 4)


def check(data: Path) -> tuple[dict[str, Any], Verdict]:
    """Return the contents of a reproducer and the current verdict.

    Raises:
        BadInputError: The file is missing or broken.
    """
    try:
        with np.load(data, allow_pickle=False) as file:
            tensors = {name: file[name] for name in file.files}
        about: dict[str, Any] = json.loads(str(tensors.pop("about")))
        return about, _KINDS[about["kind"]](about, tensors)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise BadInputError(f"{data}: no reproducer: {error}") from None


# ------------------------------------------------------------------ writing


def _described(finding: "Finding", tensors: dict[str, Array]) -> dict[str, Any]:
    verdict, about = finding.verdict, finding.about
    base = {"key": verdict.key, "place": verdict.place, "said": verdict.reason}
    if isinstance(about, Exchange):
        return base | _of_exchange(about, tensors)
    assert isinstance(about, Wrong)
    if verdict.place.startswith("output"):
        forward, settings = about.forward, about.settings
        return base | {
            "kind": "operator",
            "call": _call(about.call, "result", tensors),
            "forward": None
            if forward is about.call or forward is None
            else _call(forward, "forward", tensors),
            "settings": None if settings is None else _call(settings, None, tensors),
        }
    if verdict.place:
        place = about.call.key, about.verdict.place
        said, parts = origin(place, about.reference, about.target)
        record = about.target.tensors[place]
        tensors["observed"] = record.load()
        for i, part in enumerate(parts):
            tensors[f"part.{i}"] = part.load()
        base["said"] = f"{verdict.place} of {verdict.key} must be {said}"
        return base | {"kind": "input", "dtype": record.dtype, "parts": len(parts)}
    runs = {"reference": about.reference.dump.calls, "target": about.target.dump.calls}
    if all(about.call.key in calls for calls in runs.values()):
        taken = {name: [p for p, _ in c[about.call.key].tensors()] for name, c in runs.items()}
        return base | {"kind": "arguments", **taken}
    return base | {"kind": "calls", **_around(about)}


def _of_exchange(about: Exchange, tensors: dict[str, Array]) -> dict[str, Any]:
    received = about.received
    calls: dict[str, Any] = {}
    believed: dict[str, Any] = {}
    for rank, key in received.keys.items():
        calls[str(rank)] = _call(about.target[rank].calls[key], f"rank{rank}", tensors)
        if rank in about.reference and key in about.reference[rank].calls:
            believed[str(rank)] = _call(about.reference[rank].calls[key], None, tensors)
    return {"kind": "exchange", "rank": received.rank, "calls": calls, "reference": believed}


def _around(about: Wrong) -> dict[str, Any]:
    """Return the names of the calls around a call that only one run makes."""
    found: dict[str, Any] = {}
    for name, flow in (("reference", about.reference), ("target", about.target)):
        keys = [k for k, c in flow.dump.calls.items() if c.kind == "api"]
        found[name] = [k.rpartition("|")[2] for k in keys]
    ours, theirs = found["target"], found["reference"]
    key = about.call.key.rpartition("|")[2]
    at = (theirs if key in theirs else ours).index(key)
    cut = slice(max(0, at - _NEIGHBOURS), at + _NEIGHBOURS + 1)
    return {"call": key, "reference": theirs[cut], "target": ours[cut]}


def _call(call: Call, name: str | None, tensors: dict[str, Array]) -> dict[str, Any]:
    """Return a call as JSON; its tensors are added to a mapping, or left out if no name is given."""

    def plain(place: str, value: Value) -> Any:
        if isinstance(value, TensorRecord):
            entry: dict[str, Any] = {"tensor": place, "dtype": value.dtype, "shape": value.shape}
            if value.requires_grad is not None:
                entry["requires_grad"] = value.requires_grad
            if name is not None and value.read is not None:
                tensors[place] = value.load()
            return entry
        if isinstance(value, list):
            return {"list": [plain(f"{place}.{i}", v) for i, v in enumerate(value)]}
        if isinstance(value, dict):
            return {"dict": {k: plain(f"{place}.{k}", v) for k, v in value.items()}}
        return None if value is None else {"scalar": value.value, "type": value.type}

    own = name or "settings"
    outputs = own if own == "result" else f"{own}.output"
    return {
        "key": call.key,
        "name": call.name,
        "phase": call.phase.value,
        "inputs": [plain(f"{own}.input.{i}", v) for i, v in enumerate(call.inputs)],
        "kwargs": {k: plain(f"{own}.input.{k}", v) for k, v in call.kwargs.items()},
        "outputs": [plain(f"{outputs}.{i}", v) for i, v in enumerate(call.outputs)],
    }


# ------------------------------------------------------------------ recomputing


def _read(entry: Mapping[str, Any], tensors: Mapping[str, Array]) -> Call:
    def value(of: Any) -> Value:
        if of is None:
            return None
        if "tensor" in of:
            array, grad = tensors.get(of["tensor"]), of.get("requires_grad")
            read = None if array is None else lambda: array
            return TensorRecord(of["dtype"], tuple(of["shape"]), requires_grad=grad, read=read)
        if "list" in of:
            return [value(v) for v in of["list"]]
        if "dict" in of:
            return {k: value(v) for k, v in of["dict"].items()}
        return Scalar(of["type"], of["scalar"])

    inputs, outputs = ([value(v) for v in entry[name]] for name in ("inputs", "outputs"))
    kwargs = {k: value(v) for k, v in entry["kwargs"].items()}
    key, name, phase = entry["key"], entry["name"], Phase(entry["phase"])
    return Call(key, "api", name, 0, phase, inputs, kwargs, outputs)


def _operator(about: Mapping[str, Any], tensors: Mapping[str, Array]) -> Verdict:
    call = _read(about["call"], tensors)
    forward = call if about["forward"] is None else _read(about["forward"], tensors)
    settings = None if about["settings"] is None else _read(about["settings"], {})
    return worst(replay_call(call, forward, settings))


def _exchange(about: Mapping[str, Any], tensors: Mapping[str, Array]) -> Verdict:
    ours = {int(r): _read(c, tensors) for r, c in about["calls"].items()}
    theirs = {int(r): _read(c, {}) for r, c in about["reference"].items()}

    def rank(number: int, call: Call) -> RankDump:
        return RankDump(0, number, "", "", "", {call.key: call})

    believed = {r: rank(r, replace(c, key=ours[r].key)) for r, c in theirs.items()}
    for received in judged_collectives([rank(r, c) for r, c in ours.items()], believed):
        if received.rank == about["rank"]:
            return received.verdict
    return not_judged(about["key"], "no call of this rank")


def _input(about: Mapping[str, Any], tensors: Mapping[str, Array]) -> Verdict:
    found, dtype = tensors["observed"], about["dtype"]
    sizes = [tensors[f"part.{i}"].size for i in range(about["parts"])]
    if any(size != found.size for size in sizes):
        said = f"{found.size} elements, expected {sizes[0]}"
        return Verdict(about["key"], about["place"], "diverged", np.inf, said)
    parts = [tensors[f"part.{i}"].reshape(found.shape) for i in range(about["parts"])]
    expected: Approx | Array = parts[0]
    if is_float(dtype):
        stacked = Approx(np.stack(parts), dtype, dtype)
        expected = stacked.sum(0) if len(parts) > 1 else Approx(parts[0], dtype)
    verdict = judge(about["key"], about["place"], found, expected, dtype)
    exact = len(parts) == 1 and not np.array_equal(found, parts[0], equal_nan=True)
    return replace(verdict, status="diverged") if exact else verdict


def _calls(about: Mapping[str, Any], tensors: Mapping[str, Array]) -> Verdict:
    """Judge a call that only one run makes: both lists are there to be read and corrected."""
    if (about["call"] in about["reference"]) == (about["call"] in about["target"]):
        return Verdict(about["key"], "", "pass")
    return Verdict(about["key"], "", "diverged", np.inf, about["said"])


def _arguments(about: Mapping[str, Any], tensors: Mapping[str, Array]) -> Verdict:
    """Judge a call whose tensors differ from the reference's."""
    same = about["reference"] == about["target"]
    return Verdict(about["key"], "", "pass" if same else "diverged", np.inf, about["said"])


_KINDS = {
    "operator": _operator,
    "exchange": _exchange,
    "input": _input,
    "calls": _calls,
    "arguments": _arguments,
}
