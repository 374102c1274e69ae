"""Records of a dump of any writer: its ranks, their calls of operators and modules, and the tensors of these.

Readers (``msprobe.py``, ``statistic_csv.py``) make these records; everything else of ``tools/align`` works on them alone.
Values stay on disk until :meth:`TensorRecord.load`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from telechat_moe.tools.align.numerics import Array


class Phase(str, Enum):
    """Phase of a step that a call belongs to, in the order of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    OPTIMIZER = "optimizer"


class Stats(NamedTuple):
    """Statistics as a dump gives them; None where it gives none."""

    max: float | None
    min: float | None
    mean: float | None
    norm: float | None


FLAT = -1
"""In :class:`TensorLayout`, the dimension of a shard once it is flattened."""


@dataclass(frozen=True)
class TensorLayout:
    """The layout of a tensor over devices.

    Each axis of the mesh cuts a dimension, holds terms of a reduction, or holds copies.

    Attributes:
        mesh: Length of each axis, outermost first.
        axes: Names of the axes.
        ranks: Global rank of each device, in the order of the mesh; axes in :attr:`local` and :attr:`calls` are no
            devices.
        dims: For each dimension of the tensor the axes that cut it, outermost first; empty: whole.
        partial: Axes over which values must still be reduced, and how (``sum``, ``mean``, ``max``, ``min``, ``prod``,
            ``all``).
        interleaved: The shards of a cut dimension are interleaved over these axes: shard p of n holds the indices
            p, p + n ... in blocks of :attr:`block`.
        block: For each dimension the size of such a block; 1 where not given.
        local: Axes along which one tensor holds all shards, one after another (MindSpore's ``interleaved_parallel``).
        calls: Axis whose shards are the calls of one rank (micro-batches), in order.
        sizes: For a dimension the lengths of its shards, in order, where they are not equal.
        owned: For a dimension the indices that each of its shards holds, in the order in which it holds them (experts
            of a rank, positions of a balanced context).
        padded: For a dimension its length with filler at the end.
        flat: Axes over which each shard, cut as ``dims`` says, is flattened, filled up and cut again (ZeRO); ``sizes``
            and ``padded`` of the dimension :data:`FLAT` belong to it.
    """

    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    partial: Mapping[str, str] = field(default_factory=dict[str, str])
    interleaved: frozenset[str] = frozenset()
    block: tuple[int, ...] = ()
    local: frozenset[str] = frozenset()
    calls: str | None = None
    sizes: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    owned: Mapping[int, tuple[tuple[int, ...], ...]] = field(
        default_factory=dict[int, tuple[tuple[int, ...], ...]]
    )
    padded: Mapping[int, int] = field(default_factory=dict[int, int])
    flat: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of one call on one rank.

    Attributes:
        dtype: Canonical name of the type that the program computed in (``bfloat16``, ``int32`` ...), not of the file.
        shape: On this rank.
        stats: Statistics from the dump.
        crc: Checksum from the dump, as written there.
        path: File with the values; None: not dumped.
        layout: Its layout over devices; None: unknown.
        requires_grad: As dumped.
        fingerprint: Sketch and checksum, where the capture made them (``fingerprint.py``).
        read: Returns the values; set by the reader.
    """

    dtype: str
    shape: tuple[int, ...]
    stats: Stats | None = None
    crc: str | None = None
    path: Path | None = None
    layout: TensorLayout | None = None
    requires_grad: bool | None = None
    fingerprint: bytes | None = field(default=None, repr=False)
    read: Callable[[], Array] | None = field(default=None, repr=False, compare=False)

    def load(self) -> Array:
        """Return the values in the file's type (bfloat16 and float8 widened to float32).

        Raises:
            BadInputError: The file is missing or broken, or its shape is not the one of the record.
            LookupError: Values were not dumped.
        """
        if self.read is None:
            raise LookupError("values of this tensor were not dumped")
        return self.read()


@dataclass(frozen=True)
class Scalar:
    """An argument that is no tensor: number, bool, string, None, slice, dtype, process group."""

    type: str
    value: Any


Value = TensorRecord | Scalar | None | list["Value"] | dict[str, "Value"]


@dataclass(frozen=True)
class Call:
    """One run of an operator or module on one rank.

    Attributes:
        key: As in the dump, unique on the rank.
        kind: ``api``, ``module`` or ``parameters_grad``.
        name: Without number and direction: ``Mint.matmul``, ``Cell.layers.0.attention.MLA``.
        index: Number of the call among those of the same name and direction, from 0.
        phase: See :class:`Phase`.
        inputs: Positional arguments; backward: gradients of the outputs.
        kwargs: Arguments by name.
        outputs: Results; backward: gradients of the inputs.
        parameters: Weights of a module, or their gradients.
        parent: Key of the module that it ran in.
        stack: ShardValues lines, innermost first.
    """

    key: str
    kind: str
    name: str
    index: int
    phase: Phase
    inputs: list[Value]
    kwargs: Mapping[str, Value]
    outputs: list[Value]
    parameters: Mapping[str, Value] = field(default_factory=dict[str, Value])
    parent: str | None = None
    stack: tuple[str, ...] = ()

    @property
    def stage(self) -> Phase:
        """Phase of the step; other than :attr:`phase` for a compiled graph, whose operators all run forward."""
        if self.name.startswith("Primitive.Gradients."):
            return Phase.BACKWARD
        return Phase.REDUCTION if self.name.startswith("Primitive.Reduction.") else self.phase

    def tensors(self) -> Sequence[tuple[str, TensorRecord]]:
        """Return every tensor with its place: ``input.0``, ``input.weight``, ``output.0.1``, ``parameters.gamma``."""
        return self._places

    @cached_property
    def _places(self) -> tuple[tuple[str, TensorRecord], ...]:
        return tuple(self._walk())

    def _walk(self) -> Iterator[tuple[str, TensorRecord]]:
        for i, value in enumerate(self.inputs):
            yield from _tensors(f"input.{i}", value)
        for name, value in self.kwargs.items():
            yield from _tensors(f"input.{name}", value)
        for name, value in self.parameters.items():
            yield from _tensors(f"parameters.{name}", value)
        for i, value in enumerate(self.outputs):
            yield from _tensors(f"output.{i}", value)


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
        """Types of its tensors."""
        return frozenset(t.dtype for call in self.calls.values() for _, t in call.tensors())


@dataclass(frozen=True)
class Dump:
    """A dump of one run: steps and ranks."""

    root: Path
    ranks: Mapping[tuple[int, int], RankDump]

    @property
    def steps(self) -> list[int]:
        """Steps, in order."""
        return sorted({step for step, _ in self.ranks})

    def at(self, step: int) -> list[RankDump]:
        """Return the ranks of a step, in order."""
        return [self.ranks[key] for key in sorted(self.ranks) if key[0] == step]


def _tensors(place: str, value: Value) -> Iterator[tuple[str, TensorRecord]]:
    if isinstance(value, TensorRecord):
        yield place, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _tensors(f"{place}.{i}", item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _tensors(f"{place}.{name}", item)
