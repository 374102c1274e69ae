"""Where every expert is: the map from a logical expert to its slot, and the moves between two maps.

Shapes: L MoE layers, E experts, D devices. A device has E / D slots, numbered through: slot `s` is on device `s // (E / D)`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError


class ExpertMove(NamedTuple):
    """One expert of one MoE layer that goes from a slot to another."""

    layer: int
    expert: int
    source_device: int
    target_device: int
    source_slot: int
    target_slot: int


@dataclass(frozen=True)
class SlotMap:
    """The slot of each logical expert in each MoE layer.

    Attributes:
        slots: `[L, E]` int32, each row a permutation of the slots.
        devices: D, the devices of an expert-parallel group; it divides E.

    Raises:
        BadInputError: `devices` doesn't divide the experts, or a row names a slot twice or one that does not exist.
    """

    slots: NDArray[np.int32]
    devices: int

    def __post_init__(self) -> None:
        array = np.asarray(self.slots)
        if array.ndim != 2 or not array.size or array.dtype.kind not in "iu":
            raise BadInputError(
                f"placement: the map has shape {array.shape} and type {array.dtype}, expected integers [layers, experts]"
            )
        experts = array.shape[1]
        if self.devices < 1 or experts % self.devices:
            raise BadInputError(
                f"placement: {experts} experts cannot be shared evenly by {self.devices} devices"
            )
        for layer, row in enumerate(array):
            _check_permutation(layer, row)
        slot_LE = array.astype(np.int32)
        slot_LE.setflags(write=False)
        object.__setattr__(self, "slots", slot_LE)

    @classmethod
    def identity(cls, layers: int, experts: int, devices: int) -> "SlotMap":
        """Return the map with which a run starts: expert `e` in slot `e`."""
        return cls(np.tile(np.arange(experts, dtype=np.int32), (layers, 1)), devices)

    @property
    def capacity(self) -> int:
        """Slots of one device."""
        return self.slots.shape[1] // self.devices

    @property
    def owners(self) -> NDArray[np.int32]:
        """The device of each expert, `[L, E]`."""
        return self.slots // np.int32(self.capacity)

    @property
    def experts(self) -> NDArray[np.int32]:
        """The expert in each slot, `[L, E]`: the inverse of `slots`."""
        return np.argsort(self.slots, axis=1).astype(np.int32)


def _check_permutation(layer: int, slot_E: NDArray[np.integer[Any]]) -> None:
    """Raise BadInputError unless a row of the map names each slot once."""
    experts = len(slot_E)
    outside = np.flatnonzero((slot_E < 0) | (slot_E >= experts))
    if len(outside):
        e = int(outside[0])
        raise BadInputError(
            f"placement: MoE layer {layer}: expert {e} is in slot {slot_E[e]}, expected 0 to {experts - 1}"
        )
    count_S = np.bincount(slot_E, minlength=experts)
    if count_S.max() > 1:
        slot = int(count_S.argmax())
        twice = ", ".join(str(e) for e in np.flatnonzero(slot_E == slot))
        raise BadInputError(
            f"placement: MoE layer {layer}: experts {twice} are all in slot {slot}, and slot {int(count_S.argmin())} is empty; "
            "each slot holds one expert"
        )


def moves(old: SlotMap, new: SlotMap) -> list[ExpertMove]:
    """Return the experts whose slot differs, ordered by layer and expert.

    Raises:
        BadInputError: The maps have other layers, experts or devices.
    """
    if old.slots.shape != new.slots.shape or old.devices != new.devices:
        raise BadInputError(
            f"placement: a map of {old.slots.shape[0]} layers, {old.slots.shape[1]} experts and {old.devices} devices "
            f"cannot become one of {new.slots.shape[0]}, {new.slots.shape[1]} and {new.devices}"
        )
    layers, experts = np.nonzero(old.slots != new.slots)
    differing = []
    for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True):
        a, b = int(old.slots[layer, expert]), int(new.slots[layer, expert])
        differing.append(ExpertMove(layer, expert, a // old.capacity, b // old.capacity, a, b))
    return differing


def settle(device_LE: NDArray[np.integer[Any]], current: SlotMap) -> SlotMap:
    """Return the map that has each expert on the given device and keeps the slot of every expert that stays.

    Experts that arrive take the free slots of their device in ascending order.

    Raises:
        BadInputError: A device gets more experts than it has slots.
    """
    slot_LE = current.slots.copy()
    here_LE = current.owners
    for layer in np.flatnonzero((device_LE != here_LE).any(axis=1)):
        count_D = np.bincount(device_LE[layer], minlength=current.devices)
        room_D = np.where(np.arange(len(count_D)) < current.devices, current.capacity, 0)
        over = np.flatnonzero(count_D > room_D)
        if len(over):
            raise BadInputError(
                f"placement: MoE layer {layer}: device {over[0]} would hold {count_D[over[0]]} experts; there are "
                f"{current.devices} devices with room for {current.capacity} each"
            )
        going = np.flatnonzero(device_LE[layer] != here_LE[layer])
        free = np.sort(current.slots[layer, going])  # ascending, so grouped by device
        slot_LE[layer, going[np.argsort(device_LE[layer, going], kind="stable")]] = free
    return SlotMap(slot_LE, current.devices)
