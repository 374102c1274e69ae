"""Reading YAML: lines, traps, anchors, and the same values as PyYAML."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from yaml_edit import RECIPES

from telechat_moe.recipe.tree import MAX_DEPTH, read


def problems_of(text: str) -> list[tuple[int, str, str, str]]:
    found: list[tuple[int, str, str, str]] = []
    read(text, lambda *said: found.append(said))
    return found


def plain(text: str) -> Any:
    node = read(text, lambda *said: pytest.fail(str(said)))
    assert node is not None
    return node.plain()


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*.yaml")), ids=lambda p: p.name)
def test_reads_what_pyyaml_reads(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert plain(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", True),
        ("No", False),
        ("on", True),
        ("OFF", False),
        ("010", 8),
        ("0o17", "0o17"),
        ("0x1F", 31),
        ("0b101", 5),
        ("1_000", 1000),
        ("1:30", 90),
        ("1e-5", "1e-5"),
        ("1E5", "1E5"),
        ("1.0e8", "1.0e8"),
        ("2024-01-01", None),
        ("None", "None"),
        ("1,000", "1,000"),
    ],
)
def test_a_plain_scalar_that_surprises_says_so(text: str, value: Any) -> None:
    node = read(f"a: {text}", lambda *said: pytest.fail(str(said)))
    assert node is not None
    entry = node.get("a")
    assert entry is not None
    assert entry.node.trap
    if value is not None:
        assert entry.node.value == value == yaml.safe_load(f"a: {text}")["a"]
    quoted = read(f"a: '{text}'", lambda *said: pytest.fail(str(said)))
    assert quoted is not None
    assert quoted.plain() == {"a": text}
    assert not quoted.entries[0].node.trap


@pytest.mark.parametrize("text", ["1.e-5", "1.0e-5", "5", "-3", "0", "0.1", ".5", "True", "false"])
def test_a_plain_scalar_that_does_not_surprise_is_taken(text: str) -> None:
    node = read(f"a: {text}", lambda *said: pytest.fail(str(said)))
    assert node is not None
    assert not node.entries[0].node.trap
    assert node.plain() == yaml.safe_load(f"a: {text}")


@pytest.mark.parametrize("text", [".inf", "-.INF", ".nan", "1:30.5"])
def test_special_floats_are_traps(text: str) -> None:
    node = read(f"a: {text}", lambda *said: pytest.fail(str(said)))
    assert node is not None
    assert node.entries[0].node.trap
    assert isinstance(yaml.safe_load(text), float)
    assert math.isnan(node.entries[0].node.value)


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="0123456789abcdefonyxsTFNul+-._:, eE~", max_size=12))
def test_scalars_mean_what_pyyaml_means_or_are_traps(text: str) -> None:
    try:
        expected = yaml.safe_load(f"a: {text}\n")
    except (yaml.YAMLError, ValueError):
        return
    if not isinstance(expected, dict) or isinstance(expected["a"], dict | list):
        return
    node = read(f"a: {text}\n", lambda *said: None)
    assert node is not None
    scalar = node.entries[0].node
    if not scalar.trap:
        assert scalar.value == expected["a"]
        assert type(scalar.value) is type(expected["a"])


def test_duplicate_keys_at_any_depth() -> None:
    text = "a:\n  b: 1\n  c: 2\n  b: 3\nl:\n  - x: 1\n    x: 2\na: 4\n"
    reported = problems_of(text)
    assert [(line, key) for line, key, _, _ in reported] == [(4, "a.b"), (7, "l.0.x"), (8, "a")]
    assert "line 2" in reported[0][2]


def test_merge_keys_follow_yaml() -> None:
    text = "base: &b {x: 1, y: 2}\nmore: &m {y: 3, z: 4}\nhere: {<<: [*b, *m], x: 9}\n"
    assert plain(text) == yaml.safe_load(text)
    assert plain(text)["here"] == {"x": 9, "y": 2, "z": 4}


def test_aliases_share_their_node() -> None:
    text = "a: &n {x: 1}\nb: *n\nc: [*n, *n]\n"
    node = read(text, lambda *said: pytest.fail(str(said)))
    assert node is not None
    first, second = node.get("a"), node.get("b")
    assert first is not None
    assert second is not None
    assert second.node is first.node
    assert second.alias
    assert not first.alias
    assert second.line == 2


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: *nope\n", 1, "no anchor &nope"),
        ("a: &x [1, *x]\n", 1, "is inside"),
        ("a: &x 1\nb: &x 2\n", 2, "second time"),
        ("a: !!python/object:os.system 1\n", 1, "tag"),
        ("a: !!str 1\n", 1, "tag"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ("", 1, "empty"),
        ("a: [1, 2\n", 2, "not YAML"),
        ("a:\n\t- b\n", 2, "not YAML"),
        ("a: 'x\n", 2, "not YAML"),
        ("ok: 1\na: \x00\n", 2, "not YAML"),
        ("on: 1\n", 1, "reads as a bool"),
        ("5: 1\n", 1, "reads as a int"),
        ("[1, 2]: 3\n", 1, "not a word"),
        ("{a: 1}: 3\n", 1, "not a word"),
        ("&k key: 3\n", 1, "on the key"),
        ("a: {<<: 3}\n", 1, "<<"),
        ("a: &b {<<: *b}\n", 1, "is inside"),
    ],
)
def test_odd_yaml_is_a_problem_with_its_line(text: str, line: int, says: str) -> None:
    reported = problems_of(text)
    assert reported
    assert reported[0][0] == line
    assert says in reported[0][2]


def test_depth_is_bounded() -> None:
    for text in ("[" * 5000, "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "a:\n" + "- " * 3000):
        assert problems_of(text)
    deep = "[" * 40 + "]" * 40
    assert problems_of(deep) == []


def test_aliases_cannot_explode() -> None:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 12)]
    reported = problems_of("\n".join(lines))
    assert len(reported) == 1
    assert "aliases expand" in reported[0][2]


def test_size_is_bounded() -> None:
    assert problems_of("# " + "x" * 1_000_001)
