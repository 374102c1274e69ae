"""Checks of untyped values, such as those of JSON, that tell a type checker what was found."""

from collections.abc import Sequence
from typing import Any, TypeGuard


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is an object of JSON."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Return whether a value is a list."""
    return isinstance(value, list)


def is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list or a tuple."""
    return isinstance(value, list | tuple)


def equal_values(a: Any, b: Any) -> bool:
    """Return whether two values are equal as in JSON, where True is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def short(value: Any) -> str:
    """Return a value as a text that fits into a message."""
    try:
        text = str(value)
    except (ValueError, RecursionError):  # an integer of too many digits
        text = type(value).__name__
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 120 else text[:120] + " ..."
