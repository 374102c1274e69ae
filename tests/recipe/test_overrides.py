"""An override is refused by a command that reads only a part of a recipe, exactly where it changes nothing there."""

import argparse
from typing import Any

import pytest
import yaml
from key_values import KEYS, tried

from telechat_moe.cli import main
from telechat_moe.cli.data import _settings
from telechat_moe.recipe import Recipe, RecipeError, load
from telechat_moe.recipe.uses import USES, Use
from telechat_moe.recipe.weights import weights

TINY = "telechat3_moe/pretrain_tiny.yaml"
NONE = argparse.Namespace(
    out=None, corpus=None, vocab_size=None, tokenizer=None, valid_fraction=None, seed=None
)


def of_data(r: Recipe) -> Any:
    config = r.train_dataset.data_loader.config
    return _settings(NONE, r), config and config.eod


def of_weights(r: Recipe) -> Any:
    return r.model_config, weights(r.model_config)


EFFECTS = {"data": of_data, "weights": of_weights}


def set_to(key: str, value: object, use: Use | None = None) -> Recipe | list[str]:
    """Load the tiny recipe with an override; what is wrong with it, if anything."""
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    try:
        return load(TINY, [f"{key}={text}"], use=use)
    except RecipeError as error:
        return [f"{p.key}: {p.found}" for p in error.problems]


@pytest.mark.slow
@pytest.mark.parametrize("use", EFFECTS)
def test_what_is_refused_has_no_effect_and_what_acts_is_taken(use: Use) -> None:
    effect, counts, wrong = EFFECTS[use], [0, 0], list[str]()
    before = effect(load(TINY))
    for key in KEYS:
        for value in tried(key.field, key.field.default)[:2] if "[" not in key.place else ():
            plain = set_to(key.place, value)
            if isinstance(plain, list):
                continue  # no valid value
            said = set_to(key.place, value, use)
            counts[isinstance(said, list)] += 1
            if isinstance(said, list) and repr(effect(plain)) != repr(before):
                wrong.append(f"{key.place}={value!r} acts on {USES[use]}, and is refused: {said}")
            if isinstance(said, list) and not said[0].startswith(f"{key.place}: an override that"):
                wrong.append(f"{key.place}={value!r}: refused as {said}")
    assert not wrong, "\n".join(wrong)
    assert min(counts) > 0, counts


def test_the_vocabulary_decides_the_data_and_the_optimizer_does_not() -> None:
    load(TINY, ["model.model_config.vocab_size=4096"], use="data")
    with pytest.raises(RecipeError, match=r"data build` does not read; .*remove it"):
        load(TINY, ["optimizer.weight_decay=0.5"], use="data")


def test_keys_of_the_file_belong_to_other_uses() -> None:
    for use in EFFECTS:
        assert load(TINY, use=use).model_config.hidden_size == 128


@pytest.mark.parametrize(
    "words",
    [
        ["data", "build", "--recipe", TINY, "--set", "optimizer.weight_decay=0.5"],
        ["dryrun", TINY, "--set", "telechat_moe.saving.background=False"],
    ],
)
def test_commands_refuse_an_idle_override(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 3
    printed = capsys.readouterr().err
    assert words[-1] in printed
    assert "does not read" in printed


def test_one_that_another_needs_is_taken() -> None:
    """A callback repeats the number of micro-batches, which decides the compiled graph."""
    given = ["use_parallel=True", "parallel.parallel_mode=1", "parallel.full_batch=True"]
    given += ["parallel_config.pipeline_stage=2", "parallel_config.micro_batch_num=4"]
    repeated = "callbacks.1.micro_batch_num=4"
    assert load(TINY, [*given, repeated], use="dryrun").parallel_config.micro_batch_num == 4
    with pytest.raises(RecipeError, match=r"parallel_config.micro_batch_num \(4\)"):
        load(TINY, given, use="dryrun")
