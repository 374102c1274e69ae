"""Judge a recipe for what a command will do with it: everything that is wrong, and everything that it lacks, at once.

`check` prints what :func:`judge` returns; `train`, `launch` and `run-sharded` refuse with it before anything is compiled or
started, so all say the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from telechat_moe.recipe import Problem, Recipe
    from telechat_moe.recipe.uses import Use


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on a recipe and the reasons.

    Attributes:
        use: The use that it was judged for; ``written`` where its problems hide it, empty if there is no such recipe.
        version: Of MindFormers, by which it was judged if that is the use.
        recipe: The loaded recipe; None if it has problems of its own.
        not_judged: Keys that could not be judged, with the reason.
        notes: Messages that the build of its data left.
    """

    use: Use | Literal[""]
    recipe: Recipe | None
    problems: Sequence[Problem] = ()
    not_judged: Mapping[str, str]
    notes: Sequence[str] = ()
    version: str = ""


def judge(
    name: str,
    overrides: Sequence[str] = (),
    *,
    use: Use = "written",
    devices: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_outside: bool = False,
    local: bool = True,
    alone: bool = True,
    elsewhere: bool = False,
) -> Judgement:
    """Return everything that is wrong with a recipe.

    Args:
        use: What it is for; with ``train`` files, folders, checkpoint and device are looked at, too.
        devices: See :func:`telechat_moe.recipe.load`.
        resume, overwrite: See :func:`telechat_moe.train.start.start_of`.
        allow_outside: It may write outside of ``output_dir``.
        local: The run is on this machine; else its files are not looked at.
        alone: On no other; else its memory is not looked at.
        elsewhere: A run on a device that is not here is on another machine.
    """
    from telechat_moe.recipe import RecipeError, find, load
    from telechat_moe.recipe.problems import Missing
    from telechat_moe.recipe.uses import not_judged, resolved
    from telechat_moe.recipe.written import outside
    from telechat_moe.train import preflight

    unknown = list[str]()  # of weights
    start = {"resume": resume, "overwrite": overwrite, "notes": unknown}

    def look(recipe: Recipe, problems: Sequence[Problem]) -> Iterator[Problem]:
        missing, broken, of = Missing(bool(problems)), {p.key for p in problems}, use
        with missing.skipped():
            of, _ = resolved(recipe, use)
        if of in ("train", "mindformers") and not allow_outside:
            yield from missing.until(outside(recipe))
        yield from _device_memory(recipe, of, problems)
        if of != "train":
            return
        yield from missing.until(_schedule(recipe, broken))
        if local and alone and "model.model_config" not in broken:
            yield from missing.until(preflight.memory(recipe))
        if local:
            yield from missing.until(_lacking(recipe, problems, elsewhere, **start))

    try:
        find(name)
    except RecipeError as error:
        return Judgement(use="", recipe=None, problems=error.problems, not_judged={})
    try:
        recipe = load(name, overrides, devices=devices, use=use, look=look)
    except RecipeError as error:
        return Judgement(use=use, recipe=None, problems=error.problems, not_judged=error.not_judged)
    of, version = resolved(recipe, use)
    open_keys = not_judged(recipe, use) | _of_weights(unknown)
    notes = _notes(recipe, local, elsewhere) if of == "train" else ()
    return Judgement(use=of, version=version, recipe=recipe, not_judged=open_keys, notes=notes)


def _of_weights(unknown: Sequence[str]) -> dict[str, str]:
    """Return what could not be judged of the weights that a run begins with, by their key."""
    return {"load_checkpoint": "; ".join(unknown)} if unknown else {}


def _notes(recipe: Recipe, local: bool, elsewhere: bool) -> Sequence[str]:
    """Return what the build of the data left to say, or why nobody looked at them."""
    from telechat_moe.train import preflight

    if elsewhere and preflight.lacks_device(recipe):
        missing = f"this machine has no {recipe.context.device_target}"
        return [f"{missing}: files and folders are looked at where it is launched"]
    return preflight.data_notes(recipe) if local else ()


def judge_for_check(name: str, overrides: Sequence[str], **options: Any) -> Judgement:
    """Return what :func:`judge` does, and of a recipe of mode 1 what its own rules find."""
    from telechat_moe.recipe import RecipeError, find, mode1

    with suppress(RecipeError):  # no such recipe, as judge says
        path, uses = find(name), ("written", "mindformers", "mindformers-2.1")
        if options["use"] in uses and mode1.kind_of_file(path, overrides) == "mode 1":
            return _judge_mode1(path, overrides, options["devices"])
    return judge(name, overrides, elsewhere=True, **options)


def _judge_mode1(path: Path, overrides: Sequence[str], devices: int | None) -> Judgement:
    from telechat_moe.recipe import RecipeError, mode1

    problems: Sequence[Problem] = ()
    try:
        mode1.load(path, overrides, devices=devices)
    except RecipeError as error:
        problems = error.problems
    note = f"a recipe of mode 1, judged by what MindFormers {mode1.VERSION} reads"
    return Judgement(
        use="mindformers",
        version=mode1.VERSION,
        recipe=None,
        problems=problems,
        not_judged={},
        notes=(note,),
    )


def _lacking(
    recipe: Recipe, problems: Sequence[Problem], elsewhere: bool, **start: Any
) -> Iterator[Problem]:
    """Yield which files, folders, checkpoint or device a recipe lacks; see ``preflight.examine``."""
    from telechat_moe.interop import hf
    from telechat_moe.train import preflight

    if not (elsewhere and preflight.lacks_device(recipe)):
        yield from preflight.examine(recipe, problems, weights=hf.weights, **start)[1]


def _schedule(recipe: Recipe, broken: Collection[str]) -> Iterator[Problem]:
    """Yield what is wrong with the order of passes that a recipe chooses, as far as broken keys let it be said."""
    from telechat_moe.errors import BadInputError
    from telechat_moe.recipe import RecipeError
    from telechat_moe.tools.plan.schedules.ranks import rank_orders

    try:
        rank_orders(recipe)
    except RecipeError as error:
        yield from (problem for problem in error.problems if problem.key not in broken)
    except BadInputError:
        if not broken:
            raise


def _device_memory(recipe: Recipe, of: str, problems: Sequence[Problem]) -> Iterator[Problem]:
    """Yield that a step needs more of a device than the recipe gives to MindSpore; what cannot be estimated is not judged."""
    from telechat_moe.errors import BadInputError
    from telechat_moe.tools.plan.report.memory import fullest_stage
    from telechat_moe.units import GIB, gib_text

    if problems or of not in ("train", "mindformers") or recipe.context.device_target != "Ascend":
        return
    if (limit := recipe.context.max_device_memory) is None:
        return
    try:
        stage, needed = fullest_stage(recipe)
    except BadInputError:
        return
    if needed > float(limit.removesuffix("GB")) * GIB:
        finding = f"{limit}, but a step takes {gib_text(needed)} on a device of stage {stage} (estimate of `plan memory`)"
        expected = "more, if the devices have it, or what `telechat-moe plan memory RECIPE --device D` says to change first"
        yield recipe.problem("context.max_device_memory", finding, expected)


def require(name: str, overrides: Sequence[str] = (), *, use: Use, **options: bool) -> Recipe:
    """Return a recipe of which :func:`judge` finds nothing wrong.

    Raises:
        RecipeError: With everything that is wrong.
        UsageError: Nothing is, but a flag must say what becomes of the other run in ``output_dir``.
    """
    from telechat_moe.train.preflight import refusal

    judged = judge(name, overrides, use=use, **options)
    if judged.recipe is None:
        raise refusal(judged.problems, judged.not_judged)
    return judged.recipe
