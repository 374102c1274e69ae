"""Read `data_path` and `split` of a recipe as MindFormers does."""

import math
from collections.abc import Sequence


def parse_data_path(items: Sequence[str | float]) -> tuple[list[str], list[float] | None]:
    """Tell weights from prefixes.

    Returns:
        The prefixes, and their weights; None: they have none.

    Raises:
        ValueError: Says what is expected.
    """
    numbers = [_number(item) for item in items]
    weights = [number for number in numbers if number is not None]
    if items and not weights:
        return [str(item).strip() for item in items], None
    if not items or len(items) % 2 or weights != numbers[0::2]:
        raise ValueError("weight and prefix in turn, or prefixes only")
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError("weights above 0")
    return [str(name).strip() for name in items[1::2]], weights


def parse_split(text: str) -> list[float]:
    """Return the shares of train, valid and test in a text such as "99, 1, 0".

    Raises:
        ValueError: Says what is expected.
    """
    shares = [_number(part) for part in text.split(",") if part.strip()]
    fractions = [share for share in shares if share is not None and 0 <= share < math.inf]
    if len(fractions) < len(shares) or not 1 <= len(fractions) <= 3 or not fractions[0] > 0:
        raise ValueError('shares such as "1, 0, 0", the first above 0')
    return fractions


def _number(item: str | float) -> float | None:
    try:
        return float(item)
    except ValueError:
        return None
