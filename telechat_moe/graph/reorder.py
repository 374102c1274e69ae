"""Impose a pipeline schedule on a rank's graph: its passes in another order, dX and dW apart.

MindSpore's front end calls a function for the forward (F) and one for the backward of each micro-batch and chunk. Here
the calls are inlined already. Of a backward, dX (D) is what feeds a message to another stage or the gradients of
several weights, and dW (W) what feeds the gradient of one weight only. Each weight adds up its gradients in MindSpore's
own order, whatever the order of the passes: sums have the same bits.

Between two passes there is a token: it waits for the one, and the other waits for it. MindSpore runs kernels in any
order that their inputs allow.

An order with pairs of passes overlaps exchanges of routed rows (:mod:`telechat_moe.graph.exchanges`) with computation:
in turn, each pass of a pair runs up to the start of its next exchange, and then what needs neither that exchange nor a
later one. So a pass waits for an exchange only when the other one has come as far. A pass alone does the same, and
only its own shared experts and weight gradients run beside its exchanges.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from telechat_moe.errors import BadInputError
from telechat_moe.graph.exchanges import split
from telechat_moe.graph.inline import WRITES, inline_calls, order_writes
from telechat_moe.graph.mindir import Editor, MindIR, Operation, find_value
from telechat_moe.graph.nodes import Graph, data_inputs
from telechat_moe.graph.schedule import PassEvent, pass_of
from telechat_moe.ops import native

PassKey = tuple[str, int, int]
"""``F``, ``D``, ``W`` or ``B`` (D and W); chunk of the stage; micro-batch."""
PairedPasses = tuple[str, int, int, int, int]
"""``FB`` or ``FD``; chunk and micro-batch of the forward, then of the backward."""
PassGroup = tuple[PassKey, ...]
"""A pass, or D and W of one, that takes turns with another; see :meth:`_Orderer._add_passes`."""
SUMS = "accu_grads."
FLOAT32 = 1
# They compute nothing, or MindSpore's backend drops them, so a token does not hold them back.
_LIGHT = ("Load", "UpdateState", "TupleGetItem", "MakeTuple", "Depend")


def in_order(mindir: bytes, order: Sequence[PassKey | PairedPasses]) -> bytes:
    """Return a serialised graph without calls, its passes in an order; see :func:`impose`."""
    model = MindIR(mindir)
    passes = passes_of_calls(model)
    calls = inline_calls(model)
    impose(model, {node: passes[call] for node, call in calls.items()}, order)
    order_writes(model)
    return model.proto.SerializeToString()


def passes_of_calls(model: MindIR) -> dict[str, PassEvent]:
    """Return the forward or backward that each call in the main graph is."""
    graph = Graph(model, model.proto.graph)
    return {name: pass_of(graph, name) for name in graph.calls}


def impose(
    model: MindIR, passes: Mapping[str, PassEvent], order: Sequence[PassKey | PairedPasses]
) -> None:
    """Put the passes of the main graph into an order.

    Args:
        model: Without calls (:func:`telechat_moe.graph.inline.inline_calls`).
        passes: For each node of a call, what the call was.
        order: All passes of the stage; with a pair among them exchanges run beside computation.

    Raises:
        BadInputError: The order lacks a pass, has one twice, or has it before one that it needs.
    """
    waits = split(model) if any(len(step) == 5 for step in order) else {}
    of_starts = {start: passes[wait] for start, wait in waits.items() if wait in passes}
    _Orderer(model, {**passes, **of_starts}, waits).run(order)


def _show(step: PassKey) -> str:
    return f"{step[0]}(chunk {step[1]} of the stage, micro-batch {step[2]})"


class _Orderer:
    def __init__(
        self, model: MindIR, passes: Mapping[str, PassEvent], waits: Mapping[str, str]
    ) -> None:
        self.model, self.main, self.waits = model, model.proto.graph, waits
        self.nodes: dict[str, Any] = {node.name: node for node in self.main.node}
        kinds = ((name, model.primitive(node)) for name, node in self.nodes.items())
        self.kinds = {name: p.op_type if p is not None else "" for name, p in kinds}
        self.passes = passes
        self._free()
        self.sums = self._sums()
        self.pass_of = self._classify()
        self.members: dict[PassKey, list[str]] = defaultdict(list)
        for name in self.nodes:
            if name in self.pass_of:
                self.members[self.pass_of[name]].append(name)
        self.fresh = type(self.main)()
        self.editor = Editor(model, self.fresh.node)
        self.placed: set[str] = set()
        self.token, self.tokens = "", 0

    def _free(self) -> None:
        """Remove the edges by which MindSpore puts passes and messages into its own order, and tuples of results."""
        needed: set[str] = set()
        for name in reversed(self.nodes):
            if name in needed or name in self.passes or self.kinds[name] in ("Send", "Receive"):
                needed.update(self.nodes[name].input)
        aliases: dict[str, str] = {}
        for name, node in list(self.nodes.items()):
            node.input[:] = [aliases.get(i, i) for i in node.input]
            ordering = self.kinds[name] == "Depend" and name in needed and name not in self.passes
            if ordering:
                aliases[name] = node.input[0]
            elif (
                self.kinds[name] == "TupleGetItem" and self.kinds.get(node.input[0]) == "MakeTuple"
            ):
                item = find_value(self.nodes[node.input[1]].attribute, "value")
                aliases[name] = self.nodes[node.input[0]].input[item]
            else:
                continue
            del self.nodes[name]
        out = self.main.output[0]
        out.name = aliases.get(out.name, out.name)

    def _sums(self) -> dict[str, list[str]]:
        """Return the additions to each weight's gradient, in MindSpore's order."""
        additions: dict[str, list[str]] = defaultdict(list)
        for name in self.passes:
            if self.kinds[name] in WRITES and SUMS in self.nodes[name].input[0]:
                additions[self.nodes[name].input[0]].append(name)
        return additions

    def _classify(self) -> dict[str, PassKey]:
        """Return the pass of each node that belongs to one; additions to gradients are no part of any."""
        feeds: dict[str, set[str]] = defaultdict(set)  # the weights behind a node, or a message
        passes: dict[str, PassKey] = {}
        additions = {name for names in self.sums.values() for name in names}
        for name in reversed(self.nodes):
            node, kind = self.nodes[name], self.kinds[name]
            if name in additions:
                feeds[node.input[1]].add(node.input[0])
                continue
            event = self.passes.get(name)
            if kind in ("Send", "Receive"):
                passes[name] = self._of_message(node)
            if kind == "Send" and passes[name][0] == "D":
                feeds[name] = {"a message", "another"}
            for source in data_inputs(kind, node.input):
                if feeds[name]:
                    feeds[source] |= feeds[name]
            if event is not None and event.kind == "F":
                passes[name] = ("F", event.chunk, event.micro)
            elif event is not None and feeds[name]:
                passes[name] = ("D" if len(feeds[name]) > 1 else "W", event.chunk, event.micro)
        return passes

    def _of_message(self, node: Any) -> PassKey:
        operation = Operation("", node, self.model.primitive(node))
        marks = (*node.node_attr, *node.primal_attr)
        backward = node.domain.startswith("Gradients") or operation.attribute("is_bp")
        micro, chunk = (
            operation.attribute(name) or find_value(marks, name) or 0 for name in ("micro", "chunk")
        )
        return ("D" if backward else "F", chunk, micro)

    def run(self, order: Sequence[PassKey | PairedPasses]) -> None:
        ordered: set[PassKey] = set()
        for step in order:
            for sides in self._sides(step):
                for pass_ in (pass_ for side in sides for pass_ in side):
                    if pass_ in ordered:
                        raise BadInputError(f"the schedule has {_show(pass_)} twice")
                    ordered.add(pass_)
                    if pass_[0] == "F" and pass_ not in self.members:
                        raise BadInputError(f"the graph has no {_show(pass_)}")
                self._add_passes(sides)
        missing = min(self.members.keys() - ordered, default=None)
        if missing is not None:
            raise BadInputError(f"the schedule lacks {_show(missing)}")
        self._add(self.nodes, ())
        del self.main.node[:]
        self.main.node.extend(self.fresh.node)

    def _sides(self, step: PassKey | PairedPasses) -> list[list[PassGroup]]:
        """Return what runs one after the other; each is one or two sides, passes that take turns at exchanges."""
        if len(step) == 5:
            kind, chunk, micro, *backward = step
            letters = "D" if kind == "FD" else "DW"
            return [
                [
                    (("F", chunk, micro),),
                    tuple((letter, backward[0], backward[1]) for letter in letters),
                ]
            ]
        kind, chunk, micro = step
        passes = tuple((letter, chunk, micro) for letter in ("DW" if kind == "B" else kind))
        return [[passes]] if self.waits else [[(pass_,)] for pass_ in passes]

    def _add_passes(self, sides: Sequence[PassGroup]) -> None:
        """Add passes that take turns: each up to the start of an exchange, then what need not wait for it."""
        for turns in zip_longest(*map(self._turns, sides)):
            for side, turn in zip(sides, turns, strict=True):
                for names in turn or ():
                    self._add(names, side)
        if any(pass_[0] == "W" for side in sides for pass_ in side):
            self._add_sums()

    def _turns(self, side: PassGroup) -> list[tuple[list[str], list[str]]]:
        """Return for each exchange of a side, and behind the last, its start, and what needs none but those before it."""
        members = [name for pass_ in side for name in self.members.get(pass_, ())]
        starts = [name for name in members if name in self.waits]
        number = {self.waits[name]: i + 1 for i, name in enumerate(starts)}
        need: dict[str, int] = {}  # the last exchange behind a node, from 1
        for name, node in self.nodes.items():
            need[name] = max([number.get(name, 0), *(need.get(i, 0) for i in node.input)])
        free: list[list[str]] = [[] for _ in range(len(starts) + 1)]
        for name in members:
            if name not in self.waits:
                free[need[name]].append(name)
        return [(starts[i : i + 1], independent) for i, independent in enumerate(free)]

    def _add_sums(self) -> None:
        """Add to the gradients what is there by now."""
        ready: list[str] = []
        for weight, additions in self.sums.items():
            while additions and self.nodes[additions[0]].input[1] in self.placed:
                ready.append(additions[0])
                self.sums[weight] = additions = additions[1:]
        fresh: list[str] = []
        for name in ready:
            self._collect(name, (), fresh)
        for name in fresh:
            self._write(self.nodes[name])

    def _add(self, names: Iterable[str], side: PassGroup) -> None:
        """Add nodes of passes and what they need, behind the last token, and a token behind them."""
        fresh: list[str] = []
        for name in names:
            self._collect(name, side, fresh)
        behind: set[str] = set()
        for name in fresh:
            self._hold_back(name, behind)
            self._write(self.nodes[name])
        if side and fresh:
            self.token = self._make_token(fresh, side[0])

    def _collect(self, name: str, side: PassGroup, fresh: list[str]) -> None:
        """Append a node behind all that it needs and that is not there yet."""
        waiting = [(name, iter(self.nodes[name].input))] if name not in self.placed else []
        self.placed.add(name)
        while waiting:
            current, inputs = waiting[-1]
            for source in inputs:
                if source in self.nodes and source not in self.placed:
                    other = self.pass_of.get(source)
                    if other is not None and other not in side:
                        early = side[0] if side else other
                        raise BadInputError(
                            f"the schedule has {_show(early)} before {_show(other)}"
                        )
                    self.placed.add(source)
                    waiting.append((source, iter(self.nodes[source].input)))
                    break
            else:
                fresh.append(current)
                waiting.pop()

    def _hold_back(self, name: str, behind: set[str]) -> None:
        """Let a node wait for the token, unless it needs one that does."""
        node, kind = self.nodes[name], self.kinds[name]
        if any(source in behind for source in node.input):
            behind.add(name)
            return
        if not self.token or not kind or kind in _LIGHT:
            return
        places = [i for i, source in enumerate(node.input) if self._shape(source) is not None]
        if places:
            node.input[places[0]] = self._after(node.input[places[0]], node.domain)
            behind.add(name)

    def _shape(self, name: str) -> Any:
        """Return the attribute with the shapes of a value; None of constants."""
        if self.kinds.get(name, "") in ("", "UpdateState"):
            return None
        return next((a for a in self.nodes[name].attribute if a.name == "shape"), None)

    def _after(self, source: str, scope: str) -> str:
        name = self.editor.depend(source, self.token, (), FLOAT32, scope)
        self.fresh.node[-1].attribute[0].CopyFrom(self._shape(source))
        return name

    def _make_token(self, fresh: Sequence[str], pass_: PassKey) -> str:
        used = {source for name in fresh for source in self.nodes[name].input}
        light = ("", "Load", "UpdateState")
        ends = [name for name in fresh if name not in used and self.kinds[name] not in light]
        scope = "/".join(map(str, ("pass", *pass_)))
        waits = self.editor.pack([*ends, *([self.token] if self.token else [])], (), FLOAT32, scope)
        zero = self.editor.zeros([1], FLOAT32)
        start = self.editor.depend(zero, waits, [1], FLOAT32, scope)
        self.tokens += 1
        # An operator that MindSpore does not fold. While taps record, it writes its number down: below zero, as the
        # taps of `graph/tap.py` count from zero.
        tap = self.editor.custom("Tap", str(native.path()), tap=-self.tokens)
        return self.editor.node(tap, [start], [1], FLOAT32, scope)

    def _write(self, node: Any) -> None:
        self.fresh.node.add().CopyFrom(node)
        self.placed.add(node.name)
