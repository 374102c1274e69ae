"""Every key of the schema is read, or refused with its name: a setting without effect is never taken.

For each key values are tried that ask for something else than its default. Where our trainer reads the key, they change
what a run does (`key_effects`) or are refused; where it does not, they are refused, or the schema says why any value
is neutral, and they change nothing.
"""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import key_effects
import mini_recipe as mini
from key_settings import BESIDE, ELSEWHERE, REFUSED, RULED, SETTINGS

from telechat_moe.recipe import RecipeError, load, loads
from telechat_moe.recipe.check import options_of, section_keys, split_annotation
from telechat_moe.recipe.docs import sections

KEYS = [
    (path, cls, field) for path, cls in sections() for field in section_keys(cls).fields.values()
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a tiny recipe as plain data, its data set in place; aliases are one object."""
    folder = mini.write_data(tmp_path_factory.mktemp("keys"))
    (folder / "tokenizer.json").touch()
    values = {
        **mini.OVERRIDES,
        "train_dataset.data_loader.config.data_path": f"['1', '{folder}/train']",
        "telechat_moe.evaluation.data_path": f"['1', '{folder}/valid']",
        "telechat_moe.evaluation.interval": 4,
        "telechat_moe.sample": "{}",
        "model.model_config.num_nextn_predict_layers": 1,
        "output_dir": str(folder / "out"),
    }
    sets = [f"{key}={value}" for key, value in values.items()]
    given = load("telechat3_moe/pretrain_tiny.yaml", sets).given
    given["train_dataset_task"]["dataset_config"] = given["train_dataset"]
    return given


def with_value(given: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """Return plain data with a dotted key put in; ``list[]`` appends an item, ``list[TYPE]`` takes that of the type."""
    made = copy.deepcopy(given)
    *above, last = key.split(".")
    place: Any = made
    for part in above:
        name, bracket, kind = part.partition("[")
        if not bracket and isinstance(place, list):
            place = place[int(name)]
            continue
        if not bracket:
            if not isinstance(place.get(name), dict | list):
                place[name] = {}
            place = place[name]
            continue
        items = place.setdefault(name, [])
        found = [item for item in items if kind == "]" or item.get("type") == kind[:-1]]
        if not found:
            found = [{"type": kind[:-1]} if kind != "]" else {}]
            items.append(found[0])
        place = found[0]
    place[int(last) if isinstance(place, list) else last] = value
    return made


def judge(given: dict[str, Any], use: Literal["train", "dryrun"] = "train") -> Any:
    """Return the recipe, or the problems."""
    try:
        return loads(yaml.safe_dump(given), use=use)
    except RecipeError as error:
        return error.problems


def tried(field: dataclasses.Field[Any]) -> list[Any]:
    """Return values of a field other than its default, by its annotation."""
    found: list[Any] = []
    for option in options_of(field.type):
        kind, limits = split_annotation(option)
        now = field.default if isinstance(field.default, int | float) else 0
        origin = get_origin(kind)
        some: list[Any] = []
        if origin is Literal:
            some = list(get_args(kind))
        elif kind is bool:
            some = [True, False]
        elif kind in (int, float):
            some = [kind(x) for x in (now + 1, 7, now / 2, 0.25) if kind(x) == x]
        elif kind is str:
            some = ["3GB", "other"]
        elif origin is list:
            inner = dataclasses.field()
            inner.type = get_args(kind)[0]
            some = [[x] * 2 for x in tried(inner)[:1]] or []
        elif origin is dict or kind is object:
            some = [{"a": 1}]
        takes = field.metadata.get("takes")
        fits = [x for x in some if origin is list or all(limit.allows(x) for limit in limits)]
        neutral = (field.default,) if takes is None else takes.neutral(field)
        found += [
            x for x in fits if not any(x is n or (x == n and type(x) is type(n)) for n in neutral)
        ]
    return found[:2]


def place_of(path: str, cls: type, name: str) -> str:
    """Return the dotted key of a field, as `with_value` takes it."""
    if path == "callbacks[]":
        path = f"callbacks[{cls.__name__}]"
    return f"{path}.{name}".lstrip(".")


def refuses(problems: list[Any], key: str) -> bool:
    """Tell whether problems name a key, its section, or what decides that this is read."""
    section, _, last = key.rpartition(".")
    for p in problems:
        if "[" in key:  # an item of a list, whose index is not known here
            head, tail = key.partition("[")[0], p.key.rpartition(".")[2]
            named = p.key.startswith(head) and (tail in (last, "type") or p.key == head)
            named = named or (bool(p.key) and head.startswith(p.key))
        else:
            near = (key, section, f"{section}.type", f"{section}.model_type")
            named = p.key in near or f"{key}.".startswith(f"{p.key}.")
            named = named or p.key.startswith(f"{key}.") or key in p.found or last in p.found
        if named:
            return True
    return False


def test_every_key_is_tried() -> None:
    """A section or key that is added is walked, and the settings name no key that is gone."""
    known = {f"{cls.__name__}.{field.name}" for _, cls, field in KEYS}
    assert len(known) == len(KEYS) > 780
    assert not (SETTINGS.keys() | ELSEWHERE.keys()) - known
    tests = Path(__file__).parents[1]
    assert all((tests / file).exists() for file in ELSEWHERE.values())


def is_section(field: dataclasses.Field[Any]) -> bool:
    """Tell whether a field holds a section, or sections in a list."""

    def holds(kind: Any) -> bool:
        base_, _ = split_annotation(kind)
        inner = get_args(base_) if get_origin(base_) is list else ()
        return dataclasses.is_dataclass(base_) or any(
            holds(o) for i in inner for o in options_of(i)
        )

    return any(holds(o) for o in options_of(field.type))


def _place(path: str) -> Any:
    """Return the parameter of a section; the model's, of which each value is another model to build, is slow."""
    return pytest.param(path, marks=[pytest.mark.slow] if path == "model.model_config" else [])


@pytest.mark.parametrize("path", map(_place, sorted({path for path, _, _ in KEYS})))
def test_a_value_acts_or_is_refused(path: str, base: dict[str, Any], monkeypatch) -> None:
    effects: dict[str, str] = {}

    def effect(recipe: Any) -> str:
        key = repr(recipe)
        if key not in effects:
            effects[key] = key_effects.fingerprint(recipe, monkeypatch)
        return effects[key]

    wrong: list[str] = []
    for cls, field in [(c, f) for p, c, f in KEYS if p == path]:
        name = f"{cls.__name__}.{field.name}"
        if name not in ELSEWHERE and not is_section(field):
            found = faults(field, place_of(path, cls, field.name), base, cls, effect)
            wrong += [f"{name}{fault}" for fault in found]
    assert not wrong, "\n".join(wrong)


def faults(field: Any, key: str, base: dict[str, Any], cls: type, effect: Any) -> Iterator[str]:
    """Yield what is wrong with how a key is taken."""
    values, setting = SETTINGS.get(
        f"{cls.__name__}.{field.name}", (None, BESIDE.get(cls.__name__, {}))
    )
    given = base
    for other, value in setting.items():
        given = with_value(given, other, value)
    before = judge(given)
    if isinstance(before, list) is not (cls.__name__ in REFUSED):
        yield f": in {setting} {before}"
        return
    values = tried(field) if values is None else values
    words = [split_annotation(option)[0] for option in options_of(field.type)]
    if not values and not any(get_origin(w) is Literal and len(get_args(w)) == 1 for w in words):
        yield ": no value to try"
    takes, name = field.metadata.get("takes"), f"{cls.__name__}.{field.name}"
    judged = [(value, judge(with_value(given, key, value))) for value in values]
    refused = all(isinstance(found, list) for _, found in judged)
    if takes is None and refused and cls.__name__ not in REFUSED and name not in RULED:
        yield f": refused with each of {values}, so that nothing shows what it does"
    for value, found in judged:
        if isinstance(found, list):
            if not refuses(found, key):
                yield f"={value!r}: refused as {found[0]}"
        elif takes is None and effect(found) == effect(before):
            yield f"={value!r}: taken without effect"
        elif takes is not None and not takes.why:
            yield f"={value!r}: taken, although nothing reads it"
        elif takes is not None and effect(found) != effect(before):
            yield f"={value!r}: read by our code, which the schema denies"
