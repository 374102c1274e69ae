"""Layouts over devices."""

from typing import Any

class Layout:
    def __init__(
        self,
        device_matrix: tuple[int, ...],
        alias_name: tuple[str, ...],
        rank_list: Any = ...,
    ) -> None: ...
    def __call__(self, *tensor_map: Any) -> Layout: ...

def __getattr__(name: str) -> Any: ...
