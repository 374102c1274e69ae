"""Generate GPipe, 1F1B, interleaved 1F1B (VPP), and the variant that overlaps a forward with a backward."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.schedules.program import Op, OpKind, Program, loop_route


def gpipe(stages: int, micro_batches: int) -> Program:
    """Return GPipe: all forwards, then all backwards.

    Source: Huang et al. 2019, arXiv 1811.06965.
    """
    return _in_turn("gpipe", stages, micro_batches, 1, [micro_batches] * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Program:
    """Return 1F1B: stage s runs P - 1 - s forwards ahead, then a forward and a backward in turn.

    Source: PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503.
    """
    return _in_turn("1f1b", stages, micro_batches, 1, plain_warm_up(stages))


def interleaved(stages: int, micro_batches: int, chunks: int) -> Program:
    """Return interleaved 1F1B: stage s holds chunks s, s + P, s + 2P ...

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2; the order is Megatron-LM's.

    Raises:
        BadInputError: m is not a multiple of P.
    """
    _need_rounds(stages, micro_batches)
    ahead = interleaved_warm_up(stages, chunks)
    return _in_turn("interleaved", stages, micro_batches, chunks, ahead)


def overlapped(stages: int, micro_batches: int, chunks: int, split: bool = True) -> Program:
    """Return interleaved 1F1B whose steady state overlaps each forward with a backward.

    The experts' all-to-all of one micro-batch hides behind the computation of the other. Each stage runs one more
    forward ahead, so that a pair's forward does not wait for the backward of its own pair. With `split` the pair holds dX
    only and dW follows it (`--overlap-moe-expert-parallel-comm --delay-wgrad-compute` of Megatron-LM). One chunk a stage is plain 1F1B with
    twice its activations.

    Raises:
        BadInputError: m is not a multiple of P.
    """
    _need_rounds(stages, micro_batches)
    name, pair = ("1f1b-overlap", OpKind.FD) if split else ("1f1b-overlap-full", OpKind.FB)
    ahead = [n + 1 for n in interleaved_warm_up(stages, chunks)]
    plain = _in_turn(name, stages, micro_batches, chunks, ahead)
    ops: list[tuple[Op, ...]] = []
    for stage_ops, first in zip(plain.ops, ahead, strict=True):
        first = min(first, len(stage_ops) // 2)
        end = len(stage_ops) - first
        steady, last = stage_ops[first:end], stage_ops[end:]
        new = list(stage_ops[:first])
        for f, b in zip(steady[::2], steady[1::2], strict=True):
            new.append(Op(pair, f.chunk, f.micro, b.chunk, b.micro))
            new += [b._replace(kind=OpKind.W)] * split
        for b in last:
            new += [b._replace(kind=OpKind.D), b._replace(kind=OpKind.W)] if split else [b]
        ops.append(tuple(new))
    return Program(name, stages, micro_batches, plain.routes, tuple(ops))


def plain_warm_up(stages: int) -> list[int]:
    """Return how many forwards each stage of 1F1B runs before it alternates with backwards."""
    return list(range(stages - 1, -1, -1))


def interleaved_warm_up(stages: int, chunks: int) -> list[int]:
    """Return how many chunk forwards each stage of interleaved 1F1B runs before it alternates with backwards."""
    return [2 * (stages - 1 - s) + (chunks - 1) * stages for s in range(stages)]


def orders(
    stages: int, micro_batches: int, chunks: int, ahead: Sequence[int]
) -> list[NDArray[np.int32]]:
    """Return the order of every stage: `ahead` forwards, then alternating forwards and backwards.

    Operations are numbers, ``(kind * P V + chunk) * m + micro-batch``, with kind 0 for F and 1 for B.

    Raises:
        BadInputError: m is not a multiple of P.
    """
    number, m, total = stages * chunks, micro_batches, micro_batches * chunks
    turn, micro = np.zeros(m, dtype=np.int64), np.arange(m)  # chunk of the stage, micro-batch
    if chunks > 1:
        _need_rounds(stages, m)
        rounds, group = m // stages, np.arange(stages)
        turn = np.tile(np.repeat(np.arange(chunks), stages), rounds)
        micro = np.tile(group, rounds * chunks) + np.repeat(np.arange(0, m, stages), number)
    stage_orders: list[NDArray[np.int32]] = []
    for s in range(stages):
        forward = (turn * stages + s) * m + micro
        backward = (number + (chunks - 1 - turn) * stages + s) * m + micro
        first = min(ahead[s], total)  # as Megatron-LM, all forwards first where m = P
        both = np.stack([forward[first:], backward[: total - first]], axis=1).ravel()
        order = np.concatenate([forward[:first], both, backward[total - first :]])
        stage_orders.append(order.astype(np.int32))
    return stage_orders


def _in_turn(
    name: str, stages: int, micro_batches: int, chunks: int, ahead: Sequence[int]
) -> Program:
    """Return the program of `orders`."""
    number, m, kinds = stages * chunks, micro_batches, (OpKind.F, OpKind.B)
    ops = tuple(
        tuple(Op(kinds[op // m // number], op // m % number, op % m) for op in order.tolist())
        for order in orders(stages, m, chunks, ahead)
    )
    return Program(name, stages, m, (loop_route(stages, chunks),), ops)


def _need_rounds(stages: int, micro_batches: int) -> None:
    if micro_batches % stages:
        raise BadInputError(
            f"interleaved 1F1B: {micro_batches} micro-batches on {stages} stages; "
            f"expected a multiple of {stages}"
        )
