"""Makes fields and sections of the schema from the rows of `mindformers_keys.txt`.

`section` is the decorator of every class of the schema; a section that no code of this package reads has no class in
Python at all and is made when an annotation first names it.
"""

import ast
import dataclasses
import functools
import inspect
import re
import sys
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from telechat_moe.recipe import fields

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> object:
        """Stand in for typing's decorator, which Python 3.10 lacks."""
        return lambda decorator: decorator


FILE = Path(__file__).parent / "mindformers_keys.txt"
_NAME = re.compile(r"(\w+)(?: \(also ([\w, ]+)\))?(?: \(not ([\w, ]+)\))?")
_VOCABULARY = dict(vars(fields))
T = TypeVar("T")


class Row(NamedTuple):
    """One line of the table: a key that only MindFormers reads, or the name of a field in Python."""

    name: str
    metadata: dict[str, Any]
    values: str = ""
    """Annotation, empty for a field that the Python class defines."""

    default: str = ""


class SectionRows(NamedTuple):
    """The rows of a section, and what the section is if it has no class in Python."""

    says: str
    rows: list[Row]


@functools.cache
def blocks() -> dict[str, SectionRows]:
    """Return the blocks of the table by the name of their section."""
    table: dict[str, SectionRows] = {}
    block = SectionRows("", [])
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            name, _, says = line[1:].partition("]")
            table[name] = block = SectionRows(says.strip(), [])
        elif line and not line.startswith("#"):
            block.rows.append(_row(line))
    return table


def _row(line: str) -> Row:
    key, *columns = re.split(r" {2,}", line)
    match = _NAME.fullmatch(key)
    decided = columns.pop().split()[1:] if columns and columns[-1].startswith("decides ") else None
    if match is None or len(columns) not in (0, 1, 3, 4):
        raise ValueError(f"{FILE.name}: {line}: expected a name, or name, values, default, meaning")
    metadata: dict[str, Any] = {}
    if decided is not None:
        metadata |= fields.decides(*cast("Any", decided if decided != ["nothing"] else ()))
    if len(columns) < 2:
        return Row(key, metadata | ({"takes": _takes(columns[0])} if columns else {}))
    values, default, says, *takes = columns
    also, instead_of = (tuple(names.split(", ")) if names else () for names in match.groups()[1:])
    metadata |= {"doc": says, **fields.names(*also), **fields.instead_of(*instead_of)}
    switch = "only False" if (values, default) == ("bool", "None") else "only"
    metadata["takes"] = _takes(takes[0] if takes else switch)
    return Row(match[1], metadata, values + " | None" * (default == "None"), default)


def _takes(column: str) -> fields.Takes:
    """Return what our trainer takes: `only` (the default), `only VALUES`, `never`, or `any: WHY`."""
    word, _, text = column.partition(" ")
    if word not in ("only", "never", "any:"):
        raise ValueError(f"{FILE.name}: {column}: expected only, only VALUES, never or any: WHY")
    if word == "any:":
        return fields.Takes(reason=text)
    values = ast.literal_eval(f"({text},)") if text else ()
    return fields.Takes(values if text or word == "never" else None)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def section(cls: type[T]) -> type[T]:
    """Make a frozen dataclass of a section: the fields of its class and its rows, in the table's order."""
    block = blocks().get(cls.__name__)
    if block is not None:
        annotations = inspect.get_annotations(cls)
        names = _Names(vars(sys.modules[cls.__module__]))
        rows = {row.name: row for row in block.rows}
        if annotations.keys() != {name for name, row in rows.items() if not row.values}:
            raise TypeError(f"{FILE.name}: [{cls.__name__}] must name the fields of the class")
        cls.__annotations__ = {}
        for name, row in rows.items():
            kind = annotations.get(name)
            if row.values:
                kind = eval(_compiled(row.values), _VOCABULARY, names)
                setattr(cls, name, _field(row, kind))
            elif row.metadata:
                default = vars(cls).get(name, dataclasses.MISSING)
                setattr(cls, name, fields.add_metadata(default, row.metadata))
            cls.__annotations__[name] = kind
    return dataclasses.dataclass(frozen=True, kw_only=True, slots=True)(cls)


@functools.cache
def _compiled(annotation: str) -> CodeType:
    return compile(annotation, FILE.name, "eval")


def _field(row: Row, kind: Any) -> Any:
    if row.default == "-":
        return dataclasses.field(metadata=row.metadata)
    if row.default.endswith("()"):
        return dataclasses.field(default_factory=kind, metadata=row.metadata)
    return dataclasses.field(default=ast.literal_eval(row.default), metadata=row.metadata)


class _Names(dict[str, Any]):
    """Names that annotations may use: those of a module, and the sections of the table."""

    def __missing__(self, name: str) -> Any:
        if name not in blocks():
            raise KeyError(name)
        return getattr(sys.modules[__name__], name)


def __getattr__(name: str) -> Any:
    """Return a section that is in the table alone, so that `pickle` finds its class, too."""
    if name.startswith("_") or name not in blocks():
        raise AttributeError(name)
    body: dict[str, Any] = {
        "__doc__": blocks()[name].says,
        "__module__": __name__,
        "__annotations__": {},
    }
    globals()[name] = built = section(cast("type[Any]", type(name, (), body)))
    return built


def is_made(cls: type) -> bool:
    """Tell whether a section is in the table alone."""
    return cls.__module__ == __name__
