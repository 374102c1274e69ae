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
from telechat_moe.tools.sweep.file import LargerModel, ModelSize, Overrides, Sweep


@dataclass(frozen=True)
class PredictedCost:
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


def predict_costs(sweep: Sweep, name: str) -> dict[str, PredictedCost]:
    """Predict the step of each variant's counterpart in a larger model."""
    model = sweep.keys.larger[name]
    return {
        variant: _cost(model, recipe, [*model.set, *model.variants[variant]])
        for variant, recipe in sweep.larger[name].items()
    }


def _cost(model: LargerModel, recipe: Recipe, overrides: Overrides) -> PredictedCost:
    size, devices = ModelSize.of(recipe), recipe.devices
    sizes = (size.parameters, size.active, size.flops, devices)
    try:
        layout, step_s, fits, gap = _step(model, recipe, overrides)
    except (BadInputError, CheckFailedError, UsageError) as error:
        return PredictedCost(*sizes, why=str(error))
    a, peak = Architecture.from_recipe(recipe), load_device(model.device).peak(layout.compute)
    rate = layout.global_batch * a.seq / step_s
    return PredictedCost(
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
    model: LargerModel, recipe: Recipe, overrides: Overrides
) -> tuple[Layout, float, bool, float | None]:
    """Return layout, seconds, whether it fits, and gap; refuse where there is no layout or no such schedule."""
    if not model.search_s:
        step = of_recipe(recipe, model.device)
        return step.layout, step.step_s, report(step)["fits"], None
    machine = (recipe.devices, model.device, None, None, list[str]())
    plan = planner.find(model.recipe, list(overrides), *machine, top=1, limit_s=model.search_s)
    if not plan.best:
        in_time = f"no layout was found in {model.search_s:g} s"
        raise CheckFailedError(in_time if plan.timed_out else "no layout fits into memory")
    return plan.best[0].layout, plan.best[0].step_s, True, plan.gap
