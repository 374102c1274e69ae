"""Split the exchanges of routed rows in two, a start and a wait, so that computation can run in between.

A start hands its rows to the threads of the native library (``ops/csrc/link.cc``) and gives a token; the wait that takes
the token gives what the exchange gave. Each exchange of a graph gets a tag of its own, because several may be under way.
"""

from telechat_moe.graph.mindir import Editor, MindIR, Operation
from telechat_moe.ops import native

EXCHANGES = ("MoeDispatch", "MoeCombine")
"""Operators of the native library that exchange as many rows as the routing says."""
WAITS = tuple(f"{name}Wait" for name in EXCHANGES)
ATTRIBUTES = ("ranks", "member", "tag", "times")
FLOAT32 = 1
# Tags of groups are 32 bits wide.
_NEXT_TAG = 1 << 32


def split(model: MindIR) -> dict[str, str]:
    """Split the exchanges of the main graph; return the wait of each start, which keeps the exchange's name."""
    main = model.proto.graph
    fresh, waits = type(main)(), dict[str, str]()
    editor = Editor(model, fresh.node)
    for node in main.node:
        primitive = model.primitive(node)
        operation = Operation(main.name, node, primitive)
        name = operation.attribute("reg_op_name") if primitive is not None else None
        if name not in EXCHANGES:
            fresh.node.add().CopyFrom(node)
            continue
        attributes = {key: operation.attribute(key) for key in ATTRIBUTES}
        attributes["tag"] -= _NEXT_TAG * (len(waits) + 1)
        start = editor.custom(f"{name}Start", str(native.path()), **attributes)
        token = editor.node(start, node.input, [1], FLOAT32, node.domain)
        several = operation.attribute("multi_output")
        waiting = fresh.node.add()
        waiting.CopyFrom(node)
        waiting.op_type = editor.custom(
            f"{name}Wait", str(native.path()), several=several, **attributes
        )
        waiting.input.append(token)
        waits[token] = node.name
    del main.node[:]
    main.node.extend(fresh.node)
    return waits
