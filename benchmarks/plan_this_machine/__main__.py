"""Our own training step, predicted and measured.

    python -m benchmarks.plan_this_machine [--calibration FILE] [--rounds 7] [--json FILE]

Measures the seven steps that `telechat-moe plan calibrate` fits (or takes the description given) and, in turn with them, 13
recipes that the fit does not see, one process and one thread each, and prints how far the prediction is off.

A time is processor seconds of a step in one process: on an idle machine with one thread those that pass. On a busy one they
are longer, because caches and memory are shared; so all recipes take a step in every round, in one process, and medians
count. Takes five minutes on an idle machine, and about 6 GiB.

--json keys: machine, cases (list of {name, measured_s, predicted_s, error}), mape, worst.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from telechat_moe.tools.plan.cost import cpu_step
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.this_machine import (
    CALIBRATION,
    StepCase,
    as_job,
    medians,
    of_case,
    run_measurement,
    variant,
)

CASES = (
    StepCase("the recipe itself", ()),
    variant("6 layers, no MTP", layers=6, mtp=0),
    variant("hidden 512", layers=3, hidden=512, batch=2),
    variant("hidden 384", layers=4, hidden=384, ffn=1536, mtp=0),
    variant("sequences of 1024", layers=3, seq=1024, batch=2),
    variant("8 sequences of 256", layers=3, seq=256, batch=8),
    variant("64 experts, top 8", layers=3, experts=64, topk=8, moe=64, batch=2),
    variant("8 experts, top 2", layers=4, experts=8, topk=2, moe=320),
    variant("micro-batch 1", layers=4, batch=1),
    variant("micro-batch 8", layers=2, batch=8, mtp=0),
    variant("vocabulary 16384", layers=2, vocab=16384, batch=2, mtp=0),
    variant("4 heads", layers=4, heads=4, mtp=0, batch=3),
    variant("12 small layers", layers=12, hidden=128, ffn=512, seq=128, batch=2, moe=80, mtp=0),
)


def main() -> None:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibration", metavar="FILE", help="device description of this machine")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each recipe")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    args = parser.parse_args()
    given = args.calibration
    fitted = () if given else CALIBRATION
    job = {"cases": as_job((*fitted, *CASES)), "rounds": args.rounds}
    times = medians(run_measurement(job))
    if given:
        own = load_device(given).step
    else:
        own = cpu_step.fit([of_case(c) for c in fitted], [times[c.name] for c in fitted])
    rows = [(c.name, times[c.name], cpu_step.predict(*of_case(c), own)) for c in CASES]
    errors = [p / m - 1 for _, m, p in rows]
    print(f"{'step':24s}{'measured':>12s}{'predicted':>12s}{'error':>10s}")
    for (name, m, p), error in zip(rows, errors, strict=True):
        print(f"{name:24s}{m:10.3f} s{p:10.3f} s{error * 100:+8.1f} %")
    mape, worst = sum(map(abs, errors)) / len(errors), max(map(abs, errors))
    print(f"\n{len(rows)} steps: mean error {mape * 100:.1f} %, worst {worst * 100:.1f} %")
    if args.json:
        cases = [
            {"name": n, "measured_s": m, "predicted_s": p, "error": e}
            for (n, m, p), e in zip(rows, errors, strict=True)
        ]
        report = {
            "machine": platform.processor() or platform.machine(),
            "cases": cases,
            "mape": mape,
            "worst": worst,
        }
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(worst > 0.10)


if __name__ == "__main__":
    main()
