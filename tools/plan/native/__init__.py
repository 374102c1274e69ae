"""The planner's C++: laid-out pipelines, placements of layers with their proofs, and the scheduler of pipelines.

May import ops.native, which loads libraries. Begin with `placement.h`; `load` returns the library.
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
    "telechat_paths_new": (_POINTER,),
    "telechat_paths_delete": (None, _POINTER),
    "telechat_paths_at": (_INT, _POINTER, _INT, _POINTER),
    "telechat_placement_new": (_POINTER, *[_POINTER] * 5),
    "telechat_placement_delete": (None, _POINTER),
    "telechat_placement_solve": (None, _POINTER, _REAL, _INT, _REAL, _POINTER, _POINTER),
    "telechat_placement_best": (_REAL, _POINTER, _POINTER, _INT, _REAL, _POINTER, _POINTER),
    "telechat_placement_tree": (None, _POINTER, _POINTER, _POINTER),
    "telechat_placement_proves": (ctypes.c_bool, *[_POINTER] * 4, _INT, _REAL),
    "telechat_placement_structures": (_INT, _POINTER, _POINTER),
    "telechat_placement_proof": (_INT, _POINTER, _INT, *[_POINTER] * 4),
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
