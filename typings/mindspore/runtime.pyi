"""Untyped."""

from typing import Any

def __getattr__(name: str) -> Any: ...

set_cpu_affinity: Any
