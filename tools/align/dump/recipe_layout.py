"""Layouts of this package's own runs, from the recipe: weights, their gradients and moments.

This is the only file here that needs the product's own model of layouts; functions import it when they are called.
"""

from typing import TYPE_CHECKING

from telechat_moe.tools.align.dump.layout_dict import shared
from telechat_moe.tools.align.dump.ranges import LayoutError
from telechat_moe.tools.align.dump.records import TensorLayout

if TYPE_CHECKING:
    from telechat_moe.sharding.shards import WeightShards


def weight(
    cuts: "WeightShards", name: str, itemsize: int = 4, reduce: str | None = None
) -> tuple[TensorLayout, tuple[int, ...]]:
    """Return the layout of a weight, or of a tensor of its shape, and the shape of the whole tensor.

    Args:
        cuts: How the recipe shards its weights.
        name: Name of a weight, or ``adam_m.``, ``adam_v.`` or ``ema.`` and the name of a weight.
        itemsize: Bytes of an element; it decides which weights are divided (ZeRO).
        reduce: ``sum`` or ``mean``: a gradient that data-parallel ranks have not reduced yet; each holds all rows.

    Raises:
        LayoutError: The recipe's model has no such weight.
    """
    from telechat_moe.sharding.mesh import AXES
    from telechat_moe.sharding.shards import weight_of

    plain = weight_of(name)
    if plain not in cuts.shapes:
        raise LayoutError(f"the recipe's model has no weight {name}")
    shape, dims = cuts.shapes[plain], list(cuts.axes(plain))
    first = cuts.stage(plain) * cuts.mesh.stage_devices
    free = tuple(a for a in AXES if all(a not in axes for axes in dims))
    partial = {a: reduce for a in free if reduce is not None and cuts.mesh.sizes[a] > 1}
    mesh = tuple(cuts.mesh.sizes[a] for a in AXES)
    ranks = tuple(range(first, first + cuts.mesh.stage_devices))
    layout = TensorLayout(mesh, AXES, ranks, tuple(dims), partial)
    region = cuts.shard(first, plain, itemsize) if reduce is None and shape else None
    if region is None:
        return layout, shape
    copies = shape[0] // cuts.mesh.size(dims[0]) // (region[0][1] - region[0][0])
    return (shared(layout, copies) if copies > 1 else layout), shape
