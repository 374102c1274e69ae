"""The planner's C++: laid-out pipelines and their longest paths, placements of layers, and the scheduler of pipelines.

May import ops.native, which loads libraries. Begin with `pipeline.h`; `load` returns the library.
"""

import ctypes
import functools
from typing import Any

from numpy.typing import NDArray

from telechat_moe.ops.build import PLANNER_LIBRARY
from telechat_moe.ops.native import NativeError, built, open_library

_POINTER, _INT, _LONG, _REAL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_SEED = ctypes.c_uint64

FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "telechat_pipeline_new": (_POINTER, _INT, _INT, _INT, _POINTER, _POINTER, _POINTER),
    "telechat_pipeline_delete": (None, _POINTER),
    "telechat_pipeline_path": (_LONG, _POINTER, _POINTER, _LONG, _SEED, _POINTER),
    "telechat_placement_new": (_POINTER, *[_POINTER] * 3),
    "telechat_placement_delete": (None, _POINTER),
    "telechat_placement_finish": (ctypes.c_bool, *[_POINTER] * 3),
    "telechat_placement_improve": (_REAL, *[_POINTER] * 3, _INT, _REAL),
    "telechat_schedule_pipeline": (
        _REAL, *[_POINTER] * 5, _SEED, _LONG, _REAL, _POINTER, _POINTER,
    ),
}  # fmt: skip
"""Types of the result and the arguments of every function; the sources say what the functions do."""


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library once.

    Raises:
        NativeError: It is missing, cannot be loaded, or is older than its sources.
    """
    library = open_library(built(PLANNER_LIBRARY, "the planner's native library is"))
    for name, (result, *arguments) in FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise NativeError(
                f"{PLANNER_LIBRARY} is older than its sources and has no {name}; "
                "run `python -m telechat_moe.ops.build`"
            ) from None
        function.restype, function.argtypes = result, arguments
    return library


def address(array: NDArray[Any]) -> ctypes.c_void_p:
    """Return a pointer to a C-contiguous array's first value; the array lives as long as the pointer does."""
    return array.ctypes.data_as(ctypes.c_void_p)
