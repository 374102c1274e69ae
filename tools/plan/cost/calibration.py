"""Narrow the posterior of a device by measurements: steps of one software stack, and collectives.

Around the most probable point, in logarithms. The stack's factor is common to all steps, so that one of them mostly fixes it; the rows' own factors are
those of `posterior`. Collectives do not have the stack's factor.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.reading import read_text
from telechat_moe.recipe import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.collective_tables import (
    TABLE,
    MeasuredCollective,
    read_collectives,
)
from telechat_moe.tools.plan.cost.columns import Floats, columns
from telechat_moe.tools.plan.cost.device import FOLDER, Device, files_of, load_device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.measured_steps import median_step, read_measured_steps
from telechat_moe.tools.plan.cost.posterior import (
    STACK_FACTOR,
    Posterior,
    Prior,
    distances,
    features_of,
    load_posterior,
    upper_limit,
)
from telechat_moe.tools.plan.cost.score import MeasuredStep, checked
from telechat_moe.tools.plan.cost.step import evaluate_columns

NOISE = 0.01
"""Standard deviation of the logarithm of a measurement that is repeated."""
STEP = 1e-4
"""Step of the derivatives, in logarithms."""


@dataclass(frozen=True)
class Measurements:
    """What a user measured on one device with one stack."""

    steps: Sequence[MeasuredStep] = ()
    collectives: Sequence[MeasuredCollective] = ()

    @property
    def logarithms(self) -> Floats:
        """Logarithms of the measured seconds, steps first."""
        seconds = [x.step_s or 0.0 for x in self.steps] + [x.seconds for x in self.collectives]
        return np.log(np.array(seconds, dtype=np.float64))

    @property
    def names(self) -> list[str]:
        """Where each row is from."""
        return [f"{x.table}:{x.line}" for x in (*self.steps, *self.collectives)]

    def pairs(self) -> list[tuple[Architecture, Layout]]:
        """Return models and layouts of the steps."""
        return [(x.architecture, x.layout) for x in self.steps if x.architecture and x.layout]

    def predicted(self, device: Device, factor: float | None = None) -> Floats:
        """Return the logarithms of predicted seconds; ``factor`` is that of the stack, of the device if None."""
        factor = device.stack_factor if factor is None else factor
        seconds = [float(x.predicted(device)[0]) / factor for x in self.collectives]
        if self.steps:
            x = columns(self.pairs())
            seconds = [*evaluate_columns(x, device, steps_only=True).step_s.tolist(), *seconds]
        return np.log(seconds)

    def covariance(self, posterior: Posterior) -> Floats:
        """Return the covariance of the rows' own factors, [n, n]: of steps by layout and model, of collectives by size, ranks and nodes."""
        n, m = len(self.steps), len(self.collectives)
        apart = np.full((n + m, n + m), np.inf)
        if n:
            pairs = self.pairs()
            others = [[float(a is not b and a != b) for b, _ in pairs] for a, _ in pairs]
            apart[:n, :n] = distances([x for _, x in pairs]) + posterior.alike * np.array(others)
        for i, row in enumerate(self.collectives):
            apart[n + i, n:] = [row.unlike(other) for other in self.collectives]
        both = posterior.row_spread**2 * np.exp(-apart / posterior.alike)
        return both + NOISE**2 * np.eye(n + m)


def read_sources(
    sources: Sequence[str], device: str, recipe: str | None, overrides: Sequence[str] = ()
) -> Measurements:
    """Read tables of `plan score` (.csv), runs and logs of the recipe, and what hccl_test and nccl-tests printed.

    Raises:
        BadInputError: A source or a row cannot be used; names file, line and column.
    """
    steps: list[MeasuredStep] = []
    collectives: list[MeasuredCollective] = []
    for source in map(Path, sources):
        text = "" if source.is_dir() else read_text(source)
        if source.suffix == ".csv":
            steps += [_usable(row, source, device) for row in read_measured_steps(source)]
        elif TABLE.search(text):
            collectives += read_collectives(source, text)
        elif recipe is None:
            raise BadInputError(
                f"{source}: a run or its log, expected with the recipe that it ran: plan calibrate RECIPE --from {source}"
            )
        else:
            config = load(recipe, list(overrides))
            row = MeasuredStep(
                table=str(source), line=1, model=recipe, device="", architecture=Architecture.from_recipe(config),
                layout=Layout.from_recipe(config), step_s=median_step(str(source)),
            )  # fmt: skip
            steps.append(_usable(row, source, device))
    if not steps and not collectives:
        raise BadInputError(f"{', '.join(sources)}: no row, expected measured steps or collectives")
    return Measurements(steps, collectives)


def _usable(row: MeasuredStep, source: Path, device: str) -> MeasuredStep:
    """Return a row of this device with a time."""
    row_of_file = f"{source}:{row.line}"
    if not row.step_s and not row.reason:
        raise BadInputError(
            f"{row_of_file}: column step_s: empty, expected seconds of a step, or a log"
        )
    [row] = checked([row], device)
    if row.reason:
        raise BadInputError(f"{row_of_file}: {row.reason.replace('missing:', 'expected')}")
    if row.device and load_device(row.device) != load_device(device):
        raise BadInputError(
            f"{row_of_file}: column device: {row.device}, expected rows of {device} only; calibrate each device by itself"
        )
    return replace(row, table=str(source))


def prior_of(device: str) -> Posterior:
    """Return what is known of a device, with the factor of a new stack.

    Raises:
        BadInputError: Nothing is known.
    """
    prior = load_posterior(device)
    if prior is None:
        raise BadInputError(
            f"device {device}: its constants have no posterior to narrow; expected a shipped device, or a file with one as base"
        )
    return with_factor(prior)


def with_factor(prior: Posterior) -> Posterior:
    """Return the posterior with the factor of a stack of which nothing is known, unless it has a factor."""
    if STACK_FACTOR in prior.names:
        return prior
    n = len(prior.names)
    covariance = np.zeros((n + 1, n + 1))
    covariance[:n, :n], covariance[n, n] = prior.covariance, prior.stack_spread**2
    source = "a software stack's own factor, by the published steps"
    return replace(
        prior, names=(*prior.names, STACK_FACTOR), mean=np.append(prior.mean, 0.0), covariance=covariance, stack_spread=0.0,
        priors={**prior.priors, STACK_FACTOR: Prior(1.0, prior.stack_spread, source)},
    )  # fmt: skip


def update(prior: Posterior, device: Device, rows: Measurements) -> Posterior:
    """Return the posterior after the measurements (Laplace); the prior has a factor of the stack."""
    from scipy.optimize import least_squares

    names, n = prior.names, len(prior.names)
    row_root = np.linalg.inv(np.linalg.cholesky(rows.covariance(prior)))
    root = np.linalg.inv(np.linalg.cholesky(prior.covariance))
    measured = rows.logarithms

    def log_seconds(point: Floats) -> Floats:
        moved = replace(device, constants=prior.constants(device.constants, np.exp(point)))
        return rows.predicted(moved, float(np.exp(point[names.index(STACK_FACTOR)])))

    def residual(point: Floats) -> Floats:
        off = row_root @ (log_seconds(point) - measured)
        return np.concatenate([off, root @ (point - prior.mean)])

    def jacobian(point: Floats) -> Floats:
        base = log_seconds(point)
        moved = [log_seconds(point - STEP * np.eye(n)[i]) for i in range(n)]
        return np.vstack([row_root @ (base - np.array(moved)).T / STEP, root])

    top = np.minimum(25.0, np.log([upper_limit(name) for name in names]))
    start = np.minimum(prior.mean, top - 1e-6)
    solution = least_squares(residual, start, jac=jacobian, bounds=(np.full(n, -25.0), top))
    slopes = jacobian(solution.x)
    covariance = np.linalg.inv(slopes.T @ slopes)
    features = Counter(prior.features)
    for pair in rows.pairs():
        features.update(rows=1, **{k: int(v) for k, v in features_of(*pair).items()})
    return replace(prior, mean=solution.x, covariance=covariance, features=dict(features))


def write(posterior: Posterior, device: str, out: Path, sources: Sequence[str]) -> Path:
    """Write the device's file and its posterior beside it, and return the latter's path.

    Raises:
        BadInputError: The file would be its own base.
    """
    import yaml

    base = files_of(device)[0]
    shipped = base.parent == FOLDER
    name = base.stem if shipped else os.path.relpath(base.with_suffix(""), out.parent)
    if (out.parent / f"{name}.yaml").resolve() == out.resolve():
        raise BadInputError(f"--out {out}: has the name of its base; expected another")
    source = f"calibrated by {', '.join(sources)}"
    values = {
        n: float(f"{v:.6g}") for n, v in zip(posterior.names, np.exp(posterior.mean), strict=True)
    }
    factor = values.pop(STACK_FACTOR)
    document = {
        "base": name,
        "stack_factor": factor,
        "sources": {STACK_FACTOR: source},
        "constants": {
            n: {"value": v, "source": source, "fitted": False} for n, v in values.items()
        },
    }
    out.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    beside = out.with_name(f"{out.stem}.posterior.json")
    beside.write_text(posterior.as_text(6), encoding="utf-8")
    return beside
