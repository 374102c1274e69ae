"""Moves of a graph made by hand: where they start and are waited for, the order of operators, the peak."""

import pytest

from telechat_moe.graph.mindir import Editor, MindIR, find_value
from telechat_moe.graph.swapping import swap_on_cpu

FLOAT32, SIZE = 1, 4 * 256
SHAPE = [256]


def graph_of(prefetch: int, between: int, late_reader: bool = False, apart: bool = False) -> MindIR:
    """Return a graph that moves the first result out and back: ``between`` operators, then one that reads it.

    Args:
        apart: Among these is one that reads the graph's input only, and so waits for nothing.
    """
    model = MindIR(b"")
    main = model.proto.graph
    main.name = "main"
    editor = Editor(model, main.node)

    def operator(kind: str, *inputs: str, **attributes: int) -> str:
        primitive = editor.primitive(kind, **attributes)
        return editor.node(primitive, inputs, SHAPE, FLOAT32, "Default/network", kind + inputs[0])

    main.input.add().name = "given"
    first = operator("Abs", "given")
    places = [editor.constant(place) for place in ("CPU", "Ascend")]
    out = operator("MoveTo", first, places[0], backward_prefetch=prefetch)
    now = operator("Neg", first)
    if apart:
        operator("Exp", "given")
    for _ in range(between - 1):
        now = operator("Neg", now)
    if late_reader:
        now = operator("Add", now, first)
    back = operator("MoveTo", out, places[1], backward_prefetch=prefetch)
    main.output.add().name = operator("Mul", now, back)
    return model


def kinds(model: MindIR) -> list[str]:
    """Return the operators in their order."""
    found = []
    for node in model.proto.graph.node:
        primitive = model.primitive(node)
        if primitive is not None and primitive.op_type != "Depend":
            found.append(find_value(primitive.attribute, "reg_op_name") or primitive.op_type)
    return found


def test_starts_and_waits_are_as_far_apart_as_asked() -> None:
    model = graph_of(prefetch=2, between=6)
    swapped = swap_on_cpu(model)
    n = "Neg"
    away = ["Abs", "SwapOut", n, n, "SwapOutWait"]
    assert kinds(model) == [*away, n, n, "SwapBack", n, n, "SwapBackWait", "Mul"]
    # One result and its reader's at a time, but for the first, until it is out: Abs and two of Neg.
    assert swapped is not None
    assert swapped[:3] == (1, SIZE, SIZE)
    assert 3 * SIZE <= swapped.peak < 3 * SIZE + 20


def test_the_way_out_is_waited_for_behind_the_last_reader_and_before_the_way_back() -> None:
    model = graph_of(prefetch=9, between=3)
    assert swap_on_cpu(model) is not None
    both = ["SwapOutWait", "SwapBack", "SwapBackWait", "Mul"]
    assert kinds(model) == ["Abs", "SwapOut", *["Neg"] * 3, *both]
    model = graph_of(prefetch=1, between=4, late_reader=True)
    assert swap_on_cpu(model) is not None
    assert kinds(model) == ["Abs", "SwapOut", *["Neg"] * 4, "Add", *both]


@pytest.mark.parametrize("prefetch", [1, 3, 20])
@pytest.mark.parametrize("apart", [False, True])
def test_each_operator_waits_for_all_before(prefetch: int, apart: bool) -> None:
    model = graph_of(prefetch, between=8, apart=apart)
    swap_on_cpu(model)
    behind: dict[str, set[str]] = {}
    before = set[str]()
    for node in model.proto.graph.node:
        behind[node.name] = set().union(*({i} | behind[i] for i in node.input if i in behind))
        primitive = model.primitive(node)
        if primitive is not None and primitive.op_type != "Depend":
            assert before <= behind[node.name] or list(node.input) == ["given"]
            before.add(node.name)


def test_a_graph_without_moves_is_left_alone() -> None:
    model = graph_of(prefetch=1, between=2)
    del model.proto.graph.node[:]
    assert swap_on_cpu(model) is None
