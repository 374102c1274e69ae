"""How well a device's constants are known: a normal distribution of their logarithms, from `devices/NAME.posterior.json`.

`python -m benchmarks.plan_published.posterior --write` computes these files from priors and published steps.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.columns import Floats, columns
from telechat_moe.tools.plan.cost.device import (
    FOLDER,
    Constants,
    Device,
    base_name,
    files_of,
)
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.step import evaluate_columns

NINETY = 1.645
"""Standard deviations on each side of the mean that hold 90 % of a normal distribution."""

STACK_FACTOR = "stack_factor"
"""The name beside the constants' of the factor of one software stack, once runs of it were measured (`calibration`)."""

_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "micro_batch", "micro_batches")
_WORDS = ("zero", "sequence_parallel", "schedule")


@dataclass(frozen=True)
class Prior:
    """What is known of a constant without any row."""

    value: float
    spread: float
    """Standard deviation of the logarithm."""
    source: str


@dataclass(frozen=True)
class Posterior:
    """Constants of a device and its variants: mean and covariance of their logarithms."""

    names: tuple[str, ...]
    mean: Floats
    covariance: Floats
    priors: dict[str, Prior]
    features: dict[str, int]
    """Rows that the fit saw: in total, and those with each feature of `features_of`."""
    stack_spread: float
    """Standard deviation of the logarithm of a software stack's own factor, common to all layouts."""
    row_spread: float
    """The same of a layout's own factor, which the model's structure does not explain."""
    alike: float
    """Distance between two layouts (see `distances`) at which their own factors are correlated by 1/e."""

    def interval(self, name: str) -> tuple[float, float, float]:
        """Return the median of a constant and the limits of its 90 % interval."""
        i = self.names.index(name)
        spread = NINETY * float(np.sqrt(self.covariance[i, i]))
        low, middle, high = np.exp(self.mean[i] + spread * np.array([-1, 0, 1]))
        return float(middle), float(low), float(min(high, upper_limit(name)))

    def known_from_rows(self, name: str) -> float:
        """Return the share of the prior's variance that the rows removed, 0 to 1."""
        i = self.names.index(name)
        return float(max(0.0, 1 - self.covariance[i, i] / self.priors[name].spread ** 2))

    def draws(self, device: Device, count: int, seed: int = 1) -> list[Device]:
        """Return the device with constants drawn from the distribution."""
        random = np.random.default_rng(seed)
        points = np.exp(random.multivariate_normal(self.mean, self.covariance, size=count))
        return [
            replace(device, constants=self.constants(device.constants, point)) for point in points
        ]

    def constants(self, base: Constants, point: Floats) -> Constants:
        """Return the constants at a point, shares at most 1, slowed by the stack's factor if it has one."""
        values = {n: min(float(v), upper_limit(n)) for n, v in zip(self.names, point, strict=True)}
        factor = values.pop(STACK_FACTOR, 1.0)
        return replace(base, **values).slowed(factor)

    def own_factors(self, layouts: list[Layout]) -> Floats:
        """Return the covariance of the layouts' own factors' logarithms, [n, n]."""
        return self.row_spread**2 * np.exp(-distances(layouts) / self.alike)

    def as_text(self, digits: int = 3) -> str:
        """Return the posterior's file, its covariance with so many digits."""
        constants = {
            name: {
                "value": float(f"{np.exp(m):.{digits + 1}g}"),
                "prior": asdict(self.priors[name]),
            }
            for name, m in zip(self.names, self.mean, strict=True)
        }
        covariance = [[float(f"{x:.{digits}g}") for x in row] for row in self.covariance]
        settings = {name: getattr(self, name) for name in ("stack_spread", "row_spread", "alike")}
        head = json.dumps({"rows": self.features, **settings, "constants": constants}, indent=1)
        lines = ",\n  ".join(map(json.dumps, covariance))
        return f'{head[:-2]},\n "covariance": [\n  {lines}\n ]\n}}\n'

    def missing(self, architecture: Architecture, layouts: list[Layout]) -> list[str]:
        """Return the features of these layouts that no row behind the constants has."""
        kinds = [features_of(architecture, x) for x in layouts]
        return [n for n in kinds[0] if any(k[n] for k in kinds) and not self.features.get(n)]

    def unmeasured(self, architecture: Architecture, layouts: list[Layout]) -> str:
        """Return `missing` as a sentence; empty: nothing is."""
        lacking = ", ".join(self.missing(architecture, layouts))
        head = f"none of the {self.features['rows']} measured steps behind these constants has: "
        return lacking and f"{head}{lacking}; there the constants are priors, not measurements"


def upper_limit(name: str) -> float:
    """Return the largest value that a constant can have: a share is at most 1."""
    return 1.0 if name.endswith(("share", "exposed")) else np.inf


def recomputation(x: Layout) -> str:
    """Return what a layout recomputes: nothing where its policy is applied to no layer."""
    return "none" if x.recompute_layers is not None and not any(x.recompute_layers) else x.recompute


def features_of(a: Architecture, x: Layout) -> dict[str, bool]:
    """Return which kinds of work and communication a run has."""
    return {
        "experts": bool(a.moe_layers),
        "MLA": a.mla,
        "expert parallelism": x.ep > 1,
        "tensor parallelism": x.tp > 1,
        "context parallelism": x.cp > 1,
        "pipeline": x.pp > 1,
        "interleaved pipeline": x.vpp > 1,
        "no recomputation": recomputation(x) == "none",
        "more than 64 devices": x.devices > 64,
        "FP8": x.compute == "fp8",
    }


def distances(layouts: list[Layout]) -> Floats:
    """Return how different layouts are, [n, n]: steps by two in each degree, and one for each other setting."""
    degrees = np.log2([[getattr(x, name) for name in _DEGREES] for x in layouts])
    steps = np.abs(degrees[:, None] - degrees[None]).sum(axis=2)
    words = [[recomputation(x), *(getattr(x, name) for name in _WORDS)] for x in layouts]
    others = [[sum(p != q for p, q in zip(a, b, strict=True)) for b in words] for a in words]
    return np.asarray(steps + np.array(others, dtype=np.float64), dtype=np.float64)


def predicted(pairs: list[tuple[Architecture, Layout]], devices: list[Device]) -> Floats:
    """Return the seconds of steps in closed form by each device, [devices, n]."""
    x = columns(pairs)
    return np.array([evaluate_columns(x, device, steps_only=True).step_s for device in devices])


def posterior_file(name: str | Path) -> Path:
    """Return the posterior beside a device's file, or else that of its nearest base, or where it would lie."""
    beside = (file.with_name(f"{file.stem}.posterior.json") for file in files_of(name))
    would_be = FOLDER / f"{base_name(name)}.posterior.json"
    return next((file for file in beside if file.is_file()), would_be)


def load_posterior(name: str | Path) -> Posterior | None:
    """Read the posterior of a shipped device, a variant of one, or a file with one as its base; None: there is none.

    Raises:
        BadInputError: The file is not what the command writes.
    """
    file = posterior_file(name)
    if not file.is_file():
        return None
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        entries: dict[str, Any] = raw["constants"]
        names = tuple(entries)
        unknown = set(names) - {STACK_FACTOR, *(f.name for f in fields(Constants))}
        if unknown:
            raise ValueError(f"no constant is called {min(unknown)}")
        return Posterior(
            names=names,
            mean=np.log([float(entries[n]["value"]) for n in names]),
            covariance=np.array(raw["covariance"], dtype=np.float64),
            priors={n: Prior(**entries[n]["prior"]) for n in names},
            features=raw["rows"],
            **{name: float(raw[name]) for name in ("stack_spread", "row_spread", "alike")},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(
            f"{file}: not a posterior ({error}); python -m benchmarks.plan_published.posterior --write writes it"
        ) from None


def unmeasured(name: str | Path, architecture: Architecture, layouts: list[Layout]) -> str:
    """Return what no measured step behind a device's constants has, as a sentence; empty: nothing, or nothing is known.

    Raises:
        BadInputError: There is no such device, or its posterior is not what the command writes.
    """
    posterior = load_posterior(name)
    return posterior.unmeasured(architecture, layouts) if posterior else ""
