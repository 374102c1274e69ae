"""The names of torch that tools/align/capture uses; torch is not a dependency, so nothing else types them."""

from typing import Any

def __getattr__(name: str) -> Any: ...
