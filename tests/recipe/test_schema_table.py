"""The table of keys that only MindFormers reads, as fields of the schema."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from telechat_moe.recipe import load
from telechat_moe.recipe.fields import Takes
from telechat_moe.recipe.schema import table
from telechat_moe.recipe.schema.parallel import Context


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces the table by a text."""

    def write(text: str) -> None:
        (tmp_path / "keys.txt").write_text(text)
        table.blocks.cache_clear()

    monkeypatch.setattr(table, "FILE", tmp_path / "keys.txt")
    yield write
    table.blocks.cache_clear()


def test_rows_stand_between_the_fields_of_the_class() -> None:
    names = [field.name for field in dataclasses.fields(Context)]
    assert names[:3] == ["mode", "device_target", "device_id"]
    assert Context().mode == 0  # type: ignore[attr-defined]


def test_a_section_of_the_table_alone_survives_pickle() -> None:
    recipe = load("telechat3_moe/pretrain_tiny.yaml", ["context.jit_config={jit_level: O1}"])
    reloaded = pickle.loads(pickle.dumps(recipe))
    assert reloaded == recipe
    assert reloaded.context.jit_config.jit_level == "O1"


def test_defaults_names_and_meaning_come_from_the_row(written) -> None:
    written(
        "[Made]  A section.\na (also b, c) (not d)  int  -  First.\ne  Positive  None  Second.\n"
    )
    first, second = dataclasses.fields(table.Made)
    assert first.default is dataclasses.MISSING
    names = {"names": ("b", "c"), "instead_of": ("d",)}
    assert first.metadata == {"doc": "First.", **names, "takes": Takes()}
    assert (second.default, second.metadata["doc"]) == (None, "Second.")
    with pytest.raises(AttributeError):
        _ = table.Unmade


@pytest.mark.parametrize(
    "line", ["a  int", "a  int  1", "a  int  1  Text.  only  x", "a ; b  int  1  Text."]
)
def test_a_line_of_another_form_is_refused(written, line: str) -> None:
    written(f"[Made]\n{line}\n")
    with pytest.raises(ValueError, match=r"expected (a name|only)"):
        table.blocks()


@pytest.mark.parametrize("lines", ["x  int  1  One.", "a\nb\n"])
def test_the_table_names_every_field_of_the_class(written, lines: str) -> None:
    written(f"[Part]\n{lines}\n")
    with pytest.raises(TypeError, match="must name the fields"):
        table.section(type("Part", (), {"__annotations__": {"a": int}, "__module__": __name__}))
