"""Configurations that the step model evaluates in a second: `python -m benchmarks.plan_speed evaluation [--workers 2]`."""

import argparse
import itertools
import multiprocessing
import time

from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.step import evaluate

RECIPE = "telechat3_moe/pretrain_105b_a4b_4k.yaml"


def layouts(devices: int = 4096, batch: int = 4096) -> list[Layout]:
    """Return the configurations of a joint space that fit together."""
    found = []
    axes = ((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2), (1, 4, 16, 64), (1, 2, 4), (0, 1, 3))
    for tp, pp, vpp, cp, ep, micro, zero in itertools.product(*axes):
        dp = devices // (tp * pp * cp)
        if (pp == 1 and vpp > 1) or batch % (dp * micro) or dp * cp * tp % ep:
            continue
        for recompute, sp in itertools.product(("none", "selective", "full"), (False, True)):
            found.append(
                Layout(
                    dp=dp, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, micro_batch=micro, zero=zero, recompute=recompute,
                    micro_batches=batch // (dp * micro), sequence_parallel=sp and tp > 1,
                    schedule="interleaved" if vpp > 1 else "1f1b",
                )
            )  # fmt: skip
    return found


def run(seconds: float) -> tuple[int, float]:
    """Return configurations evaluated and CPU seconds used, from `Layout` objects to the table."""
    architecture = Architecture.from_recipe(load(RECIPE))
    device, todo = load_device("ascend-910b"), layouts()
    evaluate(architecture, todo[:100], device)
    done, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        for i in range(0, len(todo), 2000):
            done += len(evaluate(architecture, todo[i : i + 2000], device).step_s)
    return done, time.process_time() - start


def main() -> None:
    """Print the rate of each worker and of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5)
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        rates = [n / s for n, s in pool.map(run, [args.seconds] * args.workers)]
    each = ", ".join(f"{rate:,.0f}" for rate in rates)
    print(f"{len(layouts()):,} layouts of {RECIPE} on 4,096 devices")
    print(f"{each} configurations a CPU second by worker; {sum(rates):,.0f} together")


if __name__ == "__main__":
    main()
