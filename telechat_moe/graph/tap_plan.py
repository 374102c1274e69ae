"""The plan of a tapped graph: its operators, their inputs and outputs, and the taps that record these."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from mindspore.train import mind_ir_pb2 as pb

from telechat_moe.graph.mindir import NUMPY, value_of
from telechat_moe.numerics import from_bytes

TYPES = {n: np.dtype(kind).name for n, kind in NUMPY.items()}
TYPES |= {5: "int16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16"}
"""Canonical name of each MindIR element type."""

FUSED_UPDATE = "TelechatAdamW"
"""The operator that updates all weights at once."""
_PART = re.compile(r"^(?P<attribute>.+?)-(?P<kind>[^-]*)$")


@dataclass(eq=False)
class TappedTensor:
    """A tensor of a run, with the taps that record it in each graph."""

    shape: tuple[int, ...]
    dtype: str  # canonical name
    taps: dict[str, int] = field(default_factory=dict[str, int])  # number of the tap, by graph
    constant: Any = None  # its values, if the graph has them
    parameter: str | None = None  # name of the weight or state whose value it is
    # A tap of the main graph records it before any function runs, so that no function needs its own tap
    early: bool = False


class Number(NamedTuple):
    """An argument that is no tensor."""

    value: Any


Argument = TappedTensor | Number | list["Argument"]


@dataclass(frozen=True)
class TappedOperator:
    """An operator of a tapped graph."""

    # Cell that it belongs to, such as `model.layers.0.attention`; the same for backward operators
    path: tuple[str, ...]
    classes: tuple[str, ...]  # classes of the cells of the path
    kind: str  # primitive; for a custom operator of this package `Telechat` and its name
    backward: bool  # whether it belongs to the backward pass
    index: int  # number among those of the same path, kind and direction
    inputs: list[Argument]
    outputs: list[Argument]  # its outputs; for an operator that writes to weights, their new values
    attributes: Mapping[str, Any]
    graph: str  # function that it belongs to
    writes: tuple[int, ...] = ()  # positions of the inputs that it writes to
    weight: str = ""  # weight whose gradient it reduces
    # Layouts of inputs and of outputs, as the parallel compiler has recorded them
    layouts: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))


@dataclass
class TapPlan:
    """The plan of what a tapped graph records."""

    # Operators, in an order in which they can run
    nodes: list[TappedOperator] = field(default_factory=list[TappedOperator])
    taps: int = 0  # number of taps


def constant_tensor(proto: Any) -> TappedTensor:
    """Return a constant tensor of the graph."""
    kind, shape = TYPES.get(proto.data_type, "?"), tuple(proto.dims)
    values = None if kind == "?" else from_bytes(proto.raw_data, kind).reshape(shape)
    return TappedTensor(shape, kind, constant=values)


def scalar_of(attribute: Any) -> Any:
    """Return the value of an attribute; as text if it is None, a type or anything else that is no number."""
    kinds = pb.AttributeProto
    if attribute.type == kinds.NONE:
        return None
    if attribute.type in (kinds.TUPLE, kinds.LIST):
        return [scalar_of(v) for v in attribute.values]
    if attribute.type == kinds.DICT:
        return {v.name: scalar_of(v.values[0]) for v in attribute.values if v.values}
    if attribute.type == kinds.STRING and attribute.strings:
        return attribute.strings[0]
    if attribute.type in (kinds.TENSORS, kinds.TENSOR):
        return None
    return value_of(attribute)


def weight_of(node: Any) -> str:
    """Return the weight whose gradient a node reduces."""
    if "MirrorOperator" not in node.domain:
        return ""
    marks = (a for a in node.primal_attr if a.name == "mirror_user_id")
    return next((str(value_of(a)) for a in marks), "")


def layouts_of(attributes: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the layouts of inputs and outputs that the parallel compiler has recorded."""
    layouts: list[list[Any]] = [
        scalar_of(attributes[n]) if n in attributes else [] for n in ("in_layout", "out_layout")
    ]
    return layouts[0], layouts[1]


def kind_of(primitive: Any) -> str:
    """Return the name of a primitive; for a custom operator ``Telechat`` and its own name."""
    if primitive.op_type != "Custom":
        return primitive.op_type
    for attribute in primitive.attribute:
        if attribute.name == "func_name":
            return "Telechat" + value_of(attribute).rsplit(":", 1)[-1]
    return "Custom"


def cell_of(domain: str) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return the path of cells that a node's scope names, their classes, and whether it belongs to the backward pass.

    ``Gradients/Default/model-CausalLM/layers-CellList/0-Block/MatMul-op3``: ``model.layers.0``.
    """
    parts = domain.split("/")
    backward = parts[0].startswith("Gradients")
    path: list[str] = []
    classes: list[str] = []
    for part in parts[:-1]:
        match = _PART.match(part)
        if match and match["kind"]:
            path.append(match["attribute"])
            classes.append(match["kind"])
    return tuple(path), tuple(classes), backward


def weights_of(node: TappedOperator) -> int:
    """Return how many weights an operator updates at once; 0: it is no such operator."""
    decayed: Sequence[Any] = node.attributes.get("decayed") or []
    return len(decayed) if node.kind == FUSED_UPDATE else 0


def update_of(node: TappedOperator, chosen: Sequence[int]) -> TappedOperator:
    """Return an operator that updates many weights as one that updates the chosen ones, by their numbers."""
    count, decayed = weights_of(node), node.attributes["decayed"]
    inputs = [node.inputs[i * count + k] for i in range(4) for k in chosen]  # w, m, v, gradients
    attributes = {**node.attributes, "decayed": [decayed[k] for k in chosen]}
    writes = tuple(range(3 * len(chosen)))
    return replace(
        node, inputs=[*inputs, *node.inputs[4 * count :]], attributes=attributes, writes=writes
    )
