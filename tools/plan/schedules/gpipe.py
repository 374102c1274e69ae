"""GPipe: one chunk a stage, all forwards before all backwards."""

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
