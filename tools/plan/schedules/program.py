"""Define a pipeline schedule: for each stage the order of its operations.

A program says nothing about time: `Times` gives the durations, and `simulate` combines both.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError


class OpKind(str, Enum):
    """What one operation computes for a chunk and a micro-batch."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: gradient of the input (dX), then of the weights (dW)."""
    D = "D"
    """Gradient of the input only."""
    W = "W"
    """Gradient of the weights only, any time after D."""
    FB = "FB"
    """A forward and a full backward of two micro-batches, overlapped."""
    FD = "FD"
    """A forward and a D of two micro-batches, overlapped."""


PROGRAM_FILE = "what `telechat-moe plan schedule --json` writes as `program`"
PAIRS = frozenset({OpKind.FB, OpKind.FD})
"""Kinds that compute two micro-batches."""


class Op(NamedTuple):
    """One operation of a stage."""

    kind: OpKind
    chunk: int
    """Number of the chunk in the model's order, 0 .. chunks-1; for FB and FD that of the forward."""
    micro: int
    """Number of the micro-batch; for FB and FD that of the forward."""
    back_chunk: int = -1
    """Chunk of the backward of FB and FD."""
    back_micro: int = -1
    """Micro-batch of the backward of FB and FD."""

    def parts(self) -> tuple[tuple[OpKind, int, int], ...]:
        """Return the computations of the operation as (F, B, D or W; chunk; micro-batch)."""
        if self.kind not in PAIRS:
            return ((self.kind, self.chunk, self.micro),)
        backward = OpKind.B if self.kind is OpKind.FB else OpKind.D
        return ((OpKind.F, self.chunk, self.micro), (backward, self.back_chunk, self.back_micro))

    def __str__(self) -> str:
        """Write it as `F(chunk 3, micro-batch 0)`."""
        return " & ".join(f"{k.value}(chunk {c}, micro-batch {m})" for k, c, m in self.parts())


class StageWriter:
    """Writer of a stage's operations; a lane is one of its chunks, with its micro-batches in their order."""

    def __init__(self, chunks: Sequence[int], micros: Sequence[Sequence[int]]) -> None:
        self.chunks = chunks
        self.left: dict[str, deque[int]] = {}
        """Micro-batches that still go forward (`F0` for lane 0) and backward (`D0`), and those whose dW waits (`W0`)."""
        for lane, micro_batches in enumerate(micros):
            both = {f"{way}{lane}": deque(micro_batches) for way in "FD"}
            self.left |= both | {f"W{lane}": deque[int]()}
        self.ops: list[Op] = []

    def put(self, pattern: str, times: int = 1) -> None:
        """Write a pattern: `F1 D1` is the next forward and dX of lane 1, `FB01` a forward of lane 0 beside a B of lane 1."""
        for word in pattern.split() * times:
            kind, lanes = OpKind(word.rstrip("01")), word.lstrip("FBDW")
            numbers: list[int] = []
            for way, lane in zip(kind.value.replace("B", "D"), lanes, strict=True):
                numbers += (self.chunks[int(lane)], self.left[way + lane].popleft())
            if kind is OpKind.D:
                self.left["W" + lanes].append(numbers[1])
            self.ops.append(Op(kind, *numbers))


@dataclass(frozen=True)
class Program:
    """A schedule: the operations of each stage in their order."""

    name: str
    """Name of the schedule, such as `1f1b`."""
    stages: int
    """Pipeline stages P."""
    micro_batches: int
    """Micro-batches m of a step."""
    routes: tuple[tuple[int, ...], ...]
    """Ways through the pipeline, each the stage of every chunk; only DualPipe has two, one for each direction."""
    ops: tuple[tuple[Op, ...], ...]
    """For each stage its operations in order."""
    route_of: tuple[int, ...] = field(default=())
    """Number of each micro-batch's route; empty: all take route 0."""

    @property
    def chunks(self) -> int:
        """Number of chunks of the model."""
        return len(self.routes[0])

    def stage(self, chunk: int, micro: int = 0) -> int:
        """Return the stage that computes a chunk for a micro-batch."""
        return self.routes[self.route_of[micro] if self.route_of else 0][chunk]

    @cached_property
    def chunks_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """Chunks whose weights each stage holds, in ascending order."""
        chunks: list[set[int]] = [set() for _ in range(self.stages)]
        for route in self.routes:
            for chunk, stage in enumerate(route):
                chunks[stage].add(chunk)
        return tuple(tuple(sorted(h)) for h in chunks)

    def to_json(self) -> dict[str, Any]:
        """Return the program as plain data that `Program.from_json` reads."""
        ops = [
            [[op.kind.value, *op[1 : 3 + 2 * (op.kind in PAIRS)]] for op in stage_ops]
            for stage_ops in self.ops
        ]
        return {
            "name": self.name,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "routes": [list(r) for r in self.routes],
            "route_of": list(self.route_of),
            "ops": ops,
        }

    @staticmethod
    def from_json(data: Any) -> "Program":
        """Return the program of `to_json`'s data.

        Raises:
            BadInputError: The data is no program.
        """
        try:
            program = Program(
                str(data["name"]),
                int(data["stages"]),
                int(data["micro_batches"]),
                tuple(tuple(int(s) for s in r) for r in data["routes"]),
                tuple(
                    tuple(Op(OpKind(k), *map(int, of)) for k, *of in stage_ops)
                    for stage_ops in data["ops"]
                ),
                tuple(int(r) for r in data["route_of"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            problem = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise BadInputError(f"no program: {problem}; expected {PROGRAM_FILE}") from None
        if not program._fits():
            raise BadInputError(
                f"no program: stages, routes and operations do not fit together; expected {PROGRAM_FILE}"
            )
        return program

    def _fits(self) -> bool:
        return (
            self.stages == len(self.ops)
            and len({len(route) for route in self.routes}) == 1
            and len(self.route_of) in (0, self.micro_batches)
            and all(0 <= stage < self.stages for route in self.routes for stage in route)
            and all(0 <= route < len(self.routes) for route in self.route_of)
        )


@dataclass(frozen=True)
class Times:
    """How long operations take and what memory they hold; all arrays are float64 with one value for each chunk.

    Any unit of time will do, if all times use the same one.
    """

    forward: NDArray[Any]
    """F."""
    dx: NDArray[Any]
    """D."""
    dw: NDArray[Any]
    """W."""
    comm: float = 0.0
    """From the end of an operation until the neighbouring chunk, on another stage, has its output."""
    backward: NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    """B; D + W where it is empty."""
    forward_exposed: NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    """Time of F that is communication (experts' all-to-all), which FB and FD can hide; none where empty."""
    backward_exposed: NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    """Time of D that is communication, which FB and FD can hide; none where empty."""
    activation: NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    """Activations that F keeps, in units of an average stage's activations for one micro-batch;
    stages / chunks each where it is empty (then 1F1B's first stage holds P)."""
    working: NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    """What D or B needs in addition, in the unit of `activation`; none where empty."""
    kept_for_w: float = 1.0
    """Share of `activation` that W needs, so that D does not free it."""

    @staticmethod
    def even(
        stages: int,
        chunks: int,
        forward: float = 1.0,
        dx: float = 1.0,
        dw: float = 1.0,
        comm: float = 0.0,
    ) -> "Times":
        """Return equal chunks; times are those of a whole stage, so a chunk takes the share ``1 / chunks`` of them."""
        share = np.full(stages * chunks, 1.0 / chunks)
        return Times(share * forward, share * dx, share * dw, comm)

    def full(self, stages: int) -> "Times":
        """Return these times with every empty array filled in; the stages give the unit of activations.

        Raises:
            BadInputError: An array has another length, or a value is negative or not finite.
        """
        n = len(self.forward)
        forward, dx, dw = (_array(a, n) for a in (self.forward, self.dx, self.dw))
        usual = {
            "backward": dx + dw,
            "forward_exposed": np.zeros(n),
            "backward_exposed": np.zeros(n),
            "activation": np.full(n, stages / n),
            "working": np.zeros(n),
        }
        arrays = {name: getattr(self, name) for name in usual}
        filled = {k: _array(a, n) if len(a) else usual[k] for k, a in arrays.items()}
        arrays = {"forward": forward, "dx": dx, "dw": dw, **filled}
        result = Times(**arrays, comm=float(self.comm), kept_for_w=float(self.kept_for_w))
        if not 0 <= result.comm < np.inf or not 0 <= result.kept_for_w <= 1:
            raise BadInputError(
                f"times of a schedule: comm {result.comm} must be finite and not negative, "
                f"kept_for_w {result.kept_for_w} from 0 to 1"
            )
        return result


def _array(values: NDArray[Any], length: int) -> NDArray[Any]:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (length,) or not np.isfinite(array).all() or (array < 0).any():
        raise BadInputError(
            f"times of a schedule: found {array.tolist()}, expected {length} finite numbers that "
            "are not negative, one for each chunk"
        )
    return array


def v_route(stages: int, chunks: int) -> tuple[int, ...]:
    """Return the zigzag placement: chunks 0..P-1 on stages 0..P-1, the next P on P-1..0, and so on."""
    forward = list(range(stages))
    return tuple(s for k in range(chunks) for s in (forward if k % 2 == 0 else forward[::-1]))


def loop_route(stages: int, chunks: int) -> tuple[int, ...]:
    """Return the interleaved placement: chunk c on stage c mod P."""
    return tuple(range(stages)) * chunks
