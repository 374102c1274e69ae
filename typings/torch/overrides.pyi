from collections.abc import Callable
from typing import Any, Self

class TorchFunctionMode:
    def __enter__(self) -> Self: ...
    def __exit__(self, *arguments: object) -> None: ...
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = ...,
        kwargs: dict[str, Any] | None = ...,
    ) -> Any: ...

def resolve_name(function: Callable[..., Any]) -> str | None: ...
