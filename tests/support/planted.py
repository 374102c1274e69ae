"""Faults planted in a run: one call of a torch function is done wrong."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_moe
import torch
from recorded import rank_dump
from torch.overrides import TorchFunctionMode

from telechat_moe.tools.align.capture.torch_functions import capture
from telechat_moe.tools.align.dump.records import Dump

Wrong = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Planted(TorchFunctionMode):
    """Do the n-th call of a function wrong."""

    def __init__(self, name: str, number: int, wrong: Wrong) -> None:
        super().__init__()
        self.name, self.number, self.wrong, self.count = name, number, wrong, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == self.name:
            self.count += 1
            if self.count - 1 == self.number:
                return self.wrong(func, args, kwargs)
        return func(*args, **kwargs)


def result(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """Change what the call returns."""
    return lambda func, args, kwargs: change(func(*args, **kwargs))


def setting(**changed: Any) -> Wrong:
    """Call with other settings."""
    return lambda func, args, kwargs: func(*args, **{**kwargs, **changed})


def first(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """Call with another first argument."""
    return lambda func, args, kwargs: func(change(args[0]), *args[1:], **kwargs)


def second(change: Callable[[torch.Tensor], torch.Tensor]) -> Wrong:
    """Call with another second argument."""
    return lambda func, args, kwargs: func(args[0], change(args[1]), *args[2:], **kwargs)


def run(
    fault: tuple[str, int, Wrong] | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Dump:
    """Return the dump of one forward and backward pass of the small model."""
    weights = tiny_moe.weights(dtype=dtype, seed=seed)
    ids, labels = tiny_moe.batch(seed)
    planted = Planted(*fault) if fault else contextlib.nullcontext()
    with planted, capture() as calls:
        tiny_moe.model(weights, ids, labels).backward()
    return Dump(Path("run"), {(0, 0): rank_dump(calls)})


def train(
    fault: tuple[str, int, Wrong] | None = None,
    steps: int = 2,
    change: Callable[..., None] | None = None,
) -> Dump:
    """Return the dump of some steps with AdamW; ``change`` may spoil weights or gradients before each update."""
    weights = tiny_moe.weights(layers=1)
    layer = weights["layers"][0]
    flat = [weights["table"], weights["head"], weights["norm"]]
    flat += [w for value in layer.values() for w in (value if isinstance(value, list) else [value])]
    optimizer = torch.optim.AdamW(flat, 1e-2, (0.9, 0.95), weight_decay=0.1)
    planted = Planted(*fault) if fault else contextlib.nullcontext()
    ranks = {}
    with planted:
        for step in range(steps):
            optimizer.zero_grad()
            with capture() as calls:
                tiny_moe.model(weights, *tiny_moe.batch(step)).backward()
                if change is not None:
                    change(step, flat)
                optimizer.step()
            ranks[step, 0] = dataclasses.replace(rank_dump(calls), step=step)
    return Dump(Path("run"), ranks)
