"""Assign experts to devices so that the busiest device has as little to do as possible; each device gets equally many.

Shapes: L MoE layers, E experts, D devices, C = E / D experts of a device.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

LoadArray = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]


def greedy(load_LE: LoadArray, devices: int) -> NDArray[np.int64]:
    """Return the device of each expert, `[L, E]`: the largest load first, to the least loaded device that has room (LPT)."""
    layers, experts = load_LE.shape
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    sum_LD = np.zeros((layers, devices))
    count_LD = np.zeros((layers, devices), np.int64)
    owner_LE = np.empty((layers, experts), np.int64)
    row_L, full = np.arange(layers), experts // devices
    for e_L in order_LE.T:
        d_L = sum_LD.argmin(axis=1)
        owner_LE[row_L, e_L] = d_L
        count_LD[row_L, d_L] += 1
        sum_LD[row_L, d_L] += np.where(
            count_LD[row_L, d_L] < full, load_LE[row_L, e_L], np.inf
        )  # a full device is never the least loaded
    return owner_LE


def device_loads(load_LE: LoadArray, owner_LE: Integers, devices: int) -> LoadArray:
    """Return the load of each device, `[L, D]`."""
    layers = len(load_LE)
    index = np.arange(layers)[:, None] * devices + owner_LE
    flat = np.bincount(index.ravel(), weights=load_LE.ravel(), minlength=layers * devices)
    return flat.reshape(layers, devices).astype(np.float64)


def lower_bound(load_LE: LoadArray, devices: int) -> LoadArray:
    """Return a load that the busiest device of any assignment has at least, `[L]`.

    Of the `k D + 1` hottest experts some device holds `k + 1`; beside the coolest `k + 1` of them it holds, at best, the
    coolest experts of all. `k = 0` is the hottest expert. The mean over devices is the other bound.
    """
    layers, experts = load_LE.shape
    capacity = experts // devices
    hot_LE = -np.sort(-load_LE, axis=1)
    cool_LK = np.concatenate([np.zeros((layers, 1)), hot_LE[:, ::-1].cumsum(axis=1)], axis=1)
    bound_L = hot_LE.sum(axis=1) / devices
    for k in range(capacity):
        last = k * devices + 1
        held_L = hot_LE[:, last - 1 - k : last].sum(axis=1) + cool_LK[:, capacity - 1 - k]
        bound_L = np.maximum(bound_L, held_L)
    return bound_L


def match(owner_LE: Integers, home_LE: Integers, devices: int) -> NDArray[np.int64]:
    """Return `owner_LE` with its groups renamed so that as many experts as possible stay on their device of `home_LE`.

    A minimum-cost assignment of groups to devices for each layer: which experts are together does not change.
    """
    from scipy import optimize

    named_LE = np.empty(owner_LE.shape, np.int64)
    for layer, (owner_E, home_E) in enumerate(zip(owner_LE, home_LE, strict=True)):
        pair = np.bincount(owner_E * devices + home_E, minlength=devices * devices)
        name_D = optimize.linear_sum_assignment(pair.reshape(devices, devices), maximize=True)[1]  # pyright: ignore
        named_LE[layer] = name_D[owner_E]
    return named_LE


def copies(load_LE: LoadArray, devices: int, spare: int) -> NDArray[np.int64]:
    """Return the expert in each of `E + spare x D` slots, `[L, S]`: a hot expert has several copies that share its load.

    Each spare slot goes to the expert with the most load for each copy, which makes the hottest copy as cool as possible.
    The first E slots are the experts in order.
    """
    layers, experts = load_LE.shape
    count_LE = np.ones((layers, experts))
    extra_LR = np.empty((layers, spare * devices), np.int64)
    row_L = np.arange(layers)
    for r in range(spare * devices):
        hottest_L = (load_LE / count_LE).argmax(axis=1)
        extra_LR[:, r] = hottest_L
        count_LE[row_L, hottest_L] += 1
    own_LE = np.broadcast_to(np.arange(experts), (layers, experts))
    return np.concatenate([own_LE, extra_LR], axis=1)


def copy_loads(load_LE: LoadArray, expert_LS: Integers) -> LoadArray:
    """Return the load of each copy that `copies` returned, `[L, S]`."""
    layers, experts = load_LE.shape
    index = np.arange(layers)[:, None] * experts + expert_LS
    count = np.bincount(index.ravel(), minlength=layers * experts).reshape(layers, experts)
    return np.take_along_axis(load_LE / count, expert_LS, axis=1)
