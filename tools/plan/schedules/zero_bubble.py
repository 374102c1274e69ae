"""Zero-bubble schedules: dX and dW apart, dW fills what would be idle.

Source: Qi et al. 2024, arXiv 2401.10241 (H1 and H2 section 2, V section 6).
"""

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Op, Program, StageWriter, loop_route, v_route


def zb_h1(stages: int, micro_batches: int) -> Program:
    """Return ZB-H1: 1F1B's forwards and dX; stage s holds s dW back, so all stages hold P micro-batches."""
    return _handcrafted("zb-h1", stages, micro_batches, 1)


def zb_h2(stages: int, micro_batches: int) -> Program:
    """Return ZB-H2: 2(P - 1 - s) forwards ahead, 2s dW held back; about twice 1F1B's activations."""
    return _handcrafted("zb-h2", stages, micro_batches, 2)


def _handcrafted(name: str, stages: int, micro_batches: int, factor: int) -> Program:
    ops: list[tuple[Op, ...]] = []
    for s in range(stages):
        to = StageWriter((s,), (range(micro_batches),))
        ahead = min(factor * (stages - 1 - s), micro_batches)
        delayed = min(factor * s, micro_batches - ahead)
        to.put("F0", ahead)
        to.put("F0 D0", delayed)
        to.put("F0 D0 W0", micro_batches - ahead - delayed)
        to.put("D0 W0", ahead)
        to.put("W0", delayed)
        ops.append(tuple(to.ops))
    return Program(name, stages, micro_batches, (loop_route(stages, 1),), tuple(ops))


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
    to = StageWriter((stage, 2 * stages - 1 - stage), (range(micro_batches),) * 2)
    below = stages - stage
    to.put("F0", 2 * below - 1)
    to.put("F1 F0", stage)
    to.put("F1 D1 W1", below)
    to.put("F0 D0 W0 F1 D1 W1", len(to.left["F0"]))
    to.put("D0 W0 F1 D1 W1", len(to.left["F1"]))
    to.put("D0 D1", stage)
    to.put("D0 W0", below)
    to.put("W1", len(to.left["W1"]))
    to.put("W0", len(to.left["W0"]))
    return tuple(to.ops)
