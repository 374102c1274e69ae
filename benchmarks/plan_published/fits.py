"""Probability that published runs fit in memory: `python -m benchmarks.plan_published.fits`.

The logarithm of what a run needs over what is predicted is a factor of its software stack (fragmentation, buffers of libraries, gradient bytes,
what its kernels keep) and one of its own. A run finished where that is below the device's memory over the prediction. The stack's factor of
each model's runs is learned from the other models' runs of the same table, and has the prior of `cost/fitting.py`.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from benchmarks.command import answer, new_parser
from benchmarks.plan_published.order import DATA, TABLES
from benchmarks.plan_published.posterior import bins
from benchmarks.plan_published.tables import read_table
from benchmarks.plan_published.validate import checked
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.tools.plan.cost.columns import Floats
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.fitting import STACK_MEAN, STACK_SPREAD, probability_to_fit, room
from telechat_moe.tools.plan.cost.score import MeasuredStep
from telechat_moe.tools.plan.cost.step import evaluate

GRID = np.linspace(-0.6, 0.9, 301)
"""Logarithms of the stack's factor."""


def runs(device: str = "a100") -> list[tuple[MeasuredStep, float]]:
    """Return the runs that finished or ran out of memory, with the logarithm of memory over prediction."""
    rows = [row for table in TABLES for row in read_table(DATA / table)]
    out: list[tuple[MeasuredStep, float]] = []
    for row in checked(rows, device):
        if not row.reason and row.architecture and row.layout and (row.step_s or row.out_of_memory):
            target = load_device(row.device or device)
            peak = float(evaluate(row.architecture, [row.layout], target).memory.peak[0].max())
            out.append((row, room(peak, target.memory_bytes)))
    return out


def learned(rooms: Floats, finished: Floats) -> Floats:
    """Return the probabilities of a stack's factor on `GRID` after runs that finished (1) or ran out of memory (0)."""
    fit = probability_to_fit(rooms[:, None], GRID[None], 0.0)
    likelihood = np.log(np.where(finished[:, None] > 0, fit, 1 - fit) + 1e-6).sum(axis=0)
    prior = -((GRID - STACK_MEAN) ** 2) / (2 * STACK_SPREAD**2)
    weights = np.exp(likelihood + prior - (likelihood + prior).max())
    return weights / weights.sum()


def judged(of: Sequence[tuple[MeasuredStep, float]]) -> list[tuple[MeasuredStep, float]]:
    """Return each run with its probability to fit, its stack's factor learned from the table's other models."""
    tables: dict[str, list[int]] = defaultdict(list)
    for i, (row, _) in enumerate(of):
        tables[row.table].append(i)
    rooms = np.array([z for _, z in of])
    finished = np.array([float(not row.out_of_memory) for row, _ in of])
    out: list[tuple[MeasuredStep, float]] = []
    for index in tables.values():
        for model in dict.fromkeys(of[i][0].group for i in index):
            others = [i for i in index if of[i][0].group != model]
            weights = learned(rooms[others], finished[others])
            for i in index:
                if of[i][0].group == model:
                    out.append((of[i][0], float(weights @ probability_to_fit(rooms[i], GRID, 0.0))))
    return out


def run(args: argparse.Namespace) -> int:
    """Judge the runs and print shares of wrong judgements and the calibration."""
    probabilities = judged(runs())
    tables: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for row, p in probabilities:
        tables[row.table.removeprefix("published_steps/").removeprefix("layout_sweeps/")].append(
            (row.out_of_memory, p)
        )
    tables["all"] = [(row.out_of_memory, p) for row, p in probabilities]
    lines = [
        {
            "table": name,
            "finished": sum(not ended for ended, _ in of),
            "judged_not": float(np.mean([p < 0.5 for ended, p in of if not ended] or [0.0])),
            "out_of_memory": sum(ended for ended, _ in of),
            "judged_to_fit": float(np.mean([p >= 0.5 for ended, p in of if ended] or [0.0])),
        }
        for name, of in tables.items()
    ]
    sure = [(max(p, 1 - p), (p >= 0.5) != ended) for ended, p in tables["all"]]
    calibration = [{"probability": p, "right": r, "runs": n} for p, r, n in bins(sure)]
    if write_json(args.json, {"tables": lines, "calibration": calibration}):
        return 0
    heads = ["table", "finished ", "judged not to fit ", "out of memory ", "judged to fit "]
    cells = [
        [str(x["table"]), str(x["finished"]), f"{float(x['judged_not']) * 100:.1f} %", str(x["out_of_memory"]),
         f"{float(x['judged_to_fit']) * 100:.1f} %" if x["out_of_memory"] else "-"]
        for x in lines
    ]  # fmt: skip
    show_table(heads, cells)
    print()
    cells = [
        [f"{x['probability'] * 100:.1f} %", f"{x['right'] * 100:.1f} %", str(x["runs"])]
        for x in calibration
    ]
    show_table(["probability ", "right ", "runs "], cells)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = new_parser("plan_published.fits", __doc__)
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
