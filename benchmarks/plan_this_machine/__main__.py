"""Our own training step, predicted and measured.

    python -m benchmarks.plan_this_machine [--calibration FILE] [--layouts] [--rounds 7] [--json FILE]

Measures the seven steps that `telechat-moe plan calibrate` fits (or takes the description given) and, in turn with them, 13
recipes that the fit does not see, one process and one thread each, and prints how far the prediction is off. --layouts measures
layouts of two processes as well, through `run-sharded`, against a second calibration with plain operators; it needs
the recipe's data (`telechat-moe data build --recipe telechat3_moe/pretrain_19m.yaml`).

A time is processor seconds of a step in one process: on an idle machine with one thread those that pass. On a busy one they
are longer, because caches and memory are shared; so all recipes take a step in every round, in one process, and medians
count. Takes five minutes on an idle machine, and about 6 GiB.

--json keys: machine, cases (list of {name, measured_s, predicted_s, error}), mape, worst.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from telechat_moe.processes import processor_seconds
from telechat_moe.tools.plan.cost import cpu_step
from telechat_moe.tools.plan.cost.device import Device, load_device
from telechat_moe.tools.plan.cost.this_machine import (
    CALIBRATION,
    RECIPE,
    StepCase,
    as_job,
    calibrate,
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

PARALLEL = ("use_parallel=True", "parallel.parallel_mode=1", "parallel.full_batch=True")


def two(name: str, *layout: str, **changes: int) -> StepCase:
    """Return a case of two processes."""
    one = variant(name, **changes)
    return StepCase(name, (*one.overrides, *PARALLEL, *(f"parallel_config.{x}" for x in layout)))


TP2 = ("model_parallel=2", "use_seq_parallel=True")
EP2 = ("data_parallel=2", "expert_parallel=2")
LAYOUTS = (
    two("dp2", "data_parallel=2", layers=3, mtp=0),
    two("tp2", *TP2, layers=3, mtp=0),
    two("ep2", *EP2, layers=3, mtp=0),
)
SMALL_LAYOUTS = (
    two("small dp2", "data_parallel=2", layers=2, mtp=0, seq=256),
    two("small tp2", *TP2, layers=2, mtp=0, seq=256),
    two("small ep2", *EP2, layers=2, mtp=0, seq=256),
)
"""What each layout's factor is measured on."""


def measured_layout(case: StepCase, steps: int = 9) -> float:
    """Return the median processor time of a step in the busier of two processes of `run-sharded`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "telechat-moe",
            "run-sharded",
            case.recipe,
            "--processes",
            "2",
            "--steps",
            str(steps),
        ]
        for override in (*case.overrides, f"output_dir={folder}/run"):
            command += ["--set", override]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
        log = Path(folder, "log")
        with (
            log.open("w") as said,
            subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT, env=environment
            ) as process,
        ):
            marks = _watch(process, Path(folder, "run"))
        if process.returncode:
            raise SystemExit(f"{case.name}: run-sharded failed:\n{log.read_text()[-2000:]}")
    pairs = itertools.pairwise(marks[2:])
    return statistics.median(max(after[p] - before[p] for p in before) for before, after in pairs)


def _watch(process: subprocess.Popen[Any], run: Path) -> list[dict[int, float]]:
    """Return the processor seconds of each worker at the end of each step."""
    marks: list[dict[int, float]] = []
    seen = 0
    while process.poll() is None:
        time.sleep(0.02)
        for file in run.glob(".job/**/steps.jsonl"):
            lines = file.read_text().count("\n")
            if lines > seen:
                seen = lines
                marks.append(_workers(str(run)))
    return [m for m in marks if len(m) == 2]


def _workers(run: str) -> dict[int, float]:
    import psutil

    found: dict[int, float] = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        line, given = (process.info[name] or () for name in ("cmdline", "environ"))
        if any(run in word for word in line) and dict(given).get("MS_ROLE") == "MS_WORKER":
            found[process.pid] = processor_seconds(process.pid)
    return found


def layouts(device: Device) -> list[tuple[str, float, float]]:
    """Return name, measured and predicted seconds of layouts of two processes.

    What the terms do not count (concatenations, slices and copies around each exchange) is one factor for each layout,
    measured on a small model and used for a larger one.

    Args:
        device: Of `calibrate` with plain operators.
    """
    start, bandwidth = device.constants.collective_host_s, device.intra_bandwidth

    def counted(case: StepCase) -> float:
        return cpu_step.predict(*of_case(case, "plain"), device.step, start, bandwidth)

    rows: list[tuple[str, float, float]] = []
    for small, large in zip(SMALL_LAYOUTS, LAYOUTS, strict=True):
        factor = measured_layout(small) / counted(small)
        rows.append((large.name, measured_layout(large), factor * counted(large)))
    return rows


def main() -> None:
    """Measure, predict, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calibration", metavar="FILE", help="device description of this machine")
    parser.add_argument("--plain-calibration", metavar="FILE", help="the same with plain operators")
    parser.add_argument(
        "--layouts", action="store_true", help="measure layouts of two processes, too"
    )
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
    if args.layouts:
        plain = args.plain_calibration
        device = load_device(plain) if plain else calibrate(RECIPE, operators="plain").device
        rows += layouts(device)
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
