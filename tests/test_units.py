"""Sizes on the command line: decimal and binary units; what is printed is binary."""

import pytest

from telechat_moe.errors import UsageError
from telechat_moe.units import count_text, gib_text, parse_size, seconds_text, size_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("55GB", 55 * 10**9),
        ("55GiB", 55 * 2**30),
        ("55 gib", 55 * 2**30),
        ("1.5MB", 1_500_000),
        ("2KiB", 2048),
        ("3K", 3000),
        ("1Ti", 2**40),
    ],
)
def test_units_of_sizes(text: str, expected: int):
    assert parse_size("--memory", text) == expected


@pytest.mark.parametrize("text", ["55", "", "GB", "-1GB", "0GB", "1.GB", "55GBB", "5 5GB", "55iB"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(UsageError, match="expected a size such as 55GB"):
        parse_size("--memory", text)


def test_bare_numbers_are_bytes_where_they_may_be():
    assert parse_size("--shard-size", "700", bare=True) == 700
    with pytest.raises(UsageError):
        parse_size("--shard-size", "7iB", bare=True)


def test_texts():
    assert [size_text(n) for n in (512, 1536, 3 * 2**20, 2.5 * 2**40)] == [
        "512 B", "1.50 KiB", "3.00 MiB", "2.50 TiB",
    ]  # fmt: skip
    assert gib_text(34.5 * 2**30, 1) == "34.5 GiB"
    assert [seconds_text(s) for s in (2.0, 0.0125, 3e-7)] == ["2.000 s", "12.500 ms", "0.300 us"]
    assert count_text(104_576_167_936) == "104.6B"
