"""Which keys each version of MindFormers reads, by the tables that `benchmarks.dryrun_mindformers.reads` makes by observation.

A table has, for keys outside of the model section (``keys``), for names anywhere (``names``) and for the keys of each
model type: an empty text if the key was read, else where MindFormers' source has a key of that name. The file holds the
table of the first version, and of others what differs; null: not there.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from telechat_moe.recipe.check import parts_of, section_keys
from telechat_moe.recipe.schema import Recipe
from telechat_moe.recipe.schema.train import OUR_LOADER
from telechat_moe.versions import PAIRS

FILE = Path(__file__).parent / "schema" / "mindformers_reads.json"

LOADER = "BlendedMegatronDatasetDataLoader"
MODEL = "model.model_config."
_SAME = {
    "train_dataset_task.dataset_config.": "train_dataset.",
    "eval_dataset_task.dataset_config.": "train_dataset.",
    "eval_dataset_task.": "train_dataset_task.",
    "eval_dataset.": "train_dataset.",
    "eval_callbacks.": "callbacks.",
    "runner_wrapper.scale_sense.": "runner_wrapper.",
    "grouped_lr_schedule.default.": "lr_schedule.",
    "grouped_lr_schedule.grouped.*.": "lr_schedule.",
}
"""Sections that the same code reads."""


class KeyReading(NamedTuple):
    """What is known of a written key.

    Attributes:
        verdict: ``read``: seen; ``never``: neither seen nor looked up anywhere in MindFormers' source.
        place: Why it is not judged.
    """

    key: str
    verdict: Literal["read", "never", "not judged"]
    place: str = ""


@functools.cache
def table_of(version: str) -> dict[str, dict[str, str]]:
    """Return the table of a version of MindFormers."""
    tables = json.loads(FILE.read_text(encoding="utf-8"))
    first, changes = tables[PAIRS[0].mindformers], tables[version]
    return {
        section: {k: v for k, v in {**keys, **changes.get(section, {})}.items() if v is not None}
        for section, keys in first.items()
    }


@functools.cache
def schema_names(top: type) -> set[str]:
    """Return the name of every key of a section and of all sections below it."""
    sections = [top]
    for cls in sections:  # which grows
        kinds = [field.type for field in section_keys(cls).fields.values()]
        below = (inner for kind in kinds for inner, _ in parts_of(kind))
        sections += [inner for inner in dict.fromkeys(below) if inner not in sections]
    return {name for cls in sections for name in section_keys(cls).names}


def judge(
    sections: Mapping[str, Any], model_type: str | None, version: str
) -> Iterator[KeyReading]:
    """Yield what is known of every written key, keys of our own sections left out.

    Args:
        version: Of MindFormers.
        model_type: Whose network MindFormers builds; None: not known, no model key is judged.
    """
    loader, trains = _loader(sections), sections.get("run_mode") in ("train", "finetune")
    unobserved = "" if trains else "only training was observed"
    for key, pattern in _leaves(sections):
        if key.startswith("telechat_moe.") or ".TelechatMoeMonitor." in pattern:
            continue
        judged = _judge(key, pattern, model_type, table_of(version))
        reason = unobserved
        if ".data_loader." in key and loader not in (LOADER, OUR_LOADER):
            reason = f"{loader} was not observed"
        is_open = reason and judged.verdict == "never"
        yield KeyReading(key, "not judged", reason) if is_open else judged


def _loader(sections: Mapping[str, Any]) -> Any:
    """Return the type of the data loader."""
    section: Any = sections
    for key in ("train_dataset", "data_loader", "type"):
        is_section = isinstance(section, Mapping)
        section = cast("Mapping[str, Any]", section).get(key) if is_section else None
    return section or LOADER


def _leaves(value: Any, key: str = "", pattern: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys, and the same with the type of a section in the place of its index."""
    if isinstance(value, Mapping) and value:
        for name, item in cast("Mapping[str, Any]", value).items():
            yield from _leaves(item, f"{key}.{name}".lstrip("."), f"{pattern}.{name}".lstrip("."))
    elif isinstance(value, list) and (items := _sections(cast("list[Any]", value))):
        for index, item in enumerate(items):
            kind = item.get("type", "*") if pattern.endswith("callbacks") else "*"
            yield from _leaves(item, f"{key}.{index}", f"{pattern}.{kind}")
    else:
        yield key, pattern


def _sections(items: list[Any]) -> list[Mapping[str, Any]]:
    """Return the items of a list of sections, none of another list."""
    return items if all(isinstance(item, Mapping) for item in items) else []


def _judge(
    key: str, pattern: str, model_type: str | None, table: Mapping[str, Mapping[str, str]]
) -> KeyReading:
    for section, section_read in _SAME.items():
        if pattern.startswith(section):
            pattern = section_read + pattern.removeprefix(section)
    name = pattern.rpartition(".")[2]
    if not key.startswith(MODEL):
        parts = pattern.split(".")
        wildcards = {".".join([*parts[:depth], "*"]) for depth in range(1, len(parts))}
        if table["keys"].keys() & {pattern, *wildcards}:  # MindSpore gets some sections whole
            return KeyReading(key, "read")
        return _unseen(key, table["names"].get(name))
    model = table.get(model_type or "")
    name = pattern.removeprefix(MODEL).partition(".")[0]
    if model is None:
        return KeyReading(key, "not judged", f"model type {model_type} was not observed")
    place = model.get(name)
    return KeyReading(key, "read") if place == "" else _unseen(key, place)


def _unseen(key: str, place: str | None) -> KeyReading:
    """Return the judgement on a key whose reading was not seen, but perhaps is at a place of the source."""
    if place is None and key.rpartition(".")[2] not in schema_names(Recipe):
        return KeyReading(key, "not judged", "its section has keys of any name")
    if place is None:
        return KeyReading(key, "never")
    reason = f"read with other settings, or later (mindformers/{place})"
    return KeyReading(key, "not judged", reason)
