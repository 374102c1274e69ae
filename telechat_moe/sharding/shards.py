"""Find the shard of each tensor of a checkpoint that a rank holds, from the recipe alone; nothing is compiled.

What MindSpore says of a compiled rank is :func:`telechat_moe.graph.parameter_layout.shard_slices`; tests hold the two equal.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from telechat_moe.errors import BadInputError
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.weights import Weight, weights
from telechat_moe.sharding.layouts import WEIGHTS, dimensions
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.sharding.recipe import head_stage, mesh_of, shard_threshold, stages_of

MOMENTS = ("adam_m", "adam_v")
EMA = "ema"
"""First part of the name of a weight's moving average, and group of a checkpoint that holds them."""
Region = tuple[tuple[int, int], ...]

_LAYER = re.compile(r"layers\.(\d+)\.")


def weight_of(name: str) -> str:
    """Return the weight that a moment or average belongs to; of a weight, itself."""
    prefix, _, weight = name.partition(".")
    return weight if prefix in (*MOMENTS, EMA) else name


def elements(region: Region) -> int:
    """Return how many elements a region has."""
    return math.prod(end - begin for begin, end in region)


def group_of(name: str) -> str:
    """Return the group of a checkpoint that a tensor is in."""
    prefix = name.partition(".")[0]
    return "optimizer" if prefix in MOMENTS else EMA if prefix == EMA else "model"


@dataclass(frozen=True)
class WeightShards:
    """Shards of a model's weights and of AdamW's moments.

    Args:
        weights: Each weight of the whole model by name.
        stages: Pipeline stage of each decoder layer.
        head: That of all other weights but the embedding.
        threshold: Bytes from which copies of a weight split it among them (ZeRO-1); None: they do not.
        sharers: Copies that follow each other and split a weight among them; None: all that there are.
    """

    mesh: Mesh
    weights: dict[str, Weight]
    stages: Sequence[int]
    head: int
    threshold: int | None = None
    sharers: int | None = None

    @staticmethod
    def of(recipe: Recipe) -> "WeightShards":
        """Return the shards of a recipe.

        Raises:
            BadInputError: The degrees do not fit together or do not divide a weight.
        """
        config, places = recipe.model_config, stages_of(recipe)
        stages = [p.stage for p in places.layers] if places else [0] * config.num_hidden_layers
        named = {weight.name: weight for weight in weights(config)}
        zero = recipe.parallel.parallel_optimizer_config
        size = (zero.optimizer_weight_shard_size if zero is not None else None) or -1
        sharers = size if size > 0 else None
        mesh, threshold = mesh_of(recipe), shard_threshold(recipe)
        shards = WeightShards(mesh, named, stages, head_stage(recipe), threshold, sharers)
        for name, shape in shards.shapes.items():
            for length, axes in zip(shape, shards.axes(name), strict=True):
                if length % shards.mesh.size(axes):
                    raise BadInputError(
                        f"{recipe.source}: {name} {list(shape)} cannot be divided into {shards.mesh.size(axes)} along "
                        f"{length}"
                    )
        return shards

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of each weight by name."""
        return {name: weight.shape for name, weight in self.weights.items()}

    def axes(self, name: str) -> tuple[tuple[str, ...], ...]:
        """Return the mesh axes that split each dimension of a weight."""
        weight = self.weights[name]
        unsplit = not weight.cell or (self.mesh.sp and ".shared." in name)  # see sharding.place
        if unsplit:
            return tuple(() for _ in weight.shape)
        return dimensions(WEIGHTS[weight.cell][name.rsplit(".", 1)[-1]], self.mesh)

    def stage(self, name: str) -> int:
        """Return the pipeline stage of a weight."""
        if name == "embedding.weight" or name.endswith(".embed_norm.weight"):
            return 0
        layer = _LAYER.match(name)
        return self.stages[int(layer[1])] if layer else self.head

    def shard(self, rank: int, name: str, itemsize: int = 4) -> Region | None:
        """Return a rank's shard of a weight, moment or average, as (begin, end) of each dimension; None: another stage has it.

        Args:
            name: Name of a weight, or ``adam_m.``, ``adam_v.`` or ``ema.`` before one.
            itemsize: Bytes of an element.
        """
        name = weight_of(name)
        if self.stage(name) != self.mesh.stage(rank):
            return None
        shape, axes = self.shapes[name], self.axes(name)
        bounds: list[tuple[int, int]] = []
        for length, cut in zip(shape, axes, strict=True):
            rows = length // self.mesh.size(cut)
            start = self.mesh.index(rank, cut) * rows
            bounds.append((start, start + rows))
        used = {axis for cut in axes for axis in cut}
        unused = [axis for axis in self.mesh.sizes if axis not in used]
        copies = self.mesh.size(unused)
        parts = self.sharers or copies
        if copies % parts == 0 and self._split(name, tuple(bounds), itemsize, parts):
            rows = (bounds[0][1] - bounds[0][0]) // parts
            start = bounds[0][0] + self.mesh.index(rank, unused) % parts * rows
            bounds[0] = (start, start + rows)
        return tuple(bounds)

    def _split(self, name: str, shard: Region, itemsize: int, by: int) -> bool:
        """Return whether the copies of a weight split it among them."""
        if self.threshold is None or by == 1 or not self.weights[name].trained:
            return False
        begin, end = shard[0]
        return (end - begin) % by == 0 and elements(shard) * itemsize >= self.threshold

    @cached_property
    def names(self) -> list[str]:
        """Names of the weights and of the moments of those that are trained."""
        trained = [weight.name for weight in self.weights.values() if weight.trained]
        return [*self.weights, *(f"{m}.{n}" for m in MOMENTS for n in trained)]
