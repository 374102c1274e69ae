"""Parse and format sizes, times and large numbers, alike in the whole package.

On the command line ``55GB`` is 55 * 10^9 bytes and ``55GiB`` is 55 * 2^30. In keys of a recipe that MindSpore reads
(``context.max_device_memory``...) ``GB`` is 2^30, as MindSpore has it. What we print is in KiB, MiB, GiB and TiB.
"""

import re
from collections.abc import Iterable
from itertools import groupby

from telechat_moe.errors import UsageError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = ("", "K", "M", "G", "T")


def parse_size(option: str, text: str, *, bare: bool = False) -> int:
    """Return the bytes of a size that was given on the command line, such as ``55GB`` or ``55GiB``.

    ``bare``: a number without a unit is a number of bytes.

    Raises:
        UsageError: It is no size, or less than a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    count = 0
    if match and (match[2] or (bare and not match[3])):
        base = 1024 if match[3] else 1000
        count = int(float(match[1]) * base ** _POWERS.index(match[2].upper()))
    if count < 1:
        raise UsageError(
            f"{option} {text}: expected a size such as 55GB (10^9 bytes) or 55GiB (2^30)"
        )
    return count


def size_text(size: float) -> str:
    """Return bytes in the unit that suits them: ``512 B``, ``3.00 MiB``."""
    for limit, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size) >= limit:
            return f"{size / limit:,.2f} {unit}"
    return f"{size:,.0f} B"


def gib_text(size: float, digits: int = 2) -> str:
    """Return bytes in GiB: ``31.83 GiB``."""
    return f"{size / GIB:,.{digits}f} GiB"


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that suits it: ``1.346 s``, ``9.795 ms``, ``0.100 us``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3f} {name}"
    return f"{seconds * 1e6:.3f} us"


def count_text(count: float) -> str:
    """Return a large number with three or four digits: 104576167936 is ``104.6B``."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= limit:
            value = count / limit
            return f"{value:.1f}{unit}" if value >= 100 else f"{value:.2f}{unit}"
    return f"{count:g}"


def ranges_text(numbers: Iterable[int], separator: str = ", ") -> str:
    """Return rising numbers in short: ``0-3, 8, 10-11``."""
    runs = groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(members) for _, members in runs)]
    return separator.join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
