"""Exchanges beside computation, measured on CPU processes: `python -m benchmarks.exchange_overlap`."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.command import answer
from benchmarks.exchange_overlap.streams import Link, measured, simulated
from benchmarks.machine import machine
from benchmarks.ranks import run_ranks
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.recipe import Recipe, load

POINTS = 10.0
"""Measured and simulated shares may be this far apart."""
MICRO_BATCHES = 4
MODEL = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "num_nextn_predict_layers": 0,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "batch_size": 2,
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exchange_overlap",
        description="Measure how much of the experts' exchanges computation hides on CPU processes with slowed links, and "
        "compare with the planner's simulation.",
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--latency-ms", type=float, default=2.0, metavar="MS", help="default 2")
    parser.add_argument(
        "--megabytes-per-s", type=float, default=10.0, metavar="MB",
        help="of the link between two processes, each way (default 10)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default 9")
    add_json(parser)
    return parser


def recipe_of(processes: int, output: Path) -> Recipe:
    """Return a recipe whose experts are spread over all processes, several micro-batches a step."""
    model = {f"model.model_config.{name}": value for name, value in MODEL.items()}
    settings = {
        **model,
        "train_dataset.data_loader.config.seq_length": MODEL["seq_length"],
        "runner_config.batch_size": MODEL["batch_size"],
        "runner_config.gradient_accumulation_steps": MICRO_BATCHES,
        "callbacks.1.gradient_accumulation_steps": MICRO_BATCHES,
        "use_parallel": True,
        "parallel.parallel_mode": 1,
        "parallel.full_batch": True,
        "parallel_config.data_parallel": processes,
        "parallel_config.expert_parallel": processes,
        "telechat_moe.sharding.dispatcher": "alltoallv",
        "telechat_moe.sharding.overlap_exchange": True,
        "output_dir": output,
    }
    return load("telechat3_moe/pretrain_tiny.yaml", [f"{k}={v}" for k, v in settings.items()])


def steps_of(processes: int, link: Link, rounds: int) -> list[dict[str, Any]]:
    """Run the rounds; return for each rank its ``times`` by program and speed, and whether the bits are the ``same``."""
    from benchmarks.exchange_overlap.rank import PROGRAMS
    from telechat_moe.graph.execute import Job
    from telechat_moe.tools.plan.schedules.ranks import rank_orders
    from telechat_moe.train.rank_graph import compile_recipe

    with TemporaryDirectory() as folder:
        recipe = recipe_of(processes, Path(folder) / "out")
        graphs = compile_recipe(recipe, target="CPU", full_batch=True)
        for name, orders in zip(PROGRAMS, (None, rank_orders(recipe)), strict=True):
            Job.write(Path(folder) / name, graphs, orders)
        job = Path(folder) / PROGRAMS[0]
        task = {"rounds": rounds, "link": link}
        return run_ranks("benchmarks.exchange_overlap.rank", job, recipe, processes, task)


def report(processes: int, link: Link, rounds: int) -> dict[str, Any]:
    """Return what was measured and simulated."""
    ranks = steps_of(processes, link, rounds)
    seconds: dict[str, list[float]] = {}
    for name in ranks[0]["times"]:
        together = zip(*(rank["times"][name] for rank in ranks), strict=True)
        seconds[name] = [max(step.seconds for step in steps) for steps in together]
    beside = [rank["times"]["beside slow"] for rank in ranks]
    found = [statistics.median(measured(step).overlap for step in steps) for steps in beside]
    rounds_of = zip(*beside, strict=True)
    said = [
        statistics.median(shares)
        for shares in zip(
            *([s.overlap for s in simulated(x, link)] for x in rounds_of), strict=True
        )
    ]
    waiting = [rank["times"]["waiting slow"] for rank in ranks]
    without = [statistics.median(measured(step).overlap for step in steps) for steps in waiting]
    every = [x for steps in beside for step in steps for x in step.exchanges]
    return {
        "processes": processes,
        "micro_batches": MICRO_BATCHES,
        "exchanges": len(beside[0][0].exchanges),
        "exchange_bytes": statistics.median(x.bytes for x in every),
        "exchange_seconds": statistics.median(x.arrived - x.started for x in every),
        "seconds": {
            name: {"min": min(values), "median": statistics.median(values)}
            for name, values in seconds.items()
        },
        "hidden_without": without,
        "hidden_measured": found,
        "hidden_simulated": said,
        "apart_points": 100 * abs(statistics.mean(found) - statistics.mean(said)),
        "same_bits": all(rank["same"] for rank in ranks),
    }


def rows(found: dict[str, Any]) -> list[list[object]]:
    """Return the rows of the table of one number of processes."""
    lines: list[list[object]] = []
    for name, values in found["seconds"].items():
        hidden = {"waiting slow": "hidden_without", "beside slow": "hidden_measured"}.get(name)
        share = f"{statistics.mean(found[hidden]):.1%}" if hidden else ""
        said = f"{statistics.mean(found['hidden_simulated']):.1%}" if name == "beside slow" else ""
        milliseconds = [f"{1e3 * values[key]:.1f}" for key in ("min", "median")]
        lines.append([found["processes"], name, *milliseconds, share, said])
    return lines


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return the exit code."""
    link = Link(args.latency_ms / 1e3, 1 / (args.megabytes_per_s * 1e6))
    found = [report(processes, link, args.rounds) for processes in args.processes]
    result = {
        "machine": machine(),
        "link": {"latency_ms": args.latency_ms, "megabytes_per_s": args.megabytes_per_s},
        "rounds": args.rounds,
        "cases": found,
    }
    bad = [x for x in found if not x["same_bits"] or x["apart_points"] > POINTS]
    if write_json(args.json, result):
        return 1 if bad else 0
    headers = ["processes", "exchanges, link", "ms (min) ", "ms (median) ", "hidden ", "simulated "]
    show_table(headers, [row for x in found for row in rows(x)])
    print(f"{result['machine']}; link: {args.latency_ms} ms and {args.megabytes_per_s} MB/s")
    for x in found:
        print(
            f"{x['processes']} processes: {x['exchanges']} exchanges a step of {x['exchange_bytes']:.0f} bytes, "
            f"{1e3 * x['exchange_seconds']:.1f} ms; bits {'the same' if x['same_bits'] else 'DIFFER'}; measured and simulated "
            f"shares {x['apart_points']:.1f} points apart"
        )
    return 1 if bad else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
