"""What is published from the schema is current."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from yaml_edit import RECIPES

from docs.generate.json_schema import json_schema
from docs.generate.recipes_page import field_docs, markdown, sections

ROOT = RECIPES.parent


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == markdown(), "run: python -m docs.generate.recipes_page > docs/recipes.md"


def test_the_json_schema_is_current() -> None:
    published = json.loads((RECIPES / "schema.json").read_text(encoding="utf-8"))
    said = "run: python -m docs.generate.json_schema > recipes/schema.json"
    assert published == json_schema(), said


@pytest.mark.parametrize(("path", "cls"), sections(), ids=lambda v: getattr(v, "__name__", v))
def test_every_field_says_what_it_means(path: str, cls: type) -> None:
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):
        if not field.metadata.get("hidden"):
            assert docs.get(field.name, "").endswith("."), f"{path}.{field.name}"
    assert cls.__doc__


def check(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str) -> list[str]:
    """A small JSON schema validator for the words that ours uses."""
    if "$ref" in schema:
        return check(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, path)
    if "anyOf" in schema:
        tried = [check(value, option, root, path) for option in schema["anyOf"]]
        return min(tried, key=len)
    if "enum" in schema:
        same = [v for v in schema["enum"] if type(v) is type(value) and v == value]
        return [] if same else [f"{path}: {value!r}"]
    kinds = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "array": list,
             "object": dict, "null": type(None)}  # fmt: skip
    kind = schema.get("type")
    if kind and (
        not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return [f"{path}: {value!r} is not {kind}"]
    found: list[str] = []
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{path}: {value}")
    if kind == "array":
        for i, item in enumerate(value):
            found += check(item, schema["items"], root, f"{path}.{i}")
    if kind == "object" and "properties" in schema:
        for key in value:
            if key not in schema["properties"]:
                found.append(f"{path}.{key}: unknown")
            else:
                found += check(value[key], schema["properties"][key], root, f"{path}.{key}")
        found += [f"{path}.{key}: missing" for key in schema["required"] if key not in value]
    return found


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*.yaml")), ids=lambda p: p.name)
def test_the_json_schema_accepts_our_recipes(path: Path) -> None:
    schema = json_schema()
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert check(data, schema, schema, "") == []


def test_the_json_schema_refuses_slips() -> None:
    schema = json_schema()
    text = (RECIPES / "telechat3_moe" / "pretrain_tiny.yaml").read_text(encoding="utf-8")
    for old, new in (
        ("eps: 1.e-8", "eps: 1e-8"),
        ("pipeline_stage: 1", "pipline_stage: 1"),
        ("seed: 42", "seed: -1"),
        ("type: AdamW", "type: AdamV"),
    ):
        assert check(yaml.safe_load(text.replace(old, new)), schema, schema, "") != []
