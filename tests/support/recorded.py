"""Calls as a dump would hold them, from functions that are really run in torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from telechat_moe.tools.align.dump.records import Call, Phase, RankDump, Scalar, TensorRecord, Value


def record(x: Any) -> Value:
    """Return an argument or result as a reader of dumps gives it."""
    if isinstance(x, torch.Tensor):
        array = x.detach()
        array = array.float() if array.dtype in (torch.bfloat16,) else array
        values = np.array(array.numpy())
        dtype = str(x.dtype).removeprefix("torch.")
        return TensorRecord(
            dtype, tuple(x.shape), requires_grad=x.requires_grad, read=lambda: values
        )
    if isinstance(x, list | tuple):
        return [record(v) for v in x]
    if isinstance(x, slice):
        return Scalar("slice", [x.start, x.stop, x.step])
    if x is None:
        return None
    return Scalar(type(x).__name__, str(x) if isinstance(x, torch.dtype) else x)


def calls(
    name: str, function: Callable[..., Any], *args: Any, grads: Any = None, **kwargs: Any
) -> dict[str, Call]:
    """Run a function; return its forward call and, where something needs a gradient, its backward call."""
    result = function(*args, **kwargs)
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    key = f"{name}.0.forward"
    named = {k: record(v) for k, v in kwargs.items()}
    found = {
        key: Call(
            key,
            "api",
            name,
            0,
            Phase.FORWARD,
            [record(a) for a in args],
            named,
            [record(o) for o in outputs],
        )
    }
    leaves = [x for x in _flat([*args, *kwargs.values()]) if x.requires_grad]
    floating = [o for o in outputs if o.dtype.is_floating_point and o.requires_grad]
    if leaves and floating:
        generator = torch.Generator().manual_seed(1)
        coming = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in floating]
        going = torch.autograd.grad(floating, leaves, coming)
        if name.startswith(
            "Primitive."
        ):  # msprobe writes those of MindSpore's primitives backwards
            going = going[::-1]
        key = f"{name}.0.backward"
        found[key] = Call(
            key,
            "api",
            name,
            0,
            Phase.BACKWARD,
            [record(g) for g in coming],
            {},
            [record(g) for g in going],
        )
    return found


def run_case(name: str, case: tuple[Any, ...], dtype: Any) -> dict[str, Call]:
    """Return the calls of a case, ``(function, *arguments)`` and perhaps named ones last, with floats in a type."""
    function, *args = case
    kwargs = args.pop() if isinstance(args[-1], dict) else {}

    def cast(v: Any) -> Any:
        if isinstance(v, torch.Tensor) and v.dtype.is_floating_point:
            return v.detach().to(dtype).requires_grad_(v.requires_grad)
        return [cast(i) for i in v] if isinstance(v, list) else v

    named = {key: cast(v) for key, v in kwargs.items()}
    return calls(name, function, *map(cast, args), **named)


def _flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [x for v in values for x in _flat(v)] if isinstance(values, list | tuple) else []


def rank_dump(found: dict[str, Call]) -> RankDump:
    """Return calls as the dump of a rank."""
    return RankDump(0, 0, "pytorch", "tensor", "L1", found)
