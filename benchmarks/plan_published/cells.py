"""Read the cells of published tables as numbers, and make rows of them."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import yaml

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.score import MeasuredStep


class MissingError(Exception):
    """A layout field that the row does not give."""


Fields = Mapping[str, str]

LARGEST = 1e18
"""Upper limit of a table's sizes and speeds."""

MOST = 2**22
"""Upper limit of counts: layers, devices, sequences, tokens of a sequence."""


class Cells(dict[str, str]):
    """A row's cells by column: empty where the table has no such column or the line ends early."""

    def __missing__(self, key: str) -> str:
        return ""


def number_of(row: Fields, key: str, default: float | None = None) -> float:
    """Return the number that a cell begins with.

    Raises:
        MissingError: The cell has none, or one out of range, and there is no default.
    """
    text = (row.get(key) or "").strip()
    match = re.match(r"^-?\d+(\.\d+)?([eE][+-]?\d+)?", text.replace(",", ""))
    if match is None or text.lower() in ("n/a", "-", "nan"):
        if default is None:
            raise MissingError(key)
        return default
    number = float(match.group(0))
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise MissingError(f"{key}: {text[:20]} is out of range")
    return number


def int_of(row: Fields, key: str, default: int | None = None) -> int:
    """Return a cell's whole number from 1 to `MOST`, or the default; see `number_of`."""
    number = number_of(row, key, default)
    if number != int(number) or (number < 1 and default != 0) or number > MOST:
        raise MissingError(f"{key}: {number:g}, expected a whole number from 1 to {MOST:,}")
    return int(number)


def divided(whole: float, part: float, what: str) -> int:
    """Return the quotient of a division without remainder.

    Raises:
        MissingError: There is a remainder, or the divisor is not positive.
    """
    if part <= 0 or whole % part or whole < part:
        raise MissingError(f"{what}: {whole:g} is not a multiple of {part:g}")
    return int(whole // part)


def is_true(row: Fields, key: str) -> bool:
    """Return whether a cell says yes."""
    return (row.get(key) or "").strip().lower() in ("true", "1", "1.0", "yes")


def new_row(
    table: str, line: int, model: str, device: str, gpus: object, **rest: Any
) -> MeasuredStep:
    """Return a row whose group is its model and scale."""
    return MeasuredStep(
        table=table, line=line, model=model, device=device, group=f"{table}/{model}/{gpus}", **rest
    )


UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, yaml.YAMLError)
"""Exceptions that a row's own figures can raise, such as a division by a speed of 0."""


def unreadable(what: str, error: Exception) -> str:
    """Return the reason, in one line, why a row whose figures raise is not predicted."""
    reason = f"missing: a readable {what} ({type(error).__name__}: {str(error)[:60]})"
    return " ".join(reason.split())


def or_reason(start: MeasuredStep, read: Callable[[], MeasuredStep]) -> MeasuredStep:
    """Return what `read` makes of a row, or `start` with the reason why it makes nothing."""
    try:
        return read()
    except MissingError as missing:
        reason = f"missing: {missing}"
    except BadInputError as error:
        reason = f"missing: a consistent layout ({error})"
    except UNREADABLE as error:
        reason = unreadable("layout", error)
    return replace(start, reason=reason)
