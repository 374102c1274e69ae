"""Functions behind communication."""

from typing import Any

def __getattr__(name: str) -> Any: ...
