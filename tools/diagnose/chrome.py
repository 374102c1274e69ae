"""Read a trace in Chrome's Trace Event Format: torch's profiler (Kineto), trace_view.json of MindSpore's and torch_npu's, msprof_*.json.

What the device does is in Kineto's categories (``kernel``, ``gpu_memcpy``, ``gpu_memset``) or, for Ascend, in the rows ``Computing`` and
``Communication(Not Overlapped)`` of the process ``Overlap Analysis``, which the profiler itself made. Steps are the host's annotations
``ProfilerStep#N`` or msprof's ``Iteration N`` with the ``Data_aug Bound`` before it. Times are microseconds.
"""

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.numerics import Array
from telechat_moe.reading import most_inflated, read_bytes
from telechat_moe.tools.diagnose.records import COMM

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kineto's categories of what runs on the device; early versions wrote ``Kernel``, ``Memcpy`` and ``Memset``."""
EARLY = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
COLLECTIVE = re.compile(r"nccl|hccl|hcom_|nvshmem|deep_ep", re.IGNORECASE)
"""In the name of a kernel that communicates."""
STEP = re.compile(r"ProfilerStep#(\d+)$")
ITERATION = re.compile(r"Iteration (\d+)$")
DATA = re.compile(r"DataLoader")
ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
"""A backslash in a string of JSON, and what it escapes, if anything."""
OVERLAP = "Overlap Analysis"
"""Process of an Ascend profiler whose rows say what the device did."""
COMPUTING, EXPOSED = "Computing", "Communication(Not Overlapped)"
MICRO = 1e-6

TraceEvent = dict[str, Any]
Parts = dict[str, float]
"""Parts of a step, seconds."""


class RankTrace(NamedTuple):
    """A rank: its number, its steps, and how many ranks the run has (0: not known)."""

    number: int
    steps: dict[int, Parts]
    world: int = 0


class TraceStep(NamedTuple):
    """A step: its number, when the host or device began and ended it, and how long it waited for data before (microseconds)."""

    number: int
    begin: float
    end: float
    waited: float = 0.0


class Trace:
    """The events of a file.

    Raises:
        BadInputError: It is no trace, or was cut off.
    """

    def __init__(self, path: Path) -> None:
        data = _json(path)
        events = data.get("traceEvents") if isinstance(data, dict) else data
        if not isinstance(events, list) or (
            events and not any(isinstance(e, dict) and "ph" in e for e in events)
        ):
            raise BadInputError(
                f"{path}: no list traceEvents; expected a trace in Chrome's format, as torch's profiler writes it, or trace_view.json"
            )
        self.path = path
        self.about: TraceEvent = data if isinstance(data, dict) else {}
        self.events: list[TraceEvent] = [e for e in events if isinstance(e, dict)]
        self.complete = _complete(self.events)
        self.processes = {
            str(e.get("pid")): str(args.get("name"))
            for e in self.events
            if e.get("ph") == "M" and e.get("name") == "process_name"
            and isinstance(args := e.get("args"), dict)
        }  # fmt: skip

    def span(self, event: TraceEvent) -> tuple[float, float]:
        """Return begin and end of an event; Ascend's traces write numbers as text."""
        try:
            begin, lasts = float(event["ts"]), float(event["dur"])
            if not np.isfinite([begin, lasts]).all():
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise BadInputError(
                f"{self.path}: the event {str(event.get('name'))[:60]!r} has ts {event.get('ts')!r} and dur {event.get('dur')!r}; "
                "expected microseconds"
            ) from None
        return begin, begin + max(lasts, 0.0)

    def union(self, events: Iterable[TraceEvent]) -> Array:
        """Return when any of some events runs."""
        return union(map(self.span, events))

    def steps(self) -> list[TraceStep]:
        """Return the steps that the trace marks, whose numbers differ."""
        marks = [
            TraceStep(int(match[1]), *self.span(e))
            for e in self.complete
            if e.get("cat") != "gpu_user_annotation" and (match := STEP.match(str(e.get("name"))))
        ]
        if not marks:
            waits = {
                str(e.get("name")): e["args"].get("Data_aug Bound(us)", 0.0)
                for e in self.events
                if e.get("cat") == "Data_aug Bound" and e.get("ph") == "t" and isinstance(e.get("args"), dict)
            }  # fmt: skip
            marks = [
                TraceStep(int(match[1]), *self.span(e), _float(waits.get(f"Data_aug Bound {match[1]}")))
                for e in self.complete
                if e.get("cat") == "Iteration Time" and (match := ITERATION.match(str(e.get("name"))))
            ]  # fmt: skip
        twice = [number for number, count in Counter(m.number for m in marks).items() if count > 1]
        if twice:
            raise BadInputError(
                f"{self.path}: step {min(twice)} is marked more than once; expected the trace of one rank"
            )
        return marks


def read_chrome(path: Path) -> RankTrace:
    """Return the rank and the steps of a trace.

    Raises:
        BadInputError: It is no trace, marks no steps, or nothing of it ran on a device.
    """
    trace = Trace(path)
    steps = trace.steps()
    pids = {pid for pid, name in trace.processes.items() if name == OVERLAP}
    if len(pids) > 1:
        raise BadInputError(
            f"{path}: {len(pids)} processes {OVERLAP!r}, so it is of several devices; expected the trace of one rank"
        )
    if pids:
        rows = [e for e in trace.complete if str(e.get("pid")) in pids]
        works, moves = ([e for e in rows if e.get("name") == name] for name in (COMPUTING, EXPOSED))
    else:
        works, moves = _kernels(trace)
    if not works and not moves:
        raise BadInputError(f"{path}: {_no_device(trace, bool(pids))}")
    if not steps:
        raise BadInputError(
            f"{path}: no step: neither ProfilerStep#N nor Iteration N; call prof.step() after each step when the trace is recorded"
        )
    reads = [
        e for e in trace.complete if _category(e) not in DEVICE and DATA.search(str(e.get("name")))
    ]
    computing, moving, reading = (trace.union(x) for x in (works, moves, reads))
    busy = union(np.concatenate([computing, moving]))
    occupied = union(np.concatenate([busy, reading]))
    parts_of_steps: dict[int, Parts] = {}
    for number, begin, end, waited in steps:
        compute, used = _within(computing, begin, end), _within(busy, begin, end)
        data = _within(occupied, begin, end) - used
        parts_of_steps[number] = {
            "compute": compute * MICRO,
            COMM + "all": (used - compute) * MICRO,
            "data": (data + waited) * MICRO,
            "host": (end - begin - used - data) * MICRO,
        }
    if not any(parts["compute"] + parts[COMM + "all"] for parts in parts_of_steps.values()):
        raise BadInputError(
            f"{path}: nothing runs on the device within the steps that it marks; record the device in the same steps"
        )
    about = trace.about.get("distributedInfo")
    world = about.get("world_size") if isinstance(about, dict) else 0
    return RankTrace(
        rank_of(path, trace.about), parts_of_steps, world if isinstance(world, int) else 0
    )


def _kernels(trace: Trace) -> tuple[list[TraceEvent], list[TraceEvent]]:
    """Return what computes and what communicates among Kineto's events of a device."""
    device = [e for e in trace.complete if _category(e) in DEVICE]
    devices = {
        str(args["device"])
        for e in device
        if _category(e) == "kernel" and isinstance(args := e.get("args"), dict) and "device" in args
    }
    if len(devices) > 1:
        raise BadInputError(
            f"{trace.path}: kernels of {len(devices)} devices ({', '.join(sorted(devices)[:8])}); expected the trace of one rank"
        )
    moves = [e for e in device if COLLECTIVE.search(str(e.get("name")))]
    return [e for e in device if not COLLECTIVE.search(str(e.get("name")))], moves


def _no_device(trace: Trace, ascend: bool) -> str:
    """Return why nothing is known of a device."""
    if ascend or "Ascend Hardware" in trace.processes.values():
        return f"no rows {COMPUTING} and {EXPOSED} of the process {OVERLAP!r}; profile at Level0 or above and read trace_view.json or msprof_*.json"
    parts = sorted({"HCCL", "Step Trace", "CANN"} & set(trace.processes.values()))
    if parts:
        return f"only {' and '.join(parts)} of an Ascend profile; read trace_view.json or msprof_*.json, which have all of it"
    if "CPU OP" in trace.processes.values():
        return "operators of a CPU and no device; for CPU processes name the output_dir of `telechat-moe train`, whose timings have steps"
    return f"nothing runs on a device ({', '.join(DEVICE)}); profile with ProfilerActivity.CUDA"


def _category(event: TraceEvent) -> str:
    name = str(event.get("cat"))
    return EARLY.get(name, name)


def _complete(events: list[TraceEvent]) -> list[TraceEvent]:
    """Return complete events (``X``), and pairs of begin and end (``B``, ``E``) of a thread."""
    complete = [e for e in events if e.get("ph") == "X" and "dur" in e]
    open_: dict[tuple[str, str], list[TraceEvent]] = {}
    for event in events:
        thread = (str(event.get("pid")), str(event.get("tid")))
        if event.get("ph") == "B":
            open_.setdefault(thread, []).append(event)
        elif event.get("ph") == "E" and open_.get(thread):
            begun = open_[thread].pop()
            lasts = _float(event.get("ts")) - _float(begun.get("ts"))
            complete.append(begun | {"ph": "X", "dur": lasts})
    return complete


def _float(value: object) -> float:
    """Return a number that may be text: 0 if there is none, NaN for another text."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0.0
    except ValueError:
        return float("nan")


_LARGEST = 1 << 33
"""Bytes of a trace."""


def _inflated(raw: bytes) -> bytes:
    """Return the content of a file that may be compressed."""
    if raw[:2] != b"\x1f\x8b":
        return raw
    limit = most_inflated(len(raw))
    with gzip.open(io.BytesIO(raw)) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"{len(raw):,} bytes inflate to more than {limit:,}")
    return content


def _json(path: Path) -> Any:
    try:
        raw = _inflated(read_bytes(path, _LARGEST))
    except (OSError, EOFError, zlib.error) as error:
        raise BadInputError(f"cannot read the trace {path}: {error}") from error
    text = raw.decode("utf-8-sig", "replace").strip()  # names of functions may be no text
    if text and not text.startswith(("{", "[")):
        raise BadInputError(
            f"{path}: is no JSON. Export a trace of Perfetto or XLA as Chrome's JSON, and an Ascend profiler's database (.db) "
            "as text (export_type: text)"
        )
    try:
        return _parsed(text)
    except json.JSONDecodeError as error:
        if _is_cut_off(error):
            raise BadInputError(
                f"{path}: is no JSON ({error}); a trace that was cut off cannot be read"
            ) from error
        raise BadInputError(
            f"{path}:{error.lineno}: is no JSON after {text[: error.pos][-60:]!r} ({error.msg}, column {error.colno}); quotes in a name must be "
            "escaped, which torch's profiler does not do with with_stack=True"
        ) from error
    except (ValueError, RecursionError) as error:  # thousands of digits; nested too deeply
        raise BadInputError(f"{path}: cannot be read: {error}") from error


def _parsed(text: str) -> Any:
    """Return what is in a trace; torch's profiler escapes neither control characters nor backslashes in names."""
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Invalid \\"):
            return _parsed(ESCAPE.sub(lambda match: match[0] if match[1] else r"\\", text))
        # The format allows an array without its last bracket: a program that was killed could not write it.
        if _is_cut_off(error) and text.startswith("[") and text.endswith(("}", "},")):
            return json.loads(text.removesuffix(",") + "]", strict=False)
        raise


def _is_cut_off(error: json.JSONDecodeError) -> bool:
    """Return whether only the end is missing where JSON cannot be read on."""
    remainder = error.doc[error.pos :]
    words = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
    return error.msg.startswith("Unterminated") or any(word.startswith(remainder) for word in words)


def union(spans: Iterable[Sequence[float]] | Array) -> Array:
    """Return the union of intervals as disjoint rising ones, ``[intervals, 2]``."""
    x = np.array(list(spans), np.float64).reshape(-1, 2)
    if not len(x):
        return x
    x = x[np.argsort(x[:, 0], kind="stable")]
    ends = np.maximum.accumulate(x[:, 1])
    first = np.append(True, x[1:, 0] > ends[:-1])
    last = np.append(first[1:], True)
    return np.stack([x[first, 0], ends[last]], 1)


def _within(spans: Array, begin: float, end: float) -> float:
    """Return how much of disjoint intervals is between two times."""
    return float(np.maximum(np.minimum(spans[:, 1], end) - np.maximum(spans[:, 0], begin), 0).sum())


def rank_of(path: Path, about: TraceEvent) -> int:
    """Return the rank that a trace is of.

    It is what the trace says (``distributedInfo``), the number of ``profiler_info_N.json`` beside the folder of an Ascend profiler, one after
    a word for a rank in the file's or a folder's name, or the number at the end of the name; else 0.
    """
    distributed = about.get("distributedInfo")
    if isinstance(distributed, dict) and isinstance(distributed.get("rank"), int):
        return distributed["rank"]
    if (rank := info_rank(path)) is not None:
        return rank
    names = [path.name, *(folder.name for folder in list(path.absolute().parents)[:3])]
    words = (
        re.search(r"(?:rank|worker|device|card|npu|gpu)[-_. ]?(\d+)", n, re.IGNORECASE)
        for n in names
    )
    match = next(filter(None, words), None) or re.search(r"(?:^|[-_])(\d{1,6})\.", path.name)
    return int(match[1]) if match else 0


def info_rank(path: Path) -> int | None:
    """Return the rank that an Ascend profiler wrote beside the folder of a file (``profiler_info_N.json``); None: there is none."""
    for beside in sorted(path.absolute().parent.parent.glob("profiler_info_*.json")):
        if match := re.search(r"_(\d+)\.json$", beside.name):
            return int(match[1])
    return None
