"""Mutated recipes: never a traceback, never accepted with a wrong meaning.

`make test` runs 2,000; `pytest -m slow tests/recipe` runs 10,000 more.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_mutants import Mutator, assert_meaning, assert_same, has_duplicates
from yaml_edit import recipe_text

from telechat_moe.recipe import RecipeError, loads


def judge(kind: str, text: str, must_refuse: bool) -> bool:
    """Load one mutant; return whether it was accepted."""
    try:
        recipe = loads(text, name="mutant.yaml")
    except RecipeError as error:
        lines = text.count("\n") + 2
        for problem in error.problems:
            assert problem.found, kind
            assert problem.expected, kind
            assert 0 < problem.line <= lines or problem.file != "mutant.yaml", kind
        return False
    assert not must_refuse, f"{kind} was accepted:\n{text}"
    assert not has_duplicates(text), f"{kind} has a key twice:\n{text}"
    data = yaml.load(text, Loader=yaml.CSafeLoader)
    assert_same(data, recipe, "")
    assert_meaning(yaml.load(yaml.safe_dump(recipe.to_dict()), Loader=yaml.CSafeLoader))
    return True


def run(seed: int, count: int) -> None:
    mutator, kinds, accepted = Mutator(seed), Counter[str](), Counter[str]()
    for _ in range(count):
        kind, text, must_refuse = mutator.mutant()
        name = kind.partition(" ")[0]
        kinds[name] += 1
        accepted[name] += judge(kind, text, must_refuse)
    assert set(kinds) == set(mutator.kinds)
    total = sum(accepted.values())
    assert count * 0.02 < total < count * 0.7, accepted  # both answers are exercised


@pytest.mark.slow
def test_2000_mutants() -> None:
    run(seed=1, count=2000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
def test_10000_mutants(seed: int) -> None:
    run(seed, count=2000)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.binary().map(lambda b: b.decode("latin-1"))))
def test_any_text(text: str) -> None:
    with pytest.raises(RecipeError):
        loads(text)


def test_random_overrides() -> None:
    """Overrides of any path with any value: a recipe or a RecipeError."""
    rng = random.Random(3)
    text = recipe_text("telechat3_moe/pretrain_tiny.yaml")
    words = ["seed", "model", "model_config", "callbacks", "0", "1", "9", "-1", "", "type", "optimizer",
             "betas", "train_dataset", "data_loader", "sizes", "lr_schedule", "warmup_steps", "x", "é"]  # fmt: skip
    values = ["1", "-1", "1e-5", "no", "null", "", "[1, 2]", "{a: 1}", "*x", "&x 1", "[", "{", "'", "!!int 1",
              "True", "a: b", "1.5", "- 1", "\x00", "? x", "<<", "{<<: 1}"]  # fmt: skip
    right = ["seed", "callbacks.0.per_print_times", "optimizer.betas", "telechat_moe.sample"]
    accepted = 0
    for _ in range(600):
        path = ".".join(rng.choices(words, k=rng.randrange(1, 5)))
        override = f"{rng.choice([path, *right])}={rng.choice(values)}"
        try:
            loads(text, [override])
        except RecipeError as error:
            refused = error.problems
        else:
            refused = []
        accepted += not refused
    assert 0 < accepted < 600
