"""A plugin of pytest: the native kernels are called in an emulated ARM processor.

``ARM_CALLS`` is the program of ``tests/ops/arm_calls.cc`` and the library, both compiled for ARM. Operators in
MindSpore's graphs stay on this machine.
"""

import ctypes
import os
import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from telechat_moe.ops import native
from telechat_moe.ops.dvm import runtime

EMULATOR = ("qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu")
NUMBER, REAL, FUNCTION, MEMORY, MEMORIES = range(5)


class Function:
    """One function, called with numbers, arrays (changed in place), bytes and lists of these."""

    argtypes: Sequence[Any] = ()

    def __init__(self, library: "Library", name: str) -> None:
        self._library, self.name = library, name

    def __call__(self, *given: Any) -> Any:
        types = [*self.argtypes, *[None] * (len(given) - len(self.argtypes))]
        arguments = [_argument(x, t) for x, t in zip(given, types, strict=True)]
        result = self._library.ask(self.name, arguments, given)
        kind = native.SIGNATURES.get(self.name, (ctypes.c_int, None))[0]
        if kind is native.TEXT:
            text = np.zeros(64, np.uint8)
            self._library.strncpy(text, result, 63)
            return text.tobytes().split(b"\0")[0]
        return ctypes.c_int(result).value if kind is ctypes.c_int else result


class Library:
    """In place of the library that ctypes would load."""

    def __init__(self, paths: Sequence[str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([*EMULATOR, *paths], **pipes)

    def __getattr__(self, name: str) -> Function:
        return Function(self, name)

    def dvm_create(self, address: int, count: int) -> int:
        """Copy the program's words, which are known by their address only."""
        return Function(self, "dvm_create")(ctypes.string_at(address, 8 * count), count)

    def ask(self, name: str, arguments: Sequence[bytes], given: Sequence[Any]) -> int:
        """Call, and take over what was written to the arrays among ``given``."""
        pipe, reply = self._process.stdin, self._process.stdout
        assert pipe
        assert reply
        pipe.write(_sized(name) + struct.pack("<q", len(arguments)))
        pipe.write(b"".join(arguments))
        pipe.flush()
        answer = reply.read(8)
        assert len(answer) == 8, f"{name}: the emulated process has ended"
        for x in given:
            for memory in x if isinstance(x, list) else [x]:
                if isinstance(memory, np.ndarray) and memory.size:
                    memory[...] = np.frombuffer(reply.read(memory.nbytes), memory.dtype).reshape(
                        memory.shape
                    )
                elif isinstance(memory, bytes):
                    reply.read(len(_content(memory)))
        return struct.unpack("<q", answer)[0]


def _content(memory: np.ndarray | bytes | str) -> bytes:
    """Return the bytes that are sent: texts end with a zero."""
    if isinstance(memory, np.ndarray):
        return memory.tobytes()
    return (memory.encode() if isinstance(memory, str) else memory) + b"\0"


def _sized(memory: np.ndarray | bytes | str) -> bytes:
    content = _content(memory)
    return struct.pack("<q", len(content)) + content


def _argument(x: Any, kind: Any) -> bytes:
    """Return one argument as the program reads it."""
    if kind is ctypes.c_float:
        return struct.pack("<qfi", REAL, x, 0)  # the lower half of the register
    if isinstance(x, float):
        return struct.pack("<qd", REAL, x)
    if isinstance(x, str):
        return struct.pack("<q", FUNCTION) + _sized(x)
    if isinstance(x, list):
        return struct.pack("<qq", MEMORIES, len(x)) + b"".join(_sized(m) for m in x)
    if isinstance(x, (bytes, np.ndarray)):
        return struct.pack("<q", MEMORY) + _sized(x)
    return struct.pack("<qq", NUMBER, x)


class Kernel(native.Kernel):
    """As `native.Kernel`, in the emulated process."""

    def __init__(self, name: str, attributes: Mapping[str, native.Attribute] | None = None) -> None:
        self.name, self._checked, self._library = name, None, LIBRARY
        self._extra = LIBRARY.telechat_attributes_new()
        for key, value in (attributes or {}).items():
            if isinstance(value, (bool, int, float)):
                LIBRARY.telechat_attributes_number(self._extra, key.encode(), float(value))
            else:
                ints = np.asarray(value, np.int64)
                LIBRARY.telechat_attributes_list(self._extra, key.encode(), ints, ints.size)
        init = f"{name}Init"
        if LIBRARY.dlsym(0, init.encode()) and getattr(LIBRARY, init)(0, 0, 0, self._extra):
            raise native.NativeError(native.last_error())

    def shapes(self, inputs: Sequence[np.ndarray], outputs: int = 1) -> list[tuple[int, ...]]:
        ranks, shapes = _extents(inputs)
        result = np.zeros(256, np.int64)
        if (
            LIBRARY.telechat_infer(
                f"{self.name}InferShape", outputs == 1, ranks, shapes, self._extra, result, 256
            )
            < 0
        ):
            raise native.NativeError(native.last_error())
        found, at = [], 1
        for _ in range(result[0]):
            found.append(tuple(result[at + 1 : at + 1 + result[at]].tolist()))
            at += 1 + result[at]
        return found

    def __call__(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        self._check_outputs(inputs, outputs)
        arrays = [*inputs, *outputs]
        if workspace := LIBRARY.telechat_attributes_workspace(self._extra):
            arrays.append(np.empty(workspace, np.uint8))
        ranks, shapes = _extents(arrays)
        types = [a.dtype.name.encode() for a in arrays]
        if getattr(LIBRARY, self.name)(len(arrays), arrays, ranks, shapes, types, 0, self._extra):
            raise native.NativeError(native.last_error())


def _extents(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    return np.array([a.ndim for a in arrays], np.int32), [
        np.array(a.shape, np.int64) for a in arrays
    ]


def last_error() -> str:
    """As `native.last_error`."""
    text = np.zeros(1024, np.uint8)
    LIBRARY.telechat_last_error(text, 1024)
    return text.tobytes().split(b"\0")[0].decode()


LIBRARY = Library(os.environ["ARM_CALLS"].split(os.pathsep))
native.load = lambda: LIBRARY
native.Kernel, native.last_error = Kernel, last_error
runtime._numbers = lambda values: np.array(list(values), np.int64)
runtime._pointers = list
LIBRARY.telechat_set_threads(
    1
)  # emulated threads that wait for one another take turns; tests of threads start their own
