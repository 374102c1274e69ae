"""How close predictions of a stack's other rows are after one calibrating run: `python -m benchmarks.plan_published.calibration`.

Every stack with at least three rows is left out of the fit; then one of its rows calibrates the posterior, as `plan calibrate` does, and predicts the
others. Of a stack with many rows twelve are calibrating runs in turn. Beside it the error without a calibration, and after a median factor of all rows.
Regret is that of the layout that is tried first (`order`), over the groups of the other rows.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.command import answer, new_parser
from benchmarks.plan_published.order import groups
from benchmarks.plan_published.posterior import (
    ALIKE,
    DEVICES,
    ROW,
    STACK,
    DeviceRows,
    PosteriorFit,
    read_devices,
    stack_of,
)
from telechat_moe.cli.arguments import add_json
from telechat_moe.cli.output import show_table, write_json
from telechat_moe.cli.progress import bars
from telechat_moe.tools.plan.cost.calibration import Measurements, update, with_factor
from telechat_moe.tools.plan.cost.columns import Floats
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.posterior import Posterior
from telechat_moe.tools.plan.cost.score import MeasuredStep, ScoredStep

RUNS = 12
"""Most calibrating runs of one stack."""


@dataclass(frozen=True)
class Calibrated:
    """A stack's rows on one device, and the logarithms of predictions over measurements."""

    name: str
    rows: list[MeasuredStep]
    before: Floats
    after: Floats
    """[runs, rows] after each calibrating run; nan for the run itself."""

    @property
    def errors(self) -> dict[str, float]:
        """Mean errors before, after a median factor of all rows, and after one calibrating run."""
        scaled = self.before - np.median(self.before)
        after = self.after[~np.isnan(self.after)]
        parts = {"unscaled": self.before, "median_factor": scaled, "calibrated": after}
        return {name: float(np.abs(np.expm1(x)).mean()) for name, x in parts.items()}

    def regrets(self) -> list[float]:
        """Return the regret of the first layout in each group of other rows, for each calibrating run."""
        out: list[float] = []
        for ratios in self.after:
            scored = [
                ScoredStep(row=row, step_s=float(np.exp(x)) * (row.step_s or 0.0))
                for row, x in zip(self.rows, ratios, strict=True)
                if not np.isnan(x)
            ]
            out += [group.regret(group.predicted_order) for group in groups(scored)]
        return out


def prior_without(device: DeviceRows, members: Sequence[MeasuredStep]) -> Posterior:
    """Return the posterior of a fit that has not seen these rows."""
    left = set(map(id, members))
    n = len(device.all_rows.names)
    others = [row for row in device.rows if id(row) not in left]
    fit: PosteriorFit = device.fit(others, device.all_rows.point[:n])
    posterior = Posterior(
        names=tuple(fit.names), mean=fit.point[:n], covariance=fit.covariance[:n, :n], priors=fit.priors, features={"rows": 0},
        stack_spread=STACK, row_spread=ROW, alike=ALIKE,
    )  # fmt: skip
    return with_factor(posterior)


def calibrated(name: str, rows: list[MeasuredStep], prior: Posterior, device: str) -> Calibrated:
    """Calibrate with one row after another and predict the others."""
    described = load_device(rows[0].device or device)
    target = replace(described, constants=prior.constants(described.constants, np.exp(prior.mean)))
    everything = Measurements(rows)
    before = everything.predicted(target) - everything.logarithms
    runs = np.unique(np.linspace(0, len(rows) - 1, min(RUNS, len(rows))).round().astype(int))
    after = np.full((len(runs), len(rows)), np.nan)
    for i, run in enumerate(runs):
        posterior = update(prior, described, Measurements([rows[run]]))
        constants = posterior.constants(described.constants, np.exp(posterior.mean))
        after[i] = (
            everything.predicted(replace(described, constants=constants)) - everything.logarithms
        )
        after[i, run] = np.nan
    return Calibrated(name, rows, before, after)


def stacks(device: DeviceRows) -> list[Calibrated]:
    """Return all stacks of a device with at least three rows on it or on one of its variants."""
    of: dict[object, list[MeasuredStep]] = {}
    for row in device.rows:
        of.setdefault(stack_of(row), []).append(row)
    out: list[Calibrated] = []
    with bars() as move:
        for number, members in enumerate(of.values()):
            move(f"stacks of {device.name}", number, len(of))
            if len(members) == len(device.rows):
                continue
            prior = prior_without(device, members)
            for name in dict.fromkeys(row.device for row in members):
                rows = [row for row in members if row.device == name]
                if len(rows) > 2:
                    out.append(calibrated(f"{rows[0].table} {name}", rows, prior, device.name))
    return out


def run(args: argparse.Namespace) -> int:
    """Calibrate every stack and print the errors; return the exit code."""
    every = [stack for device in read_devices(args.device or DEVICES) for stack in stacks(device)]
    lines: list[dict[str, Any]] = [
        {
            "stack": s.name,
            "rows": len(s.rows),
            **s.errors,
            "groups": len(r := s.regrets()),
            "regret": sum(r),
        }
        for s in every
    ]
    total = sum(x["rows"] for x in lines)
    parts = ("unscaled", "median_factor", "calibrated")
    lines += [
        {"stack": "mean of stacks", "rows": total, **{p: float(np.mean([x[p] for x in lines])) for p in parts}},
        {"stack": "mean of rows", "rows": total, **{p: sum(x[p] * x["rows"] for x in lines) / total for p in parts}},
    ]  # fmt: skip
    for x in lines[-2:]:
        x |= {name: sum(y[name] for y in lines[: len(every)]) for name in ("groups", "regret")}
    for x in lines:
        x["regret"] = x["regret"] / x["groups"] if x["groups"] else None
    if write_json(args.json, {"stacks": lines}):
        return 0
    cells = [
        [x["stack"], str(x["rows"]), *(f"{x[p] * 100:.1f} %" for p in parts), "-" if x["regret"] is None else f"{x['regret'] * 100:.1f} %"]
        for x in lines
    ]  # fmt: skip
    show_table(["stack", "rows ", "unscaled ", "median factor ", "calibrated ", "regret "], cells)
    above = sum(x["calibrated"] > 0.1 for x in lines[: len(every)])
    worse = sum(x["calibrated"] > x["unscaled"] for x in lines[: len(every)])
    print(
        f"\nof {len(every)} stacks 10 % is missed by {above}; the error grows in {worse} by calibrating"
    )
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = new_parser("plan_published.calibration", __doc__)
    parser.add_argument(
        "--device", action="append", choices=DEVICES, help="this one only; may be repeated"
    )
    add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return answer(build_parser(), run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
