"""The first step of a start that compiles its graph, and of one that takes the graph which an earlier start has kept.

    python -m benchmarks.train_step.first_step [--rounds 5] [--recipe FILE] [--json FILE]

Each start is a `telechat-moe train` of two steps on random tokens, a process of its own; the two kinds take turns. All
must take the same steps, bit for bit. The first step contains the compilation; reading the graph and the step itself
remain where it is kept.

--json keys: machine, recipe, kept_bytes (on the disk), starts {compiled, kept: first_step_seconds {min, median, each},
process_seconds {min, median, each}}.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.data import write_indexed
from telechat_moe.recipe import load

SAID = {
    "compiled": "compiling the graph of a step",
    "kept": "the graph of a step is kept from an earlier start",
}


def settings(recipe_name: str, folder: Path) -> list[str]:
    """Write random tokens for two steps; return the overrides with which a recipe trains on them."""
    recipe = load(recipe_name)
    samples, length = 2 * recipe.global_batch, recipe.model_config.seq_length
    tokens = np.random.default_rng(0).integers(
        0, recipe.model_config.vocab_size, samples * length + 1
    )
    write_indexed(folder / "train", [tokens.astype(np.uint16)], np.dtype(np.uint16))
    return [
        f"output_dir={folder / 'run'}",
        f"train_dataset.data_loader.sizes=[{samples},0,0]",
        f"train_dataset.data_loader.config.data_path=['1', '{folder / 'train'}']",
        "lr_schedule.warmup_steps=0",
        "telechat_moe.evaluation.interval=0",
        "telechat_moe.sample=null",
    ]  # fmt: skip


def start(command: list[str], kind: str, home: Path, output: Path) -> dict[str, Any]:
    """Train in a process whose cache is below ``home``; return seconds and what the steps computed."""
    began = time.perf_counter()
    env = {**os.environ, "XDG_CACHE_HOME": str(home), "GLOG_v": "3"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode or SAID[kind] not in done.stderr or "not kept" in done.stderr:
        raise SystemExit(f"{kind}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    steps = [(x["loss"], x["grad_norm"]) for x in lines if x["event"] == "step"]
    first = json.loads((output / "summary.json").read_text())["first_step_seconds"]
    return {"first_step_seconds": first, "process_seconds": took, "steps": steps}


def measure(recipe: str, rounds: int) -> dict[str, Any]:
    """Start in turns, after one start of each kind that is not counted."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in SAID}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        words = [x for override in settings(recipe, folder) for x in ("--set", override)]
        command = [sys.executable, "-m", "telechat_moe.cli", "train", recipe, "--overwrite"]
        command += ["--plain", *words]
        first = start(command, "compiled", folder / "kept", folder / "run")
        start(command, "kept", folder / "kept", folder / "run")
        for i in range(rounds):
            for kind, rows in found.items():
                home = folder / ("kept" if kind == "kept" else f"home {i}")
                rows.append(start(command, kind, home, folder / "run"))
                if rows[-1].pop("steps") != first["steps"]:
                    raise SystemExit(f"the steps of a start that is {kind} are others")
        (file,) = (folder / "kept" / "telechat-moe" / "graphs").iterdir()
        size = file.stat().st_size
    starts: dict[str, Any] = {}
    for kind, rows in found.items():
        each = {key: [row[key] for row in rows] for key in rows[0]}
        starts[kind] = {
            key: {"min": min(x), "median": statistics.median(x), "each": x}
            for key, x in each.items()
        }
    return {"machine": machine(), "recipe": recipe, "kept_bytes": size, "starts": starts}


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipe", default="telechat3_moe/pretrain_19m.yaml")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    result = measure(args.recipe, args.rounds)
    if not write_json(args.json, result):
        print(f"{result['recipe']}, {result['machine']}; {result['kept_bytes'] / 1e3:.0f} kB kept")
        rows = [
            (kind, *(f"{found[key][least]:.2f}" for key in found for least in ("min", "median")))
            for kind, found in result["starts"].items()
        ]
        show_table(("graph", "first step s, min ", "median ", "process s, min ", "median "), rows)


if __name__ == "__main__":
    main()
