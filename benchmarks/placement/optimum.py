"""The proven optimum of one layer by integer programming (HiGHS through SciPy), and the fewest moves that keep a balance."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telechat_moe.moe.assign import lower_bound

SETS = 50_000
"""Up to so many sets of experts for a device, all of them are tried: that decides layers that assignment leaves open."""


class Optimum(NamedTuple):
    """The least load of the busiest device: exact if `proven`, else a bound from below."""

    load: float
    proven: bool


def solve(load_E: NDArray[np.float64], devices: int, found: float, seconds: float) -> Optimum:
    """Return the least possible load of the busiest device when each device holds equally many experts.

    Args:
        load_E: Load of each expert, whole numbers.
        devices: D.
        found: Load of the busiest device of some assignment, so the optimum is no more.
        seconds: Time after which the solver ends; its bound is then the result.
    """
    from scipy import optimize

    least = np.ceil(_bound(load_E, devices) - 1e-9)
    if found <= least:
        return Optimum(float(found), True)
    few = math.comb(len(load_E), len(load_E) // devices) <= SETS
    rules, upper = _sets(load_E, devices, found) if few else _assignment(load_E, devices)
    lower = np.zeros_like(upper)
    lower[-1], upper[-1] = least, found
    result = optimize.milp(
        np.eye(1, len(upper), len(upper) - 1)[0],
        constraints=rules,
        integrality=np.ones(len(upper)),
        bounds=optimize.Bounds(lower, upper),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.status == 0:
        return Optimum(float(np.rint(result.fun)), True)
    bound = result.mip_dual_bound
    return Optimum(float(least if bound is None else max(least, np.ceil(bound - 1e-6))), False)


def _bound(load_E: NDArray[np.float64], devices: int) -> float:
    """Return a load that the busiest device of any assignment has at least; never below the planner's `lower_bound`.

    Of the `n` hottest experts some device holds more than `m`, or some number `q` of devices hold them all, at most `m` each,
    and have coolest experts in their other places at best: then one of these has at least their mean.
    """
    capacity = len(load_E) // devices
    hot_E = -np.sort(-load_E)
    if capacity == 2:  # the hottest with the coolest is the best of all pairings
        return float((hot_E + hot_E[::-1]).max())
    hot_N, cool_N = (np.concatenate([[0], x.cumsum()]) for x in (hot_E, hot_E[::-1]))
    bound = lower_bound(load_E[None], devices)[0]
    for m in range(1, capacity):
        for n in range(m + 1, m * devices + 1):
            more = hot_N[n] - hot_N[n - m - 1] + cool_N[capacity - m - 1]
            q_Q = np.arange(-(-n // m), min(n, devices) + 1)
            mean = ((hot_N[n] + cool_N[q_Q * capacity - n]) / q_Q).min()
            bound = max(bound, min(more, mean))
    return float(bound)


def _assignment(load_E: NDArray[np.float64], devices: int) -> tuple[list[Any], NDArray[np.float64]]:
    """Return constraints and upper bounds of binaries "expert e is on device d", e-major, and last the busiest device's load."""
    import scipy.sparse as sparse
    from scipy import optimize

    experts = len(load_E)
    one_E = sparse.hstack(
        [sparse.kron(sparse.eye(experts), np.ones((1, devices))), np.zeros((experts, 1))]
    )
    even_D = sparse.hstack(
        [sparse.kron(np.ones((1, experts)), sparse.eye(devices)), np.zeros((devices, 1))]
    )
    load_D = sparse.hstack([sparse.kron(load_E[None], sparse.eye(devices)), -np.ones((devices, 1))])
    upper = np.ones(experts * devices + 1)
    for rank, e in enumerate(np.argsort(-load_E, kind="stable")[:devices]):
        upper[e * devices + rank + 1 : (e + 1) * devices] = (
            0  # devices are alike: name them by their hottest experts
        )
    rules = [
        optimize.LinearConstraint(one_E.tocsr(), 1, 1),
        optimize.LinearConstraint(even_D.tocsr(), experts // devices, experts // devices),
        optimize.LinearConstraint(load_D.tocsr(), -np.inf, 0),
    ]
    return rules, upper


def _sets(
    load_E: NDArray[np.float64], devices: int, found: float
) -> tuple[list[Any], NDArray[np.float64]]:
    """Return constraints and upper bounds of binaries "these experts share a device", and last the busiest device's load."""
    import scipy.sparse as sparse
    from scipy import optimize

    experts = len(load_E)
    set_NC = np.array([*itertools.combinations(range(experts), experts // devices)])
    load_N = load_E[set_NC].sum(axis=1)
    # No set beside which the others' mean is above `found`.
    fits_N = (load_N <= found) & (load_N >= load_E.sum() - (devices - 1) * found)
    set_NC, load_N = set_NC[fits_N], load_N[fits_N]
    index = set_NC.ravel(), np.repeat(np.arange(len(set_NC)), experts // devices)
    has_EN = sparse.csr_matrix((np.ones(set_NC.size), index), shape=(experts, len(set_NC)))
    one_E = sparse.hstack([has_EN, np.zeros((experts, 1))])
    load_EN = sparse.hstack([has_EN.multiply(load_N[None]), -np.ones((experts, 1))])
    rules = [
        optimize.LinearConstraint(one_E.tocsr(), 1, 1),
        optimize.LinearConstraint(load_EN.tocsr(), -np.inf, 0),
    ]
    return rules, np.ones(len(set_NC) + 1)


def fewest_moves(
    load_TE: NDArray[np.float64], start_E: NDArray[np.int64], goal_T: Sequence[float], devices: int
) -> int:
    """Return how many experts of a layer move at least over T decisions known beforehand, by trying all assignments.

    Args:
        load_TE: Loads that each decision places.
        start_E: Device of each expert before the first one.
        goal_T: Load of the busiest device that each may have at most.
        devices: D.
    """
    experts = len(start_E)
    owner_AE = _assignments(experts, devices)
    on_ADE = (owner_AE[:, None] == np.arange(devices)[:, None]).astype(np.float64)
    flat_AN = on_ADE.reshape(len(owner_AE), -1)
    apart_AA = experts - flat_AN @ flat_AN.T
    least_A = np.where((owner_AE == start_E).all(axis=1), 0, np.inf)
    for load_E, goal in zip(load_TE, goal_T, strict=True):
        even_A = (on_ADE @ load_E).max(axis=1) <= goal * (1 + 1e-9)
        before_A = np.isfinite(least_A)
        reached_A = (least_A[before_A, None] + apart_AA[before_A]).min(axis=0)
        least_A = np.where(even_A, reached_A, np.inf)
    return int(least_A.min())


def _assignments(experts: int, devices: int) -> NDArray[np.int64]:
    """Return all assignments of equally many experts to each device, `[A, E]`."""
    found = np.full((1, experts), -1)
    for device in range(devices):
        free = [np.flatnonzero(row < 0) for row in found]
        pairs = [
            (row, list(some))
            for row, left in zip(found, free, strict=True)
            for some in itertools.combinations(left, experts // devices)
        ]
        found = np.array([row for row, _ in pairs])
        for row, (_, some) in zip(found, pairs, strict=True):
            row[some] = device
    return found
