"""The tap's fingerprints beside the NumPy formulas of ``ops/fingerprint.py``: every path of the kernel."""

import numpy as np
import pytest

from telechat_moe.ops import fingerprint, native
from telechat_moe.ops.tap import recording

BLOCK = 32 * fingerprint.BUCKETS
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 3, 33 * BLOCK + 11]
"""Parts of a block, single blocks, groups of four, more than one task."""


def printed(values, folder):
    """The fingerprint that a tap writes."""
    with recording(folder, "fingerprint"):
        native.Kernel("Tap", {"tap": 0})([values], [np.zeros(1, np.float32)])
    return (folder / "values.bin").read_bytes()


def close(found, expected):
    names = ("total", "special", "checksum")
    assert [getattr(found, n) for n in names] == [getattr(expected, n) for n in names]
    scale = max(expected.norm, 1e-300)
    assert np.abs(found.buckets - expected.buckets).max() <= 1e-13 * scale
    assert found.norm == pytest.approx(expected.norm, rel=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "int64", "bool"])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_fingerprint_of_the_values(size, dtype, tmp_path):
    values = (100 * np.random.default_rng(size).standard_normal(size)).astype(dtype)
    content = printed(values, tmp_path)
    close(fingerprint.Fingerprint.from_bytes(content), fingerprint.of(values))


@pytest.mark.parametrize("places", [[0], [BLOCK - 1], [2 * BLOCK + 240, 3 * BLOCK], [5 * BLOCK]])
def test_what_is_no_number_counts_as_zero(places, tmp_path):
    values = np.random.default_rng(1).standard_normal(5 * BLOCK + 3).astype(np.float32)
    values[places] = [np.inf, np.nan][: len(places)]
    content = printed(values, tmp_path)
    found = fingerprint.Fingerprint.from_bytes(content)
    assert found.special == len(places)
    close(found, fingerprint.of(values))


def test_any_number_of_threads_gives_the_same_bytes(tmp_path):
    values = np.random.default_rng(2).standard_normal(150 * BLOCK + 7).astype(np.float32)
    before, seen = native.threads(), set()
    try:
        for n in (1, 2, 5):
            native.set_threads(n)
            seen.add(printed(values, tmp_path / str(n)))
    finally:
        native.set_threads(before)
    assert len(seen) == 1
