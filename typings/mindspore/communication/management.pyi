"""Untyped."""

from typing import Any

def __getattr__(name: str) -> Any: ...

_get_group: Any
