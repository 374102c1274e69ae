"""Names for a recording of torch: the module of each call, what it returns, and which weight an optimizer updates.

The model is the first module that is called from outside of any other; names begin there. Scripts need no change.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from telechat_moe.narrowing import is_object, is_sequence
from telechat_moe.tools.align.dump.records import Call, Phase, Value


@dataclass
class Modules:
    """Records the outputs of modules as calls of kind ``module``."""

    calls: dict[str, Call]  # those to add to
    record: Any  # makes a record of a value
    outputs: bool  # whether to record outputs; otherwise only names are collected

    def __post_init__(self) -> None:
        self.modules: dict[int, str] = {}
        self.weights: dict[int, str] = {}
        self.count = Counter[str]()
        self.running: list[str] = []  # keys of the modules that run, outermost first
        self.hooks: list[Any] = []

    def __enter__(self) -> "Modules":
        self.hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def stack(self, weight: torch.Tensor) -> tuple[str, ...]:
        """Return the stack line that names the weight of an update."""
        name = self.weights.get(id(weight))
        return () if name is None else (f"weight {name}",)

    @property
    def parent(self) -> str | None:
        """The key of the module that runs."""
        return self.running[-1] if self.running else None

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        if not self.running and id(module) not in self.modules:
            for name, part in module.named_modules():
                self.modules.setdefault(id(part), name)
            for name, weight in module.named_parameters():
                self.weights.setdefault(id(weight), name)
        parts = [part for part in (self.modules.get(id(module)), type(module).__name__) if part]
        name = ".".join(["Module", *parts])
        self.running.append(f"{name}.forward.{self.count[name]}")
        self.count[name] += 1

    def _end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        key = self.running.pop()
        if not self.outputs or id(module) not in self.modules or output is None:
            return
        name, _, index = key.rpartition(".forward.")
        records: list[Value] = [self.record(x) for x in tensors_in(output)]
        call = Call(key, "module", name, int(index), Phase.FORWARD, [], {}, records)
        self.calls[key] = replace(call, parent=self.parent)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a list, tuple or dictionary, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_sequence(value):
        for item in value:
            yield from tensors_in(item)
    elif is_object(value):
        for item in value.values():
            yield from tensors_in(item)
