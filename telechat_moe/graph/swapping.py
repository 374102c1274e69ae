"""Move activations out of a rank's memory and back on CPU processes, as `swap_config` says; see ``docs/plan_memory.md``.

MindSpore's front end has a ``MoveTo`` to the host's memory in the forward pass and one back in the backward pass. Here each
becomes two operators of the native library (``ops/csrc/swap.cc``), a start and a wait, and threads copy in between:

======================  ====================================================================
SwapOut, SwapOutWait    at the ``MoveTo``, and ``backward_prefetch`` operators later, or behind the last forward reader
SwapBack, SwapBackWait  ``backward_prefetch`` operators before the ``MoveTo`` back, and at it
======================  ====================================================================

MindSpore runs kernels in any order that their inputs allow. So that the distances hold and the peak is known, each
operator waits for the one before it.
"""

import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.graph.inline import WRITES
from telechat_moe.graph.liveness import most_alive
from telechat_moe.graph.mindir import Editor, MindIR, find_value, output_shapes
from telechat_moe.graph.nodes import SAME_MEMORY, STRUCTURE, Graph, size_of
from telechat_moe.ops import native
from telechat_moe.units import size_text

FLOAT32 = 1
ALIGNMENT = 64
"""Bytes at whose multiples tensors begin in the pool."""


def room(size: int) -> int:
    """Return the bytes that a tensor of a size takes in the pool."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class State(NamedTuple):
    """A moment of AdamW that waits in the pool between the updates.

    Attributes:
        name: The parameter that it was.
        offset: Where it begins in the pool.
        shape: This rank's shard, float32.
    """

    name: str
    offset: int
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return size_of((tuple(self.shape), FLOAT32)) or 0


class Swapped(NamedTuple):
    """What a rank's graph swaps in a step.

    Attributes:
        tensors: Activations that go out and come back.
        moved: Their bytes.
        pool: Bytes of the file that activations and states wait in.
        peak: Bytes of all results of operators that are in the graph's memory at once, at most.
        states: Moments, in the order in which they come and go.
    """

    tensors: int
    moved: int
    pool: int
    peak: int
    states: Sequence[State] = ()


class PooledTensor:
    """A state in the pool, beside the parameters of a graph; its array is the pool's memory."""

    def __init__(self, state: State, pool: mmap.mmap) -> None:
        count = state.nbytes // np.dtype(np.float32).itemsize
        values = np.frombuffer(pool, np.float32, count, state.offset)
        self.name, self.shape = state.name, tuple(state.shape)
        self.memory = values.reshape(self.shape)

    def set_data(self, value: Any) -> None:
        """Copy the values of a tensor into the pool."""
        self.memory[...] = value.asnumpy()

    def asnumpy(self) -> np.ndarray:
        """Return its values, not a copy."""
        return self.memory

    def data_ptr(self) -> int:
        """Return the address of its first value."""
        return self.memory.ctypes.data


class _Move(NamedTuple):
    """A ``MoveTo`` and the one back, by the operators that come before each.

    Attributes:
        out: Node of the ``MoveTo`` to the host's memory.
        source: What it moves.
        returning: Nodes of those back.
        left: Operators before it.
        gone: Operators before the wait for it.
        requested: Operators before the start of the way back.
        needed: Operators before the wait for it.
    """

    out: Any
    source: str
    returning: Any
    left: int
    gone: int
    requested: int
    needed: int


def swap_on_cpu(model: MindIR) -> Swapped | None:
    """Let the moves of the main graph run on CPU, and put all its operators into their order; None: it has none.

    Args:
        model: Without calls of functions that micro-batches share, in the form for CPU.
    """
    main = model.proto.graph
    graph = Graph(model, main)
    if all(node.kind != "MoveTo" for node in graph.nodes.values()):
        return None
    moves = list(_moves(graph))
    sizes = [size_of(output_shapes(move.out)[0]) or 0 for move in moves]
    places, pool = in_pool([(size, m.left, m.needed) for size, m in zip(sizes, moves, strict=True)])
    _rewrite(model, graph, moves, places)
    in_turn(model, main)
    return Swapped(len(moves), sum(sizes), pool, peak_of(model))


def peak_of(model: MindIR) -> int:
    """Return the bytes of all results of operators that are in memory at once, at most."""
    functions = {proto.name: Graph(model, proto) for proto in model.graphs()}
    main = functions[model.proto.graph.name]
    return most_alive(main, functions, lambda shape: size_of(shape) or 0)


def open_pool(size: int, folder: str | None) -> mmap.mmap:
    """Let what this process swaps wait in memory, or in a file without a name.

    Args:
        size: Bytes, taken now.
        folder: Of the file; None: memory.

    Returns:
        The pool; it lasts as long as this does.

    Raises:
        BadInputError: There is no room, or no such folder.
    """
    place = "memory" if folder is None else f"telechat_moe.swap.pool_folder {folder}"
    try:
        if folder is None:
            pool = os.memfd_create("telechat-swap")
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                pool = os.dup(file.fileno())
    except OSError as error:
        raise BadInputError(
            f"{place}: {error.strerror}; name a folder that can be written"
        ) from error
    try:
        os.posix_fallocate(pool, 0, max(size, 1))
    except OSError as error:
        os.close(pool)
        raise BadInputError(
            f"{place}: no room for {size_text(size)} of swapped tensors ({error.strerror}); "
            "swap less, or set telechat_moe.swap.pool_folder to one with room"
        ) from error
    native.load().telechat_swap_pool(pool)
    return mmap.mmap(pool, max(size, 1))


def in_pool(tensors: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Return where each tensor begins in the pool, and the pool's bytes.

    Args:
        tensors: Bytes of each, and the first and the last operator between which it is there.
    """
    places: list[int] = []
    occupied: list[tuple[int, int, int]] = []  # begin, end, and the last operator
    end = 0
    for size, first, last in tensors:
        occupied = sorted(row for row in occupied if row[2] >= first)
        place, need = 0, room(size)
        for begin, stop, _ in occupied:
            if place + need <= begin:
                break
            place = max(place, stop)
        places.append(place)
        occupied.append((place, place + need, last))
        end = max(end, place + need)
    return places, end


def _moves(graph: Graph) -> Iterator[_Move]:
    """Yield the moves in the order in which they leave."""
    count, before, reads = 0, dict[str, int](), defaultdict[str, list[int]](list)
    roots: dict[str, tuple[str, ...]] = {}
    for name, node in graph.nodes.items():
        before[name] = count
        behind = tuple(r for i in node.inputs for r in roots.get(i, (i,)))
        if node.kind in STRUCTURE | SAME_MEMORY or node.kind == "Constant":
            roots[name] = behind
            continue
        for root in behind:
            reads[root].append(count)
        count += _computes(node.kind)
    out = {name: node for name, node in graph.nodes.items() if _place(graph, name) == "CPU"}
    items = graph.nodes.items()
    returning = {n.inputs[0]: n for k, n in items if _place(graph, k) == "Ascend"}
    for name, node in out.items():
        returns = returning.get(name)
        if returns is None:
            continue
        primitive = graph.model.primitive(node.proto)
        early = find_value(primitive.attribute, "backward_prefetch") or 1
        source = node.inputs[0]
        left, needed = before[name], before[returns.name]
        readers = [
            i + 1 for root in roots.get(source, (source,)) for i in reads[root] if i < needed
        ]
        gone = min(max(left + early, *readers, left), needed)
        yield _Move(
            node.proto, source, returns.proto, left, gone, max(needed - early, gone), needed
        )


def _place(graph: Graph, name: str) -> str | None:
    """Return where a node moves a tensor to; None: it moves none."""
    node = graph.nodes[name]
    if node.kind != "MoveTo":
        return None
    return find_value(graph.nodes[node.inputs[1]].proto.attribute, "value")


def _computes(kind: str) -> bool:
    """Tell whether MindSpore's CPU backend runs a kernel for nodes of a kind."""
    return kind not in STRUCTURE | SAME_MEMORY | {"Constant", "MoveTo", ""}


def _rewrite(model: MindIR, graph: Graph, moves: Sequence[_Move], places: Sequence[int]) -> None:
    """Put starts and waits in the place of the moves; a move of which none comes back is left out."""
    main, library = model.proto.graph, str(native.path())
    fresh = type(main)()
    editor = Editor(model, fresh.node)
    tokens: dict[int, str] = {}  # of what is under way
    ends = {m.out.name: (i, m) for i, m in enumerate(moves)}
    ends |= {m.returning.name: (i, m) for i, m in enumerate(moves)}
    between: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for number, move in enumerate(moves):
        between[move.gone].append(("SwapOutWait", number))
    for number, move in enumerate(moves):
        between[move.requested].append(("SwapBack", number))

    def add(kind: str, number: int, inputs: Sequence[str]) -> None:
        node, extents = moves[number].out, dict[str, Sequence[int]]()
        shape, element = (1,), FLOAT32
        if kind == "SwapBack":
            (shape, element), *_ = output_shapes(node)
            extents["extents"] = shape
        primitive = editor.custom(
            kind, library, writes=False, several=False, number=number, at=places[number], **extents
        )
        tokens[number] = editor.node(primitive, inputs, shape, element, node.domain)

    def add_what_is_due(count: int) -> None:
        for kind, number in between.pop(count, ()):
            first = [moves[number].source] if kind == "SwapOutWait" else []
            add(kind, number, [*first, tokens[number]])

    count = 0
    for node in main.node:
        kind = graph.nodes[node.name].kind
        if _computes(kind):
            add_what_is_due(count)
            count += 1
        if kind != "MoveTo":
            fresh.node.add().CopyFrom(node)
            continue
        value = behind = node.input[0]
        number, move = ends.get(node.name, (0, None))
        if move is not None and node.name == move.out.name:
            add("SwapOut", number, [value])
            behind = tokens[number]
        elif move is not None:
            add_what_is_due(count)
            value = tokens[number]
            add("SwapBackWait", number, [value])
            behind = tokens[number]
        shape, element = output_shapes(node)[0]
        editor.depend(value, behind, shape, element, node.domain, node.name)
    del main.node[:]
    main.node.extend(fresh.node)


def in_turn(model: MindIR, function: Any) -> None:
    """Let each operator of a function wait for the one before it; the main graph up to its first call, the update."""
    graph, fresh = Graph(model, function), type(function)()
    editor = Editor(model, fresh.node)
    shapes = {
        n.name: next((a for a in n.attribute if a.name == "shape"), None) for n in function.node
    }
    waits: list[str] = []  # the operator before, and those before it for which it could not wait
    for node in function.node:
        kind = graph.nodes[node.name].kind
        added = type(node)()
        added.CopyFrom(node)
        if not kind:  # a call
            waits = []
        elif _computes(kind):
            places = range(kind in WRITES, len(node.input))
            tensor_inputs = [i for i in places if _is_tensor(graph, node.input[i])]
            # All inputs: MindSpore makes several kernels of some operators, each with inputs of its own.
            for i in tensor_inputs:
                source = node.input[i]
                for before in waits:
                    if before != source:
                        chained = added.input[i], before
                        added.input[i] = editor.depend(*chained, (), FLOAT32, node.domain)
                        fresh.node[-1].attribute[0].CopyFrom(shapes[source])
            waits = [node.name] if tensor_inputs else [*waits, node.name]
        fresh.node.add().CopyFrom(added)
    del function.node[:]
    function.node.extend(fresh.node)


def _is_tensor(graph: Graph, name: str) -> bool:
    node, others = graph.nodes.get(name), ("", "Constant", "UpdateState")
    return node is not None and node.kind not in others and bool(node.shapes)
