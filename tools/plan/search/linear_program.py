"""Small linear programs that grow row by row: `tools/plan/native/linear_program.cc`."""

import ctypes

import numpy as np

from telechat_moe.ops import native

PIVOTS = 20_000


class LinearProgram:
    """Minimise ``cost x`` over rows ``a x <= b`` and ``0 <= x <= upper``; no cost is negative.

    Args:
        cost: [columns].
        upper: [columns]; infinity: none.
    """

    def __init__(self, cost: np.ndarray, upper: np.ndarray) -> None:
        self._library = _library()
        self.columns, self.rows = len(cost), 0
        cost, upper = (np.ascontiguousarray(v, dtype=np.float64) for v in (cost, upper))
        self.cost = cost
        self._at = self._library.telechat_lp_new(
            ctypes.c_int32(self.columns), _pointer(cost), _pointer(upper)
        )
        self.x = np.zeros(self.columns)
        self.multipliers = np.zeros(0)
        """Of each row, not negative."""

    def __del__(self) -> None:
        if getattr(self, "_at", None):
            self._library.telechat_lp_delete(ctypes.c_void_p(self._at))

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Add rows, [rows, columns] and [rows]."""
        a, b = (np.ascontiguousarray(v, dtype=np.float64) for v in (a, b))
        for row, right in zip(a, b, strict=True):
            self._library.telechat_lp_add(
                ctypes.c_void_p(self._at),
                ctypes.c_int32(self.columns),
                _pointer(row),
                ctypes.c_double(right),
                ctypes.c_int64(self.rows),
            )
            self.rows += 1

    def solve(self) -> bool:
        """Solve; return whether the optimum was reached. `x` and `multipliers` hold the last solution."""
        self.multipliers = np.zeros(self.rows)
        status = self._library.telechat_lp_solve(
            ctypes.c_void_p(self._at),
            ctypes.c_int32(PIVOTS),
            ctypes.c_int32(self.columns),
            _pointer(self.x),
            _pointer(self.multipliers),
        )
        return status == 0

    def bound(self, upper: np.ndarray) -> None:
        """Lower the upper bounds of the columns."""
        for column, high in enumerate(upper):
            self._library.telechat_lp_bound(
                ctypes.c_void_p(self._at),
                ctypes.c_int32(column),
                ctypes.c_double(0.0),
                ctypes.c_double(high),
            )

    def shrink(self) -> None:
        """Leave out the rows that do not bind and the columns that cannot move."""
        self._library.telechat_lp_shrink(ctypes.c_void_p(self._at))

    @property
    def value(self) -> float:
        """The least cost."""
        return float(self.cost @ self.x)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _library() -> ctypes.CDLL:
    library = native.load()
    try:
        library.telechat_lp_new.restype = ctypes.c_void_p
        library.telechat_lp_delete.restype = library.telechat_lp_add.restype = None
        library.telechat_lp_bound.restype = library.telechat_lp_shrink.restype = None
    except AttributeError:
        raise native.NativeError(
            f"{native.path()} is older than its sources and cannot solve linear programs; "
            "run `python -m telechat_moe.ops.build`"
        ) from None
    library.telechat_lp_solve.restype = ctypes.c_int32
    return library
