"""Updates of a graph made by hand: where moments wait, in which order they come and go, how many are in memory."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from telechat_moe.graph.mindir import Editor, MindIR, find_value
from telechat_moe.graph.swapped_states import GROUPS, groups_of, swap_states
from telechat_moe.graph.swapping import ALIGNMENT, Swapped

FLOAT32, WEIGHTS, SIZE = 1, 40, 256


@given(st.lists(st.integers(0, 1000), max_size=60))
def test_groups_cover_all_updates_in_turn(sizes: list[int]) -> None:
    """No group could end earlier and still have a sixteenth of all bytes."""
    groups = groups_of(sizes)
    assert list(itertools.chain(*groups)) == list(range(len(sizes)))
    for group in groups[:-1]:
        held = [sizes[i] for i in group]
        assert sum(held[:-1]) < sum(sizes) / GROUPS <= sum(held)
    assert len(groups) <= GROUPS + 1


def graph_of() -> MindIR:
    """Return a graph whose main function calls another one that updates weights of one size."""
    model = MindIR(b"")
    main = model.proto.graph
    main.name = "main"
    update = model.proto.functions.add()
    update.name = "update"
    tensors = [f"{kind}w{i}" for i in range(WEIGHTS) for kind in ("", "adam_m.", "adam_v.")]
    for name in tensors:
        parameter = main.parameter.add()
        parameter.name, parameter.data_type = f"main:{name}", FLOAT32
        parameter.dims.extend([SIZE])
    for name in [*tensors, "rate"]:
        update.input.add().name = f"update:{name}"
    outside, inside = Editor(model, main.node), Editor(model, update.node)
    given = ["update", *(f"main:{name}" for name in tensors), "main:rate"]
    outside.node(outside.primitive("Partial"), given, (), FLOAT32, "Default", "partial")
    for i in range(WEIGHTS):
        square = inside.primitive("Square")
        gradient = inside.node(square, [f"update:w{i}"], [SIZE], FLOAT32, "Default/optimizer-op0")
        names = [f"update:{kind}w{i}" for kind in ("", "adam_m.", "adam_v.")]
        kind = inside.primitive("AdamWeightDecay", side_effect_mem=1)
        inputs = [*names, *["update:rate"] * 5, gradient]
        result = inside.node(kind, inputs, [SIZE], FLOAT32, "Default/optimizer-op1", f"step{i}")
    update.output.add().name = result
    main.output.add().name = "partial"
    return model


def events(model: MindIR) -> list[tuple[str, int]]:
    """Return starts, waits and updates of the function in its order, with the number of the tensor or update."""
    found = []
    for node in model.proto.functions[0].node:
        primitive = model.primitive(node)
        if primitive.op_type == "Custom":
            kind = find_value(primitive.attribute, "reg_op_name")
            found.append((kind, find_value(primitive.attribute, "number")))
        elif primitive.op_type == "AdamWeightDecay":
            found.append(("Update", int(node.name.removeprefix("step"))))
    return found


def test_moments_come_ahead_of_their_update_and_leave_behind_it() -> None:
    model = graph_of()
    swapped = swap_states(model, Swapped(3, 30, 640, 0))
    assert swapped is not None
    at = [state.offset for state in swapped.states]
    assert at == list(range(640, 640 + 2 * WEIGHTS * 4 * SIZE, 4 * SIZE))
    assert (swapped.tensors, swapped.pool) == (3, 640 + 2 * WEIGHTS * 4 * SIZE)
    assert [s.name for s in swapped.states[:3]] == ["adam_m.w0", "adam_v.w0", "adam_m.w1"]
    names = [p.name for p in model.proto.graph.parameter]
    assert names == [f"main:w{i}" for i in range(WEIGHTS)]
    (partial,) = model.proto.graph.node
    given = [x.name.partition(":")[2] for x in model.proto.functions[0].input]
    assert given == [x.partition(":")[2] for x in partial.input[1:]]

    there, most, place = set[int](), 0, {}
    for i, (kind, number) in enumerate(events(model)):
        place[kind, number] = i
        if kind == "SwapBack":
            there.add(number)
        elif kind == "SwapOutWait":
            there.remove(number)
        most = max(most, len(there))
    assert not there
    assert most == 2 * 3 * -(-WEIGHTS // GROUPS)
    turn = ("SwapBack", "SwapBackWait", "Update", "SwapOut", "SwapOutWait")
    for number in range(2 * WEIGHTS):
        when = [place[kind, number // 2 if kind == "Update" else number + 3] for kind in turn]
        assert when == sorted(when)
    later = 2 * -(-WEIGHTS // GROUPS)
    for number in range(2 * WEIGHTS - later):  # the next group comes before this one is updated
        assert place["SwapBack", number + later + 3] < place["Update", number // 2]


def test_places_do_not_overlap() -> None:
    swapped = swap_states(graph_of(), None)
    assert swapped is not None
    assert np.diff([state.offset for state in swapped.states]).min() >= 4 * SIZE
    assert all(state.offset % ALIGNMENT == 0 for state in swapped.states)
