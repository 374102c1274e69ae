"""Record every torch function of a script that runs on MindSpore through mindtorch 0.5.1, MSAdapter's line.

A program for the environment of mindtorch, where importing it redirects ``import torch``. It has no function mode, so its
public functions and the methods of its tensors are wrapped; a function that another one calls is not recorded, as in
torch. What mindtorch lacks to train at all is supplied (:func:`_supply`) and told.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from types import FunctionType, SimpleNamespace
from typing import Any

import mindspore
import mindtorch  # before torch, which it redirects
import torch
from mindspore.common.api import _pynative_executor as executor
from mindspore.ops.composite import GradOperation
from mindtorch._tensor import TensorPlaceHolder  # pyright: ignore[reportMissingModuleSource]
from mindtorch.executor import execute  # pyright: ignore[reportMissingModuleSource]

from telechat_moe.narrowing import is_object, is_sequence
from telechat_moe.tools.align.capture.torch_modules import Modules, tensors_in
from telechat_moe.tools.align.capture.torch_records import (
    QUERIES,
    CallRecording,
    main,
    record,
    recorded,
    writes,
)
from telechat_moe.tools.align.dump.records import Call, Phase

# The names that torch gives to operators of Python
_OPERATORS = {
    **{f"__{n}__": n for n in ("add", "sub", "mul", "matmul", "neg", "pow", "abs")},
    **{f"__i{n}__": f"{n}_" for n in ("add", "sub", "mul")},
    **{f"__{n}__": n for n in ("lt", "gt", "le", "ge", "ne")},
    **{"__radd__": "add", "__rmul__": "mul", "__truediv__": "div", "__itruediv__": "div_"},
    **{"__rsub__": "__rsub__", "__rtruediv__": "__rdiv__", "__mod__": "remainder"},
    **{n: n for n in ("__eq__", "__getitem__", "__setitem__", "__floordiv__", "__invert__")},
    **{n: n for n in ("__and__", "__or__", "__xor__")},
}
# Functions without a gradient, and functions of Python in torch, which it dispatches by another name
_CONSTANT = {"detach", *(f"{n}_like" for n in ("zeros", "ones", "full", "empty"))}
_IN_PYTHON = ("split", "einsum", "norm", "meshgrid", "tensordot", "unique", "cdist")


class _Recorder(CallRecording):
    """Runs wrapped functions, and MindSpore's gradient where a script calls ``backward``."""

    def __init__(self, calls: dict[str, Call], modules: Modules) -> None:
        super().__init__(calls, modules)
        self.inside = False  # a function that is recorded, or one that computes nothing
        self.weights: dict[int, Any] = {}  # of the graph that is recorded
        self.graph: Callable[[], None] | None = None

    @contextmanager
    def quietly(self) -> Generator[None, None, None]:
        """Record nothing."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def run(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a function and record it."""
        if self.inside or self.paused:
            return function(*args, **kwargs)
        with self.quietly():
            if name.split(".")[1] in QUERIES:
                return function(*args, **kwargs)
            return self._record(name, function, args, kwargs)

    def _record(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        key = f"{name}.{self.count[name]}"
        self.count[name] += 1
        inputs = [record(a) for a in args]
        named = {k: record(v) for k, v in kwargs.items()}
        gradients: list[Any] = []
        is_constant = writes(name, kwargs) or name.split(".")[1] in _CONSTANT
        if self._differentiates((args, kwargs)) and not is_constant:
            use = partial(self._use, gradients=gradients)
            args, kwargs = _map_tensors(args, use), _map_tensors(kwargs, use)
        result = function(*args, **kwargs)
        outputs = list(result) if is_sequence(result) else [result]
        if not any(isinstance(o, torch.Tensor) for o in outputs):
            return result
        coming: list[Any] = [None] * len(outputs)
        for i, output in enumerate(outputs):
            if gradients and _is_float(output):
                output._requires_grad = True
                _hook(output, coming, i)
        self.add(key, Phase.FORWARD, inputs, named, [record(o) for o in outputs])
        if gradients:
            self.pending[key] = coming, gradients
        return result

    def _use(self, x: Any, gradients: list[Any]) -> Any:
        """Return a copy of an input with a node of its own, so that its gradient is the one through this use."""
        if not x.requires_grad or not _is_float(x):
            return x
        used = execute("identity", x)
        used._requires_grad = True
        gradients.append(None)
        _hook(used, gradients, len(gradients) - 1)
        return used

    def transposed(self, prop: property, x: Any) -> Any:
        """Return ``x.T`` or the like, which torch's recorder does not see."""
        outermost = not self.inside and not self.paused
        with self.quietly():
            differentiates = outermost and self._differentiates(x)
            result = prop.__get__(x)
            result._requires_grad = differentiates
            return result

    def _differentiates(self, values: Any) -> bool:
        """Return whether what is computed from values has a gradient; if so begin a graph, and keep its weights."""
        tensors = [x for x in tensors_in(values) if x.requires_grad and _is_float(x)]
        if not tensors or not executor.enable_grad():
            return False
        self.weights |= {id(x): x for x in tensors if x.param_info is not None}
        if self.graph is None:
            # MindSpore finds a graph by the function it belongs to; no function holds this one.
            self.graph = lambda: None
            executor.set_grad_flag(True)
            executor.new_graph(self.graph)
        return True

    def backward(self, loss: Any, gradient: Any = None, *_: Any, **__: Any) -> None:
        """Add the gradients of a loss to its weights, as torch's ``Tensor.backward`` does."""
        if gradient is not None or self.graph is None:
            raise RuntimeError("only one backward() without arguments of each graph is supported")
        graph, weights = self.graph, tuple(self.weights.values())
        with self.quietly():
            executor.end_graph(graph, loss)
            gradients = executor.grad(graph, GradOperation(get_by_list=True), weights, None)
            for weight, g in zip(weights, gradients, strict=True):
                g._device = weight.device
                weight.grad = g if weight.grad is None else weight.grad + g
            self.graph = None
            self.weights.clear()
            for key in reversed(self.pending):
                for g in tensors_in(self.pending[key]):
                    g._device = loss.device
            for key in [*reversed(self.pending)]:
                if any(g is not None for g in self.pending[key][-1]):
                    self.finish_call(key)
            self.pending.clear()


def _is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype.is_floating_point


def _hook(x: Any, gradients: list[Any], place: int) -> None:
    """Keep the gradient of a tensor; MindSpore wants it returned."""

    def arrived(g: Any) -> Any:
        gradients[place] = g
        return g

    mindspore._c_expression.TensorPy.register_hook(x, arrived)


def _map_tensors(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(v, function) for v in value)
    if is_object(value):
        return {k: _map_tensors(v, function) for k, v in value.items()}
    return value


def _functions() -> Iterator[tuple[Any, str, str, FunctionType]]:
    """Yield where torch's functions are: module or class, name there, name in a dump, function."""
    functional = mindtorch.nn.functional
    for name, function in _defined(mindtorch):
        if function.__module__.startswith("mindtorch.ops"):
            family = "Functional" if name in _IN_PYTHON else "Torch"
            yield mindtorch, name, f"{family}.{name}", function
    for name, function in _defined(functional):
        if function.__module__ == functional.__name__:
            yield functional, name, f"Functional.{name}", function
    for name, function in _defined(TensorPlaceHolder):
        dumped = _OPERATORS.get(name, "" if name.startswith("_") else name)
        if dumped:
            yield torch.Tensor, name, f"Tensor.{dumped}", function


def _defined(owner: Any) -> list[tuple[str, FunctionType]]:
    attributes: dict[str, Any] = dict(owner.__dict__)
    return [(name, f) for name, f in attributes.items() if isinstance(f, FunctionType)]


def _supply(recorder: _Recorder) -> list[str]:
    """Supply what mindtorch lacks; return the names."""

    def backward(loss: Any, *arguments: Any, **settings: Any) -> None:
        recorder.backward(loss, *arguments, **settings)

    def record_function(name: str) -> nullcontext[None]:
        return nullcontext()

    def addcdiv(x: Any, a: Any, b: Any, value: float = 1) -> Any:
        return x + value * a / b

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    names = ["Tensor.backward (there it returns its argument and computes nothing)"]
    if not hasattr(mindtorch.autograd, "profiler"):  # without it no optimizer steps
        mindtorch.autograd.profiler = SimpleNamespace(record_function=record_function)
        names.append("autograd.profiler")
    if not hasattr(mindtorch._apis.cpu, "addcdiv"):  # Adam's
        mindtorch._apis.cpu.addcdiv = addcdiv
        names.append("addcdiv on CPU")
    return names


def _wrapped(recorder: _Recorder, name: str, function: FunctionType) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return recorder.run(name, function, args, kwargs)

    return update_wrapper(run, function)


@contextmanager
def capture(modules: bool = False) -> Generator[dict[str, Call], None, None]:
    """Record the torch functions called in the block and their backward, and maybe what modules return; yield the calls."""
    with recorded(_Recorder, modules) as recorder:
        for owner, name, dumped, function in _functions():
            setattr(owner, name, _wrapped(recorder, dumped, function))
        for name in ("T", "mT", "H", "mH"):
            if isinstance(prop := getattr(torch.Tensor, name, None), property):
                setattr(torch.Tensor, name, property(partial(recorder.transposed, prop)))
        sys.stderr.write(f"supplied, for mindtorch lacks it: {', '.join(_supply(recorder))}\n")
        yield recorder.calls


if __name__ == "__main__":
    main(capture)
