"""Records of a dump of any writer: its ranks, their calls of operators and modules, and the tensors of these.

Readers (``msprobe.py``, ``statistic_csv.py``) make these records; all other code of ``tools/align`` uses only them.
Values stay on disk until :meth:`TensorRecord.load`.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from telechat_moe.numerics import Array


class Phase(str, Enum):
    """The phase of a step that a call belongs to; values are in the order of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    OPTIMIZER = "optimizer"


class Stats(NamedTuple):
    """Statistics that a dump gives; None where it gives none."""

    max: float | None
    min: float | None
    mean: float | None
    norm: float | None


NO_STATS = Stats(None, None, None, None)

MINDTORCH = "mindtorch"
"""The framework of a dump of torch's functions on MindSpore, as msprobe calls it."""

FLAT = -1
"""Key in :class:`TensorLayout` for a shard's dimension after it is flattened."""


@dataclass(frozen=True)
class TensorLayout:
    """The layout of a tensor over devices.

    Each axis of the mesh shards a dimension, holds terms of a reduction, or holds copies.
    """

    mesh: tuple[int, ...]  # length of each axis, outermost first
    axes: tuple[str, ...]
    # Global rank of each device, in the order of the mesh; axes in `local` and `calls` do not count devices
    ranks: tuple[int, ...]
    # For each dimension of the tensor the axes that shard it, outermost first; empty: not sharded
    dims: tuple[tuple[str, ...], ...]
    # Axes over which values must still be reduced, with the reduction (`sum`, `mean`, `max`, `min`, `prod`, `all`)
    partial: Mapping[str, str] = field(default_factory=dict[str, str])
    # Axes over which the shards of a dimension are interleaved: shard p of n holds the indices p, p + n ... in blocks
    # of `block`
    interleaved: frozenset[str] = frozenset()
    block: tuple[int, ...] = ()  # for each dimension the size of such a block; 1 where not given
    # Axes along which one tensor holds all shards, one after another (MindSpore's `interleaved_parallel`)
    local: frozenset[str] = frozenset()
    # Axis whose shards are the calls of one rank (micro-batches), in order
    calls: str | None = None
    # For a dimension the lengths of its shards, in order, where they are not equal
    sizes: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    # For a dimension the indices that each of its shards holds, in the order in which it holds them (experts of a
    # rank, positions of a balanced context)
    owned: Mapping[int, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict[int, tuple[tuple[int, ...], ...]]
    )
    # For a dimension its length including filler at the end
    padded: Mapping[int, int] = field(default_factory=dict[int, int])
    # Axes over which each shard, made as `dims` says, is flattened, padded and divided further (ZeRO); `sizes` and
    # `padded` of the dimension `FLAT` apply to it
    flat: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of one call on one rank."""

    # Canonical name of the type that the program computed in (`bfloat16`, `int32` ...), not of the file
    dtype: str
    shape: tuple[int, ...]  # shape on this rank
    stats: Stats | None = None
    crc: str | None = None  # checksum from the dump, as written there
    # File with the values; None: not dumped. Places of one file are the same tensor.
    path: Path | None = None
    layout: TensorLayout | None = None  # its layout over devices; None: unknown
    requires_grad: bool | None = None
    # Sketch and checksum, if the capture made them (`ops/fingerprint.py`)
    fingerprint: bytes | None = field(default=None, repr=False)
    # Returns the values; set by the reader
    read: Callable[[], Array] | None = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the program."""
        return nbytes_of(self.dtype, self.shape)

    def load(self) -> Array:
        """Return the values in the file's type (bfloat16 and float8 widened to float32).

        Raises:
            BadInputError: The file is missing or broken, or its shape is not the one of the record.
            LookupError: Values were not dumped, or are of a type that is not read.
        """
        if self.read is None and self.path is not None:
            raise LookupError(f"values of type {self.dtype} are not read")
        if self.read is None:
            raise LookupError("values of this tensor were not dumped")
        return self.read()


@dataclass(frozen=True)
class Scalar:
    """An argument that is not a tensor: number, bool, string, None, slice, dtype, process group."""

    type: str
    value: Any


Value = TensorRecord | Scalar | None | list["Value"] | dict[str, "Value"]


@dataclass(frozen=True)
class Call:
    """One execution of an operator or module on one rank."""

    key: str  # key in the dump, unique on the rank
    kind: str  # `api`, `module` or `parameters_grad`
    name: str  # without number and direction: `Mint.matmul`, `Cell.layers.0.attention.MLA`
    index: int  # number of the call among those of the same name and direction, from 0
    phase: Phase
    inputs: list[Value]  # positional arguments; backward: gradients of the outputs
    kwargs: Mapping[str, Value]
    outputs: list[Value]  # results; backward: gradients of the inputs
    # Weights of a module, or their gradients
    parameters: Mapping[str, Value] = field(default_factory=dict[str, Value])
    parent: str | None = None  # key of the module that it ran in
    stack: tuple[str, ...] = ()  # lines of the call stack, innermost first
    on_mindspore: bool = False  # a function of torch that MindSpore's kernels compute, by mindtorch

    @property
    def formula_name(self) -> str:
        """The name that has its formula: the errors of MindSpore's kernels are larger than torch's."""
        return f"MindTorch.{self.name.partition('.')[2]}" if self.on_mindspore else self.name

    @property
    def stage(self) -> Phase:
        """The phase of the step; it differs from :attr:`phase` in a compiled graph, whose operators all run forward."""
        gradient = self.name.startswith("Primitive.") and self.name.endswith("Grad")
        if gradient or self.name.startswith("Primitive.Gradients."):
            return Phase.BACKWARD
        return Phase.REDUCTION if self.name.startswith("Primitive.Reduction.") else self.phase

    def tensors(self) -> Sequence[tuple[str, TensorRecord]]:
        """Return every tensor with its position, such as ``input.0``, ``output.0.1`` or ``parameters.gamma``."""
        return self._places

    def given(self) -> Sequence[tuple[str, TensorRecord]]:
        """Return the tensors that it takes, weights included."""
        return [(place, t) for place, t in self._places if not place.startswith("output")]

    def made(self) -> Sequence[tuple[str, TensorRecord]]:
        """Return the tensors that it makes."""
        return [(place, t) for place, t in self._places if place.startswith("output")]

    def leaves(self) -> list[tuple[str, Value]]:
        """Return the arguments that are no lists or mappings, and those inside of these, with their places."""
        arguments: list[tuple[str, Value]] = []
        self.changed(lambda place, value: arguments.append((place, value)))
        return arguments

    def changed(self, change: Callable[[str, Value], Value], results: bool = False) -> "Call":
        """Return the call with each argument, and each one inside of a list or mapping, replaced; with ``results`` these and parameters, too.

        ``change`` takes the place of a value, such as ``input.0.1``, and the value.
        """

        def walk(place: str, value: Value) -> Value:
            if isinstance(value, list):
                return [walk(f"{place}.{i}", v) for i, v in enumerate(value)]
            if isinstance(value, dict):
                return {k: walk(f"{place}.{k}", v) for k, v in value.items()}
            return change(place, value)

        inputs = [walk(f"input.{i}", v) for i, v in enumerate(self.inputs)]
        kwargs = {k: walk(f"input.{k}", v) for k, v in self.kwargs.items()}
        call = replace(self, inputs=inputs, kwargs=kwargs)
        if not results:
            return call
        parameters = {k: walk(f"parameters.{k}", v) for k, v in self.parameters.items()}
        outputs = [walk(f"output.{i}", v) for i, v in enumerate(self.outputs)]
        return replace(call, outputs=outputs, parameters=parameters)

    @property
    def source(self) -> str | None:
        """The line of the program that made the call, as one line."""
        return " ".join(self.stack[0].split()) if self.stack else None

    @property
    def only_numbers(self) -> bool:
        """Whether it returns no tensor, such as a shape, so that there is nothing to judge."""
        return bool(self.outputs) and not self.made()

    @property
    def forward_key(self) -> str:
        """The key of the forward call that a backward call belongs to; of another call its own."""
        is_backward = self.phase is Phase.BACKWARD
        return self.key.removesuffix("backward") + "forward" if is_backward else self.key

    @cached_property
    def _places(self) -> tuple[tuple[str, TensorRecord], ...]:
        arguments = [*_tensors("input", self.inputs), *_tensors("input", self.kwargs)]
        others = [*_tensors("parameters", self.parameters), *_tensors("output", self.outputs)]
        return (*arguments, *others)


@dataclass(frozen=True)
class RankDump:
    """The calls of one rank in one step, in the order in which they ended."""

    step: int
    rank: int
    framework: str
    task: str
    level: str
    calls: Mapping[str, Call] = field(repr=False)
    folder: Path | None = None

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """The types of its tensors."""
        return frozenset(t.dtype for call in self.calls.values() for _, t in call.tensors())


@dataclass(frozen=True)
class Dump:
    """A dump of one run: steps and ranks."""

    root: Path
    ranks: Mapping[tuple[int, int], RankDump]

    @property
    def steps(self) -> list[int]:
        """The steps, in order."""
        return sorted({step for step, _ in self.ranks})

    def at(self, step: int) -> list[RankDump]:
        """Return the ranks of a step, in order."""
        return [self.ranks[key] for key in sorted(self.ranks) if key[0] == step]


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor of a canonical type, such as ``bfloat16`` or ``bool``."""
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * max(1, int(bits[0]) // 8 if bits else 1)


def _tensors(place: str, value: Value | Mapping[str, Value]) -> Iterator[tuple[str, TensorRecord]]:
    if isinstance(value, TensorRecord):
        yield place, value
    elif isinstance(value, list | Mapping):
        items = enumerate(value) if isinstance(value, list) else value.items()
        for name, item in items:
            yield from _tensors(f"{place}.{name}", item)
