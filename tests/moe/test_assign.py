"""Experts on devices: valid, never worse than greedy, the optimum and the fewest moves where all ways can be tried."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.moe.assign import (
    copies,
    copy_loads,
    device_loads,
    greedy,
    lower_bound,
    match,
)
from telechat_moe.moe.planner import MoveRule, choose, copied

FREE = MoveRule(seconds_per_pair=1.0, steps=1, expert_bytes=0.0, bandwidth=float("inf"))
LOADS = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))


def drawn(devices: int, capacity: int, layers: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    share = random.gamma(random.choice([0.2, 1.0, 5.0]), size=(layers, devices * capacity)) + 1e-9
    return np.rint(share / share.sum(axis=1, keepdims=True) * 5_000)


def by_trying(load: tuple[float, ...], devices: int) -> float:
    """Return the least load of the busiest device over all assignments."""
    capacity = len(load) // devices
    if devices == 1:
        return sum(load)
    best, rest = float("inf"), range(1, len(load))
    for others in combinations(rest, capacity - 1):  # whom the first expert is with
        own = load[0] + sum(load[i] for i in others)
        if own < best:
            left = tuple(load[i] for i in rest if i not in others)
            best = min(best, max(own, by_trying(left, devices - 1)))
    return best


@settings(max_examples=80, deadline=None)
@given(LOADS)
def test_every_device_gets_as_many_experts_and_none_is_busier_than_by_greedy(drawing):
    devices, capacity, layers, seed = drawing
    load_LE = drawn(devices, capacity, layers, seed)
    greedy_LE = greedy(load_LE, devices)
    home_LE = np.random.default_rng(seed).permuted(np.sort(greedy_LE, axis=1), axis=1)
    owner_LE = choose(load_LE, home_LE, devices, FREE)
    for owner_E in (*greedy_LE, *owner_LE):
        assert np.bincount(owner_E, minlength=devices).tolist() == [capacity] * devices
    ours_L = device_loads(load_LE, owner_LE, devices).max(axis=1)
    assert (ours_L <= device_loads(load_LE, greedy_LE, devices).max(axis=1)).all()
    assert (ours_L >= lower_bound(load_LE, devices) * (1 - 1e-12)).all()


@pytest.mark.parametrize(
    ("devices", "capacity"), [(2, 2), (2, 4), (3, 2), (3, 3), (4, 2), (4, 3), (2, 6)]
)
def test_balance_is_within_one_percent_of_the_optimum(devices: int, capacity: int):
    load_LE = np.concatenate([drawn(devices, capacity, 3, seed) for seed in range(5)])
    home_LE = np.broadcast_to(np.repeat(np.arange(devices), capacity), load_LE.shape)
    owner_LE = choose(load_LE, home_LE, devices, FREE)
    ours_L = device_loads(load_LE, owner_LE, devices).max(axis=1)
    for load_E, ours, bound in zip(load_LE, ours_L, lower_bound(load_LE, devices), strict=True):
        optimum = by_trying(tuple(load_E), devices)
        assert bound <= optimum <= ours <= 1.01 * optimum


@pytest.mark.parametrize(
    ("loads", "devices", "bound"),
    [
        ([10.0, 10.0, 10.0, 0.0], 2, 20.0),  # two of the three share a device
        ([9.0, 1.0, 1.0, 2.0], 2, 10.0),  # the hottest has company
        ([3.0, 3.0, 2.0, 2.0], 2, 5.0),  # the mean
    ],
)
def test_the_lower_bound_counts_hot_experts_that_must_share(
    loads: list[float], devices: int, bound: float
):
    assert lower_bound(np.array([loads]), devices).tolist() == [bound]


def test_greedy_takes_the_largest_load_first():
    # 8 and 7 apart, 6 with 7, 5 with 8: both devices have two; equal sums are left to the order of devices.
    owner_LE = greedy(np.array([[5.0, 8.0, 6.0, 7.0], [1.0, 9.0, 1.0, 1.0]]), 2)
    assert owner_LE.tolist() == [[0, 0, 1, 1], [1, 0, 1, 0]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_matching_leaves_as_many_experts_as_can_stay(devices: int, capacity: int, seed: int):
    random = np.random.default_rng(seed)
    even = np.repeat(np.arange(devices), capacity)
    owner_LE, home_LE = random.permuted(np.tile(even, (2, 3, 1)), axis=2)
    named_LE = match(owner_LE, home_LE, devices)
    for owner_E, home_E, named_E in zip(owner_LE, home_LE, named_LE, strict=True):
        ways = [np.array(p)[owner_E] for p in permutations(range(devices))]
        assert any((named_E == way).all() for way in ways)  # the same groups
        assert (named_E == home_E).sum() == max((way == home_E).sum() for way in ways)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2**31))
def test_copies_share_their_load_and_cool_the_hottest(
    devices: int, capacity: int, spare: int, seed: int
):
    load_LE = drawn(devices, capacity, 2, seed)
    expert_LS = copies(load_LE, devices, spare)
    load_LS = copy_loads(load_LE, expert_LS)
    for load_E, expert_S, load_S in zip(load_LE, expert_LS, load_LS, strict=True):
        np.testing.assert_allclose(np.bincount(expert_S, load_S), load_E, atol=1e-9)
        assert expert_S[: len(load_E)].tolist() == list(range(len(load_E)))
        # No way to hand out the spare slots has a cooler hottest copy: each expert above it would need one more.
        hottest = load_S.max()
        needed = sum(max(int(np.ceil(x / (hottest * (1 - 1e-9)))) - 1, 0) for x in load_E)
        assert needed > spare * devices or spare == 0 or hottest == 0


def test_copies_are_spread_over_devices_with_room_for_each():
    load_LE = np.array([[60.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    expert_LS, owner_LS, busiest_L = copied(load_LE, devices=4, spare=1)
    assert np.bincount(owner_LS[0], minlength=4).tolist() == [3, 3, 3, 3]
    assert (expert_LS == 0).sum() == 5
    assert busiest_L[0] < 0.5 * 60  # without copies the hot expert alone is 60
