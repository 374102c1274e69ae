"""Times of calls, and rates of matrix products."""

import time
from collections.abc import Callable
from typing import Any


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def best_gflops(chain: Callable[[], Any]) -> float:
    """Return the best speed of a chain of eight products, 1024 cubed."""
    best = min(timed(chain) for _ in range(12))
    return 8 * 2 * 1024**3 / best / 1e9


def native_gflops(threads: int) -> float:
    """Return the fp32 rate of our own threads, each multiplying 1024 cubed."""
    import numpy as np

    from telechat_moe.ops.native import Kernel, set_threads

    set_threads(threads)
    x = np.random.default_rng(0).standard_normal((2048, 1024), np.float32)
    w, y = x[:1024].copy(), np.empty((2048, 1024), np.float32)
    kernel = Kernel("Matmul")
    best = min(timed(lambda: kernel([x, w], [y])) for _ in range(20))
    return 2 * 2048 * 1024**2 / best / 1e9
