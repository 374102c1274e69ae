"""Which experts should move: the predicted gain of a better balance against the time of the move, for each MoE layer.

Shapes: N steps, L MoE layers, E experts, D devices.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.moe.assign import (
    Integers,
    LoadArray,
    copies,
    copy_loads,
    device_loads,
    greedy,
    lower_bound,
    match,
)
from telechat_moe.moe.forecast import check_loads, forecast
from telechat_moe.moe.placement import SlotMap, settle
from telechat_moe.moe.refine import EXACT, DeviceGroups

TOLERANCE = 0.005
"""A busiest device within this share of the lower bound is left as it is."""

SHUFFLES = 12
"""Rounds of shuffles that all layers together may take, for each layer."""

PATIENCE = 12
"""Rounds of shuffles without success after which a layer is left alone."""


@dataclass(frozen=True)
class MoveRule:
    """What a better balance is worth and what a move costs.

    Attributes:
        seconds_per_pair: Time that each further (token, expert) pair on the busiest device adds to a step, in one MoE layer.
        steps: Steps until the next decision, during which a move pays.
        expert_bytes: Bytes that move with an expert of one layer: weights, master weights and both moments.
        bandwidth: Bytes per second that a device sends and receives at the same time; `inf`: moves are free.

    Raises:
        BadInputError: A value that is not a positive number (`expert_bytes` may be 0).
    """

    seconds_per_pair: float
    steps: int
    expert_bytes: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name in ("seconds_per_pair", "steps", "bandwidth"):
            if not getattr(self, name) > 0:
                raise BadInputError(
                    f"placement: {name} is {getattr(self, name)}, expected more than 0"
                )
        if not 0 <= self.expert_bytes < float("inf"):
            raise BadInputError(
                f"placement: expert_bytes is {self.expert_bytes}, expected 0 or more"
            )


@dataclass(frozen=True)
class Proposal:
    """The map to use next, and what it is expected to bring in each MoE layer.

    Attributes:
        placement: The new map; a layer whose move does not pay keeps its row.
        before: Forecast load of the busiest device now, in (token, expert) pairs of a step.
        after: The same with the new map.
        gain_s: Seconds saved until the next decision.
        cost_s: Seconds that the move takes, counted as if layers moved one after another.
    """

    placement: SlotMap
    before: LoadArray
    after: LoadArray
    gain_s: LoadArray
    cost_s: LoadArray


def plan(loads_NLE: NDArray[np.number[Any]], current: SlotMap, rule: MoveRule) -> Proposal:
    """Return where experts should be for the next steps, given the loads of the last ones.

    A layer moves only where the gain is more than the cost, and an expert that stays on its device keeps its slot.

    Args:
        loads_NLE: `[N, L, E]`, (token, expert) pairs of each expert in each step of the window, summed over all devices.

    Raises:
        BadInputError: The loads are refused by `check_loads`, or are of other layers or experts than the map.
    """
    loads_NLE = check_loads(loads_NLE)
    if loads_NLE.shape[1:] != current.slots.shape:
        raise BadInputError(
            f"placement: loads of {loads_NLE.shape[1]} layers and {loads_NLE.shape[2]} experts do not fit a map of "
            f"{current.slots.shape[0]} and {current.slots.shape[1]}"
        )
    load_LE, devices = forecast(loads_NLE), current.devices
    home_LE = current.owners.astype(np.int64)
    owner_LE = choose(load_LE, home_LE, devices, rule)
    before_L = device_loads(load_LE, home_LE, devices).max(axis=1)
    after_L = device_loads(load_LE, owner_LE, devices).max(axis=1)
    gain_s_L = (before_L - after_L) * rule.seconds_per_pair * rule.steps
    cost_s_L = arrivals(owner_LE, home_LE, devices) * rule.expert_bytes / rule.bandwidth
    return Proposal(settle(owner_LE, current), before_L, after_L, gain_s_L, cost_s_L)


def choose(
    load_LE: LoadArray,
    home_LE: Integers,
    devices: int,
    rule: MoveRule,
    goal_L: LoadArray | None = None,
) -> NDArray[np.int64]:
    """Return the device of each expert, `[L, E]`, for which least time is lost to imbalance and to moves, as far as found.

    Swaps go from the present devices towards balance, and the best assignment on this way counts. Where they end too early, so
    does an assignment from nothing, its groups matched to the devices that hold most of them. What then is still above its
    goal is improved by shuffles of a few devices.

    Args:
        load_LE: Expected load of each expert.
        home_LE: The device that each expert is on.
        goal_L: Load of the busiest device at which a layer is balanced. None: within `TOLERANCE` of the lower bound, and
            no more than by the greedy assignment.
    """
    best = _Best(load_LE, home_LE, devices, rule)
    bound_L = lower_bound(load_LE, devices)
    rows_A = best.promising(bound_L)
    greedy_AE = greedy(load_LE[rows_A], devices)
    if goal_L is None:
        goal_L = bound_L * (1 + TOLERANCE)
        greedy_A = device_loads(load_LE[rows_A], greedy_AE, devices).max(axis=1)
        goal_L[rows_A] = np.minimum(goal_L[rows_A], greedy_A)
    swapped, left_A = DeviceGroups(load_LE, home_LE, devices), rows_A
    while len(left_A := swapped.swap(left_A, goal_L)):
        best.offer(left_A, swapped.owners(left_A))
    stuck_A = swapped.busiest_L[rows_A] > goal_L[rows_A]
    rows_A = rows_A[stuck_A]
    afresh = DeviceGroups(load_LE[rows_A], greedy_AE[stuck_A], devices)
    afresh.descend(goal_L[rows_A])
    near_AE = swapped.owners(rows_A)
    afresh_AE = match(afresh.owners(), home_LE[rows_A], devices)
    lost_A = best.offer(rows_A, afresh_AE)
    owner_AE = np.where((lost_A < best.lost(rows_A, near_AE))[:, None], afresh_AE, near_AE)
    _shuffle(best, rows_A, owner_AE, bound_L, goal_L)
    return best.owner_LE


def copied(
    load_LE: LoadArray, devices: int, spare: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], LoadArray]:
    """Return the expert and the device of `E + spare x D` copies of experts, `[L, S]` each, and the busiest device's load, `[L]`.

    Hot experts have several copies, which share their load evenly.
    """
    expert_LS = copies(load_LE, devices, spare)
    load_LS = copy_loads(load_LE, expert_LS)
    rule = MoveRule(seconds_per_pair=1.0, steps=1, expert_bytes=0.0, bandwidth=float("inf"))
    owner_LS = choose(load_LS, greedy(load_LS, devices), devices, rule)
    return expert_LS, owner_LS, device_loads(load_LS, owner_LS, devices).max(axis=1)


def _shuffle(
    best: "_Best",
    rows_A: NDArray[np.int64],
    owner_AE: NDArray[np.int64],
    bound_L: LoadArray,
    goal_L: LoadArray,
) -> None:
    """Improve assignments that swaps cannot by shuffles of three and four devices, within the budget of `SHUFFLES`."""
    able_A = best.within_reach(rows_A, owner_AE, bound_L)
    rows_A, owner_AE = rows_A[able_A], owner_AE[able_A]
    groups = DeviceGroups(best.load_LE[rows_A], owner_AE, best.devices)
    random, budget = np.random.default_rng(0), SHUFFLES * len(best.load_LE)
    failed_A, rounds = np.zeros(len(rows_A), np.int64), 0
    while budget > 0:
        left = np.flatnonzero((groups.busiest_L > goal_L[rows_A]) & (failed_A < PATIENCE))[:budget]
        if not len(left):
            return
        better = groups.shuffle(left, min(best.devices, 3 + rounds % 2), random)
        failed_A[left] = np.where(better, 0, failed_A[left] + 1)
        improved = left[better]
        home_AE = best.home_LE[rows_A[improved]]
        best.offer(rows_A[improved], match(groups.owners(improved), home_AE, best.devices))
        budget, rounds = budget - len(left), rounds + 1


class _Best:
    """The best assignment of each layer so far, by the seconds lost until the next decision."""

    def __init__(self, load_LE: LoadArray, home_LE: Integers, devices: int, rule: MoveRule) -> None:
        self.load_LE, self.home_LE, self.devices = load_LE, home_LE, devices
        self._pair_s = rule.seconds_per_pair * rule.steps
        self._arrival_s = rule.expert_bytes / rule.bandwidth
        self.owner_LE = home_LE.astype(np.int64)
        self._lost_L = device_loads(load_LE, home_LE, devices).max(axis=1) * self._pair_s

    def lost(self, rows_A: Integers, owner_AE: Integers) -> LoadArray:
        """Return the seconds lost to the busiest device and to the moves in these layers, `[A]`."""
        top_A = device_loads(self.load_LE[rows_A], owner_AE, self.devices).max(axis=1)
        arrivals_A = arrivals(owner_AE, self.home_LE[rows_A], self.devices)
        return top_A * self._pair_s + arrivals_A * self._arrival_s

    def offer(self, rows_A: Integers, owner_AE: Integers) -> LoadArray:
        """Take those assignments of these layers that are better than what there is; return what each loses."""
        lost_A = self.lost(rows_A, owner_AE)
        better_A = lost_A < self._lost_L[rows_A] * (1 - EXACT)
        self.owner_LE[rows_A[better_A]] = owner_AE[better_A]
        self._lost_L[rows_A[better_A]] = lost_A[better_A]
        return lost_A

    def promising(self, bound_L: LoadArray) -> NDArray[np.int64]:
        """Return the layers for which perfect balance after one arrival would be better than what there is."""
        least_L = bound_L * self._pair_s + self._arrival_s
        return np.flatnonzero(least_L < self._lost_L * (1 - EXACT))

    def within_reach(
        self, rows_A: Integers, owner_AE: Integers, bound_L: LoadArray
    ) -> NDArray[np.bool_]:
        """Return where perfect balance with the arrivals of these assignments would be better than what there is."""
        arrivals_A = arrivals(owner_AE, self.home_LE[rows_A], self.devices)
        least_A = bound_L[rows_A] * self._pair_s + arrivals_A * self._arrival_s
        return least_A < self._lost_L[rows_A] * (1 - EXACT)


def arrivals(owner_LE: Integers, home_LE: Integers, devices: int) -> LoadArray:
    """Return how many experts arrive at the device where most do, `[L]`; as many leave each device as arrive there."""
    return device_loads((owner_LE != home_LE).astype(np.float64), owner_LE, devices).max(axis=1)
