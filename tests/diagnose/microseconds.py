"""The parts of a step, counted microsecond by microsecond."""

import numpy as np


def step_parts(computes: np.ndarray, moves: np.ndarray, reads: np.ndarray) -> dict[str, float]:
    """Return the seconds of each part from what happens in each microsecond: computing, communicating, waiting for data."""
    counts = {
        "compute": computes,
        "comm.all": moves & ~computes,
        "data": reads & ~moves & ~computes,
        "host": ~(reads | moves | computes),
    }
    return {name: float(x.sum()) * 1e-6 for name, x in counts.items()}
