"""How well predictions order layouts of one model on one cluster: `python -m benchmarks.plan_published.order [--rows]`.

A group is a model on a number of devices with one stack, of which a table has several layouts: with one global batch, or as the
table groups them. Times are those of a token. A third of the groups, chosen by a hash of table and model, is the test
(`--part test`): their rows are never looked at while the model's structure is worked on.
Regret is how much slower than the group's fastest run the layout is that is taken: the first that `plan layout` would try (of
those within 3 % of the predicted best the simplest), or the best of the first three. The rule of thumb takes no recomputation, the least tensor, then the least pipeline
parallelism, and the largest micro-batch.
"""

import argparse
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.command import answer, new_parser
from benchmarks.plan_published.fit import refit
from benchmarks.plan_published.tables import read_table
from benchmarks.plan_published.validate import checked
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.progress import bars
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.score import MeasuredStep, ScoredStep, score
from telechat_moe.tools.plan.cost.simulate_step import simulate_step
from telechat_moe.tools.plan.report.choice import first_to_try

DATA = Path(__file__).parent / "data"
TABLES = (
    "vtrain_a100_single.csv",
    "vtrain_a100_multi.csv",
    "megatron_bridge_perf.csv",
    "nvidia_dgxc_steps.csv",
    "llmfoundry_fsdp.csv",
    "published_steps.yaml",
    "mindformers_ascend.csv",
    "mindspeed_llm_ascend.csv",
    "layout_sweeps.csv",
)


@dataclass(frozen=True)
class OrderGroup:
    """Layouts of one model on one cluster: measured and predicted seconds of a token."""

    kind: str
    """Class of groups: the table, or the source within a table of several."""
    name: str
    layouts: tuple[Layout, ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...]

    def regret(self, order: Sequence[int], tried: int = 1) -> float:
        """Return by how much the fastest of the first ``tried`` layouts of an order is slower than the fastest of all."""
        return min(self.measured[i] for i in order[:tried]) / min(self.measured) - 1

    @property
    def predicted_order(self) -> list[int]:
        """The layouts as `plan layout` would try them."""
        return first_to_try(self.layouts, self.predicted)

    @property
    def rule_order(self) -> list[int]:
        """The layouts as the rule of thumb prefers them."""
        return sorted(range(len(self.layouts)), key=lambda i: rule(self.layouts[i]))

    @property
    def pairs(self) -> list[tuple[float, bool]]:
        """Of each pair the predicted difference, relative, and whether the order is right."""
        out: list[tuple[float, bool]] = []
        for i, j in combinations(range(len(self.layouts)), 2):
            first, second = self.predicted[i], self.predicted[j]
            right = (first < second) == (self.measured[i] < self.measured[j])
            out.append((abs(first - second) / min(first, second), right))
        return out

    @property
    def tau(self) -> float:
        """Kendall's tau of predicted and measured order."""
        right = [r for _, r in self.pairs]
        return 2 * sum(right) / len(right) - 1


def rule(layout: Layout) -> tuple[bool, int, int, int]:
    """Return the rule of thumb's preference, the least first."""
    return layout.recompute != "none", layout.tp, layout.pp, -layout.micro_batch


def key(row: MeasuredStep) -> tuple[object, ...]:
    """Return what layouts of one group have in common: model, cluster, software, and the batch where no group is given."""
    x = row.layout
    assert x
    if row.table.startswith("layout_sweeps"):
        return row.table, row.group
    software = row.source if row.table == "megatron_bridge_perf" else ""
    return (
        row.table, row.model, row.architecture and row.architecture.seq, row.device, x.devices, x.global_batch, x.compute, x.stack,
        software,
    )  # fmt: skip


def in_test(row: MeasuredStep) -> bool:
    """Return whether a row belongs to the third of the families that is the test."""
    family = f"{row.table} {row.architecture.name if row.architecture else ''}"
    return zlib.crc32(family.encode()) % 3 == 0


def token_s(seconds: float, row: MeasuredStep) -> float:
    """Return the seconds of a token of a step."""
    assert row.architecture
    assert row.layout
    return seconds / (row.layout.global_batch * row.architecture.seq)


def groups(scored: Sequence[ScoredStep]) -> list[OrderGroup]:
    """Return the groups with at least two layouts; equal layouts count once, with the median of their times."""
    cells: dict[tuple[object, ...], dict[Layout, list[ScoredStep]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for step in scored:
        if step.error is not None and step.row.layout:
            cells[key(step.row)][step.row.layout].append(step)
    out: list[OrderGroup] = []
    for layouts in cells.values():
        if len(layouts) > 1:
            rows = [steps[0].row for steps in layouts.values()]
            out.append(
                OrderGroup(
                    rows[0].table.removeprefix("published_steps/").removeprefix("layout_sweeps/"),
                    f"{rows[0].model} on {rows[0].layout.devices if rows[0].layout else 0}",
                    tuple(layouts),
                    tuple(
                        float(np.median([token_s(s.row.step_s or 0.0, s.row) for s in steps]))
                        for steps in layouts.values()
                    ),
                    tuple(
                        token_s(steps[0].step_s or 0.0, steps[0].row) for steps in layouts.values()
                    ),
                )
            )
    return out


def read_rows(tables: Sequence[str | Path], device: str = "a100") -> list[MeasuredStep]:
    """Return the rows of tables that can be predicted and have a time."""
    rows = [row for table in tables for row in read_table(table)]
    return [row for row in checked(rows, device) if not row.reason and row.step_s]


def simulated(step: ScoredStep) -> ScoredStep:
    """Return the row with the time of the event simulation, by which `plan layout` searches."""
    row = step.row
    if not row.architecture or not row.layout:
        return step
    result = simulate_step(row.architecture, row.layout, load_device(row.device or "a100"))
    return replace(step, step_s=result.step_s)


def line(name: str, members: Sequence[OrderGroup]) -> dict[str, float | str | int]:
    """Return a line of the summary: numbers of groups and layouts, tau, and mean and worst regrets."""
    first = [g.regret(g.predicted_order) for g in members]
    third = [g.regret(g.predicted_order, 3) for g in members]
    ruled = [g.regret(g.rule_order) for g in members]
    blind = [float(np.mean(g.measured)) / min(g.measured) - 1 for g in members]
    return {
        "class": name, "groups": len(members), "layouts": sum(len(g.layouts) for g in members),
        "tau": float(np.mean([g.tau for g in members])), "mean": float(np.mean(first)), "worst": max(first),
        "best_of_three": float(np.mean(third)), "rule": float(np.mean(ruled)), "rule_worst": max(ruled),
        "random": float(np.mean(blind)),
    }  # fmt: skip


def summary(members: Sequence[OrderGroup]) -> list[dict[str, float | str | int]]:
    """Return a line for each class, and one for all."""
    kinds: dict[str, list[OrderGroup]] = defaultdict(list)
    for group in members:
        kinds[group.kind].append(group)
    return [line(kind, of) for kind, of in kinds.items()] + [line("all", members)]


def run(args: argparse.Namespace) -> int:
    """Score the order and print it."""
    rows = read_rows(args.tables)
    if args.part != "all":
        rows = [row for row in rows if in_test(row) == (args.part == "test")]
    scored = score(rows, "a100")
    if args.held_out:
        with bars() as moved:
            scored = refit(scored, "a100", "model", moved)
    if args.simulated:
        scored = [simulated(step) for step in scored]
    members = groups(scored)
    lines = summary(members)
    if write_json(args.json, {"classes": lines}):
        return 0
    if args.rows:
        _show_groups(members)
    heads = (
        "class", "groups ", "layouts ", "tau ", "first: mean ", "worst ", "best of three ", "rule: mean ", "worst ", "any ",
    )  # fmt: skip
    show_table(
        heads,
        [
            [str(n["class"]), str(n["groups"]), str(n["layouts"]), f"{n['tau']:.2f}"]
            + [
                f"{float(n[name]) * 100:.1f} %"
                for name in ("mean", "worst", "best_of_three", "rule", "rule_worst", "random")
            ]
            for n in lines
        ],
    )
    return 0


def _show_groups(members: Sequence[OrderGroup]) -> None:
    for group in sorted(members, key=lambda g: -g.regret(g.predicted_order)):
        first = group.predicted_order
        best = int(np.argmin(group.measured))
        print(
            f"{group.kind} {group.name}: regret {group.regret(first):.1%}, rule {group.regret(group.rule_order):.1%}, "
            f"tau {group.tau:.2f}, {len(first)} layouts; took {group.layouts[first[0]].short()}, "
            f"fastest {group.layouts[best].short()} (place {first.index(best) + 1})"
        )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = new_parser("plan_published.order", __doc__)
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", default=[DATA / name for name in TABLES]
    )
    parser.add_argument("--rows", action="store_true", help="print every group")
    parser.add_argument(
        "--part", choices=("all", "train", "test"), default="all", help="the families to score"
    )
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="constants of each row fitted without its model; else the shipped ones",
    )
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="by the event simulation, as the search; else in closed form",
    )
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
