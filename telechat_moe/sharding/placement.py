"""Put the layout of one primitive, weight or cell on it; :mod:`telechat_moe.sharding.apply` does a whole model.

Traps of MindSpore 2.9.0 that this module is built around, each refused or avoided (docs/graph.md):

* a tuple strategy lets unused devices repeat on the right, so its axes must be the first of the device matrix;
* ``self_define_shard`` is not checked: it is never used for a computed axis that is split;
* an output layout on ``BatchMatMul`` gives wrong numbers: none is set;
* a placement after the first compile, or on a copied primitive, is silently lost;
* a primitive without a placement is split along its first dimension over all devices: values stay right, and
  collectives appear that nobody asked for (:func:`unplaced`);
* the optimizer's sharding takes state that is not trained, too.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mindspore import Parameter, nn, ops
from mindspore.parallel import Layout

from telechat_moe.errors import BadInputError
from telechat_moe.model.block import Block
from telechat_moe.model.causal_lm import Embedding
from telechat_moe.model.mtp import MTPLayer
from telechat_moe.sharding.cells.collective import ALONE, Group, Morphed, ParallelCrossEntropy
from telechat_moe.sharding.cells.shape_only import (
    BlockStub,
    EmbeddingStub,
    HiddenStub,
    LossStub,
    MTPStub,
)
from telechat_moe.sharding.layouts import LOCAL, TABLE, WEIGHTS, LayoutRule, dimensions
from telechat_moe.sharding.mesh import AXES, Mesh
from telechat_moe.sharding.stages import StageChunk

# Where ``self_define_shard`` may be used: the axis along which the primitive computes; None = its own attribute.
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax")
COMPUTED_AXIS = {"Concat": None, "Softmax": None, **dict.fromkeys(_REDUCTIONS, -1)}
# Primitives that need no placement, by cell: of one number, or not run in a placed model.
UNPLACED = {
    "CausalLM": {"add_mtp", "scale_mtp"},
    "ParallelCrossEntropy": {"add_tiny", "mean"},
    "PlainAttention": {"cast_scale"},
    "AttentionMask": {"tile"},
}


class ModelPlacement:
    """Placement of one model on one mesh, as one rank does it, whose groups it names."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self.layout = Layout(tuple(mesh.sizes[a] for a in AXES), AXES)
        # The same devices in the same order, for primitives that take one axis a dimension.
        self.coarse = Layout((mesh.dp, mesh.cp, mesh.tp), ("dp", "cp", "tp"))
        self.placed: dict[int, ops.Primitive] = {}  # kept alive: Python would reuse the id
        self._rules: dict[int, LayoutRule] = {}
        self._groups: dict[tuple[int, ...], str] = {}
        self._weights: dict[int, str] = {}
        self._stages: dict[int, int] = {}
        self.v_shape = False  # see sharding.stages.Stages

    def put(self, primitive: ops.Primitive, rule: LayoutRule) -> None:
        """Place one primitive.

        Raises:
            BadInputError: A layout that MindSpore would turn into wrong numbers.
        """
        other = self._rules.setdefault(id(primitive), rule)
        if other != rule:
            raise BadInputError(
                f"{primitive.name} is used twice, as {other.inputs} and as {rule.inputs}; MindSpore has one "
                "layout a primitive, so it needs two of them"
            )
        self.placed[id(primitive)] = primitive
        if rule.kind == "tuple":
            primitive.shard(tuple(self.strategy(layout, primitive.name) for layout in rule.inputs))
            return
        if rule.kind == "coarse":
            primitive.shard(tuple(self.of_degrees(layout) for layout in rule.inputs))
            return
        if rule.kind == "own":
            refuse_cut_axis(primitive, rule, self.mesh)
            primitive.add_prim_attr("self_define_shard", True)
        outputs = tuple(self.of(layout) for layout in rule.outputs) or None
        if outputs and primitive.name == "BatchMatMul":
            raise BadInputError(
                "BatchMatMul was given an output layout: MindSpore 2.9.0 computes wrong values there"
            )
        inputs = tuple(self.of(layout) for layout in rule.inputs)
        if rule.kind == "own" and primitive.name == "Concat":
            inputs = (inputs,)
        primitive.shard(inputs, outputs)

    def of(self, layout: str) -> Any:
        """Return MindSpore's layout object for a layout in words, such as ``token tp``."""
        return self.layout(*(_axes(axes) for axes in dimensions(layout, self.mesh)))

    def of_degrees(self, layout: str) -> Any:
        """Return MindSpore's layout over dp, cp and tp, not split into inner and outer axes."""
        names = {"batch": "dp", "seq": "cp", "tp": "tp", ".": "None"}
        return self.coarse(*(names[word] for word in layout.split()))

    def strategy(self, layout: str, name: str) -> tuple[int, ...]:
        """Return MindSpore's tuple strategy.

        Raises:
            BadInputError: Its axes are not the first of the device matrix, in order.
        """
        dims = dimensions(layout, self.mesh)
        used = [a for axes in dims for a in axes if self.mesh.sizes[a] > 1]
        matrix = [a for a in AXES if self.mesh.sizes[a] > 1]
        if name != "Gather" and used != matrix[: len(used)]:
            raise BadInputError(
                f"{name}: the tuple strategy of {layout!r} uses the axes {used}, which are not the first of "
                f"{matrix}; MindSpore would put other devices together"
            )
        return tuple(self.mesh.size(axes) for axes in dims)

    def cell(self, cell: nn.Cell, table: str) -> None:
        """Place the primitives of a cell by a row of the table."""
        for name, rule in TABLE[table].items():
            primitive = getattr(cell, name, None)
            if primitive is not None:
                self.put(primitive, rule)
        for name, layout in WEIGHTS.get(table, {}).items():
            self._weights[id(getattr(cell, name))] = layout

    def weight(self, parameter: Parameter) -> str:
        """Return the layout of a weight; one that the table does not name is whole everywhere."""
        return self._weights.get(id(parameter), " ".join("." * len(parameter.shape)))

    def is_here(self, parameter: Parameter) -> bool:
        """Return whether the parameter lives on this rank's pipeline stage."""
        return self._stages.get(id(parameter), 0) == self.mesh.stage(self.rank)

    def assign_stage(self, cell: nn.Cell, chunk: StageChunk) -> None:
        """Assign a cell to a pipeline stage; the chunk follows from the order of the cells, but in a V."""
        cell.pipeline_stage = chunk.stage
        if self.v_shape:
            cell.pipeline_segment = chunk.chunk
        for parameter in cell.get_parameters():
            self._stages.setdefault(id(parameter), chunk.stage)

    def stub(self, cell: nn.Cell, chunk: StageChunk) -> nn.Cell:
        """Return a placed shape-only stub of a cell of another stage."""
        if isinstance(cell, Embedding):
            other, row = EmbeddingStub(cell.weight.shape[1], cell.dtype), "EmbeddingStub"
        elif isinstance(cell, ParallelCrossEntropy):
            other, row = LossStub(), "LossStub"
        elif isinstance(cell, Block):
            name = f"elsewhere_{len(self.placed)}"
            other, row = BlockStub(name, cell.is_moe), "BlockStub"
            self.put(other.add_aux, TABLE["Block"]["add_aux"])
        elif isinstance(cell, MTPLayer):
            other, row = MTPStub(), "MTPStub"
        else:
            other = HiddenStub(getattr(cell, "out_dtype", None))
            row = "HiddenStub"
        self.morphed(other.run, row)
        self.assign_stage(other, chunk)
        return other

    def shards(self, parameter: Parameter, shard_threshold: int | None = None) -> int:
        """Return the number of different shards of a gradient within its stage.

        Args:
            parameter: Its weight.
            shard_threshold: Bytes from which MindSpore shards the optimizer's state of a weight over all
                devices that hold copies (ZeRO-1); None = it does not.
        """
        cuts = [self.mesh.size(axes) for axes in dimensions(self.weight(parameter), self.mesh)]
        shards = math.prod(cuts)
        copies = self.mesh.stage_devices // shards
        if shard_threshold is None or not getattr(parameter, "parallel_optimizer", True):
            return shards
        rows = parameter.shape[0] // cuts[0]
        size = math.prod(parameter.shape) // shards * parameter.itemsize
        return shards * copies if rows % copies == 0 and size >= shard_threshold else shards

    def morphed(self, cell: Morphed, row: str) -> None:
        """Place a cell that runs on slices."""
        inputs, outputs = LOCAL[row]
        self.placed[id(cell.morph)] = cell.morph
        # Primitives that run on slices have no layout.
        owner = getattr(cell.morph.__morph_fn__, "__self__", None)
        if isinstance(owner, nn.Cell):
            self.placed |= {id(p): p for _, _, p in primitives(owner)}
        cell.morph.shard(tuple(map(self.of, inputs)), tuple(map(self.of, outputs)))

    def local(
        self, cell: nn.Cell, row: str, infer_shape: Any = None, infer_dtype: Any = None
    ) -> Morphed:
        """Return a cell that runs ``cell`` on slices."""
        options = {"infer_shape": infer_shape, "infer_dtype": infer_dtype}
        morphed = Morphed(cell.construct, **{k: v for k, v in options.items() if v is not None})
        self.morphed(morphed, row)
        return morphed

    def group(self, axes: Sequence[str]) -> Group:
        """Return the group along ``axes``, created once."""
        degrees = dict.fromkeys(axis.split("_")[0] for axis in axes)
        return self.group_of("-".join(degrees), self.mesh.group(self.rank, axes))

    def group_of(self, name: str, ranks: Sequence[int]) -> Group:
        """Return the group of evenly spaced ranks, created once; the first that asks for it names it."""
        from mindspore.communication import create_group

        key = tuple(ranks)
        if len(key) == 1:
            return ALONE._replace(ranks=key)
        if key not in self._groups:
            # What tells an evenly spaced group from others: first rank, distance, number.
            self._groups[key] = "-".join([name, *map(str, (key[0], key[1] - key[0], len(key)))])
            create_group(self._groups[key], list(key))
        return Group(self._groups[key], len(key), key.index(self.rank), key)


def refuse_cut_axis(primitive: ops.Primitive, rule: LayoutRule, mesh: Mesh) -> None:
    """Refuse ``self_define_shard`` where a primitive computes along a dimension that is split.

    MindSpore believes the rule and adds no collective: each device would compute along its own shard.

    Raises:
        BadInputError: The dimension is split, or it is not known.
    """
    name = primitive.name
    if name not in COMPUTED_AXIS:
        allowed = ", ".join(COMPUTED_AXIS)
        raise BadInputError(
            f"{name} was given its own output layout, which MindSpore does not check; known to be right: {allowed}"
        )
    computed = COMPUTED_AXIS[name]
    axis: int | tuple[int, ...] = primitive.axis if computed is None else computed
    axes = axis if isinstance(axis, tuple) else (axis,)
    for layout in rule.inputs:
        cut = dimensions(layout, mesh)
        for dimension in axes:
            shards = mesh.size(cut[dimension])
            if shards > 1:
                raise BadInputError(
                    f"{name} computes along dimension {dimension} of {layout!r}, which is sharded into {shards} over "
                    f"{cut[dimension]}; each device would see its own shard only, and MindSpore adds no collective"
                )


def primitives(cell: nn.Cell) -> Iterator[tuple[nn.Cell, str, ops.Primitive]]:
    """Yield ``(cell, attribute, primitive)`` of a cell and those below it."""
    for _, owner in cell.cells_and_names():
        for name, value in [*vars(owner).items(), *getattr(owner, "_primitives", {}).items()]:
            if isinstance(value, ops.Primitive):
                yield owner, name, value


def _axes(axes: tuple[str, ...]) -> Any:
    return "None" if not axes else axes[0] if len(axes) == 1 else axes


def unplaced(model: nn.Cell, placement: ModelPlacement) -> list[str]:
    """Return the primitives that have no placement and need one, as ``cell.primitive (kind)``.

    MindSpore splits the first dimension of such a primitive over all devices; values stay right, and
    collectives appear where none are needed. Reshape carries its producer's layout and needs none.
    """
    names = {id(cell): name for name, cell in model.cells_and_names()}
    missing: dict[int, str] = {}
    for cell, attribute, primitive in primitives(model):
        needs_none = attribute in UNPLACED.get(type(cell).__name__, ())
        if id(primitive) in placement.placed or primitive.name == "Reshape" or needs_none:
            continue
        path = f"{names[id(cell)]}.{attribute}".lstrip(".")
        missing[id(primitive)] = f"{path} ({primitive.name})"
    return sorted(missing.values())
