"""What a checkpoint has consumed, of this version and of older ones, and whose steps its learning rate counts."""

from pathlib import Path
from typing import Any

import mini_recipe as mini
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telechat_moe.recipe import Recipe, RecipeError, load
from telechat_moe.recipe.batch_schedule import BatchSchedule
from telechat_moe.train.consumed import consumed_of, lr_batches
from telechat_moe.train.schedule import from_recipe

OF_TWO = BatchSchedule(((0, 2),), 2)


def recipe(**changes: object) -> Recipe:
    words = mini.arguments(Path("data"), Path("run"), **changes)
    return load(words[1], words[4::2])


def old(step: int, place: int, batch: int = 2, **more: Any) -> dict[str, Any]:
    """Return the state of a checkpoint as versions wrote it that counted steps alone."""
    training = {"global_batch": batch, "step_batch_size_schedule": more.pop("grows", None)}
    return {"training": training, "updates": step, "data": {"next_sample": place}, **more}


def test_steps_of_older_versions_are_samples() -> None:
    found = consumed_of(recipe(), 15, old(15, 30, updates=14))
    assert (found.samples, found.applied_samples, found.lr_batches) == (30, 28, OF_TWO)
    grown = consumed_of(recipe(), 4, old(4, 12, 4, grows="0:2 64:4"))  # 64 tokens are 4 samples
    assert (grown.samples, grown.lr_batches.entries) == (12, ((0, 2), (4, 4)))


def test_what_rollbacks_left_out_is_no_sample_of_a_step() -> None:
    """A later rollback may go back behind an earlier one."""
    rollbacks = [{"left_out": [20, 26]}, {"left_out": [10, 40]}]
    assert consumed_of(recipe(), 6, old(6, 42, rollbacks=rollbacks)).samples == 12


@pytest.mark.parametrize(("step", "place", "batch"), [(20, 50, 4), (40, 60, 1), (8, 4, 2)])
def test_steps_that_do_not_tell_are_refused(step: int, place: int, batch: int) -> None:
    """The batch had changed, or new data had begun."""
    with pytest.raises(RecipeError, match=f"go on at sample {place}"):
        consumed_of(recipe(), step, old(step, place, batch))


def test_what_is_saved_is_what_is_read() -> None:
    state = {"lr_batches": [[[0, 2], [8, 4]], 2], "samples": 20, "applied_samples": 16}
    found = consumed_of(recipe(), 7, state)
    assert (found.samples, found.applied_samples) == (20, 16)
    assert found.lr_batches == BatchSchedule(((0, 2), (8, 4)), 2)


def then(**section: Any) -> dict[str, Any]:
    return {"lr_schedule": {"type": "CosineWithWarmUpLR", "warmup_steps": 2, **section}}


def test_the_rate_goes_on_in_the_steps_that_it_had() -> None:
    """With other rates too, if no count of steps was changed; `mini_recipe` warms up in two steps of four."""
    same = lr_batches(recipe(lr_schedule__learning_rate=1e-2), OF_TWO, then())
    assert same == OF_TWO
    assert lr_batches(recipe(), OF_TWO, then(total_steps=-1)) == OF_TWO


def test_counts_that_were_all_changed_are_steps_of_the_batch_now() -> None:
    r = recipe(lr_schedule__warmup_steps=1, lr_schedule__decay_steps=10)
    assert lr_batches(r, OF_TWO, then(decay_steps=20)) == r.batches
    # And with the batch that it had, any of them.
    assert lr_batches(r, r.batches, then()) == r.batches


def test_some_counts_changed_together_with_the_batch_are_refused() -> None:
    r = recipe(lr_schedule__decay_steps=10)
    with pytest.raises(RecipeError) as error:
        lr_batches(r, OF_TWO, then(decay_steps=20))
    (problem,) = error.value.problems
    assert problem.key == "lr_schedule.warmup_steps"
    assert "1 steps of the batch now are the same 4 samples" in problem.expected
    # What it says is right: then all count steps of the batch now, at the same samples.
    mended = recipe(lr_schedule__warmup_steps=1, lr_schedule__decay_steps=10)
    assert lr_batches(mended, OF_TWO, then(decay_steps=20)) == mended.batches


@given(samples=st.integers(0, 60), batch=st.sampled_from([1, 2, 3, 4, 6]))
def test_a_rate_at_a_sample_does_not_depend_on_the_batch(samples: int, batch: int) -> None:
    """The steps of two that a run began with give the rate, whatever the batch now."""
    sizes = {"runner_config__batch_size": batch, "model__model_config__batch_size": batch}
    began = recipe(runner_config__batch_size=2, model__model_config__batch_size=2)
    now = recipe(**sizes)
    kept = lr_batches(now, began.batches, then())
    rate = from_recipe(now, kept)(kept.position(samples))
    assert rate == from_recipe(began)(samples / 2)
