"""Load the native library, report its errors, and call its operators on NumPy arrays.

Works without mindspore; there the operators use oneDNN where it can be found, else their own matrix product.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import TelechatMoeError
from telechat_moe.ops.build import LIBRARY

POINTER, TEXT, NUMBER = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64
# Function -> type of the result, types of the arguments (None: those of the call). Others return int.
SIGNATURES: dict[str, tuple[Any, list[Any] | None]] = {
    "telechat_isa": (TEXT, []),
    "telechat_use_isa": (ctypes.c_int, [TEXT]),
    "telechat_gemm_backend": (TEXT, []),
    "telechat_attributes_new": (POINTER, []),
    "telechat_attributes_workspace": (NUMBER, [POINTER]),
    "telechat_attributes_free": (None, [POINTER]),
    "telechat_attributes_number": (None, [POINTER, TEXT, ctypes.c_double]),
    "telechat_attributes_list": (None, [POINTER, TEXT, POINTER, NUMBER]),
    "telechat_infer": (NUMBER, None),
    "telechat_link_trial": (None, [ctypes.c_double, ctypes.c_double, NUMBER]),
    "telechat_link_times": (NUMBER, [POINTER, NUMBER]),
    "telechat_link_ways": (None, [ctypes.c_int, POINTER]),
    "telechat_swap_pool": (None, [ctypes.c_int]),
    "telechat_swap_trial": (None, [ctypes.c_double, NUMBER]),
    "telechat_swap_times": (NUMBER, [POINTER, NUMBER]),
    "telechat_tap_begin": (NUMBER, [TEXT, NUMBER]),
    "telechat_tap_end": (NUMBER, []),
    "dvm_create": (POINTER, [POINTER, NUMBER]),
    "dvm_destroy": (None, [POINTER]),
    "dvm_run": (ctypes.c_int, [POINTER, POINTER, POINTER]),
    "dvm_encode": (ctypes.c_int, [POINTER, POINTER]),
    "dvm_output_shapes": (NUMBER, [POINTER, POINTER, POINTER]),
    "dvm_disassemble": (NUMBER, [POINTER, POINTER, TEXT, NUMBER]),
    "dvm_explain": (NUMBER, [POINTER, TEXT, NUMBER]),
    "dvm_time_encode": (ctypes.c_int, [POINTER, POINTER, NUMBER, POINTER]),
    "dvm_opcode_names": (NUMBER, [TEXT, NUMBER]),
}

ISAS = ("scalar", "avx2", "avx512", "amx", "neon")
"""Instruction sets; ``amx`` is avx512 with bfloat16 products on tiles, ``neon`` is the only one of ARM processors."""

Attribute = bool | int | float | Sequence[int]


class NativeError(TelechatMoeError):
    """The native library is missing, or one of its operators refused its input."""


@functools.cache
def path() -> Path:
    """Return the library's file.

    Raises:
        NativeError: There is none; says what to do.
    """
    return built(LIBRARY, "the native operators are")


def built(library: Path, subject: str) -> Path:
    """Return a library's file, or raise a NativeError that says what to do where it was not built."""
    if not library.exists():
        raise NativeError(
            f"{subject} not built ({library} is missing): g++ was not found when "
            "telechat-moe was installed; install g++ and run `python -m telechat_moe.ops.build`"
        )
    return library


def open_library(library: Path) -> ctypes.CDLL:
    """Load a library, or raise a NativeError that says why it cannot be loaded."""
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeError(f"{library} cannot be loaded: {error}") from error


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library once, and oneDNN beside it where mindspore has brought one.

    Raises:
        NativeError: It is missing or cannot be loaded.
    """
    library = open_library(path())
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if onednn := onednn_path():
        library.telechat_use_onednn(str(onednn).encode())
    return library


def onednn_path() -> Path | None:
    """Return the oneDNN library that mindspore brought, or None."""
    spec = importlib.util.find_spec("mindspore")
    if not spec or not spec.submodule_search_locations:
        return None
    library = Path(spec.submodule_search_locations[0]) / "lib" / "libdnnl.so.3"
    return library if library.exists() else None


def last_error() -> str:
    """Return what the last operator that failed said."""
    text = ctypes.create_string_buffer(1024)
    load().telechat_last_error(text, ctypes.c_int64(1024))
    return text.value.decode(errors="replace")


def isa() -> str:
    """Return the instruction set in use, one of ``ISAS``: the processor's best unless `use_isa` chose another."""
    return load().telechat_isa().decode()


def isas() -> tuple[str, ...]:
    """Return the instruction sets that can be used here, the best one last."""
    best = isa()
    return (best,) if best == "neon" else ISAS[: ISAS.index(best) + 1]


def use_isa(name: str) -> None:
    """Use a lower instruction set in this process, in MindSpore's products too: for tests and benchmarks.

    Raises:
        NativeError: There is none of this name, the processor lacks it, or an operator has already run.
    """
    if load().telechat_use_isa(name.encode()):
        raise NativeError(last_error())


def gemm_backend() -> str:
    """Return what computes matrix products: ``onednn``, but for shapes that ours computes faster, or ``own``."""
    return load().telechat_gemm_backend().decode()


def threads() -> int:
    """Return the number of threads that operators use."""
    return load().telechat_threads()


def set_threads(count: int) -> None:
    """Use ``count`` threads from now on; results do not change."""
    load().telechat_set_threads(count)


def copy_memory(
    to: np.ndarray, start: np.ndarray, nbytes: np.ndarray, *, all_threads: bool
) -> None:
    """Copy many ranges of memory at once, past the caches, because the copies are not read soon.

    Args:
        to: Addresses, uint64.
        start: Addresses to copy from, uint64; no range overlaps another.
        nbytes: Bytes of each, int64.
        all_threads: Share the work; else this thread does it.
    """
    pointers = (ctypes.c_void_p(x.ctypes.data) for x in (to, start, nbytes))
    load().telechat_copy(ctypes.c_int64(len(to)), *pointers, ctypes.c_bool(all_threads))


class Kernel:
    """One operator of the library by its C name, with attributes as for `custom_op`, callable on NumPy arrays.

    Raises:
        NativeError: No such operator, or its Init refused the attributes.
    """

    def __init__(self, name: str, attributes: Mapping[str, Attribute] | None = None) -> None:
        self.name = name
        self._checked: tuple[Any, ...] | None = None
        self._library = load()
        try:
            self._run = getattr(self._library, name)
        except AttributeError as error:
            raise NativeError(f"{path()} has no operator {name}") from error
        self._extra = ctypes.c_void_p(self._library.telechat_attributes_new())
        for key, value in (attributes or {}).items():
            if isinstance(value, (bool, int, float)):
                self._library.telechat_attributes_number(self._extra, key.encode(), float(value))
            else:
                ints = np.asarray(value, np.int64)
                self._library.telechat_attributes_list(
                    self._extra, key.encode(), ints.ctypes.data, ints.size
                )
        if hasattr(self._library, f"{name}Init"):
            init = getattr(self._library, f"{name}Init")
            if init(None, None, None, self._extra):
                raise NativeError(last_error())

    def __del__(self) -> None:
        if getattr(self, "_extra", None):
            self._library.telechat_attributes_free(self._extra)

    def shapes(self, inputs: Sequence[np.ndarray], outputs: int = 1) -> list[tuple[int, ...]]:
        """Return the shapes of the results, as MindSpore would be told."""
        ranks, shapes, _ = _describe(inputs)
        result = np.zeros(256, np.int64)
        infer = getattr(self._library, f"{self.name}InferShape")
        length = self._library.telechat_infer(
            ctypes.cast(infer, ctypes.c_void_p),
            ctypes.c_int64(outputs == 1),
            ranks,
            shapes,
            self._extra,
            ctypes.c_void_p(result.ctypes.data),
            ctypes.c_int64(result.size),
        )
        if length < 0:
            raise NativeError(last_error())
        output_shapes, position = [], 1
        for _ in range(int(result[0])):
            rank = int(result[position])
            output_shapes.append(tuple(int(x) for x in result[position + 1 : position + 1 + rank]))
            position += 1 + rank
        return output_shapes

    def __call__(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Fill ``outputs``; all arrays must be C-contiguous.

        Raises:
            NativeError: The operator refused its input; carries its sentence.
        """
        self.bind(inputs, outputs)()

    def bind(
        self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
    ) -> Callable[[], None]:
        """Return a call of the operator on these arrays, which does not look at them again.

        Raises:
            NativeError: As above; the call raises what it finds in the values.
        """
        self._check_outputs(inputs, outputs)
        arrays = [*inputs, *outputs]
        workspace = self._library.telechat_attributes_workspace(self._extra)
        if workspace:
            arrays.append(np.empty(workspace, np.uint8))
        for array in arrays:
            if not array.flags.c_contiguous:
                raise NativeError(f"{self.name}: an array of shape {array.shape} is not contiguous")
        ranks, shapes, keep = _describe(arrays)
        data = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
        types = (ctypes.c_char_p * len(arrays))(*[a.dtype.name.encode() for a in arrays])

        def call(_alive: Any = (arrays, keep)) -> None:
            if self._run(len(arrays), data, ranks, shapes, types, None, self._extra):
                raise NativeError(last_error())

        return call

    def _check_outputs(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Refuse results that the operator would write beyond; once for each set of shapes."""
        key = tuple(a.shape for a in (*inputs, *outputs))
        if key == self._checked:
            return
        expected = self.shapes(inputs, len(outputs))
        actual = [y.shape for y in outputs]
        if actual != expected:
            raise NativeError(f"{self.name}: results of shapes {actual}, expected {expected}")
        self._checked = key


def _describe(arrays: Sequence[np.ndarray]) -> tuple[Any, Any, Any]:
    extents = [(ctypes.c_int64 * max(a.ndim, 1))(*a.shape) for a in arrays]
    pointers = [ctypes.cast(x, ctypes.POINTER(ctypes.c_int64)) for x in extents]
    ranks = (ctypes.c_int * len(arrays))(*[a.ndim for a in arrays])
    return ranks, (ctypes.POINTER(ctypes.c_int64) * len(arrays))(*pointers), extents
