"""Find the layout for a recipe and a number of devices; `telechat-moe plan layout` runs this."""

from dataclasses import replace
from typing import Any

from telechat_moe.errors import UsageError
from telechat_moe.recipe.load import load
from telechat_moe.tools.plan.cost.architecture import Architecture
from telechat_moe.tools.plan.cost.device import load_device
from telechat_moe.tools.plan.cost.documents import pack, read_lengths
from telechat_moe.tools.plan.cost.expert_exchange import choices, told
from telechat_moe.tools.plan.cost.layout import Layout
from telechat_moe.tools.plan.report.layouts import distinct
from telechat_moe.tools.plan.search.emit import write_recipe
from telechat_moe.tools.plan.search.search import SearchResult, search, usable
from telechat_moe.tools.plan.search.space import Space, explain_empty, parse_fixed
from telechat_moe.units import gib_text

FRONT = (0.8, 0.6, 0.45, 0.3, 0.2)
"""Memory limits of the front, as shares of the largest peak."""

FRONT_S = 8.0


def front(plan: SearchResult) -> list[SearchResult]:
    """Return the plans under smaller memory limits, each searched for `FRONT_S` at most."""
    if not plan.best:
        return []
    devices = [usable(plan.device, plan.best[0].peak_bytes * share) for share in FRONT]
    return [search(plan.architecture, plan.space, d, top=1, limit_s=FRONT_S) for d in devices]


def recipe_text(plan: SearchResult, recipe: str, overrides: list[str], pick: int = 1) -> str:
    """Return the recipe with a layout: the one of number `pick` in the ranked table.

    Raises:
        UsageError: There is no such layout.
        RecipeError: It breaks a rule of recipes.
    """
    layouts = distinct(plan)
    if not 1 <= pick <= len(layouts):
        raise UsageError(f"--pick {pick}: {len(layouts)} layouts were found")
    best, word = (
        layouts[pick - 1],
        f"proven within {plan.gap:.2%} of the best under the event simulation",
    )
    if pick > 1 or not plan.optimal:
        word = f"within {best.step_s / plan.lower_bound_s - 1:.2%} of the proven bound"
    comment = (
        f"{plan.architecture.name} on {plan.space.devices} x {plan.device.name}, by telechat-moe plan layout.\n"
        f"Predicted step {best.step_s:.4f} s ({word}), peak {gib_text(best.simulated_bytes, 1)}.\n"
        "Not measured."
    )
    times = choices(plan.architecture, best.layout, plan.device)
    if len(times) > 1:
        comment += f"\nDispatch of tokens to experts: {told(times)}."
    return write_recipe(recipe, overrides, best.layout, comment, plan.device.node_devices)


def find(
    recipe: str,
    overrides: list[str],
    devices: int,
    device: str,
    memory_bytes: float | None,
    global_batch: int | None,
    fixed: list[str],
    beyond_recipes: bool = False,
    documents: str | None = None,
    **options: Any,
) -> SearchResult:
    """Find the fastest layouts of a recipe's model.

    Where it is None, `memory_bytes` is all that the device does not reserve, `global_batch` the recipe's, and each
    sequence is one document. `fixed` are settings `name=value` of the layout, `options` the `top`, `limit_s` and `progress`
    of `search`.

    Raises:
        UsageError: A setting that does not exist, or no layout satisfies the settings, however much memory there is.
        RecipeError: The recipe has problems.
    """
    loaded = load(recipe, overrides, use="plan")
    base = Layout.from_recipe(loaded)
    batch = base.global_batch if global_batch is None else global_batch
    if batch < 1:
        raise UsageError(f"--global-batch {batch}: expected at least 1")
    target = usable(load_device(device), memory_bytes)
    space = Space(
        devices=devices,
        global_batch=batch,
        base=replace(base, imbalance=1.0),
        fixed=parse_fixed(fixed),
        beyond_recipes=beyond_recipes,
        swaps=target.host_bandwidth > 0,
    )
    seq = loaded.model_config.seq_length
    share = pack(read_lengths(documents), seq).share if documents else 0.0
    architecture = Architecture.from_recipe(loaded, share)
    plan = search(architecture, space, target, **options)
    if not len(plan.rows):
        raise UsageError(explain_empty(architecture, space))
    return plan
