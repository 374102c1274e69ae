"""Zero-bubble schedules: dX and dW apart, dW fills what would be idle.

Source: Qi et al. 2024, arXiv 2401.10241 (H1 and H2 section 2, V section 6).
"""

from collections import deque
from collections.abc import Callable

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Kind, Op, Program, loop_route, v_route


def zb_h1(stages: int, micro_batches: int) -> Program:
    """Return ZB-H1: 1F1B's forwards and dX; stage s holds s dW back, so all stages hold P micro-batches."""
    return _handcrafted("zb-h1", stages, micro_batches, lambda s: stages - 1 - s, lambda s: s)


def zb_h2(stages: int, micro_batches: int) -> Program:
    """Return ZB-H2: 2(P - 1 - s) forwards ahead, 2s dW held back; about twice 1F1B's activations."""
    return _handcrafted(
        "zb-h2", stages, micro_batches, lambda s: 2 * (stages - 1 - s), lambda s: 2 * s
    )


def _handcrafted(
    name: str,
    stages: int,
    micro_batches: int,
    ahead_of: Callable[[int], int],
    held_of: Callable[[int], int],
) -> Program:
    ops: list[tuple[Op, ...]] = []
    for s in range(stages):
        ahead, held = min(ahead_of(s), micro_batches), held_of(s)
        own = [Op(Kind.F, s, i) for i in range(ahead)]
        waiting: deque[int] = deque()
        for b in range(micro_batches):
            if b + ahead < micro_batches:
                own.append(Op(Kind.F, s, b + ahead))
            own.append(Op(Kind.D, s, b))
            waiting.append(b)
            if len(waiting) > held or b + ahead >= micro_batches:
                own.append(Op(Kind.W, s, waiting.popleft()))
        own += [Op(Kind.W, s, b) for b in waiting]
        ops.append(tuple(own))
    return Program(name, stages, micro_batches, (loop_route(stages, 1),), tuple(ops))


class _Stage:
    """Writes the operations of a stage with two chunks; counts what was written."""

    def __init__(self, stage: int, stages: int) -> None:
        self.chunk = (stage, 2 * stages - 1 - stage)
        self.next = {kind + which: 0 for kind in "FDW" for which in "01"}
        self.ops: list[Op] = []

    def put(self, pattern: str, times: int) -> None:
        """Write a pattern, such as `F1 D1`: the next forward and the next dX of the stage's second chunk."""
        for word in pattern.split() * times:
            self.ops.append(Op(Kind(word[0]), self.chunk[int(word[1])], self.next[word]))
            self.next[word] += 1


def zb_v(stages: int, micro_batches: int) -> Program:
    """Return ZB-V: two chunks a stage in the shape of a V, each stage holds P micro-batches.

    Where F, dX and dW are equal no stage is idle between its first and its last operation.

    Raises:
        BadInputError: Fewer than 2P - 1 micro-batches.
    """
    if micro_batches < 2 * stages - 1:
        raise BadInputError(
            f"ZB-V: {micro_batches} micro-batches on {stages} stages; expected at least {2 * stages - 1}"
        )
    ops = tuple(_v_stage(s, stages, micro_batches) for s in range(stages))
    return Program("zb-v", stages, micro_batches, (v_route(stages, 2),), ops)


def _v_stage(stage: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
    to = _Stage(stage, stages)
    below = stages - stage
    to.put("F0", 2 * below - 1)
    to.put("F1 F0", stage)
    to.put("F1 D1 W1", below)
    both = micro_batches - to.next["F0"]
    to.put("F0 D0 W0 F1 D1 W1", both)
    to.put("D0 W0 F1 D1 W1", micro_batches - to.next["F1"])
    to.put("D0 D1", stage)
    to.put("D0 W0", below)
    to.put("W1", micro_batches - to.next["W1"])
    to.put("W0", micro_batches - to.next["W0"])
    return tuple(to.ops)
