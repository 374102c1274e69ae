"""What recorded expert loads cost a step: experts in the recipe's order, moved where it pays, and hot experts copied.

Shapes: N records, L MoE layers, E experts.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.moe.assign import copy_loads, device_loads
from telechat_moe.moe.forecast import check_loads
from telechat_moe.moe.loads import summed_loads
from telechat_moe.moe.placement import SlotMap
from telechat_moe.moe.planner import MoveRule, copied, plan
from telechat_moe.reading import parse_json
from telechat_moe.tools.plan.cost.simulate_step import SimulatedStep, simulate_step
from telechat_moe.tools.plan.report.timeline import Table
from telechat_moe.units import gib_text, seconds_text

WINDOW = 4
"""Records that a placement is planned from: those just before the record that judges it."""

PROBE = 1.5
"""Imbalance at which the step's sensitivity to imbalance is taken."""


@dataclass(frozen=True)
class ExpertPlacementStep:
    """A step with one way to place experts."""

    name: str
    imbalance: float
    """Load of the busiest device over the mean, mean over layers and records."""
    step_s: float
    peak_bytes: float
    moved: float | None
    """Experts that move between two records, all layers together; None: not planned from where experts are."""
    move_s: float | None
    """Seconds of these moves."""


def read(path: str, layers: int, experts: int) -> tuple[NDArray[np.float64], int]:
    """Return the mean load of a step in each record, `[N, L, E]`, and the steps between two records.

    Args:
        path: A run's metrics.jsonl, whose lines `expert_loads` have `loads`, `[L][E]`, summed over `steps`.
        layers: MoE layers of the recipe, with those of multi-token prediction.
        experts: Experts of a layer.

    Raises:
        BadInputError: No such file, a line that is damaged, loads of another model, or fewer than two records.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read as a run's metrics: {error}") from None
    loads: list[NDArray[np.float64]] = []
    steps = 1
    for number, line in enumerate(lines, 1):
        if '"expert_loads"' not in line:
            continue
        place = f"{path}, line {number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise BadInputError(f"{place}: no record of expert loads ({error})") from None
        load_LE, steps = summed_loads(record, (layers, experts), place)
        try:
            loads.append(check_loads(load_LE[None] / steps)[0])
        except BadInputError as error:
            raise BadInputError(f"{place}: {error}") from None
    if len(loads) < 2:
        raise BadInputError(
            f"{path}: {len(loads)} lines of expert loads, expected two at least: one to plan from and one to judge"
        )
    return np.stack(loads), steps


def read_for(step: SimulatedStep, path: str) -> tuple[NDArray[np.float64], int]:
    """Return what `read` does, for the model and the layout of a step.

    Raises:
        UsageError: The recipe has no experts on several devices, so loads have no effect.
        BadInputError: `read` refuses the file.
    """
    a, layout = step.architecture, step.layout
    if not a.moe_layers or layout.ep == 1:
        reason = "has no experts"
        if a.moe_layers:
            reason = "keeps all experts on each device (expert_parallel 1)"
        raise UsageError(f"--expert-loads {path}: has no effect, as the recipe {reason}")
    return read(path, a.moe_layers + (a.mtp if a.layers[-1] == "moe" else 0), a.experts)


def judge(step: SimulatedStep, path: str, spare: int = 0) -> list[ExpertPlacementStep]:
    """Return the step with equal loads, with the recorded loads in the recipe's order, and with experts moved where it pays.

    Each placement is planned from the records before the one that judges it. With `spare` slots of each device for copies of
    hot experts, the step with these is the last.

    Raises:
        UsageError, BadInputError: As `read_for`.
    """
    a, layout = step.architecture, step.layout
    load_NLE, steps = read_for(step, path)
    layers = load_NLE.shape[1]
    rule = _rule(step, steps, float(load_NLE[0, 0].sum()) / layout.ep, layers)
    start = SlotMap.identity(layers, a.experts, layout.ep)
    place, recorded = start, "recorded loads, "
    before: list[float] = []
    after: list[float] = []
    copies: list[float] = []
    moves: list[tuple[int, float]] = []
    for n, next_LE in enumerate(load_NLE[1:], 1):
        known_NLE = load_NLE[max(0, n - WINDOW) : n]
        proposal = plan(known_NLE, place, rule)
        moved = int((proposal.placement.owners != place.owners).sum())
        moves.append((moved, float(proposal.cost_s.sum())))
        place = proposal.placement
        before.append(_imbalance(next_LE, start.owners, layout.ep))
        after.append(_imbalance(next_LE, place.owners, layout.ep))
        if spare:
            expert_LS, owner_LS, _ = copied(known_NLE.mean(axis=0), layout.ep, spare)
            copies.append(_imbalance(copy_loads(next_LE, expert_LS), owner_LS, layout.ep))
    mean_moves = [float(np.mean(values)) for values in zip(*moves, strict=True)]
    steps_placed = [
        _placed(step, "equal loads", [1.0]),
        _placed(step, recorded + "the recipe's order", before),
        _placed(step, recorded + "moved where it pays", after, *mean_moves),
    ]
    return steps_placed + (
        [_placed(step, f"{recorded}{spare} copies a device", copies)] if spare else []
    )


def _imbalance(
    load_LE: NDArray[np.float64], owner_LE: NDArray[np.integer[Any]], devices: int
) -> float:
    """Return the load of the busiest device over the mean, mean over the layers."""
    load_LD = device_loads(load_LE, owner_LE, devices)
    return float((load_LD.max(axis=1) / load_LD.mean(axis=1)).mean())


def _rule(step: SimulatedStep, steps: int, mean: float, layers: int) -> MoveRule:
    """Return what balance is worth in this step, all layers alike, and what moves cost on this device.

    An expert moves with its weights and its device's share of the optimizer. Moves go between nodes if the group does.
    """
    a, layout, device = step.architecture, step.layout, step.device
    slower = simulate_step(a, layout.with_changes(imbalance=PROBE), device).step_s
    faster = simulate_step(a, layout.with_changes(imbalance=1.0), device).step_s
    state = layout.optimizer_bytes / (layout.expert_copies if layout.zero else 1)
    c = device.constants
    within = layout.ep * layout.etp <= device.node_devices
    return MoveRule(
        seconds_per_pair=(slower - faster) / (PROBE - 1) / layers / mean,
        steps=steps,
        expert_bytes=a.expert_weights / layout.etp * (layout.parameter_bytes + state),
        bandwidth=device.intra_bandwidth * c.intra_share if within else device.inter_bandwidth * c.inter_share,
    )  # fmt: skip


def _placed(
    step: SimulatedStep,
    name: str,
    imbalances: list[float],
    moved: float | None = None,
    move_s: float | None = None,
) -> ExpertPlacementStep:
    """Return the step at the mean of these imbalances."""
    imbalance = float(np.mean(imbalances))
    layout = step.layout.with_changes(imbalance=imbalance)
    simulated = simulate_step(step.architecture, layout, step.device)
    peak = float(simulated.peak_bytes.max())
    return ExpertPlacementStep(name, imbalance, simulated.step_s, peak, moved, move_s)


def table(placements: list[ExpertPlacementStep]) -> Table:
    """Return what the command prints."""
    rows = [
        [
            p.name,
            f"{p.imbalance:.3f}",
            seconds_text(p.step_s),
            f"{(p.step_s / placements[0].step_s - 1) * 100:+.2f} %",
            gib_text(p.peak_bytes),
            "-" if p.moved is None else f"{p.moved:.1f}",
            "-" if p.move_s is None else seconds_text(p.move_s),
        ]
        for p in placements
    ]
    heads = ("experts", "busiest / mean ", "step ", "longer by ", "peak ", "moved a record ", "in ")
    return Table("Expert loads", heads, rows)


def data(placements: list[ExpertPlacementStep]) -> list[dict[str, Any]]:
    """Return the table as plain data."""
    return [asdict(p) for p in placements]
