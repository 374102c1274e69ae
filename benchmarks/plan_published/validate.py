"""Find impossible rows: their figure implies a utilisation that no run of that layout can have."""

from collections.abc import Sequence
from dataclasses import replace

from telechat_moe.tools.plan.cost import score
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import Device, load_device
from telechat_moe.tools.plan.cost.flops import hardware_flops, model_flops
from telechat_moe.tools.plan.cost.layout import Layout

HIGHEST = 1.0
"""More of the peak than this cannot be reached, recomputation included."""

LOWEST = 0.10
"""Less than this is not explained by launch times where the kernels are large (`LARGE`)."""

LARGE = 3e11
"""FLOPs of one layer's forward pass of one micro-batch on one device: launches do not take as long."""

LARGE_S = 5e-4
"""Seconds that they take at the peak, at least: faster devices wait longer for their host (layout_sweeps: Moonlight on H100)."""


def implausible(architecture: Architecture, layout: Layout, step_s: float, device: Device) -> str:
    """Return why a measured step time is impossible; empty: it is not."""
    if step_s <= 0:
        return f"impossible: a step of {step_s:g} s"
    tokens = layout.global_batch * architecture.seq
    peak = device.peak(layout.compute if layout.compute in device.peak_flops else "bf16")
    done = hardware_flops(architecture, layout) * tokens / layout.devices / step_s
    if done > HIGHEST * peak:
        return f"impossible: {done / peak:.0%} of the peak ({peak / 1e12:.0f} TFLOP/s), recomputation included"
    wide = device.peak_flops.get("bf16", peak)
    used = model_flops(architecture).training * tokens / layout.devices / step_s / wide
    share = architecture.seq * layout.micro_batch / (layout.cp * layout.tp)
    work = model_flops(architecture).forward / len(architecture.layers) * share
    idle = 1 + (layout.pp - 1) / (
        layout.vpp * layout.micro_batches
    )  # the pipeline's own bubble explains so much
    if used * idle < LOWEST and work > max(LARGE, LARGE_S * wide):
        return (
            f"impossible: {used:.1%} of the peak with {work:.1e} FLOPs in each layer's forward pass; "
            "the tokens counted or the layout are not those of the run"
        )
    return ""


def checked(rows: Sequence[score.MeasuredStep], default: str) -> list[score.MeasuredStep]:
    """Return the rows; those that cannot be predicted or are implausible get a reason."""
    found: list[score.MeasuredStep] = []
    for row in score.checked(rows, default):
        if not row.reason and row.architecture and row.layout and row.step_s is not None:
            device = load_device(row.device or default)
            why = implausible(row.architecture, row.layout, row.step_s, device)
            row = replace(row, reason=why)
        found.append(row)
    return found
