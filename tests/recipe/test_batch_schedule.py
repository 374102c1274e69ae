"""The global batch by consumed samples: Megatron's published rule step by step, and what a recipe may say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telechat_moe.recipe import RecipeError, load
from telechat_moe.recipe.batch_schedule import BatchSchedule

TINY = "telechat3_moe/pretrain_tiny.yaml"
KEY = "telechat_moe.step_batch_size_schedule"


def test_megatrons_example() -> None:
    found = BatchSchedule.parse("0:768 250B:1536 500B:3072 750B:6144", 4096)
    thresholds = [250 * 10**9 // 4096, 500 * 10**9 // 4096, 750 * 10**9 // 4096]
    assert found.entries == ((0, 768), *zip(thresholds, (1536, 3072, 6144), strict=True))
    assert [found.after(n) for n in (0, thresholds[0] - 1, thresholds[0], thresholds[2] + 1)] == [
        768, 768, 1536, 6144,
    ]  # fmt: skip
    first = -(-thresholds[0] // 768)  # the first step that begins with so many samples consumed
    assert [found.consumed(first + n) - found.consumed(first + n - 1) for n in (0, 1)] == [
        768,
        1536,
    ]


def test_suffixes_and_floor_division() -> None:
    found = BatchSchedule.parse("0:1K, 1.5K:2K 1M:3K", 1000)
    assert found.entries == ((0, 1000), (1, 2000), (1000, 3000))


entries = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 30)),
    min_size=0,
    max_size=5,
    unique_by=lambda e: e[0],
)


@given(
    first=st.integers(1, 30),
    more=entries,
    samples=st.integers(0, 400),
    before=st.integers(0, 60),
)
def test_steps_are_those_of_consuming_them_one_by_one(first, more, samples, before) -> None:
    schedule = BatchSchedule(((0, first), *sorted(more)))
    consumed, batches = before, []
    while True:
        batch = [b for at, b in schedule.entries if at <= consumed][-1]
        if consumed + batch > before + samples:
            break
        batches.append(batch)
        consumed += batch
    assert schedule.steps(samples, before) == len(batches)
    assert schedule.consumed(len(batches), before) == consumed
    places = [schedule.consumed(step, before) for step in range(len(batches) + 1)]
    assert places == [before + sum(batches[:step]) for step in range(len(batches) + 1)]


@given(first=st.integers(1, 30), more=entries, step=st.integers(0, 40), part=st.integers(0, 29))
def test_a_position_is_the_step_that_is_being_consumed(first, more, step, part) -> None:
    schedule = BatchSchedule(((0, first), *sorted(more)))
    begin, end = schedule.consumed(step), schedule.consumed(step + 1)
    found = schedule.position(begin + part % (end - begin))
    assert found == pytest.approx(step + part % (end - begin) / (end - begin))
    whole = schedule.position(begin)
    assert (whole, type(whole)) == (step, int)  # as exact as the step


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:4 5K:4 5001:8", "thresholds that rise"),
        ("0:4 5K:0", "batches of at least 1"),
        ("0:8 1..5K:4", "could not convert"),
        ("0:4 5K:6", "multiples of runner_config.batch_size (4)"),
        ("0:4 5K:16", "gradient_accumulation_steps 4"),
        ("0:8", "a second threshold"),
        ("5K:8", 'as "0:8 250K:16"'),
    ],
)
def test_schedules_that_do_not_fit(text: str, message: str) -> None:
    sets = [f"{KEY}='{text}'", "runner_config.gradient_accumulation_steps=2", "callbacks=[]"]
    with pytest.raises(RecipeError) as error:
        load(TINY, [*sets, "model.model_config.moe_router_enable_expert_bias=False"])
    assert message in str(error.value)
    assert KEY in str(error.value)


def test_a_recipe_counts_its_steps() -> None:
    sets = ["runner_config.gradient_accumulation_steps=2", "callbacks=[]", f"{KEY}='0:4 25600:8'"]
    recipe = load(TINY, [*sets, "model.model_config.moe_router_enable_expert_bias=False"])
    assert recipe.global_batch == 8
    assert recipe.train_steps == 25 + (4000 - 100) // 8  # 25,600 tokens are 100 samples
    assert (recipe.batches.after(99), recipe.batches.after(100)) == (4, 8)
    assert recipe.epoch_samples == 4000
