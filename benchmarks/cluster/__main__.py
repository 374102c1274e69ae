"""Train the tiny recipe in one process and on four in two layouts, and hold the curves against each other.

    python -m benchmarks.cluster [--steps 40] [--out output]

Writes OUT/cluster/<run>/ and OUT/cluster.png; exit code 1 if a loss is further from the single process than EARLY, or
LATE after the first EARLY_STEPS steps.
Run by `make cluster`, after `telechat-moe data build`.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from telechat_moe.train.plot import compare

RECIPE = "telechat3_moe/pretrain_tiny.yaml"
# Float32 sums in another order are 4e-7 apart, and stay there for 20 steps and more: EARLY is what a layout must hold.
# Then, measured at steps 24 and 33, a token has two experts whose scores are that close and takes the other one (the
# experts' loads differ from that step on), and training pulls the curves apart, up to 3e-4 in 40 steps. Two runs in
# one process, with fused and plain operators, part likewise (5e-5 in 60 steps). LATE only catches what breaks later.
EARLY_STEPS, EARLY, LATE = 20, 4e-6, 1e-3
SPREAD = {"use_parallel": True, "parallel.parallel_mode": 1, "parallel.full_batch": True}
LAYOUTS: dict[str, dict[str, object]] = {
    "one process": {},
    # Data parallel 4 with experts over 2: for the experts that is dp2 x ep2.
    "four processes, dp2 x ep2": {
        **SPREAD,
        "parallel_config.data_parallel": 4,
        "parallel_config.expert_parallel": 2,
        "runner_config.batch_size": 1,
        "model.model_config.batch_size": 1,
    },
    "four processes, tp2 x pp2": {
        **SPREAD,
        "parallel_config.model_parallel": 2,
        "parallel_config.use_seq_parallel": True,
        "parallel_config.pipeline_stage": 2,
        "parallel_config.micro_batch_num": 2,
        "callbacks.1.micro_batch_num": 2,
        "runner_config.batch_size": 2,
        "model.model_config.batch_size": 2,
    },
}


def main() -> int:
    """Train all, compare; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("output"))
    args = parser.parse_args()
    runs: dict[str, Path] = {}
    for name, layout in LAYOUTS.items():
        output = args.out / "cluster" / name.split(", ")[-1].replace(" ", "_")
        settings = {
            "train_dataset.data_loader.sizes": f"[{4 * args.steps},0,0]",
            "lr_schedule.warmup_steps": min(10, args.steps - 1),
            "telechat_moe.evaluation.interval": 0,
            "telechat_moe.sample": "null",
            "output_dir": output,
            **layout,
        }
        sets = [x for key, value in settings.items() for x in ("--set", f"{key}={value}")]
        began = time.perf_counter()
        code = "import sys; from telechat_moe.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, "train", RECIPE, "--overwrite", "--plain", *sets]
        print(f"\n{name}", flush=True)
        if failed := subprocess.run(command, check=False).returncode:
            return failed
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        runs[name] = output / "metrics.jsonl"
    errors = compare(runs, args.out / "cluster.png")
    print(f"\n{args.out / 'cluster.png'}; losses against one process, {args.steps} steps:")
    good = True
    for name, error in errors.items():
        early, late = error[:EARLY_STEPS].max(), error.max()
        print(f"  {name}: first {EARLY_STEPS} steps {early:.1e}, all {late:.1e}")
        good = good and bool(early <= EARLY and late <= LATE)
    if not good:
        print(f"error: allowed are {EARLY:g} and {LATE:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
