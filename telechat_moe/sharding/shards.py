"""Which part of each tensor of a checkpoint a rank holds, from the recipe alone; nothing is compiled.

What MindSpore says of a compiled rank is :func:`telechat_moe.graph.execute.piece_of`; tests hold the two equal.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from telechat_moe.errors import BadInputError
from telechat_moe.interop.names import pairs
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.layouts import WEIGHTS, dimensions
from telechat_moe.sharding.mesh import Mesh
from telechat_moe.sharding.recipe import mesh_of, places_of, shard_threshold

MOMENTS = ("adam_m", "adam_v")
Region = tuple[tuple[int, int], ...]

# What a weight is called -> the row of WEIGHTS for its cell; all others are whole.
_CELLS = (
    (re.compile(r"embedding\.weight"), "Embedding"),
    (re.compile(r"head\.weight"), "Linear.column"),
    (re.compile(r".*\.attention\.(q_up|q_proj)\.weight"), "Linear.column"),
    (re.compile(r".*\.attention\.kv_up\.weight"), "Linear.column_whole"),
    (re.compile(r".*\.attention\.out\.weight"), "Linear.row"),
    (re.compile(r".*\.(ffn|shared)\.(gate|up)\.weight"), "Linear.column"),
    (re.compile(r".*\.(ffn|shared)\.down\.weight"), "Linear.row"),
    (re.compile(r".*\.moe\.experts\.(gate|up|down)"), "Experts"),
)
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Cuts:
    """How a recipe cuts the weights of its model and AdamW's moments.

    Args:
        mesh: Devices.
        shapes: Whole shape of each weight by name.
        stages: Pipeline stage of each decoder layer.
        threshold: Bytes from which copies share a weight among them (ZeRO-1); None: they do not.
    """

    mesh: Mesh
    shapes: dict[str, tuple[int, ...]]
    stages: Sequence[int]
    threshold: int | None = None

    @staticmethod
    def of(recipe: Recipe) -> "Cuts":
        """Return the cuts of a recipe.

        Raises:
            BadInputError: The degrees do not fit together or do not divide a weight.
        """
        given = recipe.parallel.parallel_optimizer_config
        if (
            recipe.parallel.enable_parallel_optimizer
            and given
            and given.optimizer_weight_shard_size
        ):
            raise BadInputError(
                f"{recipe.source}: parallel_optimizer_config.optimizer_weight_shard_size is "
                f"{given.optimizer_weight_shard_size}; pieces are cut over all copies of a weight only, leave it out"
            )
        config, places = recipe.model_config, places_of(recipe)
        stages = [p.stage for p in places] if places else [0] * config.num_hidden_layers
        shapes = {pair.ours: pair.shape for pair in pairs(config)}
        cuts = Cuts(mesh_of(recipe), shapes, stages, shard_threshold(recipe))
        for name, shape in shapes.items():
            for length, axes in zip(shape, cuts.axes(name), strict=True):
                if length % cuts.mesh.size(axes):
                    raise BadInputError(
                        f"{recipe.source}: {name} {list(shape)} cannot be cut in {cuts.mesh.size(axes)} along "
                        f"{length}"
                    )
        return cuts

    def axes(self, name: str) -> tuple[tuple[str, ...], ...]:
        """Return the mesh axes that cut each dimension of a weight."""
        if self.mesh.sp and ".shared." in name:  # whole on every device, see sharding.place
            return tuple(() for _ in self.shapes[name])
        for pattern, row in _CELLS:
            if pattern.fullmatch(name):
                part = name.rsplit(".", 1)[-1]
                return dimensions(WEIGHTS[row][part], self.mesh)
        return tuple(() for _ in self.shapes[name])

    def stage(self, name: str) -> int:
        """Return the pipeline stage of a weight."""
        if name == "embedding.weight" or name.endswith(".embed_norm.weight"):
            return 0
        layer = _LAYER.match(name)
        return self.stages[int(layer[1])] if layer else self.mesh.pp - 1

    def region(self, rank: int, name: str, itemsize: int = 4) -> Region | None:
        """Return the part of a weight or moment that a rank holds, as (begin, end); None if another stage has it.

        Args:
            rank: Global rank.
            name: Of a weight, or ``adam_m.`` or ``adam_v.`` and a weight's.
            itemsize: Bytes of an element.
        """
        prefix, _, rest = name.partition(".")
        name = rest if prefix in MOMENTS else name
        if self.stage(name) != self.mesh.stage(rank):
            return None
        shape, axes = self.shapes[name], self.axes(name)
        found = []
        for length, cut in zip(shape, axes, strict=True):
            part = length // self.mesh.size(cut)
            start = self.mesh.index(rank, cut) * part
            found.append((start, start + part))
        used = {axis for cut in axes for axis in cut}
        copies = self.mesh.group(rank, [a for a in self.mesh.sizes if a not in used])
        if self._shared(name, found, itemsize, len(copies)):
            rows = (found[0][1] - found[0][0]) // len(copies)
            start = found[0][0] + copies.index(rank) * rows
            found[0] = (start, start + rows)
        return tuple(found)

    def _shared(self, name: str, part: Sequence[tuple[int, int]], itemsize: int, by: int) -> bool:
        """Return whether the copies of a weight share it among them."""
        if self.threshold is None or by == 1 or name.endswith(".router.expert_bias"):
            return False
        lengths = [end - begin for begin, end in part]
        return lengths[0] % by == 0 and math.prod(lengths) * itemsize >= self.threshold

    @cached_property
    def names(self) -> list[str]:
        """Names of the weights and of the moments of those that are trained."""
        trained = [n for n in self.shapes if not n.endswith(".router.expert_bias")]
        return [*self.shapes, *(f"{m}.{n}" for m in MOMENTS for n in trained)]
