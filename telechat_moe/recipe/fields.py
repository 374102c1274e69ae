"""Types by which the schema states what a value may be.

The schema's annotations are read by the checker (``check.py``) and by the generators of
``docs/recipes.md`` and ``recipes/schema.json`` (``docs/generate``). They may use bool, int, float, str, None, object (anything), ``Literal``,
``list``, ``dict[str, ...]``, unions, the dataclasses of the schema, and ``Annotated`` with the
classes of this module.
"""

import re
from dataclasses import MISSING, Field, dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from telechat_moe.narrowing import equal_values


@dataclass(frozen=True, slots=True)
class Range:
    """A number between two bounds."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    """The lower bound itself is excluded."""
    below: bool = False
    """The upper bound itself is excluded."""

    def allows(self, value: float) -> bool:
        """Return whether ``value`` is within the bounds."""
        if self.low is not None and (value < self.low or (self.above and value == self.low)):
            return False
        return self.high is None or not (value > self.high or (self.below and value == self.high))

    def __str__(self) -> str:
        parts: list[str] = []
        if self.low is not None:
            parts.append(f"{'>' if self.above else '>='} {_number(self.low)}")
        if self.high is not None:
            parts.append(f"{'<' if self.below else '<='} {_number(self.high)}")
        return " and ".join(parts)


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True, slots=True)
class Form:
    """Text that matches a regular expression as a whole."""

    pattern: str
    says: str
    """The form in words, with an example."""

    def allows(self, value: str) -> bool:
        """Return whether ``value`` has the form."""
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.says


@dataclass(frozen=True, slots=True)
class Length:
    """A list with a fixed number of items."""

    low: int
    high: int | None = None

    def allows(self, count: int) -> bool:
        """Return whether a list of ``count`` items is long enough and not too long."""
        return count >= self.low and (self.high is None or count <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"{self.low} or more"
        return f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}"


Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""What NumPy's generators take."""
LayerCount = Annotated[int, Range(0, 10_000)]
"""Layers, which are listed one by one; published models have 126 at most."""
Degree = Annotated[int, Range(1, 2**20)]
"""Into how many parts something is split; each is a process, and no cluster has a million devices."""
Fraction = Annotated[float, Range(0, 1)]
"""A fraction from 0 to 1."""
NonNegative = Annotated[float, Range(0)]
Above0 = Annotated[float, Range(0, above=True)]
Text = Annotated[str, Form(r"(?s).+", "text that is not empty")]
Gigabytes = Annotated[str, Form(r"[0-9]+(\.[0-9]+)?GB", 'a size such as "55.5GB"')]
Sinks = Literal["log", "tensorboard"] | list[Literal["log", "tensorboard"]]
"""Where MindFormers' monitor writes."""
Dtype = Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]

WRITTEN = {"written": True}
"""Field metadata: a recipe must write this key, though the dataclass has a default.

MindFormers fills such a key from a class default that belongs to another model.
"""

OWN = {"own": True}
"""Field metadata: MindFormers does not know this key; it is written back only if it was given."""


def names(*others: str) -> dict[str, object]:
    """Return field metadata: further names under which MindFormers reads the same setting."""
    return {"names": others}


def instead_of(*others: str) -> dict[str, object]:
    """Return field metadata: names that other programs use, to suggest this key instead of them."""
    return {"instead_of": others}


@dataclass(frozen=True, slots=True)
class Takes:
    """What our trainer takes of a key that it does not read.

    Attributes:
        values: Neutral values; None: the default.
        reason: Why every value is neutral; empty: not every value is.
    """

    values: tuple[object, ...] | None = None
    reason: str = ""

    def allows(self, value: object, of: Field[Any]) -> bool:
        """Return whether a value of the field asks for nothing that our trainer does not do."""
        neutral = self.neutral(of)
        return bool(self.reason) or value is None or any(equal_values(value, v) for v in neutral)

    def neutral(self, of: Field[Any]) -> tuple[object, ...]:
        """Return the neutral values of a field, beside None."""
        if self.values is not None:
            return self.values
        return () if of.default is MISSING else (of.default,)

    def expected(self, of: Field[Any]) -> str:
        """Return what to write instead of a value that is not allowed."""
        values = " or ".join(str(v) for v in self.neutral(of) if v is not None)
        if is_required(of):
            return values
        return f"{values}, or remove it" if values else "remove it"


def is_required(key: Field[Any]) -> bool:
    """Return whether a recipe must write the key."""
    without = key.default is MISSING and key.default_factory is MISSING
    return without or bool(key.metadata.get("written"))


ONLY_DEFAULT = {"takes": Takes()}
"""Field metadata: our trainer does not read this key and takes its default only."""


def only(*values: object) -> dict[str, object]:
    """Return field metadata: our trainer does not read this key and takes these values only."""
    return {"takes": Takes(values)}


def any_value(reason: str) -> dict[str, object]:
    """Return field metadata: our trainer does not read this key and takes any value, for a reason."""
    return {"takes": Takes(reason=reason)}


def decides(
    *parts: Literal["graph", "plugin", "data", "weights"], inside: bool = True
) -> dict[str, object]:
    """Return field metadata: what a key decides beside the run, a section for every key in it that says nothing else.

    `graph`: the compiled graph of a rank; `plugin`: our model in MindFormers' trainer; `data`: what `data build` writes;
    `weights`: names and shapes of the weights.

    Args:
        inside: False: a section that decides it by being there, and no key in it does.
    """
    return {"decides": (parts, inside)}


def only_ours(reason: str) -> dict[str, str]:
    """Return field metadata: `telechat-moe train` does this and MindFormers' trainer does not, with our model either, and why."""
    return {"only_ours": reason}


SPLIT = "there no process has the whole model or the losses of a step"
"""Why MindFormers' trainer does some of what ours does only where MindSpore does not split the model over devices."""


def add_metadata(default: Any, metadata: dict[str, Any]) -> Any:
    """Return the field of a class attribute, MISSING if there is none, with further metadata."""
    if not isinstance(default, Field):
        return field(default=default, metadata=metadata)
    described = cast("Field[Any]", default)
    described.metadata = MappingProxyType({**described.metadata, **metadata})
    return described
