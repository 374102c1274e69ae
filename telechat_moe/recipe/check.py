"""Check a tree against the dataclasses of the schema and build them.

A value with a problem is reported and left out, and so is the default of a field that a misspelt key may mean: the
object that comes back then lacks that attribute, so that cross-field rules can still run on everything else
(``rules.py``).
"""

import dataclasses
import difflib
import functools
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from telechat_moe.recipe.fields import Form, Length, Range, is_required
from telechat_moe.recipe.tree import NodeKind, YamlEntry, YamlNode

INVALID: Any = object()
"""Returned instead of a value that has a problem."""

EntryReport = Callable[["YamlEntry", str, str, str, str], None]
"""Called with (place, dotted key, found, expected, suggestion)."""

Choose = Callable[[tuple[Any, ...]], "type | None"]


class Checker:
    """Check one tree; every problem goes to ``report``.

    Args:
        choose: Picks one of several sections that may occur at a position; they differ by their
            ``type`` key if it returns None.
    """

    def __init__(self, report: EntryReport, choose: Choose = lambda options: None) -> None:
        self.report = report
        self.choose = choose
        self._checked: dict[tuple[int, int], Any] = {}

    def check(self, entry: YamlEntry, kind: Any, path: str) -> Any:
        """Return the Python value of ``entry`` as annotation ``kind`` wants it, or INVALID."""
        node = entry.node
        if node.kind == "broken":
            return INVALID
        if node.kind in ("map", "list"):
            memo = (id(node), id(kind))  # an alias is checked once, where it was written
            if memo not in self._checked:
                self._checked[memo] = self._check(entry, kind, path)
            return self._checked[memo]
        if node.trap:
            self.report(entry, path, node.show(), node.trap, "")
            return INVALID
        return self._check(entry, kind, path)

    def _check(self, entry: YamlEntry, kind: Any, path: str) -> Any:
        node = entry.node
        options = options_of(kind)
        fitting = [o for o in options if node.kind in _kinds(o)]
        if node.kind == "int" and len(fitting) > 1:  # int | float: the exact one
            fitting = [o for o in fitting if _bare(o) is not float] or fitting
        if len(fitting) == 1:
            return self._check_entry(entry, fitting[0], path)
        if len(fitting) > 1 and all(dataclasses.is_dataclass(o) for o in fitting):
            if (chosen := self.choose(tuple(fitting))) is not None:
                return self.section(entry, chosen, path)
            return self._by_type(entry, fitting, path)
        problems: list[str] = []
        for option in fitting:
            problems.clear()
            trial = Checker(lambda place, key, found, expected, near: problems.append(key))
            value = trial._check_entry(entry, option, path)
            if not problems:
                return value
        return self._refuse(entry, kind, path)

    def _refuse(self, entry: YamlEntry, kind: Any, path: str) -> Any:
        expected, node = f"expected {describe(kind)}", entry.node
        self.report(entry, path, node.show(), expected, nearest_word(node, kind))
        return INVALID

    def _check_entry(self, entry: YamlEntry, kind: Any, path: str) -> Any:
        node = entry.node
        base, limits = split_annotation(kind)
        if dataclasses.is_dataclass(base):
            return self.section(entry, cast(type, base), path)
        origin = get_origin(base)
        if origin is list:
            return self._list(entry, kind, path)
        if origin is dict:
            return self._dict(entry, get_args(base)[1], path)
        if base is object and node.kind in ("map", "list"):
            kind = dict[str, object] if node.kind == "map" else list[object]
            return self._check_entry(entry, kind, path)
        value = node.value
        if base is float and node.kind == "int":
            value = float(node.value)
            if value != node.value:
                self.report(entry, path, node.show(), "a number with at most 15 digits", "")
                return INVALID
        bad = origin is Literal and value not in get_args(base)
        if bad or not all(limit.allows(value) for limit in limits):
            return self._refuse(entry, kind, path)
        return value

    def _list(self, entry: YamlEntry, kind: Any, path: str) -> Any:
        base, limits = split_annotation(kind)
        (item,) = get_args(base)
        if not all(limit.allows(len(entry.node.entries)) for limit in limits):
            return self._refuse(entry, kind, path)
        values = [self.check(e, item, f"{path}.{e.key}") for e in entry.node.entries]
        return INVALID if any(v is INVALID for v in values) else values

    def _dict(self, entry: YamlEntry, item: Any, path: str) -> Any:
        values = {e.key: self.check(e, item, f"{path}.{e.key}") for e in entry.node.entries}
        return INVALID if any(v is INVALID for v in values.values()) else values

    def _by_type(self, entry: YamlEntry, options: list[Any], path: str) -> Any:
        """Choose among sections by their ``type`` key (callbacks)."""
        written = entry.node.get("type")
        sections = [o for o in options if written and written.node.value in type_names(o)]
        if sections:
            return self.section(entry, sections[0], path)
        type_words = [name for o in options for name in type_names(o)]
        if written is not None and written.node.kind == "broken":
            return INVALID  # reported where the text was read
        if written is None:
            self.report(entry, path, "no key 'type'", f"type is one of {', '.join(type_words)}", "")
        else:
            matches = difflib.get_close_matches(str(written.node.value), type_words, 1)
            expected = f"expected one of {', '.join(type_words)}"
            self.report(written, f"{path}.type", written.node.show(), expected, "".join(matches))
        return INVALID

    def section(self, entry: YamlEntry, cls: type, path: str) -> Any:
        """Check a map against a dataclass and build it; attributes with problems stay unset."""
        plan = section_keys(cls)
        built = cast(Any, object.__new__)(cls)
        entries: dict[str, YamlEntry] = {}
        meant: set[str] = set()  # fields that a misspelt key may set, of which nothing is known
        for child in entry.node.entries:
            below = f"{path}.{child.key}".lstrip(".")
            name = plan.names.get(child.key)
            if name is None:
                meant.add(self._unknown(child, plan, path, below))
            elif name in entries:
                text = f"{child.key} and {entries[name].key} name the same setting"
                self.report(child, below, text, f"write only {name}", "")
            else:
                entries[name] = child
        for name, field in plan.fields.items():
            if name in entries:
                below = f"{path}.{entries[name].key}".lstrip(".")
                value = self.check(entries[name], field.type, below)
            elif name in plan.required:
                expected, value = f"expected {describe(field.type)}", INVALID
                self.report(entry, f"{path}.{name}".lstrip("."), "is missing", expected, "")
            elif name in meant:
                value = INVALID
            else:
                has_value = field.default is not dataclasses.MISSING
                value = field.default if has_value else cast(Any, field.default_factory)()
            if value is not INVALID:
                object.__setattr__(built, name, value)
        return built

    def _unknown(self, child: YamlEntry, plan: "SectionKeys", path: str, below: str) -> str:
        """Report a key that is not known; return the name of the field that it may mean, empty: none."""
        section_text = f"the section {path}" if path else "a recipe"
        close = difflib.get_close_matches(child.key, plan.names, 1, 0.6)
        match = plan.elsewhere.get(child.key) or "".join(close)
        suggestion = f"{path}.{match}".lstrip(".") if match else ""
        self.report(child, below, "unknown key", f"{section_text} has no such key", suggestion)
        return plan.names.get(match, "")


@dataclasses.dataclass(frozen=True, slots=True)
class SectionKeys:
    """The keys of a section: its fields, and how they may be written."""

    fields: dict[str, dataclasses.Field[Any]]
    names: dict[str, str]
    """Every key that may be written, and the field that it sets."""
    required: frozenset[str]
    elsewhere: dict[str, str]
    """Names that other programs use for a field."""


@functools.cache
def section_keys(cls: type) -> SectionKeys:
    """Return the keys of a section."""
    fields = {f.name: f for f in dataclasses.fields(cls) if not f.metadata.get("hidden")}
    required = frozenset(name for name, field in fields.items() if is_required(field))

    def listed(kind: str) -> dict[str, str]:
        return {
            name: field.name
            for field in fields.values()
            for name in cast("tuple[str, ...]", field.metadata.get(kind, ()))
        }

    names = {name: name for name in fields} | listed("names")
    return SectionKeys(fields, names, required, listed("instead_of"))


def type_names(cls: Any) -> tuple[str, ...]:
    """Return the values that the ``type`` key of a section may have."""
    return get_args(section_keys(cls).fields["type"].type)


def options_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, nested ones too; the annotation itself if it is none."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(o for arg in get_args(kind) for o in options_of(arg))
    return (kind,)


def split_annotation(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return an annotation without its limits, and the limits."""
    if get_origin(kind) is Annotated:
        base, *limits = get_args(kind)
        return base, tuple(m for m in limits if isinstance(m, Range | Form | Length))
    return kind, ()


def parts_of(kind: Any) -> list[tuple[type, bool]]:
    """Return the sections that an annotation names, and whether each is in a list."""
    parts: list[tuple[type, bool]] = []
    for base in map(_bare, options_of(kind)):
        if dataclasses.is_dataclass(base):
            parts.append((cast(type, base), False))
        elif get_origin(base) is list:
            parts += [(inner, True) for inner, _ in parts_of(get_args(base)[0])]
    return parts


def _bare(kind: Any) -> Any:
    return split_annotation(kind)[0]


_SCALARS: dict[Any, tuple[NodeKind, ...]] = {
    bool: ("bool",),
    int: ("int",),
    float: ("int", "float"),
    str: ("str",),
    None: ("null",),
    type(None): ("null",),
    object: ("map", "list", "bool", "int", "float", "str", "null"),
}


def _kinds(kind: Any) -> tuple[NodeKind, ...]:
    base = _bare(kind)
    if dataclasses.is_dataclass(base) or get_origin(base) is dict:
        return ("map",)
    if get_origin(base) is list:
        return ("list",)
    if get_origin(base) is Literal:
        return tuple({_SCALARS[type(value)][0] for value in get_args(base)})
    return _SCALARS[base]


_WORDS = {bool: "True or False", int: "an integer", float: "a number", str: "text"}


def describe(kind: Any) -> str:
    """Say in words what annotation ``kind`` allows."""
    options = options_of(kind)
    if len(options) > 1:
        if all(dataclasses.is_dataclass(o) for o in options):
            return "a section with one of the known types"
        return " or ".join(dict.fromkeys(describe(o) for o in options))
    base, limits = split_annotation(kind)
    limits_text = " and ".join(str(limit) for limit in limits)
    if base is None or base is type(None):
        return "null"
    if dataclasses.is_dataclass(base):
        return "a section"
    if base is object:
        return "anything"
    origin, args = get_origin(base), get_args(base)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(str(a) for a in args)
    if origin is list:
        return f"a list of {limits_text + ' x ' if limits_text else ''}{describe(args[0])}"
    if origin is dict:
        return f"a map to {describe(args[1])}"
    if base is str and limits_text:
        return limits_text
    return f"{_WORDS[base]} {limits_text}".rstrip()


def nearest_word(node: YamlNode, kind: Any) -> str:
    """Return the allowed word that is nearest to a misspelt one; empty if none is near."""
    if node.kind != "str":
        return ""
    bases = map(_bare, options_of(kind))
    words = [str(v) for base in bases if get_origin(base) is Literal for v in get_args(base)]
    return "".join(difflib.get_close_matches(node.text, words, 1))
