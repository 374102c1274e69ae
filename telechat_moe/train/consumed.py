"""The samples that the run of a checkpoint has consumed, and the steps in which its learning rate is counted.

Samples are the measure of a run, whatever its batches were. `lr_schedule` counts steps of the batch with which the run
began (or of the recipe's batch, since its counts of steps were changed), so the rate at a sample stays what it was when the
batch changes. Checkpoints of versions before hold steps only; what they consumed follows from their settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from telechat_moe.data.loader import Batches
from telechat_moe.recipe import Problem, Recipe, RecipeError
from telechat_moe.recipe.batch_schedule import BatchSchedule

COUNTS = ("warmup_steps", "decay_steps", "decay_start_steps", "total_steps")
"""Keys of `lr_schedule` that count steps."""


@dataclass(frozen=True)
class Consumed:
    """What a run has consumed.

    Attributes:
        samples: Samples of its steps; not those that a rollback left out.
        applied_samples: Those of the steps whose update was applied.
        lr_batches: The batches in whose steps `lr_schedule` counts.
    """

    samples: int
    applied_samples: int
    lr_batches: BatchSchedule


def consumed_of(recipe: Recipe, step: int, state: Mapping[str, Any]) -> Consumed:
    """Return what the run of a checkpoint has consumed.

    Args:
        state: What it holds besides tensors.

    Raises:
        RecipeError: An older version wrote it, and its steps do not tell: it changed the batch or began with new data.
    """
    if "lr_batches" in state:
        entries, unit = state["lr_batches"]
        batches = BatchSchedule(tuple((begin, batch) for begin, batch in entries), unit)
        return Consumed(state["samples"], state["applied_samples"], batches)
    training, place = state.get("training"), state["data"]["next_sample"]
    if training is None:  # no run wrote it
        return Consumed(place, place, recipe.batches)
    text, batch = training.get("step_batch_size_schedule"), training["global_batch"]
    batches = BatchSchedule(((0, batch),), batch)
    if text:
        grows = BatchSchedule.parse(text, recipe.model_config.seq_length)
        batches = replace(grows, unit=recipe.micro_batch_samples)
    samples = batches.consumed(step)
    if samples + _left_out(state) != place:
        finding = (
            f"a checkpoint of an older version with {step} steps of {text or batch} samples, {samples} in all, whose "
            f"data go on at sample {place}: it does not say what was read before its batch or its data changed"
        )
        expected = (
            "an earlier checkpoint, or its weights alone (load_checkpoint, resume_training False)"
        )
        raise RecipeError([recipe.problem("resume_training", finding, expected)])
    return Consumed(samples, batches.consumed(state["updates"]), batches)


def _left_out(state: Mapping[str, Any]) -> int:
    """Return how many samples the rollbacks of a run left out; a later one may contain an earlier one."""
    count, reached = 0, 0
    for first, end in sorted(rollback["left_out"] for rollback in state.get("rollbacks", [])):
        count += max(0, end - max(first, reached))
        reached = max(reached, end)
    return count


def lr_batches(recipe: Recipe, before: BatchSchedule, training: Mapping[str, Any]) -> BatchSchedule:
    """Return the batches in whose steps `lr_schedule` counts in a run that goes on.

    Args:
        before: Those until the checkpoint.
        training: Settings of the checkpoint.

    Raises:
        RecipeError: The batch and some of the counts of steps are others, so these count different steps.
    """
    now, then = recipe.lr_schedule, training.get("lr_schedule") or {}
    counts = {key: (then.get(key), getattr(now, key)) for key in COUNTS}
    counts = {key: pair for key, pair in counts.items() if any(n and n > 0 for n in pair)}
    changed = [key for key, (a, b) in counts.items() if a != b]
    if not changed or before.entries == recipe.batches.entries:
        return before if not changed else recipe.batches
    problems: list[Problem] = []
    for key, (steps, _) in counts.items():
        if key not in changed and steps:
            samples = before.consumed(steps)
            fits = recipe.batches.position(samples)
            finding = f"{steps}, but {' and '.join(changed)} changed together with the batch, so it is not clear whose steps count"
            expected = f"{fits:g} steps of the batch now are the same {samples} samples; or leave {' and '.join(changed)}"
            problems.append(recipe.problem(f"lr_schedule.{key}", finding, expected))
    if problems:
        raise RecipeError(problems)
    return recipe.batches


def steps_left(recipe: Recipe, loader: Batches, consumed: int) -> int:
    """Return how many steps the samples still give that a loader has before it, after those that were consumed."""
    return recipe.batches.steps(loader.epochs.samples_left(loader.next_sample), consumed)
