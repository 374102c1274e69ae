"""Generate the published schedules by name, for any number of chunks a stage."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.bounds import Rules
from telechat_moe.tools.plan.schedules.dualpipe import dualpipe, dualpipev
from telechat_moe.tools.plan.schedules.interleaved import (
    gpipe,
    interleaved,
    one_f_one_b,
    overlapped,
)
from telechat_moe.tools.plan.schedules.program import OpKind, Program, Times
from telechat_moe.tools.plan.schedules.simulate import Simulation, simulate
from telechat_moe.tools.plan.schedules.zero_bubble import zb_h1, zb_h2, zb_v

Generator = Callable[[int, int, int], Program]
"""Function that makes a program from P, m and the chunks of a stage."""

GENERATORS: dict[str, tuple[int, Generator]] = {
    "gpipe": (1, lambda p, m, _v: gpipe(p, m)),
    "1f1b": (1, lambda p, m, _v: one_f_one_b(p, m)),
    "interleaved": (0, interleaved),
    "1f1b-overlap": (0, overlapped),
    "1f1b-overlap-full": (0, lambda p, m, v: overlapped(p, m, v, split=False)),
    "zb-h1": (1, lambda p, m, _v: zb_h1(p, m)),
    "zb-h2": (1, lambda p, m, _v: zb_h2(p, m)),
    "zb-v": (2, lambda p, m, _v: zb_v(p, m)),
    "dualpipe": (1, lambda p, m, _v: dualpipe(p, m)),
    "dualpipev": (2, lambda p, m, _v: dualpipev(p, m)),
}
"""For each name the chunks of a stage that the schedule needs (0: any), and its generator."""


def generate(name: str, stages: int, micro_batches: int, chunks: int) -> Program:
    """Return the published schedule of a name in `GENERATORS`.

    Raises:
        BadInputError: No schedule has this name, or it does not exist for these numbers.
    """
    if name not in GENERATORS:
        raise BadInputError(
            f"schedule {name}: not known; expected one of {', '.join(GENERATORS)} or synthesised"
        )
    need, make = GENERATORS[name]
    if need not in (0, chunks):
        raise BadInputError(
            f"schedule {name}: {chunks} chunks a stage; expected {need} chunks a stage"
        )
    return make(stages, micro_batches, chunks)


@dataclass(frozen=True)
class PublishedSchedule:
    """A published schedule on the given times."""

    chunks: int
    """Chunks of a stage that it uses; the given chunks are merged into these."""
    times: Times
    """Times of these merged chunks."""
    result: Simulation
    fits: bool
    """Whether no stage holds more activations than it may."""

    @property
    def program(self) -> Program:
        """Its program."""
        return self.result.program

    @property
    def copies(self) -> int:
        """How many times the weights are held: 2 for DualPipe."""
        return len(self.program.routes)


def merge(times: Times, chunks: int) -> Times:
    """Return the filled-in times of fewer, larger chunks, a divisor of those before: neighbours are added up."""
    arrays: dict[str, NDArray[Any]] = {
        name: a for name, a in vars(times).items() if isinstance(a, np.ndarray)
    }
    return replace(times, **{name: a.reshape(chunks, -1).sum(1) for name, a in arrays.items()})


def allowed(times: Times, rules: Rules) -> Times:
    """Return the times under the rules: where pairs may not overlap, no communication can be hidden."""
    if rules.pairs:
        return times
    zero = np.zeros(len(times.forward))
    return replace(times, forward_exposed=zero, backward_exposed=zero)


def known(
    times: Times, stages: int, micro_batches: int, memory: NDArray[Any], rules: Rules
) -> Iterator[PublishedSchedule]:
    """Yield every published schedule that these numbers and rules allow, simulated.

    Times are filled in (`Times.full`), of each chunk of the finest division; `memory` is the most activations of each
    stage.
    """
    finest = len(times.forward) // stages
    times = allowed(times, rules)
    for chunks in (v for v in range(1, finest + 1) if finest % v == 0):
        merged = merge(times, stages * chunks)
        for name in GENERATORS:
            try:
                program = generate(name, stages, micro_batches, chunks)
            except BadInputError:
                continue  # the schedule does not exist for these numbers
            if chunks == 1 and name == "interleaved":
                continue  # this is 1F1B with a longer warm-up
            if not rules.split and uses_split(program):
                continue
            result = simulate(program, merged)
            fits = bool((result.peak <= memory * (1 + 1e-9)).all())
            yield PublishedSchedule(chunks, merged, result, fits)


def uses_split(program: Program) -> bool:
    """Return whether some dX and dW are separate operations."""
    return any(op.kind in (OpKind.D, OpKind.W, OpKind.FD) for ops in program.ops for op in ops)
