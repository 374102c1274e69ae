"""Write `recipes/schema.json`, the JSON schema that editors use while a recipe is written.

    python -m docs.generate.json_schema > recipes/schema.json

An editor sees unknown keys, types and ranges; `telechat-moe check` checks the rules across sections.
"""

import dataclasses
import inspect
import json
import sys
from typing import Any, Literal, cast, get_args, get_origin

from docs.generate.recipes_page import field_docs
from telechat_moe.recipe.check import options_of, section_keys, split_annotation
from telechat_moe.recipe.fields import Form, Length, Range
from telechat_moe.recipe.schema import Recipe

_TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    None: "null",
    type(None): "null",
}


def _limit(limit: object) -> dict[str, Any]:
    if isinstance(limit, Range):
        low = {"exclusiveMinimum" if limit.above else "minimum": limit.low}
        high = {"exclusiveMaximum" if limit.below else "maximum": limit.high}
        return {key: value for key, value in (low | high).items() if value is not None}
    if isinstance(limit, Form):
        return {"pattern": f"^(?:{limit.pattern.removeprefix('(?s)')})$"}
    if isinstance(limit, Length):
        most = {} if limit.high is None else {"maxItems": limit.high}
        return {"minItems": limit.low, **most}
    return {}


class _Writer:
    """Collect the definitions of all sections."""

    def __init__(self) -> None:
        self.definitions: dict[str, dict[str, Any]] = {}

    def schema(self, kind: Any) -> dict[str, Any]:
        options = options_of(kind)
        if len(options) > 1:
            return {"anyOf": [self.schema(option) for option in options]}
        base, limits = split_annotation(kind)
        if dataclasses.is_dataclass(base):
            return {"$ref": f"#/$defs/{self.section(cast(type, base))}"}
        origin, args = get_origin(base), get_args(base)
        if base is object:
            return {}
        if origin is Literal:
            return {"enum": list(args)}
        if origin is list:
            result: dict[str, Any] = {"type": "array", "items": self.schema(args[0])}
        elif origin is dict:
            result = {"type": "object", "additionalProperties": self.schema(args[1])}
        else:
            result = {"type": _TYPES[base]}
        for limit in limits:
            result |= _limit(limit)
        return result

    def section(self, cls: type) -> str:
        if cls.__name__ not in self.definitions:
            self.definitions[cls.__name__] = {}  # reserved: sections may contain each other
            self.definitions[cls.__name__] = self._section(cls)
        return cls.__name__

    def _section(self, cls: type) -> dict[str, Any]:
        docs, properties, required = field_docs(cls), dict[str, Any](), list[str]()
        for field in section_keys(cls).fields.values():
            schema = {**self.schema(field.type), "description": docs[field.name]}
            for name in (field.name, *field.metadata.get("names", ())):
                properties[name] = schema
            no_default = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            if no_default:
                required.append(field.name)
        says = (inspect.getdoc(cls) or "").partition("\n\n")[0]
        return {
            "description": " ".join(says.split()),
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe."""
    writer = _Writer()
    name = writer.section(Recipe)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "telechat-moe recipe",
        "$ref": f"#/$defs/{name}",
        "$defs": writer.definitions,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=1) + "\n")
