"""Count the shards of the trained weights on a device, from the layout table of `telechat_moe.sharding`.

The closed forms of `memory` divide all of a layer's matrices by tensor parallelism. Down-projections of MLA, the router
and MTP's projection are whole on every device, as are shared experts with sequence parallelism; here they count whole.
"""

import math

from telechat_moe.recipe.weights import Weight, weights
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import stage_of_chunk
from telechat_moe.tools.plan.cost.layout import Layout


def mesh_of(x: Layout) -> Mesh:
    """Return a layout's devices as a mesh."""
    sp = x.sequence_parallel and x.tp > 1
    return Mesh(dp=x.dp, cp=x.cp, tp=x.tp, pp=x.pp, ep=x.ep, sp=sp, expert_tp=x.etp > 1)


def cuts_of(a: Architecture, x: Layout) -> WeightShards:
    """Return how a layout shards the trained weights of a model that a recipe can have."""
    counts, stages = x.chunk_layers(len(a.layers)), stage_of_chunk(x)
    layers = [stage for stage, count in zip(stages, counts, strict=True) for _ in range(count)]
    trained = {w.name: w for w in weights(a.to_model()) if w.trained}
    return WeightShards(mesh_of(x), trained, layers, stages[-1])


def shard_shape(cuts: WeightShards, weight: Weight) -> tuple[int, ...]:
    """Return the shape of a weight's shard on one device."""
    axes = cuts.axes(weight.name)
    return tuple(n // cuts.mesh.size(cut) for n, cut in zip(weight.shape, axes, strict=True))


def stage_elements(a: Architecture, x: Layout) -> list[int]:
    """Return the trained elements of each stage on one of its devices, without sharding of the optimizer."""
    cuts, found = cuts_of(a, x), [0] * x.pp
    for name, weight in cuts.weights.items():
        found[cuts.stage(name)] += math.prod(shard_shape(cuts, weight))
    return found
