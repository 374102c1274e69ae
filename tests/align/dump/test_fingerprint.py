"""Fingerprints: the formulas of the module, memory orders, checksums that see everything."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.errors import BadInputError
from telechat_moe.ops import fingerprint
from telechat_moe.ops.fingerprint import Fingerprint

MASK = (1 << 64) - 1
DTYPES = ["float32", "float64", "float16", "int64", "int8", "uint16", "bool"]


def splitmix(x):
    x = (x + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def by_hand(values):
    """The fingerprint element by element, in Python's integers."""
    buckets, checksum = [[] for _ in range(241)], 0
    bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").reshape(-1).tolist()
    for i, (x, b) in enumerate(zip(values.reshape(-1).tolist(), bits, strict=True)):
        block, place = divmod(i, 32 * 241)
        here, there = splitmix(place + (1 << 40)), splitmix(block)
        sign = (-1) ** ((here >> 63) + (there >> 63))
        buckets[(place % 241 + (there & 0xFFFFFFFF) % 241) % 241].append(sign * float(x))
        mixed = b * 0x9E3779B97F4A7C15 & MASK
        mixed ^= mixed >> 32
        checksum += mixed * (splitmix(here) | 1) * (splitmix(there) | 1)
    return np.array([math.fsum(b) for b in buckets]), checksum & MASK


def tensor(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3, shape)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype)
    return values > 0 if dtype == "bool" else np.clip(values, -6e4, 6e4).astype(dtype)


def close(found, expected):
    assert np.abs(found.buckets - expected.buckets).max() <= 1e-12 * max(expected.norm, 1e-300)
    assert found.checksum == expected.checksum
    assert (found.total, found.special) == (expected.total, expected.special)
    assert found.norm == pytest.approx(expected.norm, rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_what_the_module_says(dtype):
    values = tensor((3, 5479), dtype, 3)
    found = fingerprint.of(values)
    buckets, checksum = by_hand(values)
    assert found.checksum == checksum
    assert np.abs(found.buckets - buckets).max() <= 1e-14 * found.norm
    assert found.norm == pytest.approx(np.linalg.norm(values.astype(np.float64)), rel=1e-14)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 20_000), st.sampled_from(DTYPES), st.data())
def test_any_changed_or_moved_element_shows(size, dtype, data):
    values = tensor((size,), dtype, size)
    before = fingerprint.of(values)
    assert fingerprint.equal(fingerprint.of(values.copy()), before) is True
    i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    bits = values.copy().view(f"u{values.itemsize}")
    width = 1 if dtype == "bool" else 8 * values.itemsize
    bits[i] ^= bits.dtype.type(1 << data.draw(st.integers(0, width - 1)))
    assert fingerprint.of(bits.view(dtype)).checksum != before.checksum
    moved = values.copy()
    moved[[i, j]] = moved[[j, i]]
    if moved.tobytes() != values.tobytes():
        assert fingerprint.equal(fingerprint.of(moved), before) is False


def test_signs_of_zero_and_of_pairs_show():
    """Sums of raw bits would lose changes of the highest bit in pairs."""
    values = np.zeros(4096, np.float32)
    seen = {fingerprint.of(values).checksum}
    rng = np.random.default_rng(0)
    for _ in range(2000):
        pair = values.copy()
        pair[rng.choice(4096, 2, replace=False)] = -0.0
        seen.add(fingerprint.of(pair).checksum)
    assert len(seen) >= 1995  # a few pairs are drawn twice


def differences(kind, shape, rng):
    noise = rng.standard_normal(shape)
    return {
        "noise": lambda: noise,
        "sparse": lambda: noise * (rng.random(shape) < 0.02),
        "rank one": lambda: np.outer(rng.standard_normal(shape[0]), rng.standard_normal(shape[1])),
        "constant": lambda: np.ones(shape),
        "rows": lambda: noise * (rng.random((shape[0], 1)) < 0.2),
        "columns": lambda: noise * (rng.random(shape[1]) < 0.2),
        "heavy": lambda: noise**5,
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["noise", "sparse", "rank one", "constant", "rows", "columns", "heavy"]
)
def test_distance_is_within_20_percent_for_99_of_100(kind):
    rng = np.random.default_rng(5)
    off = []
    for n in range(120):
        shape = ((64, 256), (300, 241), (128, 1000), (1024, 64), (31, 2049))[n % 5]
        golden = rng.standard_normal(shape).astype(np.float32)
        target = (golden + 1e-3 * differences(kind, shape, rng)).astype(np.float32)
        true = np.linalg.norm(target.astype(float) - golden) / np.linalg.norm(golden.astype(float))
        if true:
            found = fingerprint.distance(fingerprint.of(target), fingerprint.of(golden))
            off.append(abs(found / true - 1))
    assert len(off) >= 115
    assert np.quantile(off, 0.99) <= 0.2
    assert np.median(off) <= 0.06


def test_infinities_and_nan_are_counted_and_leave_the_rest_alone():
    values = tensor((9000,), "float32", 1)
    clean = values.copy()
    values[[5, 8000]] = np.nan, -np.inf
    clean[[5, 8000]] = 0
    found = fingerprint.of(values)
    assert found.special == 2
    assert np.array_equal(found.buckets, fingerprint.of(clean).buckets)
    assert math.isnan(fingerprint.distance(found, fingerprint.of(clean)))
    assert fingerprint.distance(found, fingerprint.of(values.copy())) == 0


def test_bytes_fit_in_2_kib_and_come_back():
    found = fingerprint.of(tensor((50, 60), "float64", 2))
    content = found.to_bytes()
    assert len(content) <= 2048
    close(Fingerprint.from_bytes(content), found)
    for wrong in (
        b"",
        content[:-1],
        b"XXXX" + content[4:],
        content[:4] + b"\x01" + content[5:],  # without the squares
        content[:8] + b"\xff" * 8 + content[16:],  # of a part
    ):
        with pytest.raises(BadInputError, match="fingerprint"):
            Fingerprint.from_bytes(wrong)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40_000))
def test_the_memory_order_does_not_matter(size):
    values = tensor((size,), "float32", size)
    rows = next(n for n in (7, 5, 3, 2, 1) if size % n == 0)
    matrix = values.reshape(rows, -1)
    close(fingerprint.of(np.asfortranarray(matrix)), fingerprint.of(values))
    close(fingerprint.of(matrix.T), fingerprint.of(np.ascontiguousarray(matrix.T)))


def test_complex_and_empty():
    pairs = tensor((6, 7, 2), "float32", 4)
    close(fingerprint.of(pairs.view(np.complex64)[..., 0]), fingerprint.of(pairs))
    assert fingerprint.of(np.empty((0, 4), np.float32)).total == 0
