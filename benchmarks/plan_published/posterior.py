"""How well the tables determine each device's constants: `python -m benchmarks.plan_published.posterior [--write]`.

The logarithm of a row's time is that of the prediction, plus a factor of its software stack, plus one of its own. Constants have
the priors of `priors.yaml`. The posterior is a normal distribution around the most probable point, with the curvature there
(Laplace). A table's n rows count as n^0.3, because the model's own errors repeat in them.

Prints for each device how often the 90 % interval holds rows of models, and of whole stacks, that the fit has not seen, and how often
the more probable order of two layouts is right; `--write` writes `devices/NAME.posterior.json`, `--picture` draws the last.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import least_squares
from scipy.special import ndtr

from benchmarks.command import answer, new_parser
from benchmarks.plan_published.fit import Problem
from benchmarks.plan_published.order import DATA, TABLES, key, read_rows
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.tools.plan.cost.columns import Floats
from telechat_moe.tools.plan.cost.device import Device, base_name, load_device
from telechat_moe.tools.plan.cost.posterior import (
    NINETY,
    Posterior,
    Prior,
    distances,
    features_of,
    posterior_file,
    upper_limit,
)
from telechat_moe.tools.plan.cost.score import MeasuredStep

DEVICES = ("a100", "h100", "b200", "ascend-910b")
MEASURED_SPREAD = 0.1
SIGMA = 0.08
"""Spread of a row in the fit, beyond which a robust loss takes over."""
STACK = 0.1
"""Prior spread of a stack's own factor: one layout on one device spans a factor of two by versions of the software."""
ROW, ALIKE = 0.08, 3.0
"""Spread of a row's own factor and the distance over which layouts share it, chosen by coverage and order of left-out models."""
STEP = 1e-4
"""Step of the derivatives, in logarithms."""


def priors(device: Device) -> dict[str, Prior]:
    """Return the priors of a device's constants."""
    raw: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "priors.yaml").read_text())
    entries: dict[str, Any] = raw["all"] | raw.get(device.name, {})
    out = {name: Prior(*entry) for name, entry in entries.items()}
    for name in device.measured:
        value = getattr(device.constants, name)
        out[name] = Prior(value, MEASURED_SPREAD, device.sources[f"constants.{name}"])
    if "fp8" not in device.peak_flops:
        del out["fp8_share"]
    return out


def stack_of(row: MeasuredStep) -> tuple[object, ...]:
    """Return what the rows of one software stack have in common."""
    assert row.layout
    return row.table, row.layout.stack, row.layout.fsdp


@dataclass
class PosteriorFit:
    """The fit to some rows: constants, then a factor of each stack."""

    problem: Problem
    priors: dict[str, Prior]
    rows: Sequence[MeasuredStep]

    def __post_init__(self) -> None:
        self.names = list(self.priors)
        self.stacks = list(dict.fromkeys(map(stack_of, self.rows)))
        self.index = np.array([self.stacks.index(stack_of(row)) for row in self.rows])
        count = Counter(row.table for row in self.rows)
        self.weight = np.array([count[row.table] ** -0.35 for row in self.rows])
        self.centre = np.log([p.value for p in self.priors.values()])
        self.spread = np.array([p.spread for p in self.priors.values()])
        self.top = np.minimum(10.0, np.log([upper_limit(n) for n in self.names]))

    def log_step(self, point: Floats, problem: Problem | None = None) -> Floats:
        """Return the logarithms of predicted times, without the stacks' factors."""
        problem = problem or self.problem
        values = dict(zip(self.names, np.exp(point[: len(self.names)]), strict=True))
        constants = problem.device.constants.__class__(
            **{**asdict(problem.device.constants), **values}
        )
        return np.log(problem.predict(constants))

    def slopes(self, point: Floats, problem: Problem | None = None) -> Floats:
        """Return the derivatives of the logarithms by those of the constants, [rows, constants]."""
        n = len(self.names)
        base = self.log_step(point, problem)
        moved = [self.log_step(point + STEP * -np.eye(len(point))[i], problem) for i in range(n)]
        return np.stack([(base - m) / STEP for m in moved], axis=1)

    def solve(self, start: Floats | None = None) -> Floats:
        """Find the most probable point, keep it with the covariance, and return it."""
        n, stacks = len(self.names), len(self.stacks)

        def residual(point: Floats) -> Floats:
            off = self.log_step(point) + point[n:][self.index] - self.problem.measured
            return np.concatenate(
                [
                    off * self.weight / SIGMA,
                    (point[:n] - self.centre) / self.spread,
                    point[n:] / STACK,
                ]
            )

        def jacobian(point: Floats) -> Floats:
            of_stack = np.eye(stacks)[self.index]
            top = np.hstack([self.slopes(point), of_stack]) * (self.weight / SIGMA)[:, None]
            return np.vstack(
                [top, np.diag(np.concatenate([1 / self.spread, np.full(stacks, 1 / STACK)]))]
            )

        first = np.zeros(n + stacks)
        first[:n] = np.minimum(self.centre if start is None else start, self.top - 1e-3)
        upper = np.concatenate([self.top, np.full(stacks, 3.0)])
        solution = least_squares(
            residual, first, jacobian, bounds=(np.full(n + stacks, -25.0), upper), loss="soft_l1", max_nfev=30
        )  # fmt: skip
        self.point: Floats = solution.x
        self.covariance: Floats = np.linalg.inv(solution.jac.T @ solution.jac)
        return self.point

    def left_out(self, rows: Sequence[MeasuredStep]) -> tuple[Floats, Floats, Floats]:
        """Return mean and covariance of the logarithms of unseen rows' times, and their measured logarithms.

        The covariance has that of constants and stacks, not the rows' own factors.
        """
        problem = Problem(rows, self.problem.device, self.problem.device.name)
        n = len(self.names)
        stack_shares = np.zeros((len(rows), len(self.stacks)))
        names = [stack_of(row) for row in rows]
        for i, name in enumerate(names):
            if name in self.stacks:
                stack_shares[i, self.stacks.index(name)] = 1.0
        slopes = np.hstack([self.slopes(self.point, problem), stack_shares])
        mean = self.log_step(self.point, problem) + stack_shares @ self.point[n:]
        new = np.array([[float(a == b and a not in self.stacks) for b in names] for a in names])
        return mean, slopes @ self.covariance @ slopes.T + STACK**2 * new, problem.measured


@dataclass
class DeviceRows:
    """The rows of a device and its variants, and what is computed of them."""

    name: str
    rows: list[MeasuredStep]

    @cached_property
    def all_rows(self) -> PosteriorFit:
        """The fit to all rows."""
        return self.fit(self.rows, None)

    def fit(self, rows: Sequence[MeasuredStep], start: Floats | None) -> PosteriorFit:
        """Return the fit to some of the rows."""
        device = load_device(self.name)
        fit = PosteriorFit(Problem(rows, device, self.name), priors(device), rows)
        fit.solve(start)
        return fit

    def posterior(self) -> Posterior:
        """Return what the device's file holds."""
        fit, n = self.all_rows, len(self.all_rows.names)
        features: Counter[str] = Counter(rows=len(self.rows))
        for row in self.rows:
            assert row.architecture
            assert row.layout
            features.update(
                {k: int(v) for k, v in features_of(row.architecture, row.layout).items()}
            )
        return Posterior(
            names=tuple(fit.names), mean=fit.point[:n], covariance=fit.covariance[:n, :n], priors=fit.priors,
            features=dict(features), stack_spread=STACK, row_spread=ROW, alike=ALIKE,
        )  # fmt: skip

    def unseen(self, by: str) -> list[tuple[list[MeasuredStep], Floats, Floats, Floats]]:
        """Return rows left out of a fit together, by `model` or `stack`, with what `left_out` says of them."""
        groups: dict[object, list[MeasuredStep]] = defaultdict(list)
        for row in self.rows:
            groups[(row.table, row.model) if by == "model" else stack_of(row)].append(row)
        start = self.all_rows.point[: len(self.all_rows.names)]
        out: list[tuple[list[MeasuredStep], Floats, Floats, Floats]] = []
        for members in groups.values():
            numbers = set(map(id, members))
            others = [row for row in self.rows if id(row) not in numbers]
            if others:
                out.append((members, *self.fit(others, start).left_out(members)))
        return out


def coverage(
    unseen: Sequence[tuple[list[MeasuredStep], Floats, Floats, Floats]], row_spread: float = ROW
) -> list[bool]:
    """Return for each left-out row whether its 90 % interval holds it."""
    out: list[bool] = []
    for _, mean, covariance, measured in unseen:
        spread = np.sqrt(np.diag(covariance) + row_spread**2)
        out += [bool(x) for x in np.abs(mean - measured) <= NINETY * spread]
    return out


def pairs(
    unseen: Sequence[tuple[list[MeasuredStep], Floats, Floats, Floats]],
    row_spread: float = ROW,
    alike: float = ALIKE,
) -> list[tuple[float, bool]]:
    """Return for each pair of layouts of one left-out group the probability of the more probable order, and whether it is right."""
    out: list[tuple[float, bool]] = []
    for rows, mean, covariance, measured in unseen:
        groups: dict[object, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            groups[key(row)].append(i)
        for index in groups.values():
            layouts = [row.layout for row in (rows[i] for i in index) if row.layout]
            tokens = np.log([x.global_batch for x in layouts])
            m, t = mean[index] - tokens, measured[index] - tokens
            factors = row_spread**2 * np.exp(-distances(layouts) / alike)
            both = covariance[np.ix_(index, index)] + factors
            for i in range(len(index)):
                for j in range(i):
                    if layouts[i] == layouts[j]:
                        continue
                    spread = np.sqrt(max(both[i, i] + both[j, j] - 2 * both[i, j], 1e-12))
                    sure = float(ndtr(abs(m[i] - m[j]) / spread))
                    out.append((sure, bool((m[i] < m[j]) == (t[i] < t[j]))))
    return out


def bins(of: Sequence[tuple[float, bool]]) -> list[tuple[float, float, int]]:
    """Return mean probability, frequency and number of pairs in bins of the probability."""
    edges = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0001]
    out: list[tuple[float, float, int]] = []
    for low, high in pairwise(edges):
        chosen = [(p, r) for p, r in of if low <= p < high]
        if chosen:
            sure, right = zip(*chosen, strict=True)
            out.append((float(np.mean(sure)), float(np.mean(right)), len(chosen)))
    return out


def read_devices(names: Sequence[str] = DEVICES) -> list[DeviceRows]:
    """Return the timed rows of all stored tables by device."""
    rows = read_rows([DATA / table for table in TABLES])
    of: dict[str, list[MeasuredStep]] = defaultdict(list)
    for row in rows:
        of[base_name(row.device or "a100")].append(row)
    return [DeviceRows(name, of[name]) for name in names]


def draw(of: Sequence[tuple[float, bool]], file: Path) -> None:
    """Draw the frequency of right order over its probability."""
    import matplotlib.pyplot as plt

    sure, right, count = zip(*bins(of), strict=True)
    figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    axes.plot([0.5, 1], [0.5, 1], color="0.7", linewidth=1)
    axes.plot(sure, right, "o-", color="#1f5fa8")
    for x, y, n in zip(sure, right, count, strict=True):
        axes.annotate(
            f"{n:,}",
            (x, y),
            (-6, -14) if x > 0.99 else (4, -12),
            ha="right" if x > 0.99 else "left",
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(
        xlabel="predicted probability that the first layout is faster", ylabel="how often it was", xlim=(0.5, 1.01), ylim=(0.45, 1.02)
    )  # fmt: skip
    figure.savefig(file, dpi=110, metadata={"Software": None})


def run(args: argparse.Namespace) -> int:
    """Fit, judge, write; return the exit code."""
    lines: list[dict[str, Any]] = []
    ordered: list[tuple[float, bool]] = []
    for device in read_devices(args.device or DEVICES):
        if args.write:
            posterior_file(device.name).write_text(device.posterior().as_text(), encoding="utf-8")
            continue
        models, stacks = device.unseen("model"), device.unseen("stack")
        ordered += pairs(models)
        covered = {"models": coverage(models), "stacks": coverage(stacks)}
        lines.append(
            {
                "device": device.name,
                "rows": len(device.rows),
                **{k: sum(v) / len(v) for k, v in covered.items()},
            }
        )
    if args.write:
        return 0
    total = sum(line["rows"] for line in lines)
    means = {k: sum(line[k] * line["rows"] for line in lines) / total for k in ("models", "stacks")}
    lines.append({"device": "all", "rows": total, **means})
    if args.picture:
        draw(ordered, args.picture)
    order = [{"probability": p, "right": r, "pairs": n} for p, r, n in bins(ordered)]
    if write_json(args.json, {"coverage": lines, "order": order}):
        return 0
    print("share of left-out rows within their 90 % interval\n")
    cells = [
        [x["device"], str(x["rows"]), *(f"{x[k] * 100:.1f} %" for k in ("models", "stacks"))]
        for x in lines
    ]
    show_table(["device", "rows ", "models left out ", "stacks left out "], cells)
    print("\norder of two layouts of a left-out model\n")
    cells = [
        [f"{x['probability'] * 100:.1f} %", f"{x['right'] * 100:.1f} %", str(x["pairs"])]
        for x in order
    ]
    show_table(["probability ", "right ", "pairs "], cells)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = new_parser("plan_published.posterior", __doc__)
    parser.add_argument(
        "--device", action="append", choices=DEVICES, help="this one only; may be repeated"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the files beside the devices' descriptions"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw right order over its probability"
    )
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
