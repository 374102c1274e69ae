"""Improve an assignment of experts to devices: swaps that relieve the busiest device, then shuffles of a few devices.

Shapes: L MoE layers, E experts, D devices, C = E / D experts of a device; A layers still at work, T tries, K devices.
"""

import numpy as np
from numpy.typing import NDArray

from telechat_moe.moe.assign import Integers, LoadArray

EXACT = 1e-12
"""Smaller relative improvements are rounding."""

TRIES = 48
"""Shuffles of a few devices that are tried at once."""


class DeviceGroups:
    """The experts of each device, in several layers at once, and what each device has to do.

    Attributes:
        member_LDC: `[L, D, C]`, the experts of each device.
        sum_LD: `[L, D]`, the load of each device.
    """

    def __init__(self, load_LE: LoadArray, owner_LE: Integers, devices: int) -> None:
        """Group the experts by their device; each device has equally many."""
        layers, experts = load_LE.shape
        shape = (layers, devices, experts // devices)
        member_LE = np.argsort(owner_LE, axis=1, kind="stable")
        self._load_LE = load_LE
        self._load_LDC = np.take_along_axis(load_LE, member_LE, axis=1).reshape(shape)
        self.member_LDC = member_LE.reshape(shape)
        self.sum_LD = self._load_LDC.sum(axis=2)

    @property
    def busiest_L(self) -> LoadArray:  # noqa: N802
        """The load of the busiest device, `[L]`."""
        return self.sum_LD.max(axis=1)

    def owners(self, rows_A: Integers | None = None) -> NDArray[np.int64]:
        """Return the device of each expert in some layers, `[A, E]`, or in all."""
        member_ADC = self.member_LDC if rows_A is None else self.member_LDC[rows_A]
        layers, devices, capacity = member_ADC.shape
        owner_AE = np.empty((layers, devices * capacity), np.int64)
        device_E = np.repeat(np.arange(devices), capacity)
        np.put_along_axis(owner_AE, member_ADC.reshape(owner_AE.shape), device_E[None], axis=1)
        return owner_AE

    def swap(self, rows_A: NDArray[np.int64], target_L: LoadArray) -> NDArray[np.int64]:
        """Swap, in each of these layers, the two experts that leave the busiest device and its partner with the least.

        Returns the layers that were changed; those at their target, and those that no swap improves, are not.
        """
        sum_AD = self.sum_LD[rows_A]
        top_A = sum_AD.max(axis=1)
        rows_A, sum_AD, top_A = (x[top_A > target_L[rows_A]] for x in (rows_A, sum_AD, top_A))
        index_A = np.arange(len(rows_A))
        capacity = self.member_LDC.shape[2]
        from_A = sum_AD.argmax(axis=1)
        load_ADC = self._load_LDC[rows_A]
        # The larger of both sums after a swap is their mean plus how far what moves is from half their difference.
        wish_AD = (top_A[:, None] - sum_AD) / 2
        far = (
            load_ADC[index_A, from_A][:, None, :, None]
            - (load_ADC + wish_AD[:, :, None])[:, :, None, :]
        )
        np.abs(far, out=far)
        far += (sum_AD + wish_AD)[:, :, None, None]
        flat = far.reshape(len(rows_A), far.size // max(len(rows_A), 1))
        best_A = flat.argmin(axis=1) if len(rows_A) else from_A
        better_A = flat[index_A, best_A] < top_A * (1 - EXACT)
        to_A, pair_A = np.divmod(best_A, capacity * capacity)
        i_A, j_A = np.divmod(pair_A, capacity)
        rows_A, from_A, to_A, i_A, j_A = (x[better_A] for x in (rows_A, from_A, to_A, i_A, j_A))
        out_A, in_A = self._load_LDC[rows_A, from_A, i_A], self._load_LDC[rows_A, to_A, j_A]
        self.sum_LD[rows_A, from_A] += in_A - out_A
        self.sum_LD[rows_A, to_A] += out_A - in_A
        for table in (self._load_LDC, self.member_LDC):
            a, b = table[rows_A, from_A, i_A], table[rows_A, to_A, j_A]
            table[rows_A, from_A, i_A], table[rows_A, to_A, j_A] = b, a
        return rows_A

    def descend(self, target_L: LoadArray) -> None:
        """Swap until each layer is at its target or no swap improves it."""
        rows_A = np.arange(len(self.sum_LD))
        while len(rows_A):
            rows_A = self.swap(rows_A, target_L)

    def shuffle(
        self, rows_A: Integers, count: int, random: np.random.Generator
    ) -> NDArray[np.bool_]:
        """Deal out the experts of the busiest device and `count - 1` others anew, in `TRIES` ways, each then improved by swaps.

        Returns, for each of these layers, whether the best of the tries relieved the busiest device, and was taken.
        """
        layers, (_, devices, capacity) = len(rows_A), self.member_LDC.shape
        index_A = np.arange(layers)
        top_A, from_A = self.busiest_L[rows_A], self.sum_LD[rows_A].argmax(axis=1)
        key_ATD = random.random((layers, TRIES, devices))
        key_ATD[index_A, :, from_A] = -1.0
        device_ATK = np.argsort(key_ATD, axis=2)[:, :, :count]
        dealt = random.permuted(
            self.member_LDC[rows_A[:, None, None], device_ATK].reshape(layers * TRIES, -1), axis=1
        )
        load = np.take_along_axis(np.repeat(self._load_LE[rows_A], TRIES, axis=0), dealt, axis=1)
        owner = np.broadcast_to(np.repeat(np.arange(count), capacity), dealt.shape)
        tries = DeviceGroups(load, owner, count)
        tries.descend(np.zeros(len(dealt)))
        best_A = tries.busiest_L.reshape(layers, TRIES).argmin(axis=1)
        picked_A = index_A * TRIES + best_A
        better_A = tries.busiest_L[picked_A] < top_A * (1 - EXACT)
        target = (rows_A[better_A, None], device_ATK[index_A, best_A][better_A])
        picked_A = picked_A[better_A]
        self.sum_LD[target] = tries.sum_LD[picked_A]
        self._load_LDC[target] = tries._load_LDC[picked_A]
        order = tries.member_LDC[picked_A]
        self.member_LDC[target] = np.take_along_axis(
            dealt[picked_A], order.reshape(-1, count * capacity), axis=1
        ).reshape(order.shape)
        return better_A
