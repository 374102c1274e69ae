"""Keep AdamW's moments out of a rank's memory between the updates, as ``optimizer.swap`` says; see ``docs/plan_memory.md``.

They are no parameters of the graph any more, but wait in the pool of :mod:`telechat_moe.graph.swapping`, whose operators bring
those of a group of weights in ahead of the update and take them out behind it. At group ``i`` of the function that updates:

===================  ===================================================================
group ``i - 2``      SwapOutWait: its moments have gone, so three groups are in memory at most
group ``i + 1``      SwapBack: its moments begin to come
group ``i``          for each weight SwapBackWait, the update, SwapOut
===================  ===================================================================

A step that is not applied does not call that function, and moves nothing.
"""

from collections.abc import Sequence
from typing import Any

from telechat_moe.graph.mindir import Editor, MindIR
from telechat_moe.graph.nodes import Graph, GraphNode
from telechat_moe.graph.swapping import FLOAT32, State, Swapped, in_turn, peak_of, room
from telechat_moe.ops import native

UPDATE = "AdamWeightDecay"
MOMENTS, GRADIENT = slice(1, 3), 8
"""Inputs of an update."""
GROUPS = 16
"""As many as in MindSpeed's SwapMuon."""


def swap_states(model: MindIR, swapped: Swapped | None) -> Swapped | None:
    """Let the moments of a graph's updates wait in the pool; None: there are none, and nothing else is swapped.

    Args:
        model: In the form for CPU.
        swapped: Its activations that wait there.
    """
    swapped = swapped or Swapped(0, 0, 0, 0)
    for proto in model.graphs():
        updates = [n for n in Graph(model, proto).nodes.values() if n.kind == UPDATE]
        if updates:
            states = _without_parameters(model, proto, updates, swapped.pool)
            _Rewriter(model, swapped.tensors, states).rewrite(proto, updates)
            in_turn(model, proto)
            size = sum(room(state.nbytes) for state in states)
            return swapped._replace(pool=swapped.pool + size, peak=peak_of(model), states=states)
    return swapped if swapped.tensors else None


def groups_of(sizes: Sequence[int]) -> list[range]:
    """Return which of consecutive updates make a group: as many as reach a sixteenth of all bytes."""
    share, groups, begin, total = sum(sizes) / GROUPS, list[range](), 0, 0
    for index, size in enumerate(sizes):
        total += size
        if total >= share or index == len(sizes) - 1:
            groups.append(range(begin, index + 1))
            begin, total = index + 1, 0
    return groups


def _without_parameters(
    model: MindIR, function: Any, updates: Sequence[GraphNode], offset: int
) -> list[State]:
    """Take the moments from the parameters of a graph and of its function that updates; return their places in the pool."""
    main = model.proto.graph
    parameters = {p.name: p for p in main.parameter}
    inputs = [x.name for x in function.input]
    moments = [name for update in updates for name in update.proto.input[MOMENTS]]
    names = {name: name for name in moments}
    for node in main.node:
        if node.input[:1] == [function.name]:  # what calls it is made by a Partial
            names |= dict(zip(inputs, node.input[1:], strict=False))
            arguments = [
                x for x, n in zip(node.input[1:], inputs, strict=False) if n not in moments
            ]
            extra = node.input[1 + len(inputs) :]
            node.input[1:] = [*arguments, *extra]
    states = []
    for name in moments:
        parameter = parameters.pop(names[name])
        states.append(State(parameter.name.split(":")[-1], offset, list(parameter.dims)))
        offset += room(states[-1].nbytes)
    for owner, field, left in (
        (function, "input", [x for x in function.input if x.name not in moments]),
        (main, "parameter", list(parameters.values())),
    ):
        owner.ClearField(field)
        getattr(owner, field).extend(left)
    return states


class _Rewriter:
    """Puts starts and waits around the updates of a function.

    Args:
        first: Number of the first state's copies.
        states: Two for each update.
    """

    def __init__(self, model: MindIR, first: int, states: Sequence[State]) -> None:
        self.model, self.first, self.states = model, first, states
        self.library = str(native.path())
        self.values: dict[int, str] = {}  # of the states in memory
        self.tokens: dict[int, str] = {}  # of copies under way

    def rewrite(self, proto: Any, updates: Sequence[GraphNode]) -> None:
        """Put starts and waits around the updates of a function, group by group."""
        nodes, fresh = list(proto.node), type(proto)()
        self.editor, self.scope = Editor(self.model, fresh.node), updates[0].proto.domain
        sizes = [sum(s.nbytes for s in self.states[2 * i : 2 * i + 2]) for i in range(len(updates))]
        groups = groups_of(sizes)
        begin = {updates[group.start].name: i for i, group in enumerate(groups)}
        number = {update.name: i for i, update in enumerate(updates)}
        for node in nodes:
            if node.name in begin:
                self._begin(groups, begin[node.name], node.input[GRADIENT])
            if node.name in number:
                self._update(fresh, node, number[node.name])
            else:
                fresh.node.add().CopyFrom(node)
        self._finish(groups[-2:])
        result = next(node for node in nodes if node.name == proto.output[0].name)
        proto.output[0].name = self._depend(result.name, self.tokens[len(self.states) - 1])
        _copy_shape(result, fresh.node[-1])
        del proto.node[:]
        proto.node.extend(fresh.node)

    def _begin(self, groups: Sequence[range], turn: int, ready: str) -> None:
        """Let the states of the next group come, once those of the group before the last one have gone."""
        if turn > 1:
            self._finish([groups[turn - 2]])
        for i in _states_of(groups[turn + (turn > 0) : turn + 2]):
            self.values[i] = self._add("SwapBack", i, [ready])

    def _update(self, fresh: Any, node: Any, number: int) -> None:
        """Wait for the states of a weight, update them, and let them leave."""
        two = range(2 * number, 2 * number + 2)
        for i in two:
            token = self._add("SwapBackWait", i, [self.values[i]])
            self.values[i] = self._depend(self.values[i], token, i)
        update = fresh.node.add()
        update.CopyFrom(node)
        update.input[MOMENTS] = [self.values[i] for i in two]
        for i in two:
            self.values[i] = self._depend(self.values[i], node.name, i)
            self.tokens[i] = self._add("SwapOut", i, [self.values[i]])

    def _finish(self, groups: Sequence[range]) -> None:
        """Wait until the states of groups are in the pool."""
        for i in _states_of(groups):
            self.tokens[i] = self._add("SwapOutWait", i, [self.values[i], self.tokens[i]])

    def _add(self, kind: str, index: int, inputs: Sequence[str]) -> str:
        state, shape, extents = self.states[index], [1], dict[str, Sequence[int]]()
        if kind == "SwapBack":
            shape = extents["extents"] = list(state.shape)
        attributes = {"number": self.first + index, "at": state.offset, **extents}
        primitive = self.editor.custom(kind, self.library, **attributes)
        return self.editor.node(primitive, inputs, shape, FLOAT32, self.scope)

    def _depend(self, value: str, behind: str, index: int | None = None) -> str:
        shape = () if index is None else self.states[index].shape
        return self.editor.depend(value, behind, shape, FLOAT32, self.scope)


def _states_of(groups: Sequence[range]) -> list[int]:
    return [i for group in groups for i in range(2 * group.start, 2 * group.stop)]


def _copy_shape(source: Any, to: Any) -> None:
    """Give a node the shape of another one."""
    del to.attribute[:]
    to.attribute.extend(a for a in source.attribute if a.name == "shape")
