"""Record every torch function of a script, forward and backward, as calls of a dump.

One line is enough, in the script or around it::

    with capture() as calls: ...            # or: telechat-moe align capture --torch script.py

Each use of a tensor by a function gets a node of its own in torch's graph, so the gradient of an input is the one through
this function alone, not the sum over all uses. For a function that writes in place, the gradients are those of torch's
own node; for one that writes into a view, only the forward call is recorded.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from telechat_moe.narrowing import is_sequence
from telechat_moe.tools.align.capture.torch_modules import tensors_in
from telechat_moe.tools.align.capture.torch_records import (
    QUERIES,
    CallRecording,
    main,
    record,
    recorded,
    writes,
)
from telechat_moe.tools.align.dump.records import Call, Phase


class _Recorder(CallRecording, TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "backward":
            with self._in_backward():
                return func(*args, **kwargs)
        name = _name(func)
        if name is None or self.paused or _is_traced((*args, *kwargs.values())):
            return func(*args, **kwargs)
        key = f"{name}.{self.count[name]}"
        self.count[name] += 1
        inputs = [record(a) for a in args]
        named = {k: record(v) for k, v in kwargs.items()}
        gradients: list[torch.Tensor | None] = []
        arguments, into = args, _versions((*args, *kwargs.values()))
        if not writes(name, kwargs) and torch.is_grad_enabled():
            use = partial(self._use, gradients=gradients, key=key)
            arguments = _map_tensors(args, use)
            kwargs = {k: _map_tensors(v, use) for k, v in kwargs.items()}
        result = func(*arguments, **kwargs)
        result, gradients = _own_node(result, args, arguments, gradients)
        outputs = result if is_sequence(result) else [result]
        if result is None:
            outputs = [x for x, version in into if x._version != version]
        if not any(isinstance(o, torch.Tensor) and not o.is_meta for o in outputs):
            return result
        records = [record(o) for o in outputs]
        call = self.add(key, Phase.FORWARD, inputs, named, records)
        if writes(name, kwargs):
            self._watch(call, outputs)
            return result
        coming: list[torch.Tensor | None] = [None] * len(outputs)
        for i, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(partial(coming.__setitem__, i))
        if gradients:
            self.pending[key] = coming, gradients
        return result

    @contextmanager
    def _in_backward(self) -> Generator[None, None, None]:
        """Record what hooks, checkpoints and functions of a script compute during torch's backward pass."""
        engine: Any = torch.autograd
        run = engine._engine_run_backward

        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        engine._engine_run_backward = recorded
        try:
            yield
        finally:
            engine._engine_run_backward = run

    def _watch(self, call: Call, outputs: Sequence[Any]) -> None:
        """Record what enters and leaves torch's node of a call that wrote into one tensor."""
        inputs = [t for place, t in call.tensors() if place[0] == "i" and t.requires_grad]
        node = outputs[0].grad_fn if len(outputs) == 1 else None
        if node is None or outputs[0]._is_view():
            return
        needs_grad = [function is not None for function, _ in node.next_functions]
        if sum(needs_grad) != len(inputs):
            return
        key = call.key.removesuffix(".forward")

        def ran(
            grads: Sequence[torch.Tensor | None], coming: Sequence[torch.Tensor | None]
        ) -> None:
            pairs = zip(grads, needs_grad, strict=True)
            records = [record(g) for g, differentiated in pairs if differentiated]
            self.add(key, Phase.BACKWARD, [record(g) for g in coming], {}, records)

        node.register_hook(ran)

    def _use(self, x: torch.Tensor, gradients: list[Any], key: str) -> torch.Tensor:
        if not x.requires_grad or not x.dtype.is_floating_point:
            return x
        place = len(gradients)
        gradients.append(None)
        used = x.view_as(x)

        def arrived(g: torch.Tensor) -> None:
            gradients[place] = g
            if all(v is not None for v in gradients):
                self.finish_call(key)

        used.register_hook(arrived)
        return used


def _own_node(
    result: Any, args: Any, uses: Any, gradients: list[torch.Tensor | None]
) -> tuple[Any, list[torch.Tensor | None]]:
    """Give a result that is one of the arguments (a no-op conversion) a node of its own; return a leaf itself."""
    for argument, used in zip(args, uses, strict=True):
        if isinstance(result, torch.Tensor) and result is used and used is not argument:
            if argument.is_leaf:
                return argument, []
            with torch._C.DisableTorchFunction():
                return result.view_as(result), gradients
    return result, gradients


def _versions(values: Any) -> list[tuple[torch.Tensor, int]]:
    """Return tensors with the number of times they were written to, in order."""
    return [(x, x._version) for x in tensors_in(values) if not x.is_inference()]


def _is_traced(values: Any) -> bool:
    """Return whether a tensor represents others (vmap, meta) and has no values of its own."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
    return any(wrapped(x) or x.is_meta for x in tensors_in(values))


@contextmanager
def capture(modules: bool = False) -> Generator[dict[str, Call], None, None]:
    """Record the torch functions called in the block and their backward, and maybe what modules return; yield the calls."""
    with recorded(_Recorder, modules) as recorder, recorder:
        yield recorder.calls


def _name(func: Callable[..., Any]) -> str | None:
    """Return the name of a function as msprobe spells it; None: it computes nothing."""
    short = getattr(func, "__name__", "")
    if short in QUERIES:
        return None
    full_name = resolve_name(func) or short
    family = "Functional" if "functional" in full_name or "_nn" in full_name else "Torch"
    return f"{'Tensor' if 'Tensor' in full_name else family}.{short}"


def _map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunction():
            return function(value)
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(v, function) for v in value)
    return value


if __name__ == "__main__":
    main(capture)
