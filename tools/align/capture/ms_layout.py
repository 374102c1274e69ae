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
    found: dict[int, TensorLayout] = {}
    for node in plan.nodes:
        _said(node, stage, found)
    for node in plan.nodes:
        _follows(node, found)
    cuts = WeightShards.of(recipe)
    for node in plan.nodes:
        _of_weights(node, cuts, found)
    return found


def _said(node: TappedOperator, stage: tuple[int, ...], found: dict[int, TensorLayout]) -> None:
    for values, said in zip((node.inputs, node.outputs), node.layouts, strict=True):
        for value, entry in zip(_flat(values), said, strict=False):
            if isinstance(value, TappedTensor) and is_object(entry) and value.constant is None:
                with suppress(TelechatMoeError):
                    found.setdefault(id(value), _layout(entry, value, stage))


def _flat(values: list[Argument]) -> list[Any]:
    """Return arguments without the tuple that Concat and others take as their only one."""
    return values[0] if len(values) and isinstance(values[0], list) else values


def _layout(entry: Mapping[str, Any], tensor: TappedTensor, stage: tuple[int, ...]) -> TensorLayout:
    maps = entry["tensor_map"]
    if len(maps) != len(tensor.shape):
        raise LayoutError("of another number of dimensions")
    given = {
        "Device Matrix": list(entry["device_matrix"]),
        "Alias Name": list(entry["alias_name"]),
        "Tensor Map": [list(m) if is_sequence(m) else m for m in maps],
        "Rank List": list(stage),
    }
    return from_dict(given, None)


def _follows(node: TappedOperator, found: dict[int, TensorLayout]) -> None:
    """Set the layout of the result of an operator whose inputs have layouts."""
    made = next(iter(tensors(node.outputs)), None)
    if made is None or id(made) in found or node.writes:
        return
    taken = [t for t in tensors(node.inputs) if id(t) in found]
    if node.kind in _ELEMENTWISE:
        same = [t for t in taken if t.shape == made.shape and not found[id(t)].partial]
        if same:
            found[id(made)] = found[id(same[0])]
    elif node.kind == "MatMul" and len(taken) == 2 and len(node.inputs) > 3:
        x, y = (found[id(t)] for t in taken)
        flags = [bool(getattr(v, "value", False)) for v in node.inputs[2:4]]
        found[id(made)] = _product(x, y, flags)


def _product(x: TensorLayout, y: TensorLayout, flags: list[bool]) -> TensorLayout:
    """Return the layout of a matrix product: an axis that shards the summed dimension makes terms."""
    rows, inner = x.dims[::-1] if flags[0] else x.dims
    columns = y.dims[0] if flags[1] else y.dims[1]
    cut = {axis for axis in inner if x.mesh[x.axes.index(axis)] > 1}
    columns = tuple(axis for axis in columns if axis not in rows)
    return replace(x, dims=(rows, columns), partial=dict.fromkeys(sorted(cut), "sum"))


def _of_weights(node: TappedOperator, cuts: Any, found: dict[int, TensorLayout]) -> None:
    from telechat_moe.tools.align.dump.recipe_layout import weight

    for tensor in tensors([*node.inputs, *node.outputs]):
        if tensor.parameter:
            with suppress(LayoutError):
                found[id(tensor)] = weight(cuts, tensor.parameter)[0]
    if node.weight:
        taken, made = (next(iter(tensors(values)), None) for values in (node.inputs, node.outputs))
        with suppress(LayoutError):
            if made is not None:
                found[id(made)] = weight(cuts, node.weight)[0]
            if taken is not None:
                found[id(taken)] = weight(cuts, node.weight, reduce="sum")[0]
    if node.kind in UPDATES:
        own = next(iter(tensors(node.inputs[0])), None)
        grad = next(iter(tensors(node.inputs[UPDATES[node.kind].index("grad")])), None)
        if own is not None and grad is not None and id(own) in found and grad.shape == own.shape:
            found[id(grad)] = found[id(own)]
