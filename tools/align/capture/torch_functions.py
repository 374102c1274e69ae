"""Record every torch function of a script, forward and backward, as calls of a dump.

One line is enough, in the script or around it::

    with capture() as calls: ...            # or: telechat-moe align capture --torch script.py

Each use of a tensor by a function gets a node of its own in torch's graph, so the gradient of an input is the one through
this function alone, not the sum over all uses. For a function that writes in place, the gradients are those of torch's
own node; for one that writes into a view, only the forward call is recorded.
"""

import inspect
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.optim import optimizer as optim
from torch.overrides import TorchFunctionMode, resolve_name

from telechat_moe.narrowing import is_object, is_sequence
from telechat_moe.tools.align.capture.torch_modules import Modules, tensors_in
from telechat_moe.tools.align.dump import msprobe_write
from telechat_moe.tools.align.dump.records import (
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    TensorRecord,
    Value,
)

# Functions that query a tensor or create one from nothing: no computations.
_QUERIES = """
size dim numel nelement ndimension stride is_contiguous data_ptr storage_offset element_size get_device
is_floating_point is_complex is_nonzero is_same_size requires_grad_ retain_grad register_hook backward
numpy tolist item set_ _make_subclass unbind manual_seed
rand randn randint randperm tensor as_tensor asarray frombuffer arange empty new_empty empty_like
normal_ uniform_ bernoulli_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
__repr__ __format__ __len__ __hash__ __iter__ __bool__ __int__ __float__ __index__ __array__
__get__ __set__ __delete__
"""
_SKIPPED = frozenset(_QUERIES.split())


_DEEP = 3  # lines of the call stack that are recorded
_OWN = (str(Path(torch.__file__).parent), __file__, "<frozen")
_NUMPY_KNOWS = (torch.float16, torch.float32, torch.float64)


def widened(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a copy of the values; narrow floating-point types as float32."""
    with torch._C.DisableTorchFunction():
        x = x.detach().cpu()
        if x.dtype.is_floating_point and x.dtype not in _NUMPY_KNOWS:
            x = x.float()
        return np.array(x.numpy())


def record(x: Any) -> Value:
    """Return an argument or result as a record."""
    if isinstance(x, torch.Tensor):
        dtype = str(x.dtype).removeprefix("torch.").replace("_e4m3fn", "_e4m3")
        if x.is_meta:
            return TensorRecord(dtype, tuple(x.shape))
        values = widened(x)
        return TensorRecord(
            dtype, tuple(x.shape), requires_grad=x.requires_grad, read=lambda: values
        )
    if is_sequence(x):
        return [record(v) for v in x]
    if is_object(x):
        return {str(k): record(v) for k, v in x.items()}
    if x is None:
        return None
    if isinstance(x, slice):
        ends = cast("Any", x)
        return Scalar("slice", [ends.start, ends.stop, ends.step])
    if x is Ellipsis:
        return Scalar("ellipsis", None)
    return Scalar(type(x).__name__, x if isinstance(x, bool | int | float | str) else str(x))


def _zeros(like: torch.Tensor) -> TensorRecord:
    values = np.zeros_like(widened(like))
    return TensorRecord(
        str(like.dtype).removeprefix("torch."), tuple(like.shape), read=lambda: values
    )


class _Recorder(TorchFunctionMode):
    def __init__(self, calls: dict[str, Call], modules: Modules) -> None:
        super().__init__()
        self.calls, self.modules, self.count = calls, modules, Counter[str]()
        # The module of each call, and lines of the script
        self.origin: dict[str, tuple[str | None, tuple[str, ...]]] = {}
        self.paused = False  # in an optimizer, whose updates are recorded as a whole
        self._pending: dict[str, tuple[list[Any], list[Any]]] = {}

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
        if not _writes(name, kwargs) and torch.is_grad_enabled():
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
        call = self._add(key, Phase.FORWARD, inputs, named, records)
        if _writes(name, kwargs):
            self._watch(call, outputs)
            return result
        coming: list[torch.Tensor | None] = [None] * len(outputs)
        for i, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(partial(coming.__setitem__, i))
        if gradients:
            self._pending[key] = coming, gradients
        return result

    def _add(
        self,
        key: str,
        phase: Phase,
        inputs: list[Value],
        named: Mapping[str, Value],
        outputs: list[Value],
    ) -> Call:
        """Record a call of a function; ``key`` lacks the direction."""
        name, _, index = key.rpartition(".")
        head, key = key, f"{key}.{phase.value}"
        if phase is Phase.FORWARD:
            self.origin[head] = self.modules.parent, _lines()
        call = Call(key, "api", name, int(index), phase, inputs, named, outputs)
        parent, stack = self.origin.get(head, (None, ()))
        self.calls[key] = replace(call, parent=parent, stack=stack)
        return self.calls[key]

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
            self._add(key, Phase.BACKWARD, [record(g) for g in coming], {}, records)

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
                self._finish(key)

        used.register_hook(arrived)
        return used

    def finish(self) -> None:
        """Finish the backward calls of functions of which some inputs needed no gradient."""
        for key in list(self._pending):
            if any(g is not None for g in self._pending[key][-1]):
                self._finish(key)

    def _finish(self, key: str) -> None:
        if key in self._pending:
            coming, gradients = ([record(g) for g in gs] for gs in self._pending.pop(key))
            self._add(key, Phase.BACKWARD, coming, {}, gradients)


def _lines() -> tuple[str, ...]:
    """Return the lines of the script and its libraries that called a function, innermost first; torch's are left out."""
    lines: list[str] = []
    frame = inspect.currentframe()
    while frame is not None and len(lines) < _DEEP:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN):
            lines.append(f"File {code.co_filename}, line {frame.f_lineno}, in {code.co_name}")
        frame = frame.f_back
    return tuple(lines)


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


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function writes into one of its arguments."""
    in_place = name.endswith("_") and not name.endswith("__")
    return kwargs.get("out") is not None or name.endswith("__setitem__") or in_place


def _versions(values: Any) -> list[tuple[torch.Tensor, int]]:
    """Return tensors with the number of times they were written to, in order."""
    return [(x, x._version) for x in tensors_in(values) if not x.is_inference()]


def _is_traced(values: Any) -> bool:
    """Return whether a tensor represents others (vmap, meta) and has no values of its own."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
    return any(wrapped(x) or x.is_meta for x in tensors_in(values))


class _Optimizers:
    """Records each weight's update: its tensors before and after the step of any optimizer."""

    def __init__(self, calls: dict[str, Call], recorder: _Recorder, modules: Modules) -> None:
        self.calls, self.recorder, self.modules = calls, recorder, modules
        self.count, self.before = Counter[str](), {}

    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.recorder.paused = True
        self.before = {id(p): self._state(optimizer, p) for _, p in _weights(optimizer)}

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.recorder.paused = False
        name = f"Optimizer.{type(optimizer).__name__}"
        for group, p in _weights(optimizer):
            inputs = self.before[id(p)]
            key = f"{name}.{self.count[name]}.forward"
            settings = {k: record(v) for k, v in group.items() if k in _RULES}
            if type(optimizer).__name__ == "Adam":
                settings["decoupled"] = record(bool(group.get("decoupled_weight_decay", False)))
            after = self._state(optimizer, p)
            if "exp_avg" in after:
                fresh = _zeros(p)
                inputs = {"exp_avg": fresh, "exp_avg_sq": fresh, **inputs}
                settings["step"] = Scalar("float", float(optimizer.state[p]["step"]))
            outputs = [after[k] for k in ("weight", *_STATES) if k in after]
            named = {**inputs, **settings}
            call = Call(key, "api", name, self.count[name], Phase.OPTIMIZER, [], named, outputs)
            self.calls[key] = replace(call, stack=self.modules.stack(p))
            self.count[name] += 1

    @staticmethod
    def _state(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> dict[str, Value]:
        state = optimizer.state.get(p, {})
        states = {k: record(v) for k, v in state.items() if k in _STATES and v is not None}
        return {"weight": record(p), "grad": record(p.grad), **states}


_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_RULES = (
    *("lr", "betas", "eps", "weight_decay", "momentum", "dampening"),
    *("amsgrad", "maximize", "nesterov"),
)


def _weights(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield group, p


@contextmanager
def capture(modules: bool = False) -> Generator[dict[str, Call], None, None]:
    """Record the torch functions called in the block and their backward, and maybe what modules return; yield the calls."""
    calls: dict[str, Call] = {}
    names = Modules(calls, record, modules)
    recorder = _Recorder(calls, names)
    updates = _Optimizers(calls, recorder, names)
    hooks = (
        optim.register_optimizer_step_pre_hook(updates.begin),
        optim.register_optimizer_step_post_hook(updates.end),
    )
    try:
        with recorder, names:
            yield calls
    finally:
        for hook in hooks:
            hook.remove()
    recorder.finish()


def _name(func: Callable[..., Any]) -> str | None:
    """Return the name of a function as msprobe spells it; None: it computes nothing."""
    short = getattr(func, "__name__", "")
    if short in _SKIPPED:
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


class StepRecorder:
    """Splits a recording into steps, each of which ends with an optimizer's step."""

    def __init__(self, calls: dict[str, Call], steps: range) -> None:
        self.calls, self.recorded_steps, self.step = calls, steps, 0
        self.calls_of_steps: dict[int, dict[str, Call]] = {}

    def end(self, *_: Any) -> None:
        """Store what was recorded as a step."""
        if self.step in self.recorded_steps and self.calls:
            self.calls_of_steps[self.step] = dict(self.calls)
        self.calls.clear()
        self.step += 1


def run_script(
    script: str, arguments: list[str], out: Path, steps: range, modules: bool = False
) -> Dump:
    """Run a script as if from the command line, record its steps and write them as a tree of msprobe.

    Steps are counted from 0; an optimizer's step ends one. With ``modules``, what modules return is recorded, too.
    """
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with capture(modules) as calls:
        cut = StepRecorder(calls, steps)
        hook = optim.register_optimizer_step_post_hook(cut.end)
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            hook.remove()
    if calls:
        cut.end()
    ranks = {
        (step, 0): RankDump(step, 0, "pytorch", "tensor", "L1", step_calls)
        for step, step_calls in cut.calls_of_steps.items()
    }
    dump = Dump(out, ranks)
    msprobe_write.write(dump, out)
    return dump


def main() -> None:
    """Run ``python -m telechat_moe.tools.align.capture.torch_functions [--modules] OUT FIRST LAST SCRIPT [ARGUMENT ...]``."""
    modules = sys.argv[1] == "--modules"
    out, first, last, script, *arguments = sys.argv[1 + modules :]
    dump = run_script(script, arguments, Path(out), range(int(first), int(last) + 1), modules)
    count = sum(len(r.calls) for r in dump.ranks.values())
    steps = f"{count} calls in {len(dump.ranks)} steps"
    sys.stderr.write(f"{out}: {steps}; torch is {torch.__file__}\n")


if __name__ == "__main__":
    main()
