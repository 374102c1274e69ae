"""Layouts as dumps write them: MindSpore's ``layout`` of a tensor, with a few more keys for what it cannot express.

``Device Matrix`` is the length of each axis, ``Alias Name`` their names, ``Rank List`` the devices in the order of the
matrix. ``Tensor Map`` has for each dimension -1 or the axis that shards it, counted from the right, or a list of axes,
outermost first. ``Partial`` has null or a reduction for each axis. The axis ``interleaved_parallel``, always the last,
does not count devices: a device holds all its shards, one after another, and the matrix counts virtual devices.

This package adds ``Cyclic`` (axes), ``Blocks``, ``Local`` (axes), ``Calls`` (axis), ``Sizes``, ``Owned``, ``Padded``
(by dimension; ``flat`` is the flattened shard) and ``Flat`` (axes); see :class:`records.TensorLayout`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from telechat_moe.errors import BadInputError
from telechat_moe.narrowing import is_object, is_sequence, short
from telechat_moe.tools.align.dump.ranges import LayoutError
from telechat_moe.tools.align.dump.records import FLAT, TensorLayout

INTERLEAVED = "interleaved_parallel"
KEYS = {
    *("Device Matrix", "Alias Name", "Interleaved", "Tensor Map", "Rank List", "Partial"),
    *("Cyclic", "Blocks", "Local", "Calls", "Sizes", "Owned", "Padded", "Flat"),
}
"""The keys of a layout as dumps write it."""
_KINDS = {"avg": "mean"}


def from_dict(entry: Mapping[str, Any], shard_size: int | None = None) -> TensorLayout:
    """Return the layout that a dump describes.

    Args:
        shard_size: The value of ``hsdp_shard_size``: the number of copies that share a tensor's first dimension.

    Raises:
        BadInputError: The value does not have that form.
        LayoutError: It contradicts itself.
    """
    try:
        layout = _parse(entry)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInputError(f"layout {short(entry)} cannot be read: {error!r}") from None
    return layout if shard_size in (None, 0, 1) else shared(layout, shard_size)


def to_dict(layout: TensorLayout) -> dict[str, Any]:
    """Return a layout as dumps write it."""
    number = {axis: len(layout.axes) - 1 - i for i, axis in enumerate(layout.axes)}
    within = INTERLEAVED in layout.local
    entry: dict[str, Any] = {
        "Device Matrix": list(layout.mesh),
        "Alias Name": list(layout.axes),
        "Interleaved": "Yes" if within else "No",
        "Tensor Map": [
            -1 if not axes else number[axes[0]] if len(axes) == 1 else [number[a] for a in axes]
            for axes in layout.dims
        ],
        "Rank List": list(layout.ranks),
    }
    if layout.partial:
        entry["Partial"] = [layout.partial.get(a) for a in layout.axes]
    local = layout.local - {INTERLEAVED}
    names = {"Cyclic": layout.interleaved, "Local": local, "Flat": layout.flat}
    entry |= {key: list(axes) for key, axes in names.items() if axes}
    if any(b > 1 for b in layout.block):
        entry["Blocks"] = list(layout.block)
    if layout.calls:
        entry["Calls"] = layout.calls
    settings = {"Sizes": layout.sizes, "Owned": layout.owned, "Padded": layout.padded}
    for key, by_dimension in settings.items():
        if by_dimension:
            entry[key] = {"flat" if d == FLAT else str(d): x for d, x in by_dimension.items()}
    return entry


def shared(layout: TensorLayout, by: int) -> TensorLayout:
    """Return the layout of a tensor whose copies divide its first dimension among them (parallel optimizer).

    Raises:
        LayoutError: There are fewer neighbouring copies than that, or the tensor has no dimension.
    """
    used = {a for axes in layout.dims for a in axes}
    used |= {*layout.partial, *layout.flat, *layout.local}
    sizes = dict(zip(layout.axes, layout.mesh, strict=True))
    free = [a for a in layout.axes if a not in used and a != layout.calls]
    for first, axis in reversed([*enumerate(free)] if layout.dims else []):
        # Groups of neighbouring ranks: the innermost axes, and of the last of them perhaps a part.
        parts, remainder = divmod(by, math.prod(sizes[a] for a in free[first + 1 :]))
        if remainder or sizes[axis] % parts:
            continue
        position, inner = layout.axes.index(axis), f"{axis}_shared"
        split = (sizes[axis] // parts, parts)
        dims = ((*layout.dims[0], inner, *free[first + 1 :]), *layout.dims[1:])
        mesh = (*layout.mesh[:position], *split, *layout.mesh[position + 1 :])
        axes = (*layout.axes[: position + 1], inner, *layout.axes[position + 1 :])
        return replace(layout, mesh=mesh, axes=axes, dims=dims)
    raise LayoutError(
        f"{by} copies are said to share the tensor; its copies lie along "
        f"{', '.join(f'{a} {sizes[a]}' for a in free) or 'no axis'}"
    )


def _parse(description: Mapping[str, Any]) -> TensorLayout:
    mesh = _ints(description["Device Matrix"])
    names = description.get("Alias Name") or [f"axis{i}" for i in range(len(mesh))]
    axes = tuple(map(str, names))
    if len(axes) != len(mesh):
        raise LayoutError(
            f"Device Matrix {list(mesh)} has {len(mesh)} axes, Alias Name {len(axes)}"
        )
    local = frozenset(map(str, description.get("Local", ())))
    ranks = _ints(description["Rank List"]) if description.get("Rank List") is not None else None
    if INTERLEAVED in axes:
        if axes[-1] != INTERLEAVED:
            raise LayoutError(f"{INTERLEAVED} must be the last of {', '.join(axes)}")
        local |= {INTERLEAVED}
        ranks = None if ranks is None else _devices(ranks, mesh)
    if ranks is None:
        devices = math.prod(n for a, n in zip(axes, mesh, strict=True) if a not in local)
        ranks = tuple(range(devices))
    dims = tuple(_axes(entry, axes) for entry in description["Tensor Map"])
    if INTERLEAVED in local and not any(INTERLEAVED in cut for cut in dims):
        # this tensor is not split within a device
        axes, mesh, local = axes[:-1], mesh[:-1], local - {INTERLEAVED}
    return TensorLayout(
        mesh=mesh,
        axes=axes,
        ranks=ranks,
        dims=dims,
        partial=_partial(description.get("Partial"), axes),
        interleaved=frozenset(map(str, description.get("Cyclic", ()))),
        block=_ints(description.get("Blocks", ())),
        local=local,
        calls=None if description.get("Calls") is None else str(description["Calls"]),
        sizes={d: _ints(x) for d, x in _by_dimension(description.get("Sizes"))},
        owned={
            d: tuple(_ints(part) for part in x) for d, x in _by_dimension(description.get("Owned"))
        },
        padded={d: _int(x) for d, x in _by_dimension(description.get("Padded"))},
        flat=tuple(map(str, description.get("Flat", ()))),
    )


def _devices(ranks: tuple[int, ...], mesh: Sequence[int]) -> tuple[int, ...]:
    """Return the real devices of a rank list that may count virtual ones, which are neighbours."""
    n, virtual = mesh[-1], math.prod(mesh)
    if len(ranks) != virtual or n == 1:
        return ranks
    base = ranks[0]
    if ranks != tuple(range(base, base + virtual)) or base % n:
        raise LayoutError(f"Rank List {list(ranks)[:16]} counts virtual devices, but not in order")
    return tuple(range(base // n, (base + virtual) // n))


def _axes(entry: Any, axes: Sequence[str]) -> tuple[str, ...]:
    numbers = _ints(entry) if is_sequence(entry) else (_int(entry),)
    for number in numbers:
        if not -1 <= number < len(axes):
            raise LayoutError(f"Tensor Map names the axis {number}, there are {len(axes)}")
    return tuple(axes[len(axes) - 1 - n] for n in numbers if n != -1)


def _partial(entry: Any, axes: Sequence[str]) -> dict[str, str]:
    if not entry:
        return {}
    items = entry.items() if is_object(entry) else enumerate(entry)
    kinds = ((a, str(kind).lower()) for a, kind in items if kind not in (None, "None", ""))
    return {axes[a] if isinstance(a, int) else str(a): _KINDS.get(k, k) for a, k in kinds}


def _by_dimension(entry: Any) -> list[tuple[int, Any]]:
    by_dimension: Mapping[str, Any] = entry or {}
    return [(FLAT if d == "flat" else int(d), x) for d, x in by_dimension.items()]


def _int(x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{x!r} is no integer")
    return x


def _ints(numbers: Any) -> tuple[int, ...]:
    if not is_sequence(numbers):
        raise TypeError(f"{numbers!r} is no list")
    return tuple(map(_int, numbers))
