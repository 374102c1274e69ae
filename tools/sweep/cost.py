"""Predict what each structure costs in a larger recipe: one step, by the planner's cost model."""

from dataclasses import dataclass

from telechat_moe.recipe import Recipe
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.flops import utilisation
from telechat_moe.tools.plan.report.step import of_recipe, report
from telechat_moe.tools.plan.search import planner
from telechat_moe.tools.sweep.file import Larger, Size


@dataclass(frozen=True)
class Cost:
    """What a larger model with a variant's structure costs.

    Attributes:
        parameters, active, flops_per_token: As of a variant.
        layout: The recipe's own, or the fastest that was found.
        gap: How far the step may be from the fastest one, relatively; None: the recipe's own layout, nothing was searched.
        fits: Whether the step fits into the device's memory; None: not known, the time of the search was too short. What
            follows is None where a search found nothing.
        mfu: Model FLOPs utilisation: products and the causal half of attention, MTP included.
        device_hours: For 10^12 tokens.
    """

    parameters: int
    active: int
    flops_per_token: float
    devices: int
    layout: str | None = None
    gap: float | None = None
    fits: bool | None = False
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    device_hours: float | None = None


def costs(larger: Larger) -> dict[str, Cost]:
    """Predict the step of each counterpart in a larger recipe.

    Raises:
        UsageError: A counterpart has no layout on so many devices, however much memory there is.
    """
    return {name: _cost(larger, name, recipe) for name, recipe in larger.recipes.items()}


def _cost(larger: Larger, name: str, recipe: Recipe) -> Cost:
    size, devices = Size.of(recipe), recipe.devices
    gap: float | None = None
    if larger.search_s:
        fixed = (list(larger.overrides[name]), devices, larger.device, None, None, list[str]())
        plan = planner.find(larger.recipe, *fixed, top=1, limit_s=larger.search_s)
        if not plan.best:
            sizes = (size.parameters, size.active, size.flops)
            return Cost(*sizes, devices, fits=None if plan.timed_out else False)
        layout, step_s, fits, gap = plan.best[0].layout, plan.best[0].step_s, True, plan.gap
    else:
        step = of_recipe(recipe, larger.device)
        layout, step_s, fits = step.layout, step.step_s, report(step)["fits"]
    a, peak = Architecture.from_recipe(recipe), load_device(larger.device).peak(layout.compute)
    rate = layout.global_batch * a.seq / step_s
    return Cost(
        *(size.parameters, size.active, size.flops, devices),
        layout=layout.short(),
        gap=gap,
        fits=fits,
        step_s=step_s,
        tokens_per_s=rate,
        mfu=utilisation(a, layout, step_s, peak)["model"],
        device_hours=devices * 1e12 / rate / 3600,
    )
