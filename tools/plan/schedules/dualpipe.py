"""DualPipe and DualPipeV: every forward of the steady state overlaps a backward.

Source: DeepSeek-V3 report, arXiv 2412.19437, section 3.2.1; the order follows the public description and its figure
(8 ranks, 20 micro-batches).
"""

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Op, Program, StageWriter, loop_route, v_route


def _fill(to: StageWriter, rank: int, ranks: int, micro_batches: int) -> tuple[Op, ...]:
    """Write the eight phases of a rank; rank `ranks - 1` is in the middle, `each` micro-batches a lane."""
    outer = ranks - 1 - rank  # ranks between this one and the middle
    pairs = micro_batches - 2 * ranks + rank + 1
    to.put("F0", 2 * outer)
    to.put("F0 F1", rank + 1)
    to.put("D1 W1 F1", outer)
    if not outer:  # the middle gains nothing from overlapping its first pair
        to.put("F0 B1 FB10")
        pairs -= 1
    to.put("FB01 FB10", pairs)
    to.put("B1 FB10", outer)
    late: list[str] = []  # lanes of the dW that wait, the oldest first
    for i in range(2 * (rank + 1)):  # the second half keeps its dW for the gaps that follow
        lane = str(1 - i % 2)
        to.put(("D" if i > rank else "B") + lane)
        late += [lane] * (i > rank)
    for lane in (late + ["0"] * outer)[:outer]:
        to.put(f"W{lane} D0")
    for lane in (late + ["0"] * outer)[outer:]:
        to.put(f"W{lane}")
    return tuple(to.ops)


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
        to = StageWriter((rank, stages - 1 - rank), lanes if lower else lanes[::-1])
        ops.append(_fill(to, rank, stages // 2, half))
    route = loop_route(stages, 1)
    return Program(
        "dualpipe",
        stages,
        micro_batches,
        (route, route[::-1]),
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
        _fill(StageWriter((s, 2 * stages - 1 - s), (lane, lane)), s, stages, micro_batches)
        for s in range(stages)
    )
    return Program("dualpipev", stages, micro_batches, (v_route(stages, 2),), ops)
