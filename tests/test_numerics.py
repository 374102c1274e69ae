"""Number formats against lists of all their numbers, read off the bits."""

import bisect
import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telechat_moe.numerics import FLOATS, from_bytes, round_to, spacing, ulp_steps, widen

# Bits of exponent and fraction; float8_e4m3 has no infinity and one NaN of each sign.
FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float8_e5m2": (5, 2), "float8_e4m3": (4, 3)}


def value(bits: int, dtype: str) -> float:
    """Return what bits mean, by the definition of IEEE 754 (OCP's for float8_e4m3)."""
    exponents, fractions = FORMATS[dtype]
    sign = -1.0 if bits >> (exponents + fractions) & 1 else 1.0
    exponent, fraction = bits >> fractions & (1 << exponents) - 1, bits & (1 << fractions) - 1
    bias, last = (1 << exponents - 1) - 1, (1 << exponents) - 1
    if dtype == "float8_e4m3":
        if exponent == last and fraction == 7:
            return float("nan")
    elif exponent == last:
        return sign * float("inf") if not fraction else float("nan")
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - fractions)
    return sign * (1 + fraction / (1 << fractions)) * 2.0 ** (exponent - bias)


NUMBERS = {
    dtype: sorted({x for bits in range(1 << sum(parts)) if np.isfinite(x := value(bits, dtype))})
    for dtype, parts in FORMATS.items()
}
"""Those that are not negative."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float8_e4m3"])
def test_bits_are_widened(dtype: str):
    count = 1 << 1 + sum(FORMATS[dtype])
    bits = np.arange(count, dtype=np.uint16 if count > 256 else np.uint8)
    expected = np.array([value(int(b), dtype) for b in bits])
    np.testing.assert_array_equal(widen(bits, dtype), expected)
    zeros = expected == 0
    np.testing.assert_array_equal(np.signbit(widen(bits, dtype))[zeros], [False, True])
    if dtype == "bfloat16":
        np.testing.assert_array_equal(from_bytes(bits.tobytes(), dtype), expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_table_of_formats(dtype: str):
    numbers, form = NUMBERS[dtype], FLOATS[dtype]
    assert form.largest == numbers[-1]
    assert 1 + 2 * form.unit == numbers[numbers.index(1.0) + 1]
    above = [b - a for a, b in itertools.pairwise(numbers)]
    np.testing.assert_array_equal(spacing(np.array(numbers[:-1]), dtype), above)
    np.testing.assert_array_equal(round_to(np.array(numbers), dtype), numbers)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_formats_of_numpy_are_numpy_s(dtype: str):
    limits, form = np.finfo(dtype), FLOATS[dtype]
    tiny, largest = float(limits.tiny), float(limits.max)
    x = np.array([0.0, tiny / 4, tiny / 2, tiny, 1.5 * tiny, 2 * tiny, 1.0, 3.0, largest / 2])
    np.testing.assert_array_equal(spacing(x, dtype), np.spacing(x.astype(dtype)))
    assert (form.largest, form.unit) == (largest, float(limits.eps) / 2)
    low, high = FLOATS["tfloat32"].low, FLOATS["tfloat32"].high
    assert dtype == "float64" or (low, high) == (form.low, form.high)


def nearest(x: float, dtype: str) -> float:
    """Return the nearest number of a type, the one with an even fraction of two, by exact fractions."""
    numbers = NUMBERS[dtype]
    place = bisect.bisect(numbers, abs(x))
    below = numbers[place - 1]
    if place == len(numbers):
        step = Fraction(numbers[-1]) - Fraction(numbers[-2])
        over = Fraction(abs(x)) - Fraction(numbers[-1])
        even = (len(numbers) - 1) % 2 == 0
        inside = over < step / 2 or (over == step / 2 and even)
        beyond = float("nan") if dtype == "float8_e4m3" else float("inf")
        return float(np.copysign(below if inside else beyond, x))
    above = numbers[place]
    down, up = Fraction(abs(x)) - Fraction(below), Fraction(above) - Fraction(abs(x))
    first = down < up or (down == up and (place - 1) % 2 == 0)
    return float(np.copysign(below if first else above, x))


@pytest.mark.parametrize("dtype", FORMATS)
@given(data=st.data())
def test_rounding_takes_the_nearest(dtype: str, data: st.DataObject):
    numbers, largest = NUMBERS[dtype], NUMBERS[dtype][-1]
    place = data.draw(st.integers(0, len(numbers) - 2))
    middle = (numbers[place] + numbers[place + 1]) / 2
    near = st.sampled_from([middle, np.nextafter(middle, 0), np.nextafter(middle, largest)])
    x = data.draw(near | st.floats(-1.2 * largest, 1.2 * largest) | st.floats(-1, 1))
    np.testing.assert_array_equal(round_to(np.array([x]), dtype)[0], nearest(x, dtype))


@pytest.mark.parametrize("dtype", FORMATS)
@given(data=st.data())
def test_distances_in_numbers_of_the_type(dtype: str, data: st.DataObject):
    numbers = NUMBERS[dtype]
    place = st.integers(0, len(numbers) - 1)
    a, b = data.draw(place), data.draw(place)
    sign = data.draw(st.sampled_from([-1.0, 1.0]))
    x, y = np.array([numbers[a]]), np.array([sign * numbers[b]])
    steps = abs(a - b) if sign > 0 else a + b
    assert ulp_steps(x, y, dtype)[0] == steps


@pytest.mark.parametrize("dtype", sorted(FLOATS.keys() - {"tfloat32", "float8_e4m3"}))
def test_what_is_no_number(dtype: str):
    """Equal infinities and two NaNs are no distance apart, anything else beside a number is infinitely far."""
    inf, nan = np.inf, np.nan
    ours = np.array([inf, -inf, nan, inf, nan, 1.0, 1.0, inf, 1.0, nan])
    other = np.array([inf, -inf, nan, -inf, 1.0, nan, inf, 1.0, 1.0, inf])
    expected = [0, 0, 0, inf, inf, inf, inf, inf, 0, inf]
    np.testing.assert_array_equal(ulp_steps(ours, other, dtype), expected)
