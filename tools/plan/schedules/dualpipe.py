"""DualPipe and DualPipeV: every forward of the steady state overlaps a backward.

Source: DeepSeek-V3 report, arXiv 2412.19437, section 3.2.1; the order follows the public description and its figure
(8 ranks, 20 micro-batches).
"""

from collections import deque

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Kind, Op, Program, loop_route, v_route


class _Stage:
    """Writer of a stage's operations for two lanes, each with its own micro-batches in order."""

    def __init__(self, chunk: tuple[int, int], micros: tuple[range, range]) -> None:
        self.chunk = chunk
        self.micros = micros
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.waiting: deque[tuple[int, int]] = deque()  # chunk and micro-batch of each postponed dW
        self.ops: list[Op] = []

    def _next(self, counts: list[int], lane: int) -> tuple[int, int]:
        counts[lane] += 1
        return self.chunk[lane], self.micros[lane][counts[lane] - 1]

    def forward(self, lane: int) -> None:
        self.ops.append(Op(Kind.F, *self._next(self.forwards, lane)))

    def backward(self, lane: int, split: bool = False) -> None:
        what = self._next(self.backwards, lane)
        self.ops.append(Op(Kind.D if split else Kind.B, *what))
        if split:
            self.waiting.append(what)

    def both(self, forward: int, backward: int) -> None:
        f, b = self._next(self.forwards, forward), self._next(self.backwards, backward)
        self.ops.append(Op(Kind.FB, *f, *b))

    def weights(self) -> None:
        self.ops.append(Op(Kind.W, *self.waiting.popleft()))


def _fill(stage: _Stage, rank: int, ranks: int, each: int) -> tuple[Op, ...]:
    """Write the eight phases of a rank; rank `ranks - 1` is in the middle, `each` micro-batches a lane."""
    outer = ranks - 1 - rank  # ranks between this one and the middle
    for _ in range(2 * outer):
        stage.forward(0)
    for _ in range(rank + 1):
        stage.forward(0)
        stage.forward(1)
    for _ in range(outer):
        stage.backward(1, split=True)
        stage.weights()
        stage.forward(1)
    for i in range(each - 2 * ranks + rank + 1):
        if i == 0 and outer == 0:  # the middle gains nothing from overlapping its first pair
            stage.forward(0)
            stage.backward(1)
        else:
            stage.both(0, 1)
        stage.both(1, 0)
    for _ in range(outer):
        stage.backward(1)
        stage.both(1, 0)
    for i in range(2 * (rank + 1)):  # the second half keeps its dW for the gaps that follow
        stage.backward(1 - i % 2, split=i > rank)
    for _ in range(outer):
        stage.weights()
        stage.backward(0, split=True)
    while stage.waiting:
        stage.weights()
    return tuple(stage.ops)


def dualpipe(stages: int, micro_batches: int) -> Program:
    """Return DualPipe: micro-batches enter at both ends; stage s holds chunks s and P - 1 - s, so weights exist twice.

    Micro-batches 0 .. m/2-1 go from stage 0 to P - 1, the others from P - 1 to 0.

    Raises:
        BadInputError: P or m is odd, or m is below 2P.
    """
    if stages % 2 or micro_batches % 2 or micro_batches < 2 * stages:
        raise BadInputError(
            f"DualPipe: {stages} stages and {micro_batches} micro-batches; expected both even and "
            f"at least {2 * stages} micro-batches"
        )
    half = micro_batches // 2
    lanes = range(half), range(half, micro_batches)
    ops: list[tuple[Op, ...]] = []
    for s in range(stages):
        rank = min(s, stages - 1 - s)
        lower = s < stages // 2
        # lane 0 enters at this stage's nearer end; both lanes see the same chunk numbers on the upper half
        stage = _Stage((rank, stages - 1 - rank), lanes if lower else (lanes[1], lanes[0]))
        ops.append(_fill(stage, rank, stages // 2, half))
    there = loop_route(stages, 1)
    return Program(
        "dualpipe",
        stages,
        micro_batches,
        (there, there[::-1]),
        tuple(ops),
        (0,) * half + (1,) * half,
    )


def dualpipev(stages: int, micro_batches: int) -> Program:
    """Return DualPipeV, the folded half of DualPipe: two chunks a stage in the shape of a V, weights exist once.

    Raises:
        BadInputError: Fewer than 2P micro-batches.
    """
    if micro_batches < 2 * stages:
        raise BadInputError(
            f"DualPipeV: {micro_batches} micro-batches on {stages} stages; expected at least {2 * stages}"
        )
    lane = range(micro_batches)
    ops = tuple(
        _fill(_Stage((s, 2 * stages - 1 - s), (lane, lane)), s, stages, micro_batches)
        for s in range(stages)
    )
    return Program("dualpipev", stages, micro_batches, (v_route(stages, 2),), ops)
