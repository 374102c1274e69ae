"""Compare a recipe's step and run on a device with those on a changed one."""

from dataclasses import asdict, fields, replace
from typing import Any

from telechat_moe.errors import UsageError
from telechat_moe.recipe.schema import Recipe
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Device
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.cost.run_cost import run_cost
from telechat_moe.tools.plan.cost.simulate_step import SimulatedStep, simulate_step

SAME = 1e-12
"""Relative difference below which a setting has no effect."""


def changed(device: Device, key: str, value: float) -> Device:
    """Return a device with one figure changed: a field, `peak_flops.TYPE` or `constants.NAME`.

    Raises:
        UsageError: There is no such figure.
    """
    section, _, name = key.rpartition(".")
    if section == "peak_flops" and name in device.peak_flops:
        return replace(device, peak_flops={**device.peak_flops, name: value})
    if section == "constants" and hasattr(device.constants, name):
        return replace(device, constants=replace(device.constants, **{name: value}))
    numbers = [f.name for f in fields(Device) if f.type in (float, int) or f.name in COUNTS]
    if section or name not in numbers:
        constants = [f"constants.{f.name}" for f in fields(device.constants)]
        figures = [*numbers, *(f"peak_flops.{t}" for t in device.peak_flops), *constants]
        raise UsageError(f"--set-device {key}: no such figure; there are {', '.join(figures)}")
    return replace(device, **{name: int(value) if name in COUNTS else value})


COUNTS = ("node_devices",)


def on_devices(layout: Layout, devices: int) -> Layout:
    """Return a layout on another number of devices: other data parallelism, the unchanged global batch.

    Raises:
        UsageError: The degrees or the batch do not divide.
    """
    model = layout.devices // layout.dp
    dp, uneven = divmod(devices, model)
    micro_batches, over = divmod(layout.global_batch, max(dp, 1) * layout.micro_batch)
    if uneven or over or not dp or not micro_batches:
        raise UsageError(
            f"--devices {devices}: expected a multiple of the {model} devices of one copy of the model, with "
            f"{layout.global_batch} sequences divided among the copies in micro-batches of {layout.micro_batch}"
        )
    return layout.with_changes(dp=dp, micro_batches=micro_batches, opt_shards=0)


def steps_of(
    recipe: Recipe, device: Device, settings: dict[str, float], devices: int | None
) -> tuple[SimulatedStep, SimulatedStep]:
    """Return the step as it is and with the changes.

    Raises:
        UsageError: A setting that does not exist or has no effect on the step or its memory.
    """
    a, layout = Architecture.from_recipe(recipe), Layout.from_recipe(recipe)
    before = simulate_step(a, layout, device)
    other = layout if devices is None else on_devices(layout, devices)
    target = device
    for key, value in settings.items():
        target = changed(target, key, value)
    after = simulate_step(a, other, target)
    for key in settings:
        without = device
        for name, value in settings.items():
            without = without if name == key else changed(without, name, value)
        step = simulate_step(a, other, without)
        unchanged = abs(step.step_s / after.step_s - 1) < SAME
        if unchanged and _room(without) == _room(target):
            raise UsageError(
                f"--set-device {key}: changes neither the step nor what fits; leave it out"
            )
    return before, after


def _room(device: Device) -> float:
    return device.memory_bytes - device.reserved_bytes


def report(step: SimulatedStep, tokens: float | None, **failures: Any) -> dict[str, Any]:
    """Return the figures of a step and, with `tokens`, of its run; `failures` as in `run_cost`."""
    layout, peak = step.layout, float(step.peak_bytes.max())
    data: dict[str, Any] = {
        "layout": layout.short(),
        "devices": layout.devices,
        "step_s": step.step_s,
        "tokens_per_s": layout.global_batch * step.architecture.seq / step.step_s,
        "peak_bytes": peak,
        "fits": peak <= _room(step.device),
    }
    if tokens is not None:
        steps = -int(-tokens // (layout.global_batch * step.architecture.seq))
        data["run"] = asdict(run_cost(steps, step.step_s, layout.devices, **failures))
    return data
