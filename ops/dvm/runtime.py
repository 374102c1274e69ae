"""Run programs on the native virtual machine, show their bytecode, and use them in MindSpore."""

from __future__ import annotations

import ctypes
import json
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from telechat_moe.ops import native
from telechat_moe.ops.dvm import ir
from telechat_moe.ops.dvm.ir import DvmProgram, ProgramError

_ROOM = 1 << 20


class Compiled:
    """A program in the virtual machine.

    Raises:
        ProgramError: The compiler refuses it; names operation, line and reason.
    """

    def __init__(self, program: DvmProgram) -> None:
        self.program = program
        self._library = native.load()
        flat = program.to_ints()
        words = array("q", flat)  # ctypes' own arrays take five times as long
        self._handle = self._library.dvm_create(words.buffer_info()[0], len(flat))
        if not self._handle:
            raise ProgramError(f"{program.file}: {native.last_error()}")
        loads = sorted((n.attrs[0], n) for n in program.nodes if n.op == ir.LOAD)
        stores = sorted((n.attrs[0], n) for n in program.nodes if n.op == ir.STORE)
        self._types = [n.dtype for _, n in loads]
        self._ranks = [len(n.dims) for _, n in loads]
        self._out_types = [n.dtype for _, n in stores]
        self._out_ranks = [len(n.dims) for _, n in stores]

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.dvm_destroy(self._handle)

    def __call__(
        self, *inputs: np.ndarray, out: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        """Run on arrays and return the outputs.

        Args:
            *inputs: In the order of the loads; bfloat16 as its bits in uint16.
            out: Arrays to write to, C-contiguous; new ones if not given.

        Raises:
            ProgramError: An input does not fit, or an index is out of range.
        """
        shapes, arrays = self._shapes(inputs)
        if out is None:
            out = [
                np.empty(shape, _numpy_type(dtype))
                for shape, dtype in zip(self.output_shapes(shapes), self._out_types, strict=True)
            ]
        self._check(self._library.dvm_run(self._handle, _pointers([*arrays, *out]), shapes))
        return list(out)

    def prepared(self, inputs: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> Any:
        """Return a call without arguments that runs on these arrays: for benchmarks."""
        shapes, arrays = self._shapes(inputs)
        everything = [*arrays, *out]
        data, run, handle = _pointers(everything), self._library.dvm_run, self._handle

        def call(_keep: object = everything) -> int:
            return run(handle, data, shapes)

        return call

    def _shapes(self, inputs: Sequence[np.ndarray]) -> tuple[Any, list[np.ndarray]]:
        if len(inputs) != len(self._types):
            raise ProgramError(f"{len(inputs)} inputs, the program loads {len(self._types)}")
        flat: list[int] = []
        arrays = []
        for i, (x, dtype, rank) in enumerate(zip(inputs, self._types, self._ranks, strict=True)):
            if x.dtype != _numpy_type(dtype) or x.ndim != rank:
                raise ProgramError(
                    f"input {i} is {x.dtype} of rank {x.ndim}, expected {dtype} of rank {rank}"
                )
            arrays.append(x if x.flags.c_contiguous else np.ascontiguousarray(x))
            flat += x.shape
        return _numbers(flat), arrays

    def output_shapes(self, shapes: Any) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs for the flat shapes of the inputs."""
        flat = _numbers([0] * sum(self._out_ranks))
        self._check(self._library.dvm_output_shapes(self._handle, shapes, flat) < 0)
        shapes_out, position = [], 0
        for rank in self._out_ranks:
            shapes_out.append(tuple(flat[position : position + rank]))
            position += rank
        return shapes_out

    def disassemble(self, *shapes: Sequence[int]) -> str:
        """Return the bytecode for these input shapes in words."""
        text, extents = ctypes.create_string_buffer(_ROOM), _numbers(chain(*shapes))
        self._check(self._library.dvm_disassemble(self._handle, extents, text, _ROOM) < 0)
        return text.value.decode()

    def explain(self) -> dict[str, Any]:
        """Return what was fused: ``stages`` (pattern, domain, nodes) and ``cuts`` (why a stage ends)."""
        text = ctypes.create_string_buffer(_ROOM)
        self._library.dvm_explain(self._handle, text, _ROOM)
        return json.loads(text.value.decode())

    def encode(self, shapes: Sequence[Sequence[int]]) -> None:
        """Have the bytecode for these input shapes ready.

        Raises:
            ProgramError: The shapes do not fit.
        """
        self._check(self._library.dvm_encode(self._handle, _numbers(chain(*shapes))))

    def encode_nanoseconds(self, shapes: Sequence[Sequence[int]], repeats: int) -> np.ndarray:
        """Return the time of each of ``repeats`` encodings for a new shape."""
        times, extents = np.empty(repeats), _numbers(chain(*shapes))
        self._library.dvm_time_encode(self._handle, extents, repeats, times.ctypes.data)
        return times

    def _check(self, failed: int | bool) -> None:
        if failed:
            raise ProgramError(f"{self.program.file}: {native.last_error()}")


def _numbers(values: Iterable[int]) -> Any:
    flat = list(values)
    return (ctypes.c_int64 * max(len(flat), 1))(*flat)


def _pointers(arrays: Sequence[np.ndarray]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])


def disassemble(program: DvmProgram, *shapes: Sequence[int]) -> str:
    """Return the bytecode of a program for these input shapes in words."""
    return Compiled(program).disassemble(*shapes)


def explain(program: DvmProgram) -> str:
    """Say what was fused into which stage, and why there is more than one."""
    fusion = Compiled(program).explain()
    lines = []
    for i, stage in enumerate(fusion["stages"]):
        domain = stage["domain"]
        for k, name in enumerate(program.symbols):
            domain = domain.replace(f"#{k}", name)
        names = ", ".join(
            f"{ir.NAMES[program.nodes[n].op]}:{program.nodes[n].line}" for n in stage["nodes"]
        )
        lines.append(f"stage {i}: {stage['pattern']} pattern over {domain}: {names}")
    lines += [f"cut {cut}" for cut in fusion["cuts"]]
    return "\n".join(lines)


def opcode_names() -> dict[str, int]:
    """Return the native library's own table of operations."""
    text = ctypes.create_string_buffer(1 << 14)
    native.load().dvm_opcode_names(text, 1 << 14)
    rows = (line.split() for line in text.value.decode().splitlines())
    return {name: int(code) for code, name in rows}


def custom_op(program: DvmProgram) -> Any:
    """Return the program as a MindSpore primitive for graph mode on CPU.

    Its inputs are the program's loads, its results the stores; dynamic shapes work.
    """
    import mindspore as ms

    from telechat_moe.ops.custom import custom_op as make

    types = [
        getattr(ms, _MINDSPORE_TYPE[program.store_of(i).dtype]) for i in range(program.outputs)
    ]
    if len(types) == 1:
        return make("Dvm", lambda *inputs: types[0], prog=program.to_ints())
    return make("DvmMulti", lambda *inputs: tuple(types), len(types), prog=program.to_ints())


_MINDSPORE_TYPE = {"bool": "bool_", **{t: t for t in ir.DTYPES if t != "bool"}}


def _numpy_type(dtype: str) -> np.dtype:
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
