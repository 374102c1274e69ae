"""Every key of the schema, values to try for it, and recipes with such a value."""

import copy
import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import mini_recipe as mini
import numpy as np
import yaml
from tokenizers import Tokenizer, models

from docs.generate.recipes_page import sections
from telechat_moe.checkpoint import checkpoint
from telechat_moe.data import IndexedDataset, write_indexed
from telechat_moe.recipe import RecipeError, load, loads
from telechat_moe.recipe.check import options_of, section_keys, split_annotation
from telechat_moe.recipe.uses import Use
from telechat_moe.recipe.weights import weights
from telechat_moe.train import preflight

_FILE = yaml.safe_load(Path(__file__).with_name("key_settings.yaml").read_text(encoding="utf-8"))
SETTINGS: dict[str, dict[str, Any]] = _FILE["settings"]
ACTS: dict[str, list[Any]] = _FILE["acts"]


class Key(NamedTuple):
    """A key of the schema."""

    path: str
    section: type
    field: dataclasses.Field[Any]

    def __str__(self) -> str:
        return f"{self.section.__name__}.{self.field.name}"

    @property
    def place(self) -> str:
        """The dotted key; ``list[]`` is any item of a list; of `callbacks`, the one of the type of the section."""
        return f"{self.path}.{self.field.name}".lstrip(".")

    @property
    def acts(self) -> tuple[str, tuple[object, ...]]:
        """The setting in which it acts, empty: the plain recipe; and values that show it, none: any."""
        setting, *values = ACTS.get(str(self), [""])
        names = (self.section.__name__, setting, self.path)
        return next((name for name in names if name in SETTINGS), setting), tuple(values)

    def section_is_absent(self, sections: dict[str, Any]) -> bool:
        """Tell whether a recipe lacks the section."""
        section: Any = sections
        for part in self.path.split(".") if self.path else ():
            section = section.get(part) if isinstance(section, dict) else None
        return section is None or self.section.__name__ in SETTINGS


KEYS = [Key(path, cls, f) for path, cls in sections() for f in section_keys(cls).fields.values()]


CLASSES = {name: key.section for key in reversed(KEYS) for name in (key.path, key.section.__name__)}
SAME = {f"{at}.seq_length" for at in ("model.model_config", "train_dataset.data_loader.config")}
"""One setting, which a recipe writes once and repeats by an alias."""


def within(sections: dict[str, Any], key: str, section: str = "") -> tuple[Any, Any]:
    """Return the section of a dotted key, made where it is missing, and the name or index in it.

    Args:
        section: The `type` of a callback.
    """
    *above, last = key.split(".")
    node: Any = sections
    path = ""
    for part in above:
        name, bracket, _ = part.partition("[")
        path = f"{path}.{part}".lstrip(".")
        if isinstance(node, list):
            node = node[int(name)]
            continue
        if not isinstance(node.get(name), dict | list):
            node[name] = [] if bracket else required(path)
        node = node[name]
        if bracket:
            items = [item for item in node if item.get("type") == section or path != "callbacks[]"]
            if not items:
                is_callback = path == "callbacks[]"
                node.append(
                    required(section) | {"type": section} if is_callback else required(path)
                )
            node = (items or node)[-1]
    return node, int(last) if isinstance(node, list) else last


def required(path: str) -> dict[str, Any]:
    """Return what a section must hold, of its path or class; it is all that a section that is not known holds."""
    content: dict[str, Any] = {}
    for name in section_keys(CLASSES[path]).required if path in CLASSES else ():
        field = section_keys(CLASSES[path]).fields[name]
        content[name] = (tried(field, None) or [{}])[0]
    return content


def with_value(sections: dict[str, Any], key: Key, value: object) -> dict[str, Any]:
    """Return plain data with the value of a key put in."""
    changed = copy.deepcopy(sections)
    for place in SAME if key.place in SAME else (key.place,):
        section, last = within(changed, place, key.section.__name__)
        section[last] = value
    return changed


def in_setting(sections: dict[str, Any], name: str) -> dict[str, Any]:
    """Return plain data with a setting put in."""
    changed = copy.deepcopy(sections)
    for key, value in SETTINGS[name].items() if name else ():
        section, last = within(changed, key)
        section[last] = value
    return changed


def value_of(sections: dict[str, Any], key: Key) -> Any:
    """Return what is written for a key, else its default."""
    section, name = within(copy.deepcopy(sections), key.place, key.section.__name__)
    return section[name] if isinstance(section, list) else section.get(name, key.field.default)


def shut(key: Key) -> bool:
    """Tell whether our trainer refuses the section of a key with any content."""
    above = [
        k for k in KEYS if key.path.removesuffix("[]") == f"{k.path}.{k.field.name}".lstrip(".")
    ]
    return any("takes" in k.field.metadata or shut(k) for k in above)


def tried(field: dataclasses.Field[Any], now: Any) -> list[Any]:
    """Return values of a field other than ``now``, by its annotation."""
    values: list[Any] = []
    number = now if isinstance(now, int | float) and not isinstance(now, bool) else 0
    for option in options_of(field.type):
        kind, limits = split_annotation(option)
        origin = get_origin(kind)
        some: list[Any] = []
        if origin is Literal:
            some = list(get_args(kind))
        elif kind is bool:
            some = [True, False]
        elif kind in (int, float):
            some = [number + 1, number * 2, number / 2, 7, 0.25]
            some = [kind(x) for x in some if kind(x) == x]
        elif kind is str:
            some = ["3GB", "other"]
        elif origin is list:
            inner = dataclasses.field()
            inner.type = get_args(kind)[0]
            some = [[x] * 2 for x in tried(inner, None)[:1]]
        elif origin is dict or kind is object:
            some = [{"a": 1}]
        values += [x for x in some if origin is list or all(limit.allows(x) for limit in limits)]
    return [x for x in values if not same(x, now)]


def same(a: object, b: object) -> bool:
    """Tell whether two values are equal, or two names of a data type; a number is no switch."""
    a, b = (_NAMES.get(x, x) if isinstance(x, str) else x for x in (a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def judge(sections: dict[str, Any], use: Use) -> Any:
    """Return the recipe, or the problems that `check` tells."""
    try:
        recipe = loads(yaml.dump(sections, Dumper=yaml.CSafeDumper), use=use)
    except RecipeError as error:
        return error.problems
    return (preflight.examine(recipe)[1] if use == "train" else []) or recipe


REPEATED = [
    f"model.model_config.{key}"
    for key in ("batch_size", "num_key_value_heads", "moe_shared_expert_intermediate_size")
]
"""Keys that repeat others, which could not change alone."""


def small_recipe(root: Path) -> dict[str, Any]:
    """Return a tiny recipe as plain data, its data set in place; aliases are one object."""
    folder = mini.write_data(root)
    for name in ("train", "valid"):  # another value of `eod` ends a document, too
        old = IndexedDataset(folder / name)
        texts = [np.array(old[i]) for i in range(len(old))]
        write_indexed(folder / name, [*texts, np.array([3, 7], np.uint16)], np.dtype(np.uint16))
    for name in ("other", "talks"):
        (folder / name).mkdir()
    mini.write_data(folder / "other", seed=1)
    for name in ("train", "valid"):
        talks = [np.array([~1, ~2, 3, 4, 0]), np.arange(5)] * 20
        write_indexed(folder / "talks" / name, talks, np.int32)
    template = "{{ date_string }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "talks" / "chat_template.jinja").write_text(template)
    for place in (folder, folder / "other", folder / "talks"):
        Tokenizer(models.WordLevel({"<|endoftext|>": 0})).save(str(place / "tokenizer.json"))
    values = {
        **mini.OVERRIDES,
        "train_dataset.data_loader.config.data_path": f"['1', '{folder}/train']",
        "telechat_moe.evaluation.data_path": f"['1', '{folder}/valid']",
        "telechat_moe.evaluation.interval": 4,
        "telechat_moe.sample": "{}",
        "telechat_moe.saving": "{background: False}",
        "model.model_config.num_nextn_predict_layers": 1,
        "model.model_config.max_position_embeddings": 32,
        "output_dir": str(folder / "out"),
        **dict.fromkeys(REPEATED, "null"),
        "callbacks.1": "{type: TopkBiasBalanceCallback}",
    }
    sets = [f"{key}={value}" for key, value in values.items()]
    recipe = load("telechat3_moe/pretrain_tiny.yaml", sets)
    model = {w.name: np.ones(w.shape, np.float32) for w in weights(recipe.model_config)}
    with preflight.open_loader(recipe) as loader:
        state = {
            "version": 1,
            "model_config": dataclasses.asdict(recipe.model_config),
            "data": loader.state(),
        }
    checkpoint.save(folder / "run", 1, {"model": model}, state)
    (folder / "overlap.json").write_text('{"pp_1f1b_overlap": "AlltoAllV"}')
    (folder / "config.json").write_text('{"rope_interleave": false}')
    recipe.given["train_dataset_task"]["dataset_config"] = recipe.given["train_dataset"]
    return recipe.given
