"""Rewrite a rank's collectives into the one that MindSpore's CPU backend has for every group: a summing AllReduce.

===============  =====================================================================
Ascend           CPU
===============  =====================================================================
AllReduce sum    itself
AllReduce max    gather, then Maximum of the shards (min likewise)
AllGather        AllReduce of a concatenation that is zero except for this rank's shard
ReduceScatter    AllReduce, then this rank's slice
AlltoAll         gather, then this rank's slices of all shards
Send, Receive    messages of the native library, by rank and tag (:mod:`telechat_moe.graph.links`)
AlltoAllV        such messages, too; the cells of the model say so (:mod:`telechat_moe.graph.exchanges`)
===============  =====================================================================

Every value is exact: zeros are added, or the same terms in AllReduce's own order. All collectives of a graph are
chained in the order of the graph, so that no two ranks wait for each other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from telechat_moe.errors import BadInputError
from telechat_moe.graph.exchanges import EXCHANGES, WAITS
from telechat_moe.graph.inline import inline
from telechat_moe.graph.mindir import COLLECTIVES, PEER, Editor, MindIR, Operation
from telechat_moe.graph.swapped_states import swap_states
from telechat_moe.graph.swapping import Swapped, swap_on_cpu
from telechat_moe.ops import native

FLOAT32, FLOATS = 1, (1, 10)
TYPE_ID = {1: 43, 6: 34, 7: 35}  # element type of MindIR to the number that Cast takes
KEEP = ("group", "no_eliminate", "side_effect_mem", "side_effect_io", "side_effect_backprop")


MessageAddress = tuple[int, int, tuple[int, ...]]


class Rewritten(NamedTuple):
    """A rank's graph for CPU.

    Attributes:
        sent: Receiver, tag and shape of each message that it sends.
        received: Sender, tag and shape of each that it receives.
        counts: Collectives rewritten, by kind.
        swapped: What goes out of its memory and comes back; None: all stays.
    """

    mindir: bytes
    sent: set[MessageAddress]
    received: set[MessageAddress]
    counts: dict[str, int]
    swapped: Swapped | None


class _Site:
    """One collective that is being rewritten."""

    def __init__(
        self, editor: Editor, operation: Operation, ranks: Sequence[int], rank: int
    ) -> None:
        self.editor, self.operation, self.ranks = editor, operation, ranks
        self.rank, self.me, self.size = rank, ranks.index(rank), len(ranks)
        node = operation.node
        self.name, self.scope = node.name, node.domain
        self.source = node.input[0]
        shapes = operation.shapes()
        self.shape, self.element = list(shapes[0][0]), shapes[0][1]

    @property
    def peer(self) -> int:
        """The other end of a Send or Receive."""
        return self.ranks[self.operation.attribute(PEER[self.operation.kind])]

    @property
    def tag(self) -> int:
        """The number by which the two ends of a Send and its Receive know each other."""
        return self.operation.attribute("sr_tag")

    def all_reduce(
        self, x: str, shape: Sequence[int], name: str | None = None, **attributes: Any
    ) -> str:
        kind = self.editor.primitive(
            "AllReduce", self.operation.primitive, KEEP, op="sum", index=0, fusion=0, **attributes
        )
        if self.element in FLOATS:
            return self.editor.node(kind, [x], shape, self.element, self.scope, name)
        # CPU adds floats only: exact for integers below 2^24, which ids, positions and masks are.
        cast = self.editor.primitive("Cast")
        to_float, to_element = (self.editor.constant(TYPE_ID[e]) for e in (FLOAT32, self.element))
        x = self.editor.node(cast, [x, to_float], shape, FLOAT32, self.scope)
        total = self.editor.node(kind, [x], shape, FLOAT32, self.scope)
        return self.editor.node(cast, [total, to_element], shape, self.element, self.scope, name)

    def gather(self, x: str, shape: Sequence[int], name: str | None = None) -> str:
        """Concatenate the shards of all ranks along dimension 0."""
        zero = self.make("ZerosLike", [x], shape)
        parts = [zero] * self.me + [x] + [zero] * (self.size - 1 - self.me)
        gathered_shape = [shape[0] * self.size, *shape[1:]]
        packed = self.editor.pack(parts, shape, self.element, self.scope)
        joined = self.make("Concat", [packed, self.editor.constant(0)], gathered_shape)
        return self.all_reduce(joined, gathered_shape, name)

    def make(
        self, kind: str, inputs: Sequence[str], shape: Sequence[int], name: str | None = None
    ) -> str:
        primitive = self.editor.primitive(kind)
        return self.editor.node(primitive, inputs, shape, self.element, self.scope, name)

    def slice(
        self, x: str, begin: Sequence[int], end: Sequence[int], name: str | None = None
    ) -> str:
        shape = [e - b for b, e in zip(begin, end, strict=True)]
        zero = self.editor.constant(0)
        places = [self.editor.constant(list(v)) for v in (begin, end, [1] * len(shape))]
        return self.make("StridedSlice", [x, *places, *[zero] * 5], shape, name)


def _all_gather(site: _Site) -> None:
    site.gather(site.source, [site.shape[0] // site.size, *site.shape[1:]], site.name)


def _reduce_scatter(site: _Site) -> None:
    rows, trailing = site.shape[0], site.shape[1:]
    total = site.all_reduce(site.source, [rows * site.size, *trailing])
    begin = [site.me * rows] + [0] * len(trailing)
    site.slice(total, begin, [begin[0] + rows, *trailing], site.name)


def _extreme(site: _Site) -> None:
    """Rewrite an AllReduce with max or min."""
    kind = "Maximum" if site.operation.attribute("op") == "max" else "Minimum"
    shape = site.shape or [1]
    x = site.source
    if not site.shape:
        x = site.make("Reshape", [x, site.editor.constant([1])], [1])
    gathered = site.gather(x, shape)
    rows = shape[0]
    result = site.slice(gathered, [0] * len(shape), shape)
    for part in range(1, site.size):
        begin = [part * rows] + [0] * (len(shape) - 1)
        other = site.slice(gathered, begin, [begin[0] + rows, *shape[1:]])
        last = part == site.size - 1
        result = site.make(kind, [result, other], shape, site.name if last and site.shape else None)
    if not site.shape:
        site.make("Reshape", [result, site.editor.constant([])], [], site.name)


def _all_to_all(site: _Site) -> None:
    split, concat = site.operation.attribute("split_dim"), site.operation.attribute("concat_dim")
    input_shape = list(site.shape)
    input_shape[split] *= site.size
    input_shape[concat] //= site.size
    gathered = site.gather(site.source, input_shape)
    stacked = [site.size, *input_shape]
    parts = site.make("Reshape", [gathered, site.editor.constant(stacked)], stacked)
    width = input_shape[split] // site.size
    begin, end = [0] * len(stacked), list(stacked)
    begin[split + 1], end[split + 1] = site.me * width, (site.me + 1) * width
    cut = site.slice(parts, begin, end)
    shape = [e - b for b, e in zip(begin, end, strict=True)]
    order = [*range(1, concat + 1), 0, *range(concat + 1, len(stacked))]
    moved = site.make("Transpose", [cut, site.editor.constant(order)], [shape[i] for i in order])
    site.make("Reshape", [moved, site.editor.constant(site.shape)], site.shape, site.name)


def _send(site: _Site) -> None:
    kind = site.editor.custom("Send", str(native.path()), peer=site.peer, tag=site.tag)
    site.editor.node(kind, [site.source], [1], FLOAT32, site.scope, site.name)


def _receive(site: _Site) -> None:
    message = {"peer": site.peer, "tag": site.tag, "extents": site.shape}
    kind = site.editor.custom("Receive", str(native.path()), **message)
    site.editor.node(kind, [site.source], site.shape, site.element, site.scope, site.name)


# Collective -> its form on CPU, in words.
FORMS = {
    "AllReduce": "max or min: gathered by AllReduce, then Maximum or Minimum of the parts",
    "AllGather": "AllReduce of a concatenation that is zero except for this rank's shard",
    "ReduceScatter": "AllReduce, then this rank's slice",
    "AlltoAll": "gathered by AllReduce, then this rank's slices of all parts",
    "Send": "a message through a socket",
    "Receive": "a message through a socket",
    "AlltoAllV": "the same rows, as messages through sockets",
}
REWRITES: dict[str, Callable[[_Site], None]] = {
    "AllGather": _all_gather,
    "ReduceScatter": _reduce_scatter,
    "AlltoAll": _all_to_all,
    "Send": _send,
    "Receive": _receive,
}


def for_cpu(
    mindir: bytes, rank: int, groups: Mapping[str, Sequence[int]], states: bool = False
) -> Rewritten:
    """Return a rank's graph in the form that CPU processes can run.

    Args:
        groups: Groups by name, global ranks.
        states: The optimizer's are swapped.

    Raises:
        BadInputError: A collective has no static form (AlltoAllV) or an unknown group.
    """
    model = MindIR(mindir)
    inline(model)
    counts: dict[str, int] = {}
    messages: dict[str, set[MessageAddress]] = {"Send": set(), "Receive": set()}
    for graph in model.graphs():
        fresh = type(graph)()
        editor = Editor(model, fresh.node)
        before: str | None = None
        for node in list(graph.node):
            primitive = model.primitive(node)
            if primitive is None or primitive.op_type not in (*COLLECTIVES, "Custom"):
                fresh.node.add().CopyFrom(node)
                continue
            chained = type(node)()
            chained.CopyFrom(node)
            operation = Operation(graph.name, chained, primitive)
            if operation.kind == "Custom":
                if operation.attribute("reg_op_name") in (*EXCHANGES, *WAITS):
                    peers = _exchange(operation, editor, before)
                    for addresses in messages.values():
                        addresses |= peers
                    before = node.name
                    counts["AlltoAllV"] = counts.get("AlltoAllV", 0) + 1
                fresh.node.add().CopyFrom(chained)
                continue
            ranks = groups.get(operation.attribute("group"))
            if ranks is None:
                raise BadInputError(
                    f"rank {rank}: {operation.kind} in {operation.scope} uses the group "
                    f"{operation.attribute('group')!r}, which was not created"
                )
            site = _Site(editor, operation, ranks, rank)
            if before is not None:
                site.source = editor.depend(site.source, before, *_input_shape(site), site.scope)
                chained.input[0] = site.source
            before = site.name
            if not _rewrite(site, fresh, chained):
                continue
            counts[operation.kind] = counts.get(operation.kind, 0) + 1
            if operation.kind in PEER:
                messages[operation.kind].add((site.peer, site.tag, tuple(site.shape)))
        del graph.node[:]
        graph.node.extend(fresh.node)
    swapped, sent, received = _swap(model, states), messages["Send"], messages["Receive"]
    return Rewritten(model.proto.SerializeToString(), sent, received, counts, swapped)


def _swap(model: MindIR, states: bool) -> Swapped | None:
    swapped = swap_on_cpu(model)
    return swap_states(model, swapped) if states else swapped


def _exchange(operation: Operation, editor: Editor, before: str | None) -> set[MessageAddress]:
    """Make an exchange of rows follow the collective before it; return the messages to all other devices."""
    ranks, member = operation.attribute("ranks"), operation.attribute("member")
    name = operation.attribute("reg_op_name")
    (shape, element), *_ = operation.shapes()
    if name in WAITS:  # it waits with its token; a start waits for nothing
        place, input_shape, element = -1, [1], FLOAT32
    else:
        rows, times = shape[0], operation.attribute("times")
        rows = rows // times if name == "MoeDispatch" else rows * times
        place, input_shape = 0, [rows, *shape[1:]]
    if before is not None:
        inputs = operation.node.input
        inputs[place] = editor.depend(inputs[place], before, input_shape, element, operation.scope)
    others = [rank for i, rank in enumerate(ranks) if i != member]
    return {(rank, operation.attribute("tag"), ()) for rank in others}


def _input_shape(site: _Site) -> tuple[list[int], int]:
    """Return shape and type of a collective's input."""
    shape = list(site.shape)
    kind = site.operation.kind
    if kind == "AllGather":
        shape[0] //= site.size
    elif kind == "ReduceScatter":
        shape[0] *= site.size
    elif kind == "AlltoAll":
        shape[site.operation.attribute("split_dim")] *= site.size
        shape[site.operation.attribute("concat_dim")] //= site.size
    return shape, site.element


def _rewrite(site: _Site, fresh: Any, node: Any) -> bool:
    """Add the CPU form of a collective; return whether it differs."""
    kind = site.operation.kind
    if kind == "AllReduce":
        if site.operation.attribute("op") in ("max", "min"):
            _extreme(site)
            return True
        fresh.node.add().CopyFrom(node)
        return False
    if kind not in REWRITES:
        raise BadInputError(
            f"{kind} in {site.scope} has no static form: its sizes depend on the routing; "
            "run the recipe with telechat_moe.sharding.dispatcher alltoall, the padded form of the same exchange"
        )
    REWRITES[kind](site)
    return True
