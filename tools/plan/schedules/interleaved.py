"""Interleaved 1F1B (virtual pipeline, VPP), and its form that overlaps a forward with a backward."""

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Kind, Op, Program, loop_route


def interleaved(stages: int, micro_batches: int, chunks: int) -> Program:
    """Return interleaved 1F1B: stage s holds chunks s, s + P, s + 2P ...

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2; the order is Megatron-LM's.

    Args:
        stages: P.
        micro_batches: m, a multiple of P.
        chunks: Chunks of a stage, V.

    Raises:
        BadInputError: m is not a multiple of P.
    """
    forward, backward = _orders(stages, micro_batches, chunks)
    total = micro_batches * chunks
    ops: list[tuple[Op, ...]] = []
    for s in range(stages):
        # Megatron-LM runs all forwards first where m = P; so does this for V > 1, the rest follows in turn
        ahead = min(_ahead(stages, chunks, s), total)
        own = [_op(Kind.F, s, stages, *forward[i]) for i in range(ahead)]
        for i in range(ahead, total):
            own.append(_op(Kind.F, s, stages, *forward[i]))
            own.append(_op(Kind.B, s, stages, *backward[i - ahead]))
        own += [_op(Kind.B, s, stages, *b) for b in backward[total - ahead :]]
        ops.append(tuple(own))
    return Program("interleaved", stages, micro_batches, (loop_route(stages, chunks),), tuple(ops))


def overlapped(stages: int, micro_batches: int, chunks: int, split: bool = True) -> Program:
    """Return interleaved 1F1B whose steady state overlaps each forward with a backward.

    The experts' all-to-all of one micro-batch hides behind the computation of the other. Each stage runs one forward
    more ahead, so that a pair's forward does not wait for the backward of its own pair. With `split` the pair holds dX
    only and dW follows it (`--overlap-moe-expert-parallel-comm --delay-wgrad-compute` of Megatron-LM).

    Args:
        stages: P.
        micro_batches: m, a multiple of P.
        chunks: Chunks of a stage, V; 1 is plain 1F1B with twice its activations.
        split: Whether dX and dW are apart.

    Raises:
        BadInputError: m is not a multiple of P.
    """
    forward, backward = _orders(stages, micro_batches, chunks)
    total = micro_batches * chunks
    ops: list[tuple[Op, ...]] = []
    for s in range(stages):
        ahead = min(_ahead(stages, chunks, s) + 1, total)
        own = [_op(Kind.F, s, stages, *forward[i]) for i in range(ahead)]
        for i in range(ahead, total):
            f = _op(Kind.F, s, stages, *forward[i])
            b = _op(Kind.B, s, stages, *backward[i - ahead])
            pair = Kind.FD if split else Kind.FB
            own.append(Op(pair, f.chunk, f.micro, b.chunk, b.micro))
            if split:
                own.append(Op(Kind.W, b.chunk, b.micro))
        last = [_op(Kind.D, s, stages, *b) for b in backward[total - ahead :]]
        for b in last:
            own += [b, Op(Kind.W, b.chunk, b.micro)] if split else [b._replace(kind=Kind.B)]
        ops.append(tuple(own))
    return Program(
        "1f1b-overlap" if split else "1f1b-overlap-full",
        stages,
        micro_batches,
        (loop_route(stages, chunks),),
        tuple(ops),
    )


def _ahead(stages: int, chunks: int, stage: int) -> int:
    """Return how many chunk forwards a stage runs before it begins to take turns."""
    return 2 * (stages - 1 - stage) + (chunks - 1) * stages


def _orders(
    stages: int, micro_batches: int, chunks: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (chunk of the stage, micro-batch) in the order of forwards and of backwards."""
    if micro_batches % stages:
        raise BadInputError(
            f"interleaved 1F1B: {micro_batches} micro-batches on {stages} stages; "
            f"expected a multiple of {stages}"
        )
    groups = range(0, micro_batches, stages)
    order = [(k, g + i) for g in groups for k in range(chunks) for i in range(stages)]
    return order, [(chunks - 1 - k, i) for k, i in order]


def _op(kind: Kind, stage: int, stages: int, chunk: int, micro: int) -> Op:
    return Op(kind, chunk * stages + stage, micro)
