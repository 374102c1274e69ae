"""Predict what each structure costs in a larger recipe: one step, by the planner's cost model."""

from dataclasses import dataclass

from telechat_moe.errors import BadInputError, CheckFailedError, UsageError
from telechat_moe.recipe import Recipe
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.flops import utilisation
from telechat_moe.tools.plan.cost.layout import Layout
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
        why: Why there is no step and all that follows is None; empty: there is one.
        fits: Whether the step fits into the device's memory.
        mfu: Model FLOPs utilisation: products and the causal half of attention, MTP included.
        device_hours: For 10^12 tokens.
    """

    parameters: int
    active: int
    flops_per_token: float
    devices: int
    layout: str | None = None
    gap: float | None = None
    why: str = ""
    fits: bool | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    device_hours: float | None = None


def costs(larger: Larger) -> dict[str, Cost]:
    """Predict the step of each counterpart in a larger recipe."""
    return {name: _cost(larger, name, recipe) for name, recipe in larger.recipes.items()}


def _cost(larger: Larger, name: str, recipe: Recipe) -> Cost:
    size, devices = Size.of(recipe), recipe.devices
    sizes = (size.parameters, size.active, size.flops, devices)
    try:
        layout, step_s, fits, gap = _step(larger, recipe, list(larger.overrides[name]))
    except (BadInputError, CheckFailedError, UsageError) as error:
        return Cost(*sizes, why=str(error))
    a, peak = Architecture.from_recipe(recipe), load_device(larger.device).peak(layout.compute)
    rate = layout.global_batch * a.seq / step_s
    return Cost(
        *sizes,
        layout=layout.short(),
        gap=gap,
        fits=fits,
        step_s=step_s,
        tokens_per_s=rate,
        mfu=utilisation(a, layout, step_s, peak)["model"],
        device_hours=devices * 1e12 / rate / 3600,
    )


def _step(
    larger: Larger, recipe: Recipe, overrides: list[str]
) -> tuple[Layout, float, bool, float | None]:
    """Return layout, seconds, whether it fits, and gap.

    Raises:
        CheckFailedError: The search found no layout.
        BadInputError: The recipe's schedule does not exist for its layout.
        UsageError: No layout divides the model.
    """
    if not larger.search_s:
        step = of_recipe(recipe, larger.device)
        return step.layout, step.step_s, report(step)["fits"], None
    where = (recipe.devices, larger.device, None, None, list[str]())
    plan = planner.find(larger.recipe, overrides, *where, top=1, limit_s=larger.search_s)
    if not plan.best:
        in_time = f"no layout was found in {larger.search_s:g} s"
        raise CheckFailedError(in_time if plan.timed_out else "no layout fits into memory")
    return plan.best[0].layout, plan.best[0].step_s, True, plan.gap
