"""Read and edit MindIR, MindSpore's serialised graph."""

import ast
import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.errors import BadInputError

COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AlltoAllV", "Broadcast")
COLLECTIVES += ("Send", "Receive")
PEER = {"Send": "dest_rank", "Receive": "src_rank"}
"""The attribute that says which rank of the group is at the other end."""
ITEM_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}
NUMPY: dict[int, type[np.generic]] = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32}
NUMPY |= {7: np.int64, 9: np.bool_, 10: np.float16}


class Operation(NamedTuple):
    """A node of a graph and its primitive."""

    graph: str
    node: Any
    primitive: Any

    @property
    def kind(self) -> str:
        """Return the name of the primitive."""
        return self.primitive.op_type

    @property
    def scope(self) -> str:
        """Path of the cell that made the node; backward ones start with ``Gradients``."""
        return self.node.domain

    def attribute(self, name: str) -> Any:
        """Return the value of an attribute of the primitive, None if it has none."""
        return find_value(self.primitive.attribute, name)

    def shapes(self) -> list[tuple[tuple[int, ...], int]]:
        """Return ``(shape, element type)`` of each output."""
        return output_shapes(self.node)


class MindIR:
    """A parsed MindIR file.

    Args:
        data: Serialised ``ModelProto``.
    """

    def __init__(self, data: bytes) -> None:
        self.proto = _message_class()()
        self.proto.ParseFromString(data)
        self.primitives = {p.name: p for p in self.proto.primitives}

    def graphs(self) -> list[Any]:
        """Return the main graph and the functions that it calls."""
        return [self.proto.graph, *self.proto.functions]

    def primitive(self, node: Any) -> Any:
        """Return the primitive of a node, or None for constants and calls."""
        kind = node.op_type
        return self.primitives.get(kind[5:]) if kind.startswith("REF::") else None

    def operations(self) -> Iterator[Operation]:
        """Return all nodes with a primitive, graph by graph, in their order."""
        for graph in self.graphs():
            for node in graph.node:
                primitive = self.primitive(node)
                if primitive is not None:
                    yield Operation(graph.name, node, primitive)


@cache
def _message_class() -> Any:
    """Return the class of MindSpore's ``ModelProto``, made for protobuf's compiled parser.

    MindSpore's own class works with protobuf's Python parser alone, 15 times slower and with twice the memory, and
    comes with MindSpore's 400 MB. So its schema, a constant in its source, is read without importing it, and the class
    made as by ``google.protobuf.message_factory``, which would obey the parser that MindSpore chose for the process.
    """
    # As importing MindSpore does, which fails where protobuf has chosen another parser before.
    os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
    from google.protobuf.message import Message

    try:
        from google._upb import _message  # unknown to pyright: protobuf has no types for it
    except ImportError:  # protobuf before 4.21, which MindSpore takes, too
        from mindspore.train.mind_ir_pb2 import ModelProto

        return ModelProto
    package = importlib.util.find_spec("mindspore")
    if package is None or package.origin is None:
        raise BadInputError("mindspore is not installed; pip install 'telechat-moe[train]'")
    source = Path(package.origin).with_name("train") / "mind_ir_pb2.py"
    constants = (n for n in ast.walk(ast.parse(source.read_bytes())) if isinstance(n, ast.Constant))
    schema = (
        c.value for c in constants if isinstance(c.value, bytes) and b"mind_ir.proto" in c.value
    )
    pool = _message.DescriptorPool()
    pool.AddSerializedFile(next(schema))
    descriptor = pool.FindMessageTypeByName("mind_ir.ModelProto")
    return _message.MessageMeta(
        "ModelProto", (Message,), {"DESCRIPTOR": descriptor, "__module__": None}
    )


def kinds(data: bytes) -> Counter[str]:
    """Return how many nodes of each primitive a serialised graph has."""
    return Counter(operation.kind for operation in MindIR(data).operations())


def value_of(attribute: Any) -> Any:
    """Return the Python value of an attribute."""
    if attribute.type == attribute.STRING:
        text = attribute.s
        return text.decode() if isinstance(text, bytes) else text
    if attribute.type in (attribute.TUPLE, attribute.LIST):
        return tuple(value_of(item) for item in attribute.values)
    if attribute.type in (attribute.FLOAT, attribute.DOUBLE):
        return attribute.f if attribute.type == attribute.FLOAT else attribute.d
    if attribute.type == attribute.BOOL:
        return bool(attribute.i)
    if attribute.ints and not attribute.i:
        return attribute.ints[0] if len(attribute.ints) == 1 else tuple(attribute.ints)
    return attribute.i


def find_value(attributes: Iterable[Any], name: str) -> Any:
    """Return the value of the attribute of this name, None if there is none."""
    return next((value_of(a) for a in attributes if a.name == name), None)


def output_shapes(node: Any) -> list[tuple[tuple[int, ...], int]]:
    """Return ``(shape, element type)`` of each output of a node."""
    shapes: list[tuple[tuple[int, ...], int]] = []

    def walk(attribute: Any) -> None:
        shapes.extend((tuple(t.dims), t.data_type) for t in attribute.tensors)
        for item in attribute.values:
            walk(item)

    for attribute in node.attribute:
        if attribute.name == "shape":
            walk(attribute)
    return shapes


class Editor:
    """Add nodes to a graph, in front of those that follow.

    Args:
        model: Where new primitives go.
        nodes: Where new nodes go.
    """

    _count = 0

    def __init__(self, model: MindIR, nodes: Any) -> None:
        self.model, self.nodes = model, nodes

    def name(self, kind: str) -> str:
        """Return a name that is not taken."""
        Editor._count += 1
        return f"telechat_{kind}_{Editor._count}"

    def add(self, name: str, kind: str, inputs: Sequence[str] = (), scope: str = "") -> Any:
        """Add a node with one output of its own name, and return it."""
        return self.nodes.add(
            name=name, op_type=kind, input=inputs, output=[name], domain=scope or None
        )

    def constant(self, value: int | Sequence[int]) -> str:
        """Add an integer, or a tuple of them."""
        node = self.add(self.name("constant"), "Constant")
        _set_value(node.attribute.add(), "value", value)
        return node.name

    def zeros(self, shape: Sequence[int], kind: int) -> str:
        """Add a constant tensor of zeros of an element type; return its name."""
        node = self.add(self.name("zeros"), "Constant")
        attribute = node.attribute.add()
        attribute.name = "value"
        tensor = _add_tensor(attribute, shape, kind)
        tensor.name, tensor.raw_data = node.name, np.zeros(shape, NUMPY[kind]).tobytes()
        return node.name

    def primitive(
        self, kind: str, like: Any = None, keep: Sequence[str] = (), **attributes: Any
    ) -> str:
        """Add a primitive with integer and string attributes; those of ``like`` named in ``keep`` are copied."""
        primitive = self.model.proto.primitives.add()
        primitive.name, primitive.op_type = self.name(kind), kind
        if like is not None:
            primitive.prim_type, primitive.instance_name = like.prim_type, like.instance_name
            for attribute in like.attribute:
                if attribute.name in keep and attribute.name not in attributes:
                    primitive.attribute.add().CopyFrom(attribute)
        for name, value in attributes.items():
            _set_value(primitive.attribute.add(), name, value)
        self.model.primitives[primitive.name] = primitive
        return f"REF::{primitive.name}"

    def node(
        self,
        kind: str,
        inputs: Sequence[str],
        shape: Sequence[int],
        element: int,
        scope: str,
        name: str | None = None,
    ) -> str:
        """Add a node with one tensor as output; ``kind`` comes from :meth:`primitive`."""
        name = name or self.name("node")
        node = self.add(name, kind, inputs, f"{scope}-{Editor._count}")
        attribute = node.attribute.add()
        attribute.name = "shape"
        _add_tensor(attribute, shape, element)
        return name

    def depend(
        self,
        value: str,
        behind: str,
        shape: Sequence[int],
        element: int,
        scope: str,
        name: str | None = None,
    ) -> str:
        """Add a node that gives ``value`` once ``behind`` is there."""
        kind = self.primitive("Depend", side_effect_propagate=1)
        return self.node(kind, [value, behind], shape, element, scope, name)

    def custom(
        self,
        name: str,
        library: str,
        *,
        writes: bool = False,
        several: bool = False,
        **attributes: int | Sequence[int],
    ) -> str:
        """Add a primitive of an operator of a native library; ``writes``: with a side effect, ``several``: outputs."""
        function = f"{library}:{name}"
        names = {"func_name": function, "uniq_name": f"Custom__{function}", "reg_op_name": name}
        reference = self.primitive(
            "Custom", None, (), func_type="aot", imply_path="", **names, **attributes
        )
        primitive = self.model.primitives[reference.removeprefix("REF::")]
        flags = {
            "multi_output": several,
            "cpp_infer_shape": True,
            "autodiff": False,
            "side_effect_mem": writes,
        }
        for flag, value in flags.items():
            attribute = primitive.attribute.add()
            attribute.name, attribute.type, attribute.i = flag, attribute.BOOL, int(value)
        primitive.instance_name, primitive.prim_type = name, primitive.PRIMITIVE
        return reference

    def pack(self, parts: Sequence[str], shape: Sequence[int], element: int, scope: str) -> str:
        """Add a tuple of tensors of one shape."""
        node = self.add(self.name("tuple"), self.primitive("MakeTuple"), parts, scope)
        attribute = node.attribute.add()
        attribute.name, attribute.type = "shape", attribute.TUPLE
        attribute.seq_info.is_dyn_len = False
        for _ in parts:
            _add_tensor(attribute.values.add(), shape, element)
        return node.name


def _add_tensor(attribute: Any, shape: Sequence[int], element: int) -> Any:
    attribute.type = attribute.TENSORS
    tensor = attribute.tensors.add()
    tensor.dims.extend(shape)
    tensor.data_type = element
    return tensor


def _set_value(attribute: Any, name: str, value: str | int | Sequence[int]) -> None:
    attribute.name = name
    if isinstance(value, str):
        attribute.type, attribute.s = attribute.STRING, value.encode()
    elif isinstance(value, int):
        attribute.type, attribute.i = attribute.INT64, value
    else:
        attribute.type = attribute.TUPLE
        for item in value:
            part = attribute.values.add()
            part.type = attribute.INT64
            part.ints.append(item)
