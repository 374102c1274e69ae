"""How long the planner takes to place layers in the chunks of a pipeline: `python -m benchmarks.plan_speed placement [--limit 20]`.

Layers of the larger kind take 10 ms forward and 20 backward, three dense ones less, MTP and head as much as a layer and two
thirds; memory is free. CPU seconds are printed, and the gap where the limit came first.
"""

import argparse
import math
import time

from telechat_moe.tools.plan.search.placement import PathPool, PlacementSearch
from telechat_moe.tools.plan.search.placement_problem import LayerGroup, PlacementProblem
from telechat_moe.tools.plan.search.search import GAP

MS = 10**9
"""Picoseconds."""

SHAPES = (
    (8, 2, 32, 45),
    (16, 2, 64, 61),
    (16, 4, 64, 96),
    (32, 2, 64, 96),
    (32, 4, 64, 126),
    (32, 4, 64, 160),
)
"""Stages, chunks of a stage, micro-batches, layers."""


def problem(stages: int, chunks: int, micro_batches: int, layers: int) -> PlacementProblem:
    """Return a placement problem."""
    kept = (0,) * stages
    return PlacementProblem(
        schedule="interleaved",
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        layers=(
            LayerGroup(count=3, times=(3 * MS, 6 * MS, 0), states=0, activations=kept),
            LayerGroup(count=layers - 3, times=(10 * MS, 20 * MS, 0), states=0, activations=kept),
        ),
        first=(MS, MS, 0),
        last=(17 * MS, 33 * MS, 0),
        send=MS // 2,
        memory=kept,
        buffer=kept,
    )


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each")
    args = parser.parse_args()
    for shape in SHAPES:
        p = problem(*shape)
        inner, began = PlacementSearch(p, PathPool(p.pipeline)), time.process_time()
        answer = inner.solve(math.inf, GAP, time.perf_counter() + args.limit)
        took = time.process_time() - began
        stages, chunks, micro_batches, layers = shape
        print(f"P{stages} V{chunks} m{micro_batches}, {layers} layers: {took:.2f} s, ", end="")
        if answer.best:
            gap = answer.best.seconds / answer.bound - 1 if answer.bound else math.inf
            print(f"step {answer.best.seconds:.4f} s, gap {max(gap, 0):.2%}")
        else:
            print("nothing found")


if __name__ == "__main__":
    main()
