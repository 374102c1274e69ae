"""Copies past the caches are the same bytes, whatever the sizes and addresses, and touch nothing beside them."""

import numpy as np
import pytest

from telechat_moe.ops import native


@pytest.mark.parametrize("all_threads", [False, True])
def test_copies_are_exact_and_touch_nothing_else(all_threads: bool) -> None:
    random = np.random.default_rng(0)
    sizes = np.array([*range(200), 4095, 4096, (1 << 20) - 1, (1 << 20) + 65, 3 << 20], np.int64)
    gaps = random.integers(1, 100, len(sizes))
    starts = np.cumsum(gaps + sizes) - sizes
    source = random.integers(0, 256, int(starts[-1] + sizes[-1] + 100), np.uint8)
    shifted = random.integers(0, 64)  # the two are aligned differently
    target = np.zeros(len(source) + 64, np.uint8)
    expected = target.copy()
    for start, size in zip(starts, sizes, strict=True):
        expected[shifted + start : shifted + start + size] = source[start : start + size]
    native.copy_memory(
        (target.ctypes.data + shifted + starts).astype(np.uint64),
        (source.ctypes.data + starts).astype(np.uint64),
        sizes,
        all_threads=all_threads,
    )
    np.testing.assert_array_equal(target, expected)
