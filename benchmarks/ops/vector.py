"""Vector programs: DVM's own shapes and the operators of a transformer, beside torch and MindSpore."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ops.timing import Call, Measurement, aligned, check_same, in_turns, relative_error
from benchmarks.ops.translate import mindspore_cell, torch_function
from telechat_moe.ops import dvm

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
from dvm_interpreter import interpret  # pyright: ignore[reportMissingImports]

Body = Callable[..., None]


def _gelu(k: Any, x: Any) -> None:
    k.store(0.5 * x * (1.0 + k.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))))


def _softmax(k: Any, x: Any) -> None:
    e = k.exp(x - k.max(x, -1))
    k.store(e * k.reciprocal(k.sum(e, -1)))


def _rms_norm(k: Any, x: Any, w: Any) -> None:
    k.store(x * k.rsqrt(k.sum(x * x, -1) * (1.0 / 1024) + 1e-6) * w)


def _swiglu(k: Any, gate: Any, up: Any) -> None:
    k.store(gate * k.sigmoid(gate) * up)


def _two_outputs(k: Any, x: Any, y: Any) -> None:
    z = k.log(k.abs(x) / (k.abs(y) + 1.0) + 1.0)
    k.store(z)
    k.store(z * y)


def _chain(k: Any, x: Any, y: Any) -> None:
    k.store(k.sqrt(k.abs(x * y + x) + 1.0) - x * 0.5 + y)


def _batch_norm(k: Any, x: Any, g: Any, b: Any) -> None:
    mean = k.sum(x, 0) * (1.0 / 32)
    d = x - mean
    k.store(d * k.rsqrt(k.sum(d * d, 0) * (1.0 / 32) + 1e-5) * g + b)


def _add_sum_mul(k: Any, x: Any, y: Any) -> None:
    s = k.sum(x + y, -1)
    k.store(s * (x + y))


def _column_join(k: Any, x: Any, c: Any) -> None:
    k.store(k.exp(x * 0.1) * c + x)


def _many_adds(k: Any, x: Any, y: Any) -> None:
    for _ in range(200):
        x = x + y
    k.store(x)


def _relu_mul_add(k: Any, x: Any, y: Any) -> None:
    k.store(k.maximum(x * y + x, 0.0))


def _root(k: Any, x: Any, y: Any) -> None:
    k.store(k.sqrt(k.abs(x) + k.abs(y) + 1.0) * 0.5)


H = [("T", "H")]
# name, program, symbolic inputs, real shapes
SET: list[tuple[str, Body, list[Any], list[list[tuple[int, ...]]]]] = [
    ("gelu", _gelu, H, [[(r, 1024)] for r in (16, 32, 128, 2048)]),
    ("softmax", _softmax, H, [[(r, 1024)] for r in (16, 128, 2048)]),
    (
        "rms_norm",
        _rms_norm,
        [("T", 1024), (1024,)],
        [[(r, 1024), (1024,)] for r in (16, 128, 2048)],
    ),
    ("swiglu", _swiglu, H * 2, [[(r, 1024)] * 2 for r in (16, 128, 2048)]),
    ("div, log, mul", _two_outputs, H * 2, [[(8, 32000)] * 2]),
    ("chain", _chain, H * 2, [[(7, 116)] * 2]),
    ("batch_norm", _batch_norm, [("T", "H"), ("H",), ("H",)], [[(32, 1000), (1000,), (1000,)]]),
    (
        "add, sum, mul",
        _add_sum_mul,
        [("A", "B", "C")] * 2,
        [[s] * 2 for s in ((2, 30, 8000), (3, 10, 8000))],
    ),
    ("add, sum, mul", _add_sum_mul, H * 2, [[(100, 500)] * 2]),
    ("join", _column_join, [("T", "H"), ("T", 1)], [[(32, 1024), (32, 1)]]),
    ("join", _column_join, [("A", "B", "C"), ("A", "B", 1)], [[(428, 16, 8), (428, 16, 1)]]),
    ("200 adds", _many_adds, H * 2, [[(512, 512)] * 2]),
    ("relu(xy + x)", _relu_mul_add, H * 2, [[(128, 128)] * 2]),
    ("root", _root, H * 2, [[(1024, 1024)] * 2]),
]


def cases(threads: int, quick: bool, tell: Callable[[str], None]) -> Iterator[Measurement]:
    """Run the set; torch, Inductor and MindSpore are left out where they are not installed."""
    rng = np.random.default_rng(0)
    done: dict[int, tuple[Any, ...]] = {}
    for name, body, specs, shapes in SET:
        for real in shapes[:1] if quick else shapes:
            inputs = [aligned(rng.standard_normal(s).astype(np.float32)) for s in real]
            tell(f"{name} {list(real[0])}")
            key = id(body) + hash(str(specs))
            if key not in done:
                done[key] = _compiled(body, specs, real)
            program, run, built = done[key]
            case = Measurement("vector", name, "x".join(map(str, real[0])), threads)
            case.compile["trace, build, encode"] = float(np.median(built))
            case.compile["trace, build, encode: slowest of 50"] = max(built)
            case.compile["encode"] = float(np.median(run.encode_nanoseconds(real, 1000))) / 1e3
            out = [aligned(y) for y in run(*inputs)]
            exact = interpret(program, inputs)
            case.error = max(relative_error(a, b) for a, b in zip(out, exact, strict=True))
            peers: dict[str, Call] = {"ours": run.prepared(inputs, out)}
            for package, peers_of in (("torch", _torch_peers), ("mindspore", _mindspore_peers)):
                if find_spec(package) is not None:
                    peers |= peers_of(case, program, inputs, out[0])
            in_turns(case, peers, 0.1 if quick else 0.6)
            yield case


def _compiled(body: Body, specs: list[Any], real: list[tuple[int, ...]]) -> tuple[Any, ...]:
    """Return program, machine, and the times from the Python function to the bytecode."""
    times = []
    program = dvm.build(body, *specs)
    run = dvm.Compiled(program)
    for _ in range(60):
        began = time.perf_counter()
        program = dvm.build(body, *specs)
        run = dvm.Compiled(program)
        run.encode(real)
        times.append((time.perf_counter() - began) * 1e6)
    return program, run, times[10:]  # the first runs warm Python up


def _torch_peers(
    case: Measurement, program: Any, inputs: list[np.ndarray], ours: np.ndarray
) -> dict[str, Call]:
    import torch

    torch.set_num_threads(case.threads)
    function = torch_function(program)
    tensors = [torch.from_numpy(x) for x in inputs]
    check_same(case, "torch eager", ours, function(*tensors)[0], 1e-4)
    torch._dynamo.reset()
    compiled = torch.compile(function, dynamic=False)
    began = time.perf_counter()
    result = compiled(*tensors)
    case.compile["inductor"] = (time.perf_counter() - began) * 1e6
    check_same(case, "inductor", ours, result[0], 1e-4)
    return {"torch eager": lambda: function(*tensors), "inductor": lambda: compiled(*tensors)}


def _mindspore_peers(
    case: Measurement, program: Any, inputs: list[np.ndarray], ours: np.ndarray
) -> dict[str, Call]:
    import mindspore as ms

    peers: dict[str, Call] = {}
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU", jit_config={"jit_level": "O0"})
    tensors = [ms.Tensor(x) for x in inputs]
    cells = {"mindspore O0": mindspore_cell(program), "ours in a graph": _node(program)}
    for name, cell in cells.items():
        began = time.perf_counter()
        result = cell(*tensors)
        result = result[0] if isinstance(result, tuple) else result
        check_same(case, name, ours, result.asnumpy(), 2e-3)  # its tanh is that coarse
        case.compile[name] = (time.perf_counter() - began) * 1e6
        peers[name] = lambda cell=cell: _wait(cell(*tensors))
    return peers


def _wait(result: Any) -> np.ndarray:
    return (result[0] if isinstance(result, tuple) else result).asnumpy()


def _node(program: Any) -> Any:
    from mindspore import nn

    class Node(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.op = dvm.custom_op(program)

        def construct(self, *inputs: Any) -> Any:
            return self.op(*inputs)

    return Node()


def dynamic_cases(threads: int, quick: bool, tell: Callable[[str], None]) -> Iterator[Measurement]:
    """Measure 500 random row counts for each operator, from the first call on."""
    rng = np.random.default_rng(1)
    count = 40 if quick else 500
    for name, body, specs, inner in (
        ("rms_norm", _rms_norm, [("T", 1024), (1024,)], (1024,)),
        ("softmax", _softmax, H, None),
        ("swiglu", _swiglu, H * 2, (0, 1024)),
    ):
        lengths = rng.integers(1, 2049, count)
        table = rng.standard_normal((2048, 1024)).astype(np.float32)
        weight = rng.standard_normal(1024).astype(np.float32)

        def arrays(rows: int, inner: Any = inner, table: Any = table, weight: Any = weight) -> list:
            if inner is None:
                return [table[:rows]]
            return [table[:rows], weight if inner == (1024,) else table[2048 - rows :]]

        tell(f"dynamic {name}")
        case = Measurement("dynamic", name, f"{count} random row counts", threads)
        program = dvm.build(body, *specs)
        alone = dvm.Compiled(program)
        for peer, run in _dynamic_peers(program, body, specs, threads, arrays):
            times = []
            for i, rows in enumerate(lengths):
                inputs = arrays(int(rows))
                began = time.perf_counter()
                result = run(inputs)
                times.append((time.perf_counter() - began) * 1e6)
                if i % 10 == 0:
                    check_same(case, peer, alone(*inputs)[0], result, 1e-4)
            case.best[peer] = case.median[peer] = float(np.sum(times))
            case.extra[f"{peer}: worst call"] = float(np.max(times))
        yield case


def _dynamic_peers(
    program: Any, body: Body, specs: list[Any], threads: int, arrays: Any
) -> Iterator[tuple[str, Any]]:
    built: list[Any] = []

    def ours(inputs: list[np.ndarray]) -> np.ndarray:
        if not built:
            built.append(dvm.Compiled(dvm.build(body, *specs)))
        return built[0](*inputs)[0]

    yield "ours", ours
    with contextlib.suppress(ImportError):
        import mindspore as ms

        ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU", jit_config={"jit_level": "O0"})
        shapes = [[None if d == "T" else 1024 for d in s] for s in specs]
        unknown = [ms.Tensor(shape=shape, dtype=ms.float32) for shape in shapes]
        cells = {"ours in a graph": _node(program), "mindspore O0": mindspore_cell(program)}
        for name, cell in cells.items():
            cell.set_inputs(*unknown)
            yield name, lambda inputs, cell=cell: _wait(cell(*map(ms.Tensor.from_numpy, inputs)))
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(threads)
        torch._dynamo.reset()
        compiled = torch.compile(torch_function(program), dynamic=True)
        yield "inductor, cold", lambda inputs: compiled(*[torch.from_numpy(x) for x in inputs])[0]
