"""Every key of the schema acts, or is refused with its name, in each use: a setting without effect is never taken.

For each key values are tried that ask for something else than the recipe says, in the setting that
`key_settings.yaml` names (else in a plain recipe). Where a use reads the key, they change what it makes of the recipe
(`key_effects`) or are refused; where it does not, they are refused, or the schema says why any value is neutral, and
they change nothing.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import key_effects
from key_values import (
    KEYS,
    SETTINGS,
    Key,
    in_setting,
    judge,
    shut,
    small_recipe,
    tried,
    value_of,
    with_value,
)

from telechat_moe.ops.select import OPERATORS
from telechat_moe.recipe.uses import Use, decides
from telechat_moe.train import preflight


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a tiny recipe as plain data, its data set in place."""
    return small_recipe(tmp_path_factory.mktemp("keys"))


def refuses(problems: list[Any], key: str, value: object = None) -> bool:
    """Tell whether problems name a key or its value, its section, or what decides that this is read."""
    section, _, last = key.rpartition(".")
    for p in problems:
        if "[" in key:  # an item of a list, whose index is not known here
            head, tail = key.partition("[")[0], p.key.rpartition(".")[2]
            named = p.key.startswith(head) and (tail in (last, "type") or p.key == head)
            named = named or (bool(p.key) and head.startswith(p.key))
        else:
            near = (key, section, f"{section}.type", f"{section}.model_type")
            named = isinstance(value, str) and value in p.found
            named = named or p.key in near or f"{key}.".startswith(f"{p.key}.")
            named = named or p.key.startswith(f"{key}.") or last in f"{p.found} {p.expected}"
        if named:
            return True
    return False


def test_every_key_is_tried() -> None:
    """A section or key that is added is walked, and the keys name no setting that is gone."""
    assert len({str(key) for key in KEYS}) == len(KEYS) > 780
    assert {key.acts[0] for key in KEYS} - {""} <= SETTINGS.keys()


Effect = Callable[[Any], str]
NEUTRAL = {
    "ModelConfig.fp32_residual_connection": "compute_dtype of the plain recipe is float32",
    "GptDatasetConfig.eod": "nothing in the plain recipe asks where documents end",
    **{
        f"Operators.{x}": "auto is plain"
        for x, backends in OPERATORS.items()
        if "ascend" not in backends
    },
    **dict.fromkeys(("Operators.permute", "Operators.grouped_matmul"), "both go with the default"),
}
"""Keys whose other value asks for what the plain recipe does anyway."""


def faults(
    key: Key, base: dict[str, Any], use: Use, effect: Effect, acted: dict[Key, Any]
) -> Iterator[str]:
    """Yield what is wrong with how a use takes a key; add recipes that it makes different to those that act."""
    setting, values = key.acts
    names = {"", setting} if reads(key, use) else {""}
    for name in {setting} if key.section_is_absent(base) else names:
        sections = in_setting(base, name)
        before = judge(sections, use)
        if isinstance(before, list) and not refuses(before, key.place):
            if not name:
                yield f": {before[0]}"
            continue  # another use takes it
        idle: list[str] = []
        chosen = values if name == setting else ()
        some = tried(key.field, value_of(sections, key))
        for value in chosen or some[: None if reads(key, use) else 1]:
            judged = judge(with_value(sections, key, value), use)
            told = f" in {name!r}={value!r}"
            if isinstance(judged, list):
                if not refuses(judged, key.place, value) and not isinstance(before, list):
                    yield f"{told}: refused as {judged[0]}"
            elif isinstance(before, list) or effect(judged) != effect(before):
                if not reads(key, use):
                    yield f"{told}: acts, which the schema denies"
                acted[key] = before, judged
                idle.clear()
                if not chosen:  # of values that were made up one is enough
                    break
            elif not is_neutral(key, value, use):
                idle.append(f"{told}: taken without effect")
        yield from idle if name or str(key) not in NEUTRAL else ()


def reads(key: Key, use: Use) -> bool:
    """Tell whether a use reads a key."""
    return "takes" not in key.field.metadata and not shut(key) and decides(use, key.place)


def is_neutral(key: Key, value: object, use: Use) -> bool:
    """Tell whether a value asks for nothing of a use."""
    takes = key.field.metadata.get("takes")
    return not decides(use, key.place) or (takes is not None and takes.allows(value, key.field))


USES: dict[Use, Effect] = {"train": key_effects.trained, "dryrun": key_effects.compiled}


REPEATS = {"PipelineConfig.pipeline_interleave": "pp_interleave_num > 1, which needs it"}
"""Keys that no recipe can change alone, and what they repeat."""

SLOW = ("model.model_config", "parallel_config", "telechat_moe.operators")
"""Sections of which each value is another model to build."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] if path in SLOW else [])
        for path in sorted({key.path for key in KEYS})
    ],
)
def test_a_value_acts_or_is_refused(
    path: str, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(base["output_dir"]).parent)
    monkeypatch.setitem(preflight._DEVICE_FILES, "Ascend", "null")  # as if this machine had one
    key_effects.patch(monkeypatch)
    wrong: list[str] = []
    keys = [k for k in KEYS if k.path == path and tried(k.field, k.field.default)]
    acted: dict[Key, Any] = {}
    for use, effect in USES.items():
        known: dict[str, str] = {}

        def once(recipe: Any, effect: Effect = effect, known: dict[str, str] = known) -> str:
            text = repr(recipe)
            if text not in known:
                known[text] = effect(recipe)
            return known[text]

        wrong += [
            f"{use}: {key}{fault}" for key in keys for fault in faults(key, base, use, once, acted)
        ]
    wrong += [
        f"{key}: acts nowhere"
        for key in keys
        if reads(key, "train") and key not in acted and str(key) not in REPEATS
    ]
    assert not wrong, "\n".join(wrong)


LEFT = {
    **dict.fromkeys(
        ("CorpusSection.paths", "CorpusSection.valid_fraction", "CorpusSection.tokenizer"),
        "of `data build`",
    ),
    "Saving.background": "MindFormers goes by async_save alone, as docs/checkpoints.md says",
}
"""Keys of our own section that ask for nothing in MindFormers."""


BESIDE = tuple(
    f"telechat_moe.{name}"
    for name in (
        *("evaluation", "sample", "saving", "ema", "loss_guard", "moe.load_interval"),
        "max_skipped_steps",
    )
)
"""Keys of what is done beside the steps."""


@pytest.mark.slow
@pytest.mark.mindformers
def test_beside_mindformers(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for beside the steps acts on our callbacks in MindFormers' trainer, or is refused."""
    pytest.importorskip("mindformers", reason="mindformers is not installed")
    monkeypatch.chdir(Path(base["output_dir"]).parent)
    key_effects.patch(monkeypatch)
    sections, wrong = copy.deepcopy(base), list[str]()
    sections["context"]["device_target"] = "Ascend"

    def effect(sections: dict[str, Any]) -> list[Any] | str:
        judged = judge(sections, "mindformers")
        if isinstance(judged, list):
            return judged
        return key_effects.beside_mindformers(judged, monkeypatch)

    for key in (key for key in KEYS if key.place.startswith(BESIDE) and str(key) not in LEFT):
        setting, values = key.acts
        place = in_setting(sections, setting)
        before, idle = effect(place), list[object]()
        for value in values or tried(key.field, value_of(place, key)):
            after = effect(with_value(place, key, value))
            if isinstance(after, list):
                if not refuses(after, key.place, value):
                    wrong.append(f"{key}={value!r}: refused as {after[0]}")
            elif after != before:
                idle.clear()
                break
            else:
                idle.append(value)
        wrong += [f"{key}={value!r}: taken without effect" for value in idle]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.mindformers
def test_through_mindformers(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What MindFormers leaves to our model acts on it or is refused; all else reaches MindFormers, or is refused."""
    pytest.importorskip("mindformers", reason="mindformers is not installed")
    folder = Path(base["output_dir"]).parent
    monkeypatch.chdir(folder)
    key_effects.patch(monkeypatch)
    sections = copy.deepcopy(base)
    sections["telechat_moe"] |= {"evaluation": {"interval": 0}, "sample": None}
    sections["context"]["device_target"] = "Ascend"
    before, wrong = key_effects.received(sections, folder), list[str]()
    for key in KEYS:
        if key.place.startswith(BESIDE):
            continue
        if decides("mindformers", key.place):
            wrong += [
                f"{key}{fault}"
                for fault in faults(key, sections, "mindformers", key_effects.in_mindformers, {})
            ]
            continue
        place = in_setting(sections, key.acts[0] if key.section_is_absent(sections) else "")
        plain = before if place == sections else key_effects.received(place, folder)
        values = tried(key.field, value_of(place, key))[:2]
        taken: list[object] = []
        for value in values:
            changed = with_value(place, key, value)
            judged = judge(changed, "mindformers")
            if not isinstance(judged, list):
                taken.append(value)
                if key_effects.received(changed, folder) != plain:
                    break
            elif not refuses(judged, key.place, value):
                wrong.append(f"{key}={value!r}: refused as {judged[0]}")
        else:
            if taken and str(key) not in LEFT:
                wrong.append(f"{key}={taken}: does not reach MindFormers")
    assert not wrong, "\n".join(wrong)
