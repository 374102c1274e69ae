"""Records of torch's tensors, of the updates of weights, and of steps, for any program that offers torch's functions."""

import inspect
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.optim import optimizer as optim

from telechat_moe.narrowing import is_object, is_sequence
from telechat_moe.tools.align.capture.torch_modules import Modules
from telechat_moe.tools.align.dump import msprobe_write
from telechat_moe.tools.align.dump.records import (
    MINDTORCH,
    Call,
    Dump,
    Phase,
    RankDump,
    Scalar,
    TensorRecord,
    Value,
)

# Functions that query a tensor or create one from nothing: no computations.
_NAMES = """
size dim numel nelement ndimension stride is_contiguous data_ptr storage_offset element_size get_device
is_floating_point is_complex is_nonzero is_same_size requires_grad_ retain_grad register_hook backward
numpy tolist item set_ _make_subclass unbind manual_seed
rand randn randint randperm tensor as_tensor asarray frombuffer arange empty new_empty empty_like
normal_ uniform_ bernoulli_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
__repr__ __format__ __len__ __hash__ __iter__ __bool__ __int__ __float__ __index__ __array__
__get__ __set__ __delete__
"""
QUERIES = frozenset(_NAMES.split())


_DEEP = 3  # lines of the call stack that are recorded
_LIBRARIES = [sys.modules[name].__file__ for name in ("torch", "mindspore") if name in sys.modules]
_OWN = (*(str(Path(file).parent) for file in (*_LIBRARIES, __file__) if file), "<frozen")
_FRAMEWORK = "pytorch" if hasattr(torch._C, "DisableTorchFunction") else MINDTORCH
_QUIETLY: Any = getattr(torch._C, "DisableTorchFunction", nullcontext)
_NUMPY_KNOWS = (torch.float16, torch.float32, torch.float64)


def widened(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a copy of the values; narrow floating-point types as float32."""
    with _QUIETLY():
        x = x.detach().cpu()
        if x.dtype.is_floating_point and x.dtype not in _NUMPY_KNOWS:
            x = x.float()
        return np.array(x.numpy())


def type_name(x: torch.Tensor) -> str:
    """Return the name of a tensor's type: ``float32`` for torch's ``torch.float32`` and mindtorch's ``Float32``."""
    return str(x.dtype).lower().removeprefix("torch.").replace("_e4m3fn", "_e4m3")


def record(x: Any) -> Value:
    """Return an argument or result as a record."""
    if isinstance(x, torch.Tensor):
        dtype = type_name(x)
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
    return TensorRecord(type_name(like), tuple(like.shape), read=lambda: values)


def lines() -> tuple[str, ...]:
    """Return the lines of the script and its libraries that called a function, innermost first; torch's are left out."""
    lines: list[str] = []
    frame = inspect.currentframe()
    while frame is not None and len(lines) < _DEEP:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN):
            lines.append(f"File {code.co_filename}, line {frame.f_lineno}, in {code.co_name}")
        frame = frame.f_back
    return tuple(lines)


def writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function writes into one of its arguments."""
    in_place = name.endswith("_") and not name.endswith("__")
    return kwargs.get("out") is not None or name.endswith("__setitem__") or in_place


class CallRecording:
    """Calls while they are recorded: forward at once, backward when all gradients of a call have arrived."""

    def __init__(self, calls: dict[str, Call], modules: Modules) -> None:
        super().__init__()
        self.calls, self.modules, self.count = calls, modules, Counter[str]()
        # The module of each call, and lines of the script
        self.origin: dict[str, tuple[str | None, tuple[str, ...]]] = {}
        self.paused = False  # in an optimizer, whose updates are recorded as a whole
        self.pending: dict[str, tuple[list[Any], list[Any]]] = {}

    def add(
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
            self.origin[head] = self.modules.parent, lines()
        call = Call(key, "api", name, int(index), phase, inputs, named, outputs)
        parent, stack = self.origin.get(head, (None, ()))
        self.calls[key] = replace(call, parent=parent, stack=stack)
        return self.calls[key]

    def finish(self) -> None:
        """Finish the backward calls of functions of which some inputs needed no gradient."""
        for key in list(self.pending):
            if any(g is not None for g in self.pending[key][-1]):
                self.finish_call(key)

    def finish_call(self, key: str) -> None:
        """Record the backward call of a function."""
        if key in self.pending:
            coming, gradients = ([record(g) for g in gs] for gs in self.pending.pop(key))
            self.add(key, Phase.BACKWARD, coming, {}, gradients)


class Optimizers:
    """Records each weight's update: its tensors before and after the step of any optimizer."""

    def __init__(self, calls: dict[str, Call], recorder: CallRecording, modules: Modules) -> None:
        self.calls, self.recorder, self.modules = calls, recorder, modules
        self.count, self.before = Counter[str](), {}

    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep what a step will change."""
        self.recorder.paused = True
        self.before = {id(p): self._state(optimizer, p) for _, p in _weights(optimizer)}

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Record what a step changed."""
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
        self.recorder.paused = False

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


Recorder = TypeVar("Recorder", bound=CallRecording)


@contextmanager
def recorded(
    make: Callable[[dict[str, Call], Modules], Recorder], modules: bool
) -> Generator[Recorder, None, None]:
    """Record updates of weights in the block, and maybe what modules return; yield what records functions."""
    calls: dict[str, Call] = {}
    names = Modules(calls, record, modules)
    recorder = make(calls, names)
    updates = Optimizers(calls, recorder, names)
    hooks = (
        optim.register_optimizer_step_pre_hook(updates.begin),
        optim.register_optimizer_step_post_hook(updates.end),
    )
    try:
        with names:
            yield recorder
    finally:
        for hook in hooks:
            hook.remove()
    recorder.finish()


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


Recorded = AbstractContextManager[dict[str, Call]]
"""A recording that runs, whose calls it gives."""


def run_script(
    script: str, arguments: list[str], out: Path, steps: range, recording: Recorded
) -> Dump:
    """Run a script as if from the command line, record its steps and write them as a tree of msprobe.

    Steps are counted from 0; an optimizer's step ends one.
    """
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with recording as calls:
        cut = StepRecorder(calls, steps)
        hook = optim.register_optimizer_step_post_hook(cut.end)
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            hook.remove()
    if calls:
        cut.end()
    ranks = {
        (step, 0): RankDump(step, 0, _FRAMEWORK, "tensor", "L1", step_calls)
        for step, step_calls in cut.calls_of_steps.items()
    }
    dump = Dump(out, ranks)
    msprobe_write.write(dump, out)
    return dump


def main(capture: Callable[[bool], Recorded]) -> None:
    """Run ``python -m MODULE [--modules] OUT FIRST LAST SCRIPT [ARGUMENT ...]``."""
    modules = sys.argv[1] == "--modules"
    out, first, last, script, *arguments = sys.argv[1 + modules :]
    steps = range(int(first), int(last) + 1)
    dump = run_script(script, arguments, Path(out), steps, capture(modules))
    count = sum(len(r.calls) for r in dump.ranks.values())
    sys.stderr.write(
        f"{out}: {count} calls in {len(dump.ranks)} steps; torch is {torch.__file__}\n"
    )
