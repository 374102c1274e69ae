"""Shards of random layouts are merged as an oracle says that asks each element; corrupted ones are refused."""

from collections import Counter

import numpy as np
import pytest
from logical_cases import Case, InvalidError, corrupt, expected, random_case

from telechat_moe.tools.align.dump.logical import Shard, logical
from telechat_moe.tools.align.dump.ranges import LayoutError


def merged(case: Case, limit: int = 1 << 20):
    shards = [Shard(rank, values, call) for (rank, call), values in case.shards.items()]
    found = logical(shards, case.layout, case.shape if case.give_shape else None)
    blocks = list(found.blocks(limit))
    whole = {}
    for box, block in blocks:
        for at in np.ndindex(*block.shape):
            index = tuple(s.start + i for s, i in zip(box, at, strict=True))
            assert index not in whole
            whole[index] = block[at]
    return whole, found


def same(whole, wanted, partial):
    assert set(whole) == set(wanted)
    for index, value in wanted.items():
        if partial:
            assert whole[index] == value, index
        else:
            assert whole[index].tobytes() == value.tobytes(), index


def round_trips(first: int, count: int) -> None:
    for seed in range(first, first + count):
        rng = np.random.default_rng(seed)
        case = random_case(rng)
        whole, found = merged(case, int(rng.choice([8, 64, 1 << 20])))
        assert found.shape == case.shape
        same(whole, expected(case), bool(case.layout.partial))


def test_random_layouts_merge_byte_exact() -> None:
    round_trips(0, 1000)


@pytest.mark.slow
def test_many_random_layouts_merge_byte_exact() -> None:
    """10,000 together with the test above."""
    round_trips(1000, 9000)


def judged(case: Case):
    """Return the merged tensor by the oracle, or None and why it finds the case invalid."""
    try:
        return expected(case), ""
    except InvalidError as invalid:
        return None, str(invalid)


def corruptions(first: int, wanted: int) -> tuple[Counter[str], Counter[str]]:
    """Corrupt cases until so many were refused; count kinds of refused and of undetectable corruptions.

    Undetectable by construction: the oracle finds the corrupted layout valid, and shards that agree with it.
    The merge must then be what that layout says.
    """
    refused: Counter[str] = Counter()
    undetectable: Counter[str] = Counter()
    seed = first
    while refused.total() < wanted:
        rng = np.random.default_rng([7, seed])
        seed += 1
        made = corrupt(rng, random_case(rng))
        if made is None:
            continue
        kind, case = made
        wanted_whole, why = judged(case)
        if wanted_whole is None:
            with pytest.raises(LayoutError) as error:
                merged(case)
            assert len(str(error.value).split()) >= 4, (kind, why)
            refused[kind] += 1
        else:
            whole, _ = merged(case)
            same(whole, wanted_whole, bool(case.layout.partial))
            undetectable[kind] += 1
    return refused, undetectable


def test_corrupted_layouts_and_pieces_are_refused() -> None:
    refused, undetectable = corruptions(0, 200)
    assert len(refused) >= 25
    assert undetectable.total() < refused.total()


@pytest.mark.slow
def test_many_corrupted_layouts_are_refused() -> None:
    """1,000 together with the test above."""
    refused, undetectable = corruptions(10_000, 800)
    assert undetectable.total() < refused.total()
    assert len(refused) >= 30
