"""Fit a device's constants to published steps, and measure how well they predict groups left out of the fit.

The residual is log(predicted / measured), so that errors count alike at all scales. A row weighs n^-0.35 with n the
rows of its table, so that tables of ten rows count beside tables of seven hundred. A robust loss keeps single odd runs
from pulling, and a prior holds constants that few rows determine: to `TYPICAL` where a device sets `prior_weight`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.columns import Columns, Floats, columns
from telechat_moe.tools.plan.cost.device import Constants, Device, base_name, load_device
from telechat_moe.tools.plan.cost.score import MeasuredStep, ScoredStep
from telechat_moe.tools.plan.cost.step import evaluate_columns

NEVER = {"inter_latency_s"}
"""Constants that no table determines, which keep their defaults."""

WITHOUT_FP8 = {"fp8_share"}

TYPICAL = {
    "matmul_share": 0.74,
    "matmul_half": 60.0,
    "attention_share": 0.42,
    "memory_share": 0.7,
    "fp8_share": 0.9,
    "eager_share": 0.9,
    "layer_host_s": 5e-4,
    "inter_share": 0.7,
    "exposed": 0.3,
    "tensor_exposed": 0.3,
    "step_host_s": 0.01,
}
"""Usual values for stacks that launch kernel by kernel; the prior where a device sets `prior_weight`."""

WEAK = 0.02
"""Weight of staying near the defaults on all other devices."""


class Problem:
    """Rows of a device and its variants with one set of constants."""

    def __init__(self, rows: Sequence[MeasuredStep], device: Device, default: str = "") -> None:
        self.rows = list(rows)
        self.device = device
        if not rows:
            raise BadInputError(f"fit {device.name}: no row to fit to")
        self.measured = np.log([row.step_s or np.nan for row in rows])
        count = Counter(row.table for row in rows)
        self.weight = np.array([count[row.table] ** -0.35 for row in rows])
        named = [load_device(row.device or default or device.name) for row in rows]
        self.variants: list[tuple[Device, Columns, NDArray[np.int64]]] = []
        for name in sorted({d.name for d in named}):
            index = np.array([i for i, d in enumerate(named) if d.name == name])
            pairs = [(self.rows[i].architecture, self.rows[i].layout) for i in index]
            self.variants.append((named[index[0]], columns(pairs), index))  # type: ignore[arg-type]

    def predict(self, constants: Constants) -> Floats:
        """Return predicted seconds of each row."""
        out = np.zeros(len(self.rows))
        for device, x, index in self.variants:
            out[index] = evaluate_columns(
                x, replace(device, constants=constants), steps_only=True
            ).step_s
        return out

    def without(self, keep: NDArray[np.bool_]) -> "Problem":
        """Return the problem of the rows kept."""
        return Problem([row for row, k in zip(self.rows, keep, strict=True) if k], self.device)


def free_constants(rows: Sequence[MeasuredStep], device: Device) -> list[str]:
    """Return the constants to fit: those that the rows can determine."""
    skip = NEVER | set(device.measured)
    layouts = [row.layout for row in rows if row.layout]
    if "fp8" not in device.peak_flops or not any(x.compute == "fp8" for x in layouts):
        skip |= WITHOUT_FP8
    if all(x.stack.fused for x in layouts):
        skip.add("eager_share")
    if not any(x.stack.tp_overlap for x in layouts):
        skip.add("tensor_exposed")
    return [name for name in asdict(Constants()) if name not in skip]


def fit(problem: Problem, start: Constants | None = None, evaluations: int = 40) -> Constants:
    """Return the constants that fit best.

    Args:
        start: Where to begin; the defaults if None.
        evaluations: Most evaluations with derivatives.
    """
    from scipy.optimize import least_squares

    given = {name: getattr(problem.device.constants, name) for name in problem.device.measured}
    base = replace(start or Constants(), **given)
    names = free_constants(problem.rows, problem.device)
    held = problem.device.prior_weight
    centre = asdict(Constants()) | (TYPICAL if held else {})
    prior = np.log([centre[name] for name in names])
    first = np.log([getattr(base, name) for name in names])
    shares = np.array([name.endswith("share") or name.endswith("exposed") for name in names])
    top = np.where(shares, 0.0, 10.0)

    def at(point: Floats) -> Constants:
        return replace(base, **{n: float(np.exp(v)) for n, v in zip(names, point, strict=True)})

    def residual(point: Floats) -> Floats:
        off = (np.log(problem.predict(at(point))) - problem.measured) * problem.weight * 10
        return np.concatenate([off, (held or WEAK) * (point - prior)])

    answer = least_squares(
        residual,
        np.minimum(first, top - 1e-3),
        bounds=(np.full(len(names), -25.0), top),
        loss="soft_l1",
        f_scale=0.05,
        max_nfev=evaluations,
    )
    return at(answer.x)


def held_out(
    problem: Problem,
    groups: Sequence[str],
    moved: Callable[[str, int, int | None], None] | None = None,
) -> Floats:
    """Return the prediction of each row by constants that were fitted without its group.

    Args:
        problem: Rows and device.
        groups: Group of each row.
        moved: Told what is refitted, how many groups are done and how many there are.
    """
    whole = fit(problem)
    names = np.array(groups)
    out = np.zeros(len(names))
    todo = sorted(set(groups))
    for done, group in enumerate(todo):
        if moved:
            moved(f"refitting {problem.device.name}", done, len(todo))
        here = names == group
        if here.all():
            raise BadInputError(
                f"fit {problem.device.name}: one group only ({group}); nothing is left to fit to"
            )
        constants = fit(problem.without(~here), whole, 6)
        out[here] = problem.without(here).predict(constants)
    return out


def refit(
    scored: Sequence[ScoredStep],
    default: str,
    by: str,
    moved: Callable[[str, int, int | None], None] | None = None,
) -> list[ScoredStep]:
    """Replace predictions by those of constants fitted without the row's group.

    Args:
        scored: What `score` returned.
        default: Device of rows that name none.
        by: `model` (a model of a table with all its scales) or `scale` (one scale of it).
        moved: Told what is refitted, how many groups are done and how many there are.
    """
    out = list(scored)
    bases: dict[str, list[int]] = defaultdict(list)
    for i, one in enumerate(scored):
        if one.error is not None:
            bases[base_name(one.row.device or default)].append(i)
    for base, index in bases.items():
        rows = [scored[i].row for i in index]
        groups = [row.group if by == "scale" else row.group.rsplit("/", 1)[0] for row in rows]
        predicted = held_out(Problem(rows, load_device(base), default), groups, moved)
        for i, seconds in zip(index, predicted, strict=True):
            out[i] = replace(out[i], step_s=float(seconds))
    return out
