"""Assign experts to devices so that the busiest device has as little to do as possible; each device gets E / D experts.

Shapes: L MoE layers, E experts, D devices.
"""

import numpy as np
from numpy.typing import NDArray


def greedy(load_LE: NDArray[np.float64], devices: int) -> NDArray[np.int64]:
    """Return the device of each expert, `[L, E]`: the largest load first, to the least loaded device that has room (LPT)."""
    layers, experts = load_LE.shape
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    sum_LD = np.zeros((layers, devices))
    room_LD = np.full((layers, devices), experts // devices)
    device_LE = np.empty((layers, experts), np.int64)
    row_L = np.arange(layers)
    for e_L in order_LE.T:
        d_L = np.where(room_LD > 0, sum_LD, np.inf).argmin(axis=1)
        device_LE[row_L, e_L] = d_L
        sum_LD[row_L, d_L] += load_LE[row_L, e_L]
        room_LD[row_L, d_L] -= 1
    return device_LE


def device_loads(
    load_LE: NDArray[np.float64], device_LE: NDArray[np.integer], devices: int
) -> NDArray[np.float64]:
    """Return the load of each device, `[L, D]`."""
    layers = len(load_LE)
    index = np.arange(layers)[:, None] * devices + device_LE
    flat = np.bincount(index.ravel(), weights=load_LE.ravel(), minlength=layers * devices)
    return flat.reshape(layers, devices).astype(np.float64)
