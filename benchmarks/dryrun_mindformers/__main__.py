"""Compile ranks of MindFormers' own models without an NPU: time, memory, collectives of a step.

    python -m benchmarks.dryrun_mindformers [--cases NAME...] [--json FILE]

To be set beside our model's graph on the same layout. Ranks compile one after the other, each in a process
of its own.

Needs the extras `train` and `mindformers`.

--json keys: machine, versions, command, cases: list of {name, recipe, overrides, devices, rank, build_seconds
(MindFormers' import and classes), compile_seconds (MindSpore's front end), peak_memory_gib (of the compiling
process), mindir_mb, operators (calls a step), recomputed (of those), collectives}. A collective is {kind, group
(axes), ranks, calls (a step, all micro-batches), mb (10^6 bytes a step, the larger of input and output; AlltoAllV
with evenly spread tokens), mb_certain (without sizes that depend on the routing), mb_sent (by ring, direct for
exchanges)}. Only the shapes are real: nothing ran.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from telechat_moe.graph.read import read
from telechat_moe.interop.mindformers_dryrun import compile_mindformers, sections_of, subject_of

MODEL = "model.model_config"
TELECHAT = "telechat3_moe/pretrain_105b_a4b_4k.yaml"
DEEPSEEK = "deepseek3/pretrain_deepseek3_671b.yaml"


DEGREES = (
    "data_parallel",
    "model_parallel",
    "pipeline_stage",
    "expert_parallel",
    "micro_batch_num",
)


def layout(*degrees: int) -> list[str]:
    """Return overrides for a layout, in the order of :data:`DEGREES`."""
    pairs = zip(DEGREES, degrees, strict=True)
    return [f"parallel_config.{key}={value}" for key, value in pairs]


SMALL = [
    f"{MODEL}.{item}"
    for item in (
        "hidden_size=256",
        "intermediate_size=512",
        "moe_intermediate_size=128",
        "n_routed_experts=16",
        "num_attention_heads=8",
        "num_key_value_heads=8",
        "vocab_size=1024",
    )
]
FOUR_LAYERS = [f"{MODEL}.num_hidden_layers=4", f"{MODEL}.offset=0", f"{MODEL}.pp_interleave_num=1"]
SHARD_ANY = ["parallel.parallel_optimizer_config.optimizer_weight_shard_size=-1"]
# Name -> (recipe, overrides, ranks).
CASES: dict[str, tuple[str, list[str], list[int]]] = {
    "telechat3 small, 4 layers": (
        TELECHAT,
        [
            *layout(2, 2, 1, 2, 1),
            *FOUR_LAYERS,
            *SMALL,
            f"{MODEL}.moe_shared_expert_intermediate_size=128",
        ],
        [0],
    ),
    "telechat3 105B widths, 4 layers": (TELECHAT, [*layout(4, 8, 1, 4, 1), *FOUR_LAYERS], [0]),
    "deepseek-v3 small, 4 layers": (
        DEEPSEEK,
        [*layout(2, 2, 1, 2, 1), *FOUR_LAYERS, *SMALL, *SHARD_ANY],
        [0],
    ),
    "deepseek-v3 671B widths, 4 layers": (
        DEEPSEEK,
        [*layout(4, 8, 1, 32, 1), *FOUR_LAYERS, *SHARD_ANY],
        [0],
    ),
    "telechat3 105B": (TELECHAT, [], [0, 224]),
}


def measure(name: str) -> list[dict[str, Any]]:
    """Return what is known of each rank of a case."""
    recipe, overrides, ranks = CASES[name]
    _, mesh, expected, _ = subject_of(*sections_of(recipe, overrides))
    rows = []
    for rank in ranks:
        (graph,) = compile_mindformers(recipe, [rank], overrides=overrides)
        reading = read(graph, mesh, expected)
        groups: dict[tuple[Any, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for found in reading.collectives:
            total = groups[found.kind, found.group, found.ranks]
            total["calls"] += found.times
            total["mb"] += found.times * found.bytes / 1e6
            total["mb_certain"] += found.times * found.floor / 1e6
            total["mb_sent"] += found.times * found.sent / 1e6
        rows.append(
            {
                "name": name,
                "recipe": recipe,
                "overrides": overrides,
                "devices": graph.devices,
                "rank": rank,
                "build_seconds": round(graph.build_seconds, 1),
                "compile_seconds": round(graph.compile_seconds, 1),
                "peak_memory_gib": round(graph.peak_memory / 2**30, 2),
                "mindir_mb": round(len(graph.mindir) / 1e6, 1),
                "operators": sum(sum(counts.values()) for counts in reading.operators.values()),
                "recomputed": sum(reading.recomputed.values()),
                "collectives": [
                    {
                        "kind": kind,
                        "group": group,
                        "ranks": list(members),
                        **{k: round(v, 3) for k, v in total.items()},
                    }
                    for (kind, group, members), total in sorted(groups.items())
                ],
            }
        )
        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a rank."""
    print(
        f"{row['name']}: rank {row['rank']} of {row['devices']}: build {row['build_seconds']} s, compile "
        f"{row['compile_seconds']} s, {row['peak_memory_gib']} GiB, MindIR {row['mindir_mb']} MB, "
        f"{row['operators']} operators a step, {row['recomputed']} of them recomputed"
    )
    for c in row["collectives"]:
        print(
            f"  {c['kind']:14} {c['group']:10} of {len(c['ranks']):3}: {c['calls']:5.0f} calls, "
            f"{c['mb']:10.1f} MB ({c['mb_certain']:.1f} certain), {c['mb_sent']:10.1f} MB sent"
        )


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {name: version(name) for name in ("mindspore", "mindformers")},
        "command": "python -m benchmarks.dryrun_mindformers --json benchmarks/dryrun_mindformers.json",
        "cases": [row for name in args.cases for row in measure(name)],
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
