"""Swapped activations and moments on CPU processes: `python -m benchmarks.swap`."""

import argparse
import pickle
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.command import answer
from benchmarks.machine import machine
from benchmarks.swap.streams import measured, predicted
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.launch.commands import LaunchNode, environment, free_port
from telechat_moe.launch.job import write_resolved
from telechat_moe.processes import Control
from telechat_moe.recipe import Recipe, load

PEAK, STALL = 0.05, 0.15
"""Measured and predicted may be this far apart, as a share of the measured."""
KEPT, SWAPPED = "kept", "swapped"
WIDER = {
    "model.model_config.num_hidden_layers": 2,
    "model.model_config.hidden_size": 768,
    "model.model_config.intermediate_size": 2304,
    "model.model_config.moe_intermediate_size": 384,
    "model.model_config.moe_shared_expert_intermediate_size": 384,
}
LENGTH = ("model.model_config.seq_length", "train_dataset.data_loader.config.seq_length")
MICRO_BATCHES = 2
PROCESSES = 2
_PEAK = re.compile(r"dynamic memory pool .*?peak used mem:(\d+)M")
"""What MindSpore 2.9 says at its end with the setting below."""
STATISTICS = {"MS_DEV_RUNTIME_CONF": "memory_statistics:True"}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.swap",
        description="Measure memory and waiting of swapped activations, or moments, on two CPU processes with a slowed link, and "
        "compare with what sizes, bandwidth and computation predict.",
    )
    parser.add_argument(
        "--megabytes-per-s", type=float, default=60.0, metavar="MB",
        help="of the link to the pool, each way (default 60)",
    )  # fmt: skip
    parser.add_argument(
        "--prefetch", type=int, default=20, metavar="N", help="operators (default 20)"
    )
    parser.add_argument(
        "--states",
        action="store_true",
        help="swap AdamW's moments, of larger weights, not activations",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default 5")
    add_json(parser)
    return parser


def recipe_of(swap: bool, states: bool, prefetch: int, output: Path) -> Recipe:
    """Return a small recipe for two devices that swaps layers, or, with larger weights, moments; or not."""
    settings: dict[str, object] = {
        "model.model_config.num_hidden_layers": 3,
        "model.model_config.num_nextn_predict_layers": 0,
        "runner_config.gradient_accumulation_steps": MICRO_BATCHES,
        "callbacks.1.gradient_accumulation_steps": MICRO_BATCHES,
        "use_parallel": True,
        "parallel.parallel_mode": 1,
        "parallel.full_batch": True,
        "parallel_config.data_parallel": PROCESSES,
        "output_dir": output,
    }
    if states:
        settings |= dict.fromkeys(LENGTH, 64)
        settings |= WIDER | {"optimizer.swap": swap}
    elif swap:
        settings["swap_config.swap"] = True
        settings["swap_config.layer_swap"] = f"[{{layers: True, backward_prefetch: {prefetch}}}]"
    return load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in settings.items()])


def launch(job: Path, recipe: Recipe, task: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Run a task on all processes; return what they found, and the largest peak of their memory, MiB."""
    write_resolved(recipe, job)
    Control.fresh(job, task=task)
    program = ["python", "-u", "-m", "benchmarks.swap.rank", str(job)]
    node = LaunchNode(local=PROCESSES, total=PROCESSES, port=free_port())
    logs = job / "log"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    # Not watched: a process says its peak when it ends by itself.
    command = node.msrun(logs.absolute(), program)
    with (logs / "msrun.log").open("wb") as log:
        subprocess.run(command, env=environment() | STATISTICS, stdout=log, stderr=log, check=True)
    said = [
        path.read_text(encoding="utf-8", errors="replace") for path in logs.glob("worker_*.log")
    ]
    peaks = [int(peak) for text in said for peak in _PEAK.findall(text)]
    paths = [job / f"found_{number}.pickle" for number in range(PROCESSES)]
    return [pickle.loads(path.read_bytes()) for path in paths], max(peaks)


def report(seconds_per_byte: float, states: bool, prefetch: int, rounds: int) -> dict[str, Any]:
    """Return what was measured and predicted."""
    from telechat_moe.graph.execute import Job
    from telechat_moe.graph.mindir import MindIR
    from telechat_moe.graph.swapping import peak_of
    from telechat_moe.train.rank_graph import compile_recipe

    with TemporaryDirectory() as place:
        folder, graphs = Path(place), []
        for name in (KEPT, SWAPPED):
            recipe = recipe_of(name == SWAPPED, states, prefetch, folder / "out")
            if not (states and graphs):  # moments leave when a graph is rewritten for CPU
                graphs = compile_recipe(recipe, target="CPU", full_batch=True, shared_graph=True)
            job = Job.write(folder / name, graphs, states=recipe.optimizer.swap)
        task = {"rounds": rounds, "seconds_per_byte": seconds_per_byte, "programs": [KEPT, SWAPPED]}
        both, kept_peak = launch(folder / KEPT, recipe, task)
        alone = {**task, "rounds": 1}
        here, peak = launch(folder / SWAPPED, recipe, {**alone, "programs": [SWAPPED]})
        swapped = next(row for row in job.swapped if row is not None)
        predicted_peak = swapped.peak / 2**20
        if states:
            there, _ = launch(folder / KEPT, recipe, {**alone, "programs": [KEPT]})
            kept_peak, peak = (statistics.mean(r["memory"] for r in x) for x in (there, here))
            before = peak_of(MindIR((folder / KEPT / "rank_0.mindir").read_bytes()))
            saved = (sum(s.nbytes for s in swapped.states) - swapped.peak + before) / 2**20
            predicted_peak = kept_peak - saved
    waited = [[measured(c) for _, c in rank["steps"]["swapped slow"]] for rank in both]
    # On a link without a limit the threads that copy take the cores from what computes, which does not happen on this one.
    said = [
        [predicted(c, seconds_per_byte) for _, c in rank["steps"]["swapped half"]] for rank in both
    ]
    stall, expected = (statistics.mean(map(statistics.median, rows)) for rows in (waited, said))
    seconds = {
        name: [max(s) for s in zip(*([t for t, _ in r["steps"][name]] for r in both), strict=True)]
        for name in both[0]["steps"]
    }
    return {
        "tensors": swapped.tensors + len(swapped.states),
        "moved_mib": (swapped.moved + sum(s.nbytes for s in swapped.states)) / 2**20,
        "pool_mib": swapped.pool / 2**20,
        "seconds": {n: {"min": min(v), "median": statistics.median(v)} for n, v in seconds.items()},
        "peak_mib": {"kept": kept_peak, "measured": peak, "predicted": predicted_peak},
        "stall_seconds": {"measured": stall, "predicted": expected},
        "peak_apart": abs(predicted_peak - peak) / peak,
        "peak_apart_of_saved": abs(predicted_peak - peak) / (kept_peak - predicted_peak),
        "stall_apart": abs(expected / stall - 1) if stall else 0.0,
        "same_bits": all(len({*rank["digests"].values()}) == 1 for rank in both),
    }


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    found = report(1 / (args.megabytes_per_s * 1e6), args.states, args.prefetch, args.rounds)
    result = {
        "machine": machine(),
        "megabytes_per_s": args.megabytes_per_s,
        "prefetch": args.prefetch,
        "states": args.states,
        "rounds": args.rounds,
        **found,
    }
    bad = not found["same_bits"] or found["peak_apart"] > PEAK or found["stall_apart"] > STALL
    if write_json(args.json, result):
        return int(bad)
    rows = [
        [name, *(f"{t[key]:.3f}" for key in ("min", "median"))]
        for name, t in found["seconds"].items()
    ]
    what = "moments" if args.states else "activations"
    show_table([f"{what}, link", "s (min) ", "s (median) "], rows)
    peak, stall = found["peak_mib"], found["stall_seconds"]
    print(f"{result['machine']}; link: {args.megabytes_per_s:g} MB/s each way")
    print(
        f"{found['tensors']} {what} of {found['moved_mib']:.1f} MiB a step, {found['pool_mib']:.1f} MiB at once; "
        f"bits {'the same' if found['same_bits'] else 'DIFFER'}"
    )
    print(
        f"peak: {peak['measured']:.0f} MiB measured, {peak['predicted']:.1f} predicted ({found['peak_apart']:.1%} of it apart, "
        f"{found['peak_apart_of_saved']:.1%} of what is saved); {peak['kept']:.0f} without swapping"
    )
    print(
        f"waiting: {stall['measured']:.3f} s a step measured, {stall['predicted']:.3f} predicted "
        f"({found['stall_apart']:.1%} apart)"
    )
    return int(bad)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
