"""The proven optimum of one layer by integer programming (HiGHS through SciPy)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telechat_moe.moe.assign import lower_bound


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
    import scipy.sparse as sparse
    from scipy import optimize

    experts = len(load_E)
    least = max(np.ceil(lower_bound(load_E[None], devices)[0] - 1e-9), load_E.max())
    if found <= least:
        return Optimum(float(found), True)
    # Binaries "expert e is on device d", e-major, and last the load of the busiest device.
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
    lower = np.zeros_like(upper)
    lower[-1], upper[-1] = least, found
    result = optimize.milp(
        np.eye(1, len(upper), len(upper) - 1)[0],
        constraints=[
            optimize.LinearConstraint(one_E.tocsr(), 1, 1),
            optimize.LinearConstraint(even_D.tocsr(), experts // devices, experts // devices),
            optimize.LinearConstraint(load_D.tocsr(), -np.inf, 0),
        ],
        integrality=np.ones(len(upper)),
        bounds=optimize.Bounds(lower, upper),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.status == 0:
        return Optimum(float(np.rint(result.fun)), True)
    bound = result.mip_dual_bound
    return Optimum(float(least if bound is None else max(least, np.ceil(bound - 1e-6))), False)
