"""One process of a pipeline: `python -m telechat_moe.pipeline.worker CONTROL [STAGE:SOCKET ...]`.

CONTROL and SOCKET are descriptors of sockets that the parent opened: to itself, and to each other stage.
"""

import os
import socket
import sys
import time
import traceback
from typing import Any

import numpy as np

from telechat_moe.errors import TelechatMoeError
from telechat_moe.pipeline.chunks import parse
from telechat_moe.pipeline.schedule import Operation, Pass, Schedule, show_operation
from telechat_moe.pipeline.spec import Spec
from telechat_moe.pipeline.sums import Arrays, InOrder, Uses
from telechat_moe.pipeline.transport import Inbox, Link, LinkError
from telechat_moe.processes import beat, describe_failure
from telechat_moe.recipe import ModelConfig

BEAT_S = 0.5


class Worker:
    """A stage, or (number -1) the unpipelined run."""

    def __init__(self, number: int, control: Link, peers: dict[int, Link]) -> None:
        self.number, self.control, self.peers = number, control, peers
        self.inbox = Inbox()
        for peer, link in peers.items():
            self.inbox.listen(peer, link)
        self.graphs: dict[tuple[str, int], Any] = {}
        self.whole: Any = None

    def serve(self) -> None:
        """Do what the parent asks for, until it closes the connection."""
        header, _ = self.control.receive()
        given = header["spec"]
        self.spec = Spec(ModelConfig(**given.pop("config")), **given)
        self.say("built")
        while True:
            try:
                header, arrays = self.control.receive()
            except LinkError:
                return
            if header["do"] == "whole":
                self.run_whole(arrays)
            else:
                self.run(header, arrays)

    def say(self, state: str, arrays: Arrays | None = None, **more: Any) -> None:
        """Report to the parent."""
        counts = {
            "sent": [[n, link.sent] for n, link in self.peers.items()],
            "received": [[n, count] for n, count in self.inbox.received.items()],
        }
        self.control.send({"state": state, **counts, **more}, arrays or [])

    def run_whole(self, batches: Arrays) -> None:
        """Run the unpipelined model on the micro-batches of a step."""
        from telechat_moe.pipeline.stage import Whole

        self.whole = self.whole or Whole(self.spec)
        sums, losses, load = self.whole.run(batches)
        named = {
            **{f"sum {n}": a for n, a in sums.items()},
            **{f"load {n}": a for n, a in load.items()},
        }
        named["losses"] = np.stack(losses)
        self.say(
            "done", list(named.values()), names=list(named), events=[], peak_bytes=0, sent_bytes=0
        )

    def run(self, header: dict[str, Any], batches: Arrays) -> None:
        """Run this stage's operations of a step."""
        ops = tuple(
            tuple(tuple((k, c, m) for k, c, m in op) for op in stage) for stage in header["ops"]
        )
        schedule = Schedule(header["name"], header["chunks"], len(batches[0]), ops)
        step = _Step(self, schedule, header, batches)
        for op in ops[self.number]:
            step.do(op)
        named = step.result()
        self.say(
            "done",
            list(named.values()),
            names=list(named),
            events=step.events,
            peak_bytes=step.peak_bytes,
            sent_bytes=step.sent_bytes,
        )

    def chunk(self, layout: str, number: int) -> Any:
        """Return the graphs of a chunk; they are kept from step to step."""
        from telechat_moe.pipeline.stage import ChunkGraphs, NoGraphs, build

        key = (layout, number)
        if key not in self.graphs:
            chunk = parse(layout, self.spec.config)[number]
            self.graphs[key] = NoGraphs() if chunk.empty else ChunkGraphs(build(self.spec), chunk)
        return self.graphs[key]


class _Step:
    """One step of a stage.

    Args:
        schedule: The program of all stages.
        header: The parent's: `layout`; `start`, the clock's zero; `pace`, how long each pass lasts at least, in
            seconds, by kind and chunk.
        batches: Columns of all micro-batches.
    """

    def __init__(
        self, worker: Worker, schedule: Schedule, header: dict[str, Any], batches: Arrays
    ) -> None:
        from mindspore import Tensor

        from telechat_moe.pipeline.stage import ONE, loads

        self.worker, self.schedule, self.here = worker, schedule, worker.number
        self.one, self.loads, self.header = ONE, loads, header
        self.batches = [[Tensor(column[m]) for column in batches] for m in range(len(batches[0]))]
        own = {c for op in schedule.ops[self.here] for _, c, _ in op}
        self.graphs = {c: worker.chunk(header["layout"], c) for c in sorted(own)}
        self.before = self._loads()
        replicated = {
            c for (c, _), stage in schedule.stage_of.items() if c in own and stage != self.here
        }
        self.alone = {c for c in own if c not in replicated}
        self.shared: set[str] = set(header["shared"])
        self.states: dict[tuple[int, int], Arrays] = {}
        self.taps: dict[tuple[int, int], list[Arrays]] = {}
        self.gradients = {c: InOrder() for c in own}
        self.losses: dict[int, np.ndarray] = {}
        self.events: list[list[Any]] = []
        self.peak_bytes = self.sent_bytes = 0

    def do(self, op: Operation) -> None:
        """Run an operation, pass by pass."""
        self.worker.say("run", at=show_operation(op))
        for part in op:
            asked = self._now()
            inputs = self._inputs(part, op)
            start = self._now()
            outputs = self._compute(part, inputs)
            self._pace(part, start)
            end = self._now()
            self._send(part, outputs)
            self.events.append([*part, asked, start, end])

    def _now(self) -> float:
        return time.monotonic() - self.header["start"]

    def _pace(self, part: Pass, start: float) -> None:
        pace = self.header.get("pace")
        if pace:
            kinds = "DW" if part[0] == "B" else part[0]
            lasting = sum(pace[kind][part[1]] for kind in kinds)
            time.sleep(max(0.0, start + lasting - self._now()))

    def _inputs(self, part: Pass, op: Operation) -> Arrays:
        """Wait for the inputs of a pass."""
        kind, chunk, micro = part
        last = self.schedule.chunks - 1
        if kind == "W":
            return []
        if kind == "F":
            return (
                [np.zeros(1, np.float32)] if chunk == 0 else self._take(("F", chunk - 1, micro), op)
            )
        if chunk == last:
            return [self.one] * 3
        return self._take(("D", chunk + 1, micro), op)

    def _take(self, key: Pass, op: Operation) -> Arrays:
        sender = self.schedule.stage_of[key[1:]]

        def waiting() -> None:
            self.worker.say("wait", at=show_operation(op), key=list(key), sender=sender)

        return self.worker.inbox.take((self.header["step"], *key), sender, waiting)

    def _compute(self, part: Pass, inputs: Arrays) -> Arrays:
        """Compute a pass; return what it sends."""
        kind, chunk, micro = part
        graphs, place, batch = self.graphs[chunk], (chunk, micro), self.batches[micro]
        outputs: Arrays = []
        if kind == "F":
            self.states[place] = inputs
            outputs = graphs.forward(batch, inputs)
        if kind in "BD":
            outputs, self.taps[place], direct = graphs.backward(batch, self._kept(part), inputs)
            del self.states[place]
            for name, gradient in direct.items():
                self._add(chunk, name, micro, {0: gradient})
        self._measure()
        if kind in "BW":
            if place not in self.taps:
                raise TelechatMoeError(f"stage {self.here}: {part} comes before its D")
            for name, uses in graphs.weights(self.taps.pop(place)).items():
                self._add(chunk, name, micro, uses)
        return outputs

    def _kept(self, part: Pass) -> Arrays:
        if part[1:] not in self.states:
            raise TelechatMoeError(f"stage {self.here}: {part} comes before its F")
        return self.states[part[1:]]

    def _add(self, chunk: int, name: str, micro: int, uses: Uses) -> None:
        alone = chunk in self.alone and name not in self.shared
        self.gradients[chunk].add(name, micro, uses, alone=alone)

    def _measure(self) -> None:
        held = sum(a.nbytes for state in self.states.values() for a in state)
        held += sum(a.nbytes for taps in self.taps.values() for tap in taps for a in tap)
        self.peak_bytes = max(self.peak_bytes, held)

    def _send(self, part: Pass, outputs: Arrays) -> None:
        kind, chunk, micro = part
        if kind == "W":
            return
        if kind == "F" and chunk == self.schedule.chunks - 1:
            self.losses[micro] = np.concatenate(outputs)
            return
        if kind != "F" and chunk == 0:
            return
        kind, to = ("F", chunk + 1) if kind == "F" else ("D", chunk - 1)
        receiver = self.schedule.stage_of[(to, micro)]
        key = (self.header["step"], kind, chunk, micro)
        if receiver == self.here:
            self.worker.inbox.put(key, outputs)
        else:
            self.sent_bytes += self.worker.peers[receiver].send({"key": list(key)}, outputs)

    def _loads(self) -> dict[str, np.ndarray]:
        return {
            name: value
            for graphs in self.graphs.values()
            if hasattr(graphs, "cell")
            for name, value in self.loads(graphs.cell).items()
        }

    def result(self) -> dict[str, np.ndarray]:
        """Return gradients, losses and expert loads by name."""
        named: dict[str, np.ndarray] = {}
        for gradients in self.gradients.values():
            named |= {f"sum {name}": a for name, a in gradients.sums.items()}
            for name, micros in gradients.apart.items():
                for micro, uses in micros.items():
                    named |= {f"apart {name} {micro} {use}": a for use, a in uses.items()}
        after = self._loads()
        named |= {f"load {name}": after[name] - self.before[name] for name in after}
        named |= {f"losses {micro}": a for micro, a in self.losses.items()}
        return named


def main(words: list[str]) -> int:
    """Run a process; return its exit code."""
    number, ends = int(words[0]), words[1:]
    sockets = {
        int(stage): socket.socket(fileno=int(descriptor))
        for stage, descriptor in (word.split(":") for word in ends)
    }
    control = Link(sockets.pop(-1), "the parent")
    peers = {stage: Link(end, f"stage {stage}") for stage, end in sockets.items()}
    worker = Worker(number, control, peers)
    beat(lambda: _report_life(control), BEAT_S)
    try:
        worker.serve()
    except BaseException as error:
        said = describe_failure(error)
        if not said["known"]:
            traceback.print_exc()
        worker.say("failed", echo=isinstance(error, LinkError), **said)
        os._exit(said["exit_code"])
    os._exit(0)


def _report_life(control: Link) -> None:
    try:
        control.send({"state": "beat"})
    except LinkError:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
