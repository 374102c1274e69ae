"""Derive the layouts of the tensors of a rank's graph, as far as the graph and the recipe determine them.

Operators carry the layouts of their inputs and outputs from the parallel compiler; those of weights and moments follow
from the recipe; a gradient has the layout of its weight, and holds terms of a sum before its reduction. An elementwise
operator keeps its input's layout; a product over a sharded dimension makes terms of a sum. Others are unknown.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from telechat_moe.errors import TelechatMoeError
from telechat_moe.graph.tap_plan import Argument, TappedOperator, TappedTensor, TapPlan
from telechat_moe.narrowing import is_object, is_sequence
from telechat_moe.tools.align.capture.ms_read import UPDATES, tensors
from telechat_moe.tools.align.dump.layout_dict import from_dict
from telechat_moe.tools.align.dump.ranges import LayoutError
from telechat_moe.tools.align.dump.records import TensorLayout

if TYPE_CHECKING:
    from telechat_moe.recipe import Recipe

_ONE_BY_ONE = """
Add Sub Mul RealDiv Div AddN Square Sqrt Rsqrt Neg Exp Log Sigmoid SiLU Tanh Cast Maximum Minimum Muls Adds
PowTensorScalar RsqrtGrad SqrtGrad SiLUGrad SigmoidGrad Softmax SoftmaxBackward Assign AssignAdd
"""
_ELEMENTWISE = frozenset(_ONE_BY_ONE.split())


def layouts(plan: TapPlan, recipe: "Recipe", rank: int) -> dict[int, TensorLayout]:
    """Return the layouts of the tensors of a rank's graph by their ``id``."""
    from telechat_moe.sharding.recipe import mesh_of
    from telechat_moe.sharding.shards import WeightShards

    mesh = mesh_of(recipe)
    first = mesh.stage(rank) * mesh.stage_devices
    stage = tuple(range(first, first + mesh.stage_devices))
    by_tensor: dict[int, TensorLayout] = {}
    for node in plan.nodes:
        _from_compiler(node, stage, by_tensor)
    for node in plan.nodes:
        _from_inputs(node, by_tensor)
    cuts = WeightShards.of(recipe)
    for node in plan.nodes:
        _from_weights(node, cuts, by_tensor)
    return by_tensor


def _from_compiler(
    node: TappedOperator, stage: tuple[int, ...], by_tensor: dict[int, TensorLayout]
) -> None:
    for values, entries in zip((node.inputs, node.outputs), node.layouts, strict=True):
        for value, entry in zip(_flat(values), entries, strict=False):
            if isinstance(value, TappedTensor) and is_object(entry) and value.constant is None:
                with suppress(TelechatMoeError):
                    by_tensor.setdefault(id(value), _layout(entry, value, stage))


def _flat(values: list[Argument]) -> list[Any]:
    """Return arguments without the tuple that Concat and others take as their only one."""
    return values[0] if len(values) and isinstance(values[0], list) else values


def _first(values: Argument) -> TappedTensor | None:
    return next(iter(tensors(values)), None)


def _layout(entry: Mapping[str, Any], tensor: TappedTensor, stage: tuple[int, ...]) -> TensorLayout:
    maps = entry["tensor_map"]
    if len(maps) != len(tensor.shape):
        raise LayoutError("of another number of dimensions")
    described = {
        "Device Matrix": list(entry["device_matrix"]),
        "Alias Name": list(entry["alias_name"]),
        "Tensor Map": [list(m) if is_sequence(m) else m for m in maps],
        "Rank List": list(stage),
    }
    return from_dict(described, None)


def _from_inputs(node: TappedOperator, by_tensor: dict[int, TensorLayout]) -> None:
    """Set the layout of the result of an operator whose inputs have layouts."""
    output = _first(node.outputs)
    if output is None or id(output) in by_tensor or node.writes:
        return
    sources = [t for t in tensors(node.inputs) if id(t) in by_tensor]
    if node.kind in _ELEMENTWISE:
        alike = [t for t in sources if t.shape == output.shape and not by_tensor[id(t)].partial]
        if alike:
            by_tensor[id(output)] = by_tensor[id(alike[0])]
    elif node.kind == "MatMul" and len(sources) == 2 and len(node.inputs) > 3:
        x, y = (by_tensor[id(t)] for t in sources)
        flags = [bool(getattr(v, "value", False)) for v in node.inputs[2:4]]
        by_tensor[id(output)] = _product(x, y, flags)


def _product(x: TensorLayout, y: TensorLayout, flags: list[bool]) -> TensorLayout:
    """Return the layout of a matrix product: an axis that shards the summed dimension makes terms."""
    rows, inner = x.dims[::-1] if flags[0] else x.dims
    columns = y.dims[0] if flags[1] else y.dims[1]
    cut = {axis for axis in inner if x.mesh[x.axes.index(axis)] > 1}
    columns = tuple(axis for axis in columns if axis not in rows)
    return replace(x, dims=(rows, columns), partial=dict.fromkeys(sorted(cut), "sum"))


def _from_weights(node: TappedOperator, cuts: Any, by_tensor: dict[int, TensorLayout]) -> None:
    from telechat_moe.tools.align.dump.recipe_layout import weight

    for tensor in tensors([*node.inputs, *node.outputs]):
        if tensor.parameter:
            with suppress(LayoutError):
                by_tensor[id(tensor)] = weight(cuts, tensor.parameter)[0]
    if node.weight:
        source, output = _first(node.inputs), _first(node.outputs)
        with suppress(LayoutError):
            if output is not None:
                by_tensor[id(output)] = weight(cuts, node.weight)[0]
            if source is not None:
                by_tensor[id(source)] = weight(cuts, node.weight, reduce="sum")[0]
    if node.kind in UPDATES:
        updated = _first(node.inputs[0])
        grad = _first(node.inputs[UPDATES[node.kind].index("grad")])
        layout = by_tensor.get(id(updated))
        if updated and grad and layout and grad.shape == updated.shape:
            by_tensor[id(grad)] = layout
