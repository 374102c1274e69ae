"""Which experts should move: the predicted gain of a better balance against the time of the move, for each MoE layer.

Shapes: N steps, L MoE layers, E experts, D devices.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import BadInputError
from . import assign
from .forecast import check_loads, forecast
from .placement import Placement, settle


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

    placement: Placement
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    gain_s: NDArray[np.float64]
    cost_s: NDArray[np.float64]


def plan(loads_NLE: NDArray[np.number], current: Placement, rule: MoveRule) -> Proposal:
    """Return where experts should be for the next steps, given the loads of the last ones.

    A layer moves only where the gain is more than the cost, and an expert that stays on its device keeps its slot.

    Args:
        loads_NLE: `[N, L, E]`, (token, expert) pairs of each expert in each step of the window, summed over all devices.
        current: The map now.
        rule: What balance is worth and what a move costs.

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
    before_L = assign.device_loads(load_LE, current.owners, devices).max(axis=1)
    device_LE = assign.greedy(load_LE, devices)
    after_L = assign.device_loads(load_LE, device_LE, devices).max(axis=1)
    gain_s_L = (before_L - after_L) * rule.seconds_per_pair * rule.steps
    cost_s_L = move_seconds(current.owners, device_LE, devices, rule)
    pays_L = gain_s_L > cost_s_L
    device_LE = np.where(pays_L[:, None], device_LE, current.owners)
    return Proposal(
        settle(device_LE, current),
        before_L,
        np.where(pays_L, after_L, before_L),
        np.where(pays_L, gain_s_L, 0.0),
        np.where(pays_L, cost_s_L, 0.0),
    )


def move_seconds(
    old_LE: NDArray[np.integer], new_LE: NDArray[np.integer], devices: int, rule: MoveRule
) -> NDArray[np.float64]:
    """Return the seconds that the moves of each layer take, `[L]`: as many experts as arrive at the busiest device.

    As many experts leave a device as arrive, and links carry both directions at once.
    """
    arriving = assign.device_loads((old_LE != new_LE).astype(float), new_LE, devices)
    return arriving.max(axis=1) * rule.expert_bytes / rule.bandwidth
