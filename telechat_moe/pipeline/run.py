"""Start the processes of a pipeline, give them programs, watch them, and combine their results."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import CheckFailedError, UsageError
from telechat_moe.pipeline.chunks import Chunk, parse
from telechat_moe.pipeline.schedule import Pass, Schedule, show
from telechat_moe.pipeline.spec import Spec
from telechat_moe.pipeline.sums import Array, Arrays, InOrder, Named
from telechat_moe.pipeline.transport import Link, LinkError
from telechat_moe.processes import (
    SILENCE_S,
    HangDetector,
    RankDiedError,
    RankFailedError,
    death,
    end,
    start,
)
from telechat_moe.recipe import ModelConfig

WHOLE = -1
"""Number of the process that runs the unpipelined model."""
LAST_WORDS_S = 1.0


class DeadlockError(CheckFailedError):
    """Every process waits for another, and nothing is on its way (exit code 1)."""


class Event(NamedTuple):
    """One pass as it was run; seconds since the step began.

    Attributes:
        part: The pass.
        asked_s: When the stage came to it.
        start_s: When its inputs were there.
        end_s: When it was computed.
    """

    part: Pass
    asked_s: float
    start_s: float
    end_s: float


@dataclass
class Step:
    """What a step computed.

    Attributes:
        gradients: Sum over the micro-batches, in their order, of each weight's gradient.
        losses: Losses of each micro-batch: next-token, MTP, balance and z-loss.
        loads: Tokens that each expert got, by router.
        events: The passes of each stage, in the order in which they ran.
        peak_bytes: Most that each stage kept for its backward passes: inputs of chunks, operands of dW.
        sent_bytes: What each stage sent to others.
    """

    gradients: Named
    losses: Arrays
    loads: Named
    events: list[list[Event]] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)


@dataclass
class _Process:
    name: str
    process: subprocess.Popen[bytes]
    link: Link
    status: dict[str, Any] = field(default_factory=dict)
    heard: int = 0

    @property
    def at(self) -> str:
        """Its position in the program, for messages."""
        return f" at {self.status['at']}" if "at" in self.status else ""


class Pipeline:
    """The processes of a pipeline, for any number of steps.

    Args:
        stages: Processes, besides the one of the unpipelined run, which is started when it is asked for.
        silence_s: A process that neither says anything nor computes for this long hangs.
        watch: Called with a stage and the operation that it begins.
    """

    def __init__(
        self,
        spec: Spec,
        stages: int,
        *,
        silence_s: float = SILENCE_S,
        watch: Callable[[int, str], None] | None = None,
    ) -> None:
        self.spec, self.stages, self.watch = spec, stages, watch
        self.detector = HangDetector(silence_s)
        self.heard: queue.Queue[tuple[int, dict[str, Any], Arrays]] = queue.Queue()
        self.processes: dict[int, _Process] = {}
        self.steps = 0
        self.pending: dict[int, tuple[dict[str, Any], Arrays]] = {}
        ends: dict[int, dict[int, socket.socket]] = {s: {} for s in range(stages)}
        for a in range(stages):
            for b in range(a + 1, stages):
                ends[a][b], ends[b][a] = socket.socketpair()
        for stage, sockets in ends.items():
            self._start(stage, sockets)

    def _start(self, number: int, sockets: dict[int, socket.socket]) -> None:
        ours, theirs = socket.socketpair()
        given = {WHOLE: theirs, **sockets}
        words = [f"{stage}:{side.fileno()}" for stage, side in given.items()]
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from telechat_moe.pipeline.worker import main; "
            f"sys.exit(main({[str(number), *words]!r}))"
        )
        process = start(
            [sys.executable, "-c", program],
            pass_fds=[side.fileno() for side in given.values()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"GLOG_v": "3", **os.environ},
        )
        for side in given.values():
            side.close()
        name = f"stage {number}" if number >= 0 else "the unpipelined run"
        link = Link(ours, name)
        self.processes[number] = _Process(name, process, link)
        link.send({"spec": asdict(self.spec)})
        threading.Thread(target=self._listen, args=(number, link), daemon=True).start()

    def _listen(self, number: int, link: Link) -> None:
        with contextlib.suppress(LinkError):
            while True:
                self.heard.put((number, *link.receive()))
        self.heard.put((number, {"state": "closed"}, []))

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for p in self.processes.values():
            end(p.process)
            p.link.close()

    def run(
        self,
        schedule: Schedule,
        layout: str,
        batches: Arrays,
        pace: Mapping[str, Sequence[float]] | None = None,
    ) -> Step:
        """Run a step.

        Args:
            schedule: What each stage does; as many stages as there are processes.
            layout: Chunks in Megatron's notation (:func:`telechat_moe.pipeline.chunks.parse`).
            batches: Columns of the micro-batches, each ``[m, B, S]``.
            pace: Seconds that ``F``, ``D`` and ``W`` of each chunk last at least: they sleep for the rest.

        Raises:
            BadInputError: The schedule is incomplete.
            UsageError: Schedule, layout and processes do not fit each other.
            DeadlockError: All stages wait for each other.
            RankDiedError: A process died, or hangs.
        """
        schedule.check()
        chunks = parse(layout, self.spec.config)
        if len(chunks) != schedule.chunks or schedule.stages != self.stages:
            raise UsageError(
                f"schedule {schedule.name} has {schedule.chunks} chunks on {schedule.stages} stages, the layout "
                f"{layout} {len(chunks)}, and there are {self.stages} processes"
            )
        self.steps += 1
        header = {
            "do": "run",
            "step": self.steps,
            "name": schedule.name,
            "chunks": schedule.chunks,
            "ops": schedule.ops,
            "layout": layout,
            "shared": shared_weights(chunks, self.spec.config),
            "pace": pace and {kind: list(values) for kind, values in pace.items()},
            "start": time.monotonic(),
        }
        stages = range(self.stages)
        for stage in stages:
            self._ask(stage, header, batches)
        found = self._wait(list(stages))
        return _assemble([found[stage] for stage in stages], schedule.micro_batches)

    def begin_whole(self, batches: Arrays) -> None:
        """Let the unpipelined model compute the step meanwhile."""
        if WHOLE not in self.processes:
            self._start(WHOLE, {})
        self._ask(WHOLE, {"do": "whole"}, batches)

    def whole(self, batches: Arrays | None = None) -> Step:
        """Return what the unpipelined model computes: batches, or those of :meth:`begin_whole`."""
        if batches is not None:
            self.begin_whole(batches)
        header, arrays = self._wait([WHOLE])[WHOLE]
        named = dict(zip(header["names"], arrays, strict=True))
        return Step(_pick(named, "sum "), list(named["losses"]), _pick(named, "load "))

    def _ask(self, number: int, header: dict[str, Any], batches: Arrays) -> None:
        p = self.processes[number]
        p.status, p.heard = {}, p.heard + 1
        try:
            p.link.send(header, batches)
        except LinkError:
            raise RankDiedError(self._obituary(number)) from None

    def _wait(self, numbers: list[int]) -> dict[int, tuple[dict[str, Any], Arrays]]:
        """Wait until these processes have done what they were asked for."""
        while not all(n in self.pending for n in numbers):
            try:
                number, header, arrays = self.heard.get(timeout=0.2)
            except queue.Empty:
                self._check_silence()
                self._check_deadlock(numbers)
                continue
            self._hear(number, header, arrays)
        return {n: self.pending.pop(n) for n in numbers}

    def _hear(self, number: int, header: dict[str, Any], arrays: Arrays) -> None:
        p, state = self.processes[number], header["state"]
        p.heard += 1
        if state in ("closed", "failed"):
            self._mourn(number, header)
        if state == "beat":
            return
        p.status = header if "at" in header else {**p.status, **header}
        if state == "done":
            self.pending[number] = (header, arrays)
        if state == "run" and self.watch is not None:
            self.watch(number, header["at"])

    def _mourn(self, number: int, header: dict[str, Any]) -> None:
        """Raise the first cause: a process that died without a word, or one that failed by itself."""
        said = {number: header}
        deadline = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                other, more, _ = self.heard.get(timeout=0.1)
                if more["state"] in ("closed", "failed"):
                    said.setdefault(other, more)
            if any(not m.get("echo", True) for m in said.values()):
                break
        for n, message in said.items():
            if message["state"] == "failed" and not message["echo"]:
                text = f"{self.processes[n].name} failed: {message['message']}"
                raise RankFailedError(text, message["exit_code"])
        silent = [n for n, message in said.items() if message["state"] == "closed"]
        if silent:
            raise RankDiedError(self._obituary(silent[0]))
        raise RankDiedError(f"{self.processes[number].name} failed: {header['message']}")

    def _obituary(self, number: int) -> str:
        p = self.processes[number]
        try:
            code = p.process.wait(timeout=LAST_WORDS_S)
            how = f"was killed by {death(code)}" if code < 0 else f"ended with {death(code)}"
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        return f"{p.name} (process {p.process.pid}) {how}{p.at}"

    def _check_silence(self) -> None:
        for p in self.processes.values():
            if self.detector.hangs(p.process.pid, p.heard):
                raise RankDiedError(
                    f"{p.name} (process {p.process.pid}) has given no sign of life for "
                    f"{self.detector.silence_s:g} s{p.at}"
                )

    def _check_deadlock(self, numbers: list[int]) -> None:
        """Raise where every stage waits or is done and nothing is on its way: nothing can change that."""
        all_of = [self.processes[n].status for n in numbers if n != WHOLE]
        if not any(s.get("state") == "wait" for s in all_of):
            return
        if any(s.get("state") not in ("wait", "done") for s in all_of):
            return
        sent = {(n, to): c for n, s in enumerate(all_of) for to, c in s["sent"]}
        received = {(by, n): c for n, s in enumerate(all_of) for by, c in s["received"]}
        if sent != received:
            return
        lines = [
            f"  stage {n} is stopped at {s['at']} and waits for {show(tuple(s['key']))} of stage {s['sender']}"
            if s["state"] == "wait"
            else f"  stage {n} has done all of its operations"
            for n, s in enumerate(all_of)
        ]
        raise DeadlockError("deadlock, no message is in flight:\n" + "\n".join(lines))


def shared_weights(chunks: Sequence[Chunk], config: ModelConfig) -> list[str]:
    """Return the weights that several chunks use: the embedding, where MTP or a tied head is in another chunk."""
    users = [c.embedding or bool(c.mtp) or (c.head and config.tie_word_embeddings) for c in chunks]
    return ["embedding.weight"] if sum(users) > 1 else []


def _pick(named: Named, prefix: str) -> Named:
    return {n.removeprefix(prefix): a for n, a in named.items() if n.startswith(prefix)}


def _assemble(found: list[tuple[dict[str, Any], Arrays]], micro_batches: int) -> Step:
    """Combine what the stages sent; sum in a fixed order what several of them contribute to."""
    total = InOrder()
    losses: dict[int, Array] = {}
    loads: Named = {}
    apart: dict[tuple[str, int], dict[int, Array]] = defaultdict(dict)
    for header, arrays in found:
        for name, array in zip(header["names"], arrays, strict=True):
            kind, what, *numbers = name.split(" ")
            if kind == "sum":
                total.sums[what] = array
            elif kind == "losses":
                losses[int(what)] = array
            elif kind == "load":
                loads[what] = loads[what] + array if what in loads else array
            else:
                micro, use = map(int, numbers)
                apart[what, micro][use] = array
    for (what, micro), uses in apart.items():
        total.add(what, micro, uses, alone=True)
    return Step(
        total.sums,
        [losses[m] for m in range(micro_batches)],
        loads,
        [[Event((k, c, m), *times) for k, c, m, *times in h["events"]] for h, _ in found],
        [h["peak_bytes"] for h, _ in found],
        [h["sent_bytes"] for h, _ in found],
    )


def different(found: Step, expected: Step) -> list[str]:
    """Return what differs by a byte between two steps, each with the largest difference."""
    problems: list[str] = []
    for what in ("gradients", "loads"):
        a, b = getattr(found, what), getattr(expected, what)
        for name in sorted(set(a) | set(b)):
            if name not in a or name not in b:
                problems.append(
                    f"{what} of {name}: missing in {'the pipeline' if name not in a else 'the unpipelined run'}"
                )
            elif a[name].tobytes() != b[name].tobytes():
                problems.append(f"{what} of {name}: {_distance(a[name], b[name])}")
    for micro, (x, y) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if x.tobytes() != y.tobytes():
            problems.append(f"losses of micro-batch {micro}: {_distance(x, y)}")
    return problems


def _distance(a: Array, b: Array) -> str:
    if a.shape != b.shape:
        return f"shape {a.shape}, unpipelined {b.shape}"
    count = int((a.view(np.uint32) != b.view(np.uint32)).sum())
    return f"{count} of {a.size} values, by at most {np.abs(a - b).max():.1e}"
