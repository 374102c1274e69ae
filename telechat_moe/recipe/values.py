"""Turn checked sections back into plain data."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from telechat_moe.recipe.check import section_keys


def plain(section: Any, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section as plain data, with the defaults of everything that has a value.

    Args:
        section: A dataclass of the schema.
        mapping: The section as it was written; keys that were not written are left out if they have
            no value, are sections, or mean nothing to MindFormers.
    """
    cls = cast("type[Any]", type(section))
    written = {section_keys(cls).names[key]: value for key, value in mapping.items()}
    result = {name: _value(getattr(section, name), value) for name, value in written.items()}
    for field in dataclasses.fields(cls):
        value = getattr(section, field.name)
        skip = field.metadata.get("hidden") or field.metadata.get("own") or field.name in result
        if not skip and value not in (None, []) and not dataclasses.is_dataclass(value):
            result[field.name] = _value(value, value)
    return result


def _value(value: Any, written: Any) -> Any:
    if dataclasses.is_dataclass(value) and isinstance(written, Mapping):
        return plain(value, cast("Mapping[str, Any]", written))
    if isinstance(value, list):
        return [_value(v, w) for v, w in zip(cast("list[Any]", value), written, strict=True)]
    return value
