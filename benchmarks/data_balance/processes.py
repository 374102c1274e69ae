"""Wall time of a step on CPU processes with samples in order and dealt, beside what their visible pairs predict.

    python -m benchmarks.data_balance.processes [--quick] [--json FILE]

Every process trains the same weights on the same global batches, in order and dealt. A process is bound to one core, and those
on one core take turns. In turn with these, steps are run that give the time of a step as a function of the visible pairs on each core:
samples of 64 documents each (light), of one (full), and of one on the first core only, for a core that works alone is
faster than one beside others:

    seconds = light + together (least - pairs of light) + alone (most - least)

with the pairs on the least and on the most busy core. Windows are one document or many short ones.

--json keys: machine, processes, window, micro_batches, rounds, steps, cores, pairs, {kind: [a step each]}; seconds, {kind:
{min, median}}; predicted, {kind: seconds}; ratio_measured, ratio_predicted (dealt over in order), apart, losses_apart.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.command import answer, new_parser
from benchmarks.data_balance.rank import CALIBRATIONS, KINDS
from benchmarks.machine import machine
from benchmarks.ranks import run_ranks
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.data import write_indexed
from telechat_moe.recipe import Recipe, load

BAR = 0.1
"""The measured ratio may be this far from the predicted one."""
ROUNDING = 1e-5
MICRO_BATCHES = 2
CANDIDATES = 64
"""Global batches of which those are measured whose order is worst."""
MODEL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "num_nextn_predict_layers": 0,
    "batch_size": 1,
    "use_flash_attention": True,
    "moe_router_enable_expert_bias": False,
    "moe_router_load_balancing_type": "none",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = new_parser("data_balance.processes", __doc__)
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="default 4")
    parser.add_argument("--window", type=int, default=4096, metavar="TOKENS", help="default 4096")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="batches (default 4)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default 5")
    parser.add_argument(
        "--quick", action="store_true", help="512 tokens, one batch, two rounds: whether it runs"
    )
    add_json(parser)
    return parser


def write_documents(folder: Path, window: int, tokens: int) -> Path:
    """Write at least so many tokens, windows of one document or of many short ones, each document with 0 at its end."""
    rng, written, documents = np.random.default_rng(0), 0, list[np.ndarray]()
    while written < tokens:
        end = written + window
        long = rng.random() < 0.5
        while written < end:
            length = end - written
            if not long:
                length = min(length, int(np.clip(rng.lognormal(0, 1) * window / 64, 2, window)))
            documents.append(np.append(rng.integers(1, MODEL["vocab_size"], length - 1), 0))
            written += length
    write_indexed(folder / "train", documents, np.uint16)
    return folder / "train"


def recipe_of(args: argparse.Namespace, folder: Path) -> Recipe:
    """Return a recipe of data-parallel ranks whose attention stays within documents."""
    samples = args.processes * MICRO_BATCHES * CANDIDATES
    data, config = "train_dataset.", "train_dataset.data_loader.config."
    lengths = {"seq_length": args.window, "max_position_embeddings": args.window}
    settings = {
        **{f"model.model_config.{name}": value for name, value in (MODEL | lengths).items()},
        f"{config}seq_length": args.window,
        f"{config}data_path": f"['1', '{write_documents(folder, args.window, 2 * samples * args.window)}']",
        f"{config}eod": 0,
        f"{config}create_attention_mask": True,
        f"{config}reset_attention_mask": True,
        f"{data}input_columns": "null",
        f"{data}construct_args_key": "null",
        f"{data}data_loader.sizes": f"[{samples}, 0, 0]",
        "telechat_moe.evaluation.interval": 0,
        "telechat_moe.sample": "null",
        "runner_config.batch_size": 1,
        "runner_config.gradient_accumulation_steps": MICRO_BATCHES,
        "lr_schedule.warmup_steps": 0,
        "callbacks": "[]",
        "use_parallel": True,
        "parallel.parallel_mode": 1,
        "parallel.full_batch": True,
        "parallel_config.data_parallel": args.processes,
        "telechat_moe.operators.attention": "fused",
        "telechat_moe.balance_attention": True,
        "output_dir": folder / "out",
    }
    sets = [f"{k}={v}" for k, v in settings.items()]
    return load("telechat3_moe/pretrain_tiny.yaml", sets, use="train")


def ranks_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the rounds; return what each rank kept."""
    from telechat_moe.graph.execute import Job
    from telechat_moe.train.rank_graph import compile_recipe

    with TemporaryDirectory() as name:
        job = Path(name) / "job"
        recipe = recipe_of(args, Path(name))
        Job.write(job, compile_recipe(recipe, target="CPU", full_batch=True))
        cores = min(args.processes, len(os.sched_getaffinity(0)))
        task = {"rounds": args.rounds, "steps": args.steps, "batches": CANDIDATES, "cores": cores}
        return run_ranks("benchmarks.data_balance.rank", job, recipe, args.processes, task)


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured and predicted; the seconds of a kind are those of all its steps together."""
    ranks = ranks_of(args)
    cores = [tuple(rank["cores"]) for rank in ranks]
    busy: dict[Any, tuple[int, int]] = {}  # pairs on the least and on the most busy core
    seconds: dict[Any, list[float]] = {}
    for key, pairs in ranks[0]["pairs"].items():
        on = [sum(p for p, c in zip(pairs, cores, strict=True) if c == core) for core in cores]
        busy[key] = min(on), max(on)
        rounds = zip(*(rank["times"][key] for rank in ranks), strict=True)
        # From the moment when all have begun.
        seconds[key] = [max(e for _, e in one) - max(b for b, _ in one) for one in rounds]
    low, full, lone = (statistics.median(seconds[kind, 0]) for kind in CALIBRATIONS)
    light = busy["light", 0][1]
    span = busy["full", 0][1] - light

    def predict(least: int, most: int) -> float:
        return low + ((full - low) * (least - light) + (lone - low) * (most - least)) / span

    steps = range(args.steps)
    predicted = {kind: sum(predict(*busy[kind, i]) for i in steps) for kind in KINDS}
    found = {
        kind: {
            name: sum(take(seconds[key]) for key in seconds if key[0] == kind)
            for name, take in (("min", min), ("median", statistics.median))
        }
        for kind in (*CALIBRATIONS, *KINDS)
    }
    values = ranks[0]["values"]
    one, other = (np.array([values[kind, i] for i in steps]) for kind in KINDS)
    first, second = KINDS
    measured = found[second]["median"] / found[first]["median"]
    expected = predicted[second] / predicted[first]
    return {
        "cores": cores,
        "pairs": {k: [ranks[0]["pairs"][k, i].tolist() for i in steps] for k in KINDS},
        "seconds": found,
        "predicted": predicted,
        "ratio_measured": measured,
        "ratio_predicted": expected,
        "apart": abs(measured / expected - 1),
        "losses_apart": float(np.max(np.abs(other - one) / np.maximum(np.abs(one), 1e-6))),
    }


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    if args.quick:
        args.window, args.steps, args.rounds = 512, 1, 2
    found = report(args)
    given = {name: getattr(args, name) for name in ("processes", "window", "rounds", "steps")}
    result = {"machine": machine(), **given, "micro_batches": MICRO_BATCHES, **found}
    bad = found["losses_apart"] > ROUNDING or (found["apart"] > BAR and not args.quick)
    if write_json(args.json, result):
        return int(bad)
    rows = []
    for kind, times in found["seconds"].items():
        predicted = f"{1e3 * found['predicted'][kind]:.0f}" if kind in KINDS else ""
        rows.append([kind, *(f"{1e3 * x:.0f}" for x in times.values()), predicted])
    show_table(["samples", "ms (min) ", "ms (median) ", "predicted "], rows)
    print(
        f"{result['machine']}; {args.processes} processes on cores {found['cores']}, {args.window} tokens"
    )
    print(
        f"dealt over in order: measured {found['ratio_measured']:.3f}, predicted {found['ratio_predicted']:.3f}, "
        f"{found['apart']:.1%} apart; losses and norms at most {found['losses_apart']:.1e} apart"
    )
    return int(bad)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
