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
