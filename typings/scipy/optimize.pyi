"""The functions of scipy.optimize that we call."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

class OptimizeResult:
    x: NDArray[np.float64]

def least_squares(
    fun: Callable[[NDArray[np.float64]], NDArray[np.float64]], x0: ArrayLike, **options: Any
) -> OptimizeResult: ...
def nnls(A: ArrayLike, b: ArrayLike) -> tuple[NDArray[np.float64], float]: ...
