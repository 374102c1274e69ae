"""Maps and moves of experts, windows of loads, and a plan that moves a layer only where it pays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.errors import BadInputError
from telechat_moe.moe.forecast import LoadWindow, check_loads, forecast
from telechat_moe.moe.placement import SlotMap, moves, settle
from telechat_moe.moe.planner import MoveRule, plan

PAIRS = 4_096


def window(steps: int, layers: int, experts: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    share = random.dirichlet(np.full(experts, 0.5), layers)
    return np.stack([[random.multinomial(PAIRS, p) for p in share] for _ in range(steps)])


def rule(**changes: float) -> MoveRule:
    values = {"seconds_per_pair": 1e-6, "steps": 50, "expert_bytes": 1e6, "bandwidth": 1e9}
    return MoveRule(**{**values, **changes})  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31))
def test_a_plan_is_a_map_whose_moves_lead_there(
    devices: int, capacity: int, layers: int, seed: int
):
    experts = devices * capacity
    random = np.random.default_rng(seed)
    current = SlotMap(random.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1), devices)
    loads_NLE = window(3, layers, experts, seed)
    proposal = plan(loads_NLE, current, rule())
    place = current.slots.copy()
    for move in moves(current, proposal.placement):
        assert place[move.layer, move.expert] == move.source_slot
        assert move.source_slot // capacity == move.source_device
        assert move.target_slot // capacity == move.target_device
        assert move.source_device != move.target_device  # who stays keeps its slot
        place[move.layer, move.expert] = move.target_slot
    assert (place == proposal.placement.slots).all()
    assert (np.sort(place, axis=1) == np.arange(experts)).all()
    for layer, load_E in enumerate(
        loads_NLE.mean(axis=0)
    ):  # what the proposal says, counted one by one
        for found, where in ((proposal.before, current), (proposal.after, proposal.placement)):
            held = [load_E[where.owners[layer] == d].sum() for d in range(devices)]
            assert found[layer] == pytest.approx(max(held))


@settings(max_examples=60, deadline=None)
@given(st.floats(1e4, 1e9), st.integers(0, 2**31))
def test_each_layer_moves_only_where_the_gain_repays_the_move(expert_bytes: float, seed: int):
    current = SlotMap.identity(4, 16, 4)
    one = rule(expert_bytes=expert_bytes)
    proposal = plan(window(2, 4, 16, seed), current, one)
    changed = proposal.placement.owners != current.owners
    saved = (proposal.before - proposal.after) * one.seconds_per_pair * one.steps
    for layer in range(4):
        arriving = np.bincount(proposal.placement.owners[layer, changed[layer]], minlength=4)
        cost = arriving.max() * expert_bytes / one.bandwidth
        assert proposal.cost_s[layer] == pytest.approx(cost)
        assert proposal.gain_s[layer] == pytest.approx(saved[layer])
        assert saved[layer] > cost or (not changed[layer].any() and saved[layer] == cost == 0)


def test_a_dearer_move_leaves_more_experts_where_they_are():
    loads, current = window(4, 6, 32), SlotMap.identity(6, 32, 8)
    count = [
        len(moves(current, plan(loads, current, rule(expert_bytes=b)).placement))
        for b in (0, 1e6, 1e7, 1e10)
    ]
    assert count == sorted(count, reverse=True)
    assert count[0] > count[1] > count[3] == 0


def test_nothing_moves_twice_for_the_same_loads():
    loads, current = window(4, 3, 32), SlotMap.identity(3, 32, 8)
    first = plan(loads, current, rule(expert_bytes=0)).placement
    assert moves(first, plan(loads, first, rule(expert_bytes=0)).placement) == []


def test_equal_loads_move_nothing():
    current = SlotMap.identity(2, 12, 4)
    proposal = plan(np.full((3, 2, 12), 8), current, rule(expert_bytes=0))
    assert moves(current, proposal.placement) == []
    assert proposal.gain_s.tolist() == [0, 0]


def test_one_expert_is_placed_with_the_coolest():
    loads = np.array([[[900, 30, 30, 30, 5, 5, 0, 0]]])
    proposal = plan(loads, SlotMap.identity(1, 8, 4), rule(expert_bytes=0))
    owner_E = proposal.placement.owners[0]
    assert owner_E[0] in (owner_E[6], owner_E[7])
    assert proposal.after[0] == 900


def test_a_window_forgets_its_oldest_step():
    kept = LoadWindow(2, pairs=6)
    for first in (1, 2, 3):
        kept.add(np.array([[first, 6 - first]]))
    assert len(kept) == 2
    assert forecast(kept.loads()).tolist() == [[2.5, 3.5]]
    kept.clear()
    with pytest.raises(BadInputError, match="window is empty"):
        kept.loads()


@pytest.mark.parametrize(
    ("loads", "pairs", "said"),
    [
        ([[[1, 2], [2, 1]], [[3, 0], [1, 1]]], 3, "step 1, MoE layer 1: the loads add up to 2, tokens x top-k are 3"),
        ([[[1, 2], [2, 2]]], None, "step 0, MoE layer 1: the loads add up to 4, those of layer 0 are 3"),
        ([[[4, -1], [2, 1]]], 3, "step 0, MoE layer 0, expert 1: -1.0 is negative"),
        ([[[3, float("nan")], [2, 1]]], 3, "step 0, MoE layer 0, expert 1: nan is not a number"),
        ([[3, 0]], 3, r"shape \(1, 2\)"),
        ([[["a"]]], 3, "expected numbers"),
    ],
)  # fmt: skip
def test_impossible_loads_are_refused(loads: list[object], pairs: int | None, said: str):
    with pytest.raises(BadInputError, match=said):
        check_loads(np.array(loads), pairs)


@pytest.mark.parametrize(
    ("slots", "devices", "said"),
    [
        ([[0, 1, 1, 3]], 2, "MoE layer 0: experts 1, 2 are all in slot 1, and slot 2 is empty"),
        ([[0, 1, 2, 3], [0, 1, 2, 4]], 2, "MoE layer 1: expert 3 is in slot 4, expected 0 to 3"),
        ([[0, 1, 2, -1]], 2, "expert 3 is in slot -1"),
        ([[0, 1, 2]], 2, "3 experts cannot be shared evenly by 2 devices"),
        ([[0.0, 1.0]], 2, "expected integers"),
        ([0, 1], 2, "expected integers"),
    ],
)
def test_impossible_maps_are_refused(slots: list[object], devices: int, said: str):
    with pytest.raises(BadInputError, match=said):
        SlotMap(np.array(slots), devices)


def test_a_device_without_room_is_refused():
    current = SlotMap.identity(2, 6, 3)
    with pytest.raises(
        BadInputError, match="layer 1: device 2 would hold 3 experts; there are 3 devices"
    ):
        settle(np.array([[0, 0, 1, 1, 2, 2], [0, 2, 1, 1, 2, 2]]), current)
    with pytest.raises(BadInputError, match="layer 0: device 3 would hold 1 experts"):
        settle(np.array([[0, 0, 1, 1, 2, 3], [0, 0, 1, 1, 2, 2]]), current)


def test_maps_and_loads_of_other_models_are_refused():
    current = SlotMap.identity(2, 6, 3)
    with pytest.raises(
        BadInputError, match="loads of 3 layers and 6 experts do not fit a map of 2 and 6"
    ):
        plan(window(1, 3, 6), current, rule())
    with pytest.raises(
        BadInputError, match="a map of 2 layers, 6 experts and 3 devices cannot become"
    ):
        moves(current, SlotMap.identity(2, 6, 2))


@pytest.mark.parametrize("name", ["seconds_per_pair", "steps", "bandwidth"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_a_rule_that_says_nothing_is_refused(name: str, value: float):
    with pytest.raises(BadInputError, match=f"placement: {name} is"):
        rule(**{name: value})
