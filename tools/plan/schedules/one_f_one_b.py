"""GPipe and 1F1B: one chunk a stage."""

from telechat_moe.tools.plan.schedules.program import Kind, Op, Program, loop_route


def gpipe(stages: int, micro_batches: int) -> Program:
    """Return GPipe: all forwards, then all backwards.

    Source: Huang et al. 2019, arXiv 1811.06965.
    """
    ops = tuple(
        (
            *(Op(Kind.F, s, i) for i in range(micro_batches)),
            *(Op(Kind.B, s, i) for i in range(micro_batches)),
        )
        for s in range(stages)
    )
    return Program("gpipe", stages, micro_batches, (loop_route(stages, 1),), ops)


def one_f_one_b(stages: int, micro_batches: int) -> Program:
    """Return 1F1B: stage s runs P - 1 - s forwards ahead, then a forward and a backward in turn.

    Source: PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503.
    """
    ops: list[tuple[Op, ...]] = []
    for s in range(stages):
        ahead = min(stages - 1 - s, micro_batches)
        own = [Op(Kind.F, s, i) for i in range(ahead)]
        for i in range(ahead, micro_batches):
            own += [Op(Kind.F, s, i), Op(Kind.B, s, i - ahead)]
        own += [Op(Kind.B, s, i) for i in range(micro_batches - ahead, micro_batches)]
        ops.append(tuple(own))
    return Program("1f1b", stages, micro_batches, (loop_route(stages, 1),), tuple(ops))
