"""The filters of scipy.ndimage that we call."""

import numpy as np
from numpy.typing import NDArray

def maximum_filter1d(
    input: NDArray[np.float64], size: int, *, mode: str
) -> NDArray[np.float64]: ...
def median_filter(input: NDArray[np.float64], size: int, *, mode: str) -> NDArray[np.float64]: ...
