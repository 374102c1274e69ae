"""Read YAML into a tree that remembers where every value was written.

PyYAML's constructors lose lines, let the last of two equal keys win and turn ``no``, ``010`` and
``1:30`` into something else. This module builds its own tree from the parser's events: every key
keeps its line, duplicate keys, odd anchors and tags are problems, and a scalar with a
surprising meaning in YAML 1.1 keeps the reason in ``YamlNode.trap``. What a plain scalar means is decided by
PyYAML's own resolver, because MindFormers reads the same file with ``yaml.safe_load``.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

import yaml

try:  # libyaml parses about ten times faster; its events are the same
    from yaml import CSafeLoader as _Loader
except ImportError:  # pragma: no cover - PyYAML built without libyaml
    from yaml import SafeLoader as _Loader

MAX_DEPTH = 50
MAX_VALUES = 100_000
MAX_CHARACTERS = 1_000_000

NodeKind = Literal["map", "list", "bool", "int", "float", "str", "null", "broken"]
LineReport = Callable[[int, str, str, str], None]
"""Called with (line, dotted key, found, expected) for each problem of the text."""


@dataclass(slots=True, eq=False)
class YamlEntry:
    """One position in a map or list: a key and its value."""

    key: str
    line: int
    node: "YamlNode"
    alias: bool = False
    """The value was written at its anchor and is only referred to here (``*name`` or ``<<``)."""


@dataclass(slots=True, eq=False)
class YamlNode:
    """One value."""

    kind: NodeKind
    line: int
    value: Any = None
    """The Python value of a scalar."""
    text: str = ""
    """A scalar as it was written."""
    trap: str = ""
    """Why the scalar does not mean what it seems to mean; empty if it does."""
    entries: list[YamlEntry] = field(default_factory=list["YamlEntry"])
    size: int = 1
    """Number of values in the tree below, aliases counted as often as they occur."""
    origin: str = ""
    """Where the value comes from if not from the recipe file, such as ``--set a.b=c``."""

    def get(self, key: str) -> YamlEntry | None:
        """Return the entry with this key, or None."""
        return next((e for e in self.entries if e.key == key), None)

    def become(self, other: "YamlNode") -> None:
        """Take over another value, at every position that shares this node."""
        for slot in fields(self):
            setattr(self, slot.name, getattr(other, slot.name))

    def plain(self) -> Any:
        """Return the value as plain Python data."""
        if self.kind == "map":
            return {e.key: e.node.plain() for e in self.entries}
        if self.kind == "list":
            return [e.node.plain() for e in self.entries]
        return self.value

    def scalars(self) -> Iterator["YamlNode"]:
        """Yield the scalars of the tree, those behind aliases as often as they occur."""
        for entry in self.entries:
            yield from entry.node.scalars()
        if self.kind not in ("map", "list"):
            yield self

    def show(self) -> str:
        """Describe the value in a few words for a message."""
        if self.kind == "map":
            return f"a section with {len(self.entries)} keys"
        if self.kind == "list":
            return f"a list of {len(self.entries)} items"
        if self.kind == "null":
            return f"nothing ({self.text or 'empty'})"
        if self.kind == "str":
            return f"the text {_short(self.text)!r}"
        return _short(self.text)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


_INT64 = 1 << 63  # MindSpore's integers
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?")
_NUMBER_ELSEWHERE = re.compile(
    r"[-+]?([0-9][0-9_,]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|0[ox][0-9a-fA-F]+"
)
_TAG = "tag:yaml.org,2002:"
_Resolvers = dict[str | None, list[tuple[str, re.Pattern[str]]]]


def _tag_of(text: str) -> str:
    resolvers: _Resolvers = cast(Any, yaml.SafeLoader).yaml_implicit_resolvers
    for tag, pattern in [*resolvers.get(text[:1], []), *resolvers.get(None, [])]:
        if pattern.match(text):
            return tag.removeprefix(_TAG)
    return "str"


def scalar(text: str, line: int) -> YamlNode:
    """Return the node of a plain (unquoted) scalar, as YAML 1.1 reads it."""
    tag = _tag_of(text)
    if tag == "null":
        return YamlNode("null", line, None, text)
    if tag == "bool":
        word = text.lower()
        if word in ("true", "false"):
            return YamlNode("bool", line, word == "true", text)
        value = word in ("yes", "on")
        trap = f"YAML reads {text} as {value}; write {value}, or quote it if text is meant"
        return YamlNode("bool", line, value, text, trap)
    if tag == "int":
        return _integer(text, line)
    if tag == "float":
        if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
            return YamlNode("float", line, float(text), text)
        trap = f"YAML reads {text} as a special or base-60 number; write a plain decimal number"
        return YamlNode("float", line, float("nan"), text, trap)
    if tag != "str":
        return YamlNode("str", line, text, text, f"YAML reads {text} as a {tag}; quote it")
    return YamlNode("str", line, text, text, _text_trap(text))


def _integer(text: str, line: int) -> YamlNode:
    if _DECIMAL.fullmatch(text) and len(text) <= 30 and -_INT64 <= (value := int(text)) < _INT64:
        return YamlNode("int", line, value, text)
    value = 0
    trap = f"{_short(text)} is too long for a number of 64 bits"
    if len(text) <= 30 and not _DECIMAL.fullmatch(text):
        value = int(cast(Any, yaml.SafeLoader("")).construct_yaml_int(yaml.ScalarNode("", text)))
        how = "base 60" if ":" in text else "octal, hexadecimal, binary or with underscores"
        trap = f"YAML reads {text} as {value} ({how}); write a plain decimal number"
    return YamlNode("int", line, value, text, trap)


def _text_trap(text: str) -> str:
    if text == "None":
        return "None is the text 'None' in YAML; write null"
    if len(text) <= 40 and _NUMBER_ELSEWHERE.fullmatch(text):
        return f"YAML reads {text} as text, not as a number; write {_as_float(text)}, or quote it"
    return ""


def _as_float(text: str) -> str:
    """Spell a number such as 1e-5 so that YAML 1.1 reads a number."""
    try:
        number = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return "a plain decimal number"
    if number.is_integer() and abs(number) < 1e15:
        return str(int(number)) if "e" not in text.lower() else f"{number:.1f}"
    mantissa, _, exponent = repr(number).partition("e")
    if not exponent:
        return repr(number)
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"


class _Builder:
    """Turn parser events into a tree; problems go to ``report`` and leave a broken node."""

    def __init__(self, events: Iterator[Any], report: LineReport) -> None:
        self.events = events
        self.report = report
        self.anchors: dict[str, YamlNode | None] = {}

    def node(self, event: Any, depth: int, path: str) -> YamlNode:
        """Read one value and everything inside it."""
        line = event.start_mark.line + 1
        if depth > MAX_DEPTH:
            raise _TooDeepError(line)
        anchor = cast("str | None", event.anchor)
        if anchor is not None:
            if anchor in self.anchors:
                problem = f"the anchor &{anchor} is defined a second time"
                self.report(line, path, problem, "give each anchor its own name")
            self.anchors[anchor] = None  # open: an alias to it now would contain itself
        built = self._content(event, line, depth, path)
        if built.size > MAX_VALUES:
            raise _TooDeepError(line, f"aliases expand to more than {MAX_VALUES} values")
        if anchor is not None:
            self.anchors[anchor] = built
        return built

    def _content(self, event: Any, line: int, depth: int, path: str) -> YamlNode:
        tag = cast("str | None", event.tag)
        if tag is not None:
            self.report(line, path, f"the tag {tag}", "tags are not used in recipes; remove it")
        if isinstance(event, yaml.ScalarEvent):
            text = cast(str, cast(Any, event).value)
            plain = cast(Any, event).implicit[0] and tag is None
            return scalar(text, line) if plain else YamlNode("str", line, text, text)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(line, depth, path)
        return self._map(line, depth, path)

    def place(self, event: Any, key: str, line: int, depth: int, path: str) -> YamlEntry:
        """Read one value, or an alias of one."""
        if isinstance(event, yaml.AliasEvent):
            return YamlEntry(key, line, self._alias(event, path), alias=True)
        return YamlEntry(key, line, self.node(event, depth + 1, path))

    def _alias(self, event: Any, path: str) -> YamlNode:
        line, name = event.start_mark.line + 1, cast(str, event.anchor)
        target = self.anchors.get(name)
        if target is None:
            anchors = [a for a, n in self.anchors.items() if n is not None]
            problem = f"*{name} is inside &{name}" if name in self.anchors else f"no anchor &{name}"
            expected = f"use one defined above: {', '.join(anchors) or 'none'}"
            self.report(line, path, problem, expected)
            return YamlNode("broken", line)
        return target

    def _list(self, line: int, depth: int, path: str) -> YamlNode:
        node = YamlNode("list", line)
        for event in self.events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            index = str(len(node.entries))
            item_line = event.start_mark.line + 1
            entry = self.place(event, index, item_line, depth, f"{path}.{index}".lstrip("."))
            node.entries.append(entry)
            node.size += entry.node.size
        return node

    def _map(self, line: int, depth: int, path: str) -> YamlNode:
        node, lines, merged = YamlNode("map", line), dict[str, int](), list[YamlEntry]()
        for event in self.events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key, key_line = self._key(event, path)
            below = f"{path}.{key}".lstrip(".")
            value = self.place(next(self.events), key, key_line, depth, below)
            node.size += value.node.size
            if key == "<<" and event.implicit[0]:
                merged += self._merge(value, path)
            elif key in lines:
                problem = f"a second time, first on line {lines[key]}"
                expected = "write each key once (MindFormers takes the last)"
                self.report(key_line, below, problem, expected)
            else:
                lines[key] = key_line
                node.entries.append(value)
        for entry in merged:
            if entry.key not in lines:
                lines[entry.key] = entry.line
                node.entries.append(entry)
        return node

    def _key(self, event: Any, path: str) -> tuple[str, int]:
        line = event.start_mark.line + 1
        if not isinstance(event, yaml.ScalarEvent):
            if not isinstance(event, yaml.AliasEvent):
                self.node(event, 1, path)  # read past it
            self.report(line, path, "a key that is not a word", "keys are plain words")
            return "?", line
        text = cast(str, cast(Any, event).value)
        if cast(Any, event).anchor is not None or cast(Any, event).tag is not None:
            self.report(line, path, f"an anchor or tag on the key {text}", "remove it")
        if cast(Any, event).implicit[0] and _tag_of(text) not in ("str", "merge"):
            problem = f"the key {text}, which YAML reads as a {_tag_of(text)}"
            self.report(line, path, problem, "keys are plain words")
        return text, line

    def _merge(self, value: YamlEntry, path: str) -> list[YamlEntry]:
        sources = value.node.entries if value.node.kind == "list" else [value]
        entries: list[YamlEntry] = []
        for source in sources:
            if source.node.kind != "map":
                self.report(value.line, path, "<< with something else", "<< takes a section")
                continue
            have = {e.key for e in entries}
            new = (e for e in source.node.entries if e.key not in have)
            entries += [YamlEntry(e.key, e.line, e.node, alias=True) for e in new]
        return entries


class _TooDeepError(Exception):
    def __init__(self, line: int, problem: str = f"more than {MAX_DEPTH} levels") -> None:
        super().__init__(problem)
        self.line = line


def read(text: str, report: LineReport) -> YamlNode | None:
    """Parse YAML text.

    Returns:
        The tree, or None if the text is not one YAML document.
    """
    if len(text) > MAX_CHARACTERS:
        report(1, "", f"{len(text)} characters", f"a recipe has at most {MAX_CHARACTERS}")
        return None
    parser = (
        yaml.SafeLoader if "\t" in text else _Loader
    )  # libyaml takes tabs that MindFormers' PyYAML refuses
    try:
        events = cast(Iterator[Any], cast(Any, yaml).parse(text, Loader=parser))
        builder, root = _Builder(events, report), None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    line = cast(Any, event).start_mark.line + 1
                    report(line, "", "a second document", "a recipe is one YAML document")
                    return None
                root = builder.place(next(events), "", 1, -1, "").node
        if root is None:
            report(1, "", "an empty file", "a recipe is a YAML map")
        return root
    except _TooDeepError as error:
        report(error.line, "", str(error), "write it simpler")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        report(mark.line + 1 if mark else 1, "", f"not YAML: {problem}", "correct the syntax")
    except yaml.YAMLError as error:  # a byte that YAML does not allow
        before = text[: getattr(error, "position", 0) or 0]
        problem = getattr(error, "reason", None) or str(error)
        report(before.count("\n") + 1, "", f"not YAML: {problem}", "remove the character")
    return None


def locate(top: YamlEntry, key: str) -> YamlEntry:
    """Return the entry of a dotted key, or of the nearest section above it that is written."""
    entry = top
    for part in key.split(".") if key else ():
        below = entry.node.get(part)
        if below is None:
            break
        entry = below
    return entry
