"""Will a step fit into memory, at which imbalance of the experts, and what to change first: `plan memory`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.moe.assign import device_loads
from telechat_moe.moe.placement import SlotMap
from telechat_moe.recipe.load import load
from telechat_moe.recipe.schema import Recipe
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Device, load_device
from telechat_moe.tools.plan.cost.fitting import probability_of_graph
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.simulate_step import SimulatedStep, simulate_step
from telechat_moe.tools.plan.report.expert_loads import read_for
from telechat_moe.tools.plan.report.step import per_stage
from telechat_moe.tools.plan.report.timeline import Table
from telechat_moe.tools.plan.search.emit import settings
from telechat_moe.tools.plan.search.layer_memory import choose
from telechat_moe.units import GIB, gib_text, seconds_text

MARGIN = 0.05
"""Share of the peak that is added for the allocator's fragmentation and the model's error."""

PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True)
class Change:
    """The step with one thing changed, devices and sequences of a step as before."""

    name: str
    overrides: tuple[str, ...]
    step: SimulatedStep


@dataclass(frozen=True)
class MemoryForecast:
    """What `plan memory` says of a recipe."""

    step: SimulatedStep
    limit_bytes: float
    """What the step may use of a device: `--memory`, `context.max_device_memory`, or the device without what it reserves."""
    limit_from: str
    margin: float
    largest_factor: float | None
    """Largest load factor that fits, at most `expert_parallel`, where one device gets all tokens; None: not even 1 fits,
    or the load has no effect."""
    recorded: tuple[tuple[int, float, float], ...]
    """Percentile of the records, load factor, peak bytes."""
    host: float
    """What a device may use of the host's memory, bytes."""
    changes: tuple[Change, ...]
    """Those that recipes can say, fastest first; those that do not fit come last."""

    def needs(self, step: SimulatedStep) -> float:
        """Return the bytes that the fullest stage needs, with the margin."""
        return float(step.peak_bytes.max()) * (1 + self.margin)

    def fits(self, step: SimulatedStep) -> bool:
        """Return whether all stages fit, with the margin."""
        return self.needs(step) <= self.limit_bytes

    @property
    def probability(self) -> float:
        """How probable it is that the recipe fits, over the ranges of what is not counted; without the routing's imbalance."""
        return probability_of_graph(float(self.step.peak_bytes.max()), self.limit_bytes)

    @property
    def first(self) -> Change | None:
        """The change to make first: the fastest that fits, if it is faster or the recipe does not fit."""
        best = self.changes[0] if self.changes else None
        if best is None or not self.fits(best.step):
            return None
        return best if not self.fits(self.step) or best.step.step_s < self.step.step_s else None


def answer(
    name: str,
    overrides: Sequence[str],
    device: Device,
    margin: float = MARGIN,
    memory: int | None = None,
    expert_loads: str | None = None,
    host: float = np.inf,
) -> MemoryForecast:
    """Predict the memory of a recipe's step and of the steps with one thing changed.

    Args:
        overrides: Settings instead of the recipe's, as `KEY=VALUE`.
        margin: Share of the peak, see `MARGIN`.
        memory: Bytes that the step may use. None: what the recipe or the device says.
        expert_loads: A run's metrics.jsonl.
        host: Bytes of the host's memory that a device may use for activations.

    Raises:
        RecipeError, BadInputError: The recipe or the file of loads is refused.
        UsageError: Loads have no effect.
    """
    recipe = load(name, overrides, use="plan")
    step = _step(recipe, device)
    limit, source = (memory, "--memory") if memory else _limit(recipe, device)
    top = limit / (1 + margin)
    changes = list(_legal(name, overrides, recipe, _variants(step, top, host), device))
    changes.sort(key=lambda c: (c.step.peak_bytes.max() > top, c.step.step_s))
    recorded = _recorded(step, expert_loads) if expert_loads else ()
    factor = _largest_factor(recipe, step, top)
    return MemoryForecast(step, limit, source, margin, factor, recorded, host, tuple(changes))


def fullest_stage(recipe: Recipe) -> tuple[int, float]:
    """Return the pipeline stage of a recipe that needs the most memory, and how much a device of it needs, bytes.

    Raises:
        BadInputError: The cost model does not know the model or the layout.
    """
    step = _step(recipe, load_device("ascend-910b"))  # whose speed the memory does not depend on
    return int(step.peak_bytes.argmax()), float(step.peak_bytes.max())


def _step(recipe: Recipe, device: Device) -> SimulatedStep:
    return simulate_step(Architecture.from_recipe(recipe), Layout.from_recipe(recipe), device)


def _limit(recipe: Recipe, device: Device) -> tuple[float, str]:
    """Return the bytes of a device that the step may use, and what says so."""
    room = device.memory_bytes - device.reserved_bytes
    told: str | None = getattr(recipe.context, "max_device_memory", None)  # a key of the table
    limit = float(told.removesuffix("GB")) * GIB if told else room
    if limit < room:
        return limit, f"context.max_device_memory {told}"
    return room, f"{device.name}, of which the runtime has {gib_text(device.reserved_bytes)}"


def _with_factor(step: SimulatedStep, factor: float) -> SimulatedStep:
    return simulate_step(step.architecture, step.layout.with_changes(imbalance=factor), step.device)


def _largest_factor(recipe: Recipe, step: SimulatedStep, top: float) -> float | None:
    """Return the largest load factor at which all stages have at most `top` bytes, by bisection."""
    c, highest = recipe.model_config, float(step.layout.ep)
    dropless = not (c.moe_token_drop_policy and c.moe_expert_capacity_factor)
    if highest == 1 or not step.architecture.moe_layers or not dropless:
        return None
    low, high = 1.0, highest
    if step.peak_bytes.max() > top:
        return None
    if _with_factor(step, highest).peak_bytes.max() <= top:
        return highest
    while high - low > 0.005:
        middle = (low + high) / 2
        if _with_factor(step, middle).peak_bytes.max() <= top:
            low = middle
        else:
            high = middle
    return low


def _recorded(step: SimulatedStep, path: str) -> tuple[tuple[int, float, float], ...]:
    """Return percentiles of the load factors of a run's records: what the fullest device has of all MoE layers, over the mean."""
    load_NLE, _ = read_for(step, path)
    devices = step.layout.ep
    owner_LE = SlotMap.identity(load_NLE.shape[1], load_NLE.shape[2], devices).owners
    load_ND = [device_loads(load_LE, owner_LE, devices).sum(axis=0) for load_LE in load_NLE]
    factor_N = np.array([float(load_D.max() / load_D.mean()) for load_D in load_ND])
    factors = [float(np.percentile(factor_N, p)) for p in PERCENTILES]
    peaks = (float(_with_factor(step, f).peak_bytes.max()) for f in factors)
    return tuple(zip(PERCENTILES, factors, peaks, strict=True))


def _variants(step: SimulatedStep, top: float, host: float) -> Iterator[tuple[str, Layout]]:
    """Yield what could be changed, with the layout that it gives; not all are legal."""
    now = step.layout
    yield from _activations(step, top, host)
    if now.zero == 0 and now.dp * now.cp > 1:
        yield "shard the optimizer", now.with_changes(zero=1)
    twice = now.micro_batches * 2
    if now.micro_batch % 2 == 0:
        half = now.with_changes(micro_batch=now.micro_batch // 2, micro_batches=twice)
        yield "half the micro-batch", half
    ep = now.ep * 2
    while step.architecture.moe_layers and now.dp * now.cp * now.tp % (ep * now.etp) == 0:
        yield f"experts over {ep} devices", now.with_changes(ep=ep)
        ep *= 2
    if now.dp % 2:
        return
    fewer = {"dp": now.dp // 2, "micro_batches": twice}
    for kind, degree in (("tensor", "tp"), ("context", "cp"), ("pipeline", "pp")):
        changes: dict[str, Any] = {**fewer, degree: getattr(now, degree) * 2}
        if degree == "pp":
            changes.update(chunks=None, recompute_layers=None)
        try:
            layout = now.with_changes(**changes)
        except BadInputError:
            continue
        yield f"{kind} parallelism {changes[degree]}, data parallelism {fewer['dp']}", layout


def _activations(step: SimulatedStep, top: float, host: float) -> Iterator[tuple[str, Layout]]:
    """Yield what could be kept, recomputed or swapped."""
    now = step.layout.with_changes(recomputed=None, swapped=(), prefetch=1)
    if now.recompute != "none" or now != step.layout:
        yield "recompute nothing", now.with_changes(recompute="none", recompute_layers=None)
    if now.recompute != "norm+activation":
        modules = now.with_changes(recompute="norm+activation", recompute_layers=None)
        yield "recompute norms and activations only", modules
    if now.recompute != "full" or now.recompute_layers is not None or now != step.layout:
        yield "recompute all layers", now.with_changes(recompute="full", recompute_layers=None)
    if (fewest := _fewest_layers(replace(step, layout=now), top)) is not None:
        yield "recompute as few layers as fit", fewest
    mixed = choose(step, top, host) if step.device.host_bandwidth else None
    if mixed is not None and mixed.swapped and mixed != step.layout:
        yield "keep, recompute or swap each layer", mixed


def _fewest_layers(step: SimulatedStep, top: float) -> Layout | None:
    """Return the layout that recomputes whole layers where a stage needs it, as few as fit; None: that is all or none."""
    now, layers = step.layout, step.layers
    counts, chunks_of_stage = [0] * len(layers), step.program.chunks_of_stage

    def full() -> SimulatedStep:
        layout = now.with_changes(recompute="full", recompute_layers=tuple(counts))
        return simulate_step(step.architecture, layout, step.device)

    for _ in range(max(layers) * now.vpp):
        over: list[int] = np.flatnonzero(full().peak_bytes > top).tolist()
        if not over:
            break
        for stage in over:
            free = [c for c in chunks_of_stage[stage] if counts[c] < layers[c]]
            if not free:
                return None
            counts[min(free, key=counts.__getitem__)] += 1
    if not any(counts) or tuple(counts) == layers or tuple(counts) == now.recompute_layers:
        return None
    return now.with_changes(recompute="full", recompute_layers=tuple(counts))


def _legal(
    name: str,
    overrides: Sequence[str],
    source: Recipe,
    variants: Iterator[tuple[str, Layout]],
    device: Device,
) -> Iterator[Change]:

    def said(layout: Layout) -> dict[str, Any]:
        """Return the layout's settings; a schedule that they lack is the same in all variants."""
        named = ("1f1b", "interleaved", "gpipe")
        plain = layout.schedule if layout.schedule in named else named[layout.vpp > 1]
        level = min(layout.zero, 1)  # no change touches what is sharded
        layout = layout.with_changes(schedule=plain, zero=level)
        return settings(layout, source.model_config.num_hidden_layers)

    current = said(Layout.from_recipe(source))
    columns = source.train_dataset.construct_args_key or source.train_dataset.input_columns or []
    for change, layout in variants:
        try:
            target = said(layout)
            changed = {key: value for key, value in target.items() if value != current.get(key)}
            off = {"swap_config.swap": False, "swap_config.layer_swap": "null"}
            changed |= {key: off[key] for key in current.keys() - target.keys()}
            if "parallel_config.data_parallel" in changed:
                changed["parallel.dataset_strategy"] = [[layout.dp, 1]] * len(columns)
            sets = tuple(f"{key}={value}".replace(" ", "") for key, value in changed.items())
            step = _step(load(name, [*overrides, *sets], use="plan"), device)
        except TelechatMoeError:  # the model or the recipe's other settings do not allow it
            continue
        if sets:
            yield Change(change, sets, step)


def sentence(a: MemoryForecast) -> str:
    """Return the answer in a sentence."""
    peak_P = a.step.peak_bytes
    stage = int(peak_P.argmax())
    over = a.needs(a.step) - a.limit_bytes
    verdict = "It fits" if over <= 0 else f"It does not fit, {gib_text(over)} are missing"
    return (
        f"{verdict}: stage {stage} needs {gib_text(float(peak_P[stage]))}, {gib_text(a.needs(a.step))} with "
        f"{a.margin * 100:.3g} % for fragmentation, of {gib_text(a.limit_bytes)} ({a.limit_from})."
    )


def next_thing(a: MemoryForecast) -> str:
    """Return what to change first, with the settings; empty where the recipe fits and no change is faster."""
    if a.first is None and a.fits(a.step):
        return ""
    if a.first is None:
        return (
            "No single change below makes it fit; `telechat-moe plan layout` searches all layouts of "
            f"{a.step.layout.devices} devices, or of more."
        )
    step, sets = a.first.step, " ".join(f'--set "{word}"' for word in a.first.overrides)
    return (
        f"Change first: {a.first.name}, {gib_text(a.needs(step))} with the margin, a step in "
        f"{seconds_text(step.step_s)} instead of {seconds_text(a.step.step_s)}: {sets}"
    )


def routing(a: MemoryForecast) -> list[str]:
    """Return what imbalance of the experts' load still fits."""
    ep = a.step.layout.ep
    if a.largest_factor is None:
        return []
    if a.largest_factor == ep:
        return [f"Routing: any fits, even all tokens to one of {ep} devices."]
    return [
        f"Routing: it fits while the fullest of {ep} devices gets at most {a.largest_factor:.2f} times the mean, in all "
        "MoE layers at once."
    ]


def tables(a: MemoryForecast) -> list[Table]:
    """Return what the command prints: stages, recorded loads, changes."""
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")
    stages = [
        [
            str(stage["stage"]),
            "+".join(map(str, stage["layers"])),
            *(gib_text(stage[f"{part}_bytes"]) for part in parts),
            f"{stage['peak_bytes'] * (1 + a.margin) / a.limit_bytes * 100:.1f} %",
        ]
        for stage in per_stage(a.step)
    ]
    heads = ["stage ", "layers", *(f"{p} " for p in parts), "with margin, of the limit "]
    printed = [Table("Stages", heads, stages)]
    if a.recorded:
        rows = [
            [f"{p} %", f"{factor:.3f}", gib_text(peak * (1 + a.margin)), _fits(peak * (1 + a.margin) <= a.limit_bytes)]
            for p, factor, peak in a.recorded
        ]  # fmt: skip
        title = "Recorded loads: fullest device over the mean, over the records of a run"
        printed.append(Table(title, ("percentile ", "factor ", "with margin ", "fits"), rows))
    changes = [
        [_name(c), gib_text(a.needs(c.step)), _fits(a.fits(c.step)), seconds_text(c.step.step_s), " ".join(c.overrides)]
        for c in a.changes
    ]  # fmt: skip
    heads = ["change", "with margin ", "fits", "step ", "settings"]
    return [*printed, Table("One change at a time, same devices and sequences", heads, changes)]


def _name(change: Change) -> str:
    """Return what is changed, and what that takes of the host's memory."""
    host = float(change.step.host_bytes.max())
    return change.name + (f" ({gib_text(host)} of the host for each device)" if host else "")


def _fits(fits: bool) -> str:
    return "yes" if fits else "no"


def report(a: MemoryForecast) -> dict[str, Any]:
    """Return the answer as plain data."""
    return {
        "model": a.step.architecture.name,
        "layout": a.step.layout.short(),
        "device": a.step.device.name,
        "fits": a.fits(a.step),
        "probability": a.probability,
        "limit_bytes": a.limit_bytes,
        "limit_from": a.limit_from,
        "margin": a.margin,
        "step_s": a.step.step_s,
        "stages": per_stage(a.step),
        "largest_load_factor": a.largest_factor,
        "recorded_loads": [
            {"percentile": p, "factor": factor, "peak_bytes": peak}
            for p, factor, peak in a.recorded
        ],
        "first": a.first and a.first.name,
        "changes": [
            {
                "name": c.name,
                "set": list(c.overrides),
                "fits": a.fits(c.step),
                "peak_bytes": float(c.step.peak_bytes.max()),
                "host_bytes": float(c.step.host_bytes.max()),
                "step_s": c.step.step_s,
            }
            for c in a.changes
        ],
    }
