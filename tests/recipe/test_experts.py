"""Which expert-parallel degrees fit: the list and the shares say the same."""

import itertools
import math

import pytest

from telechat_moe.recipe.experts import expert_degrees, expert_shares


@pytest.mark.parametrize("degrees", [*itertools.product((1, 2, 3, 4, 6), repeat=3), (8,), (12,)])
def test_listed_degrees_are_those_with_shares(degrees: tuple[int, ...]) -> None:
    tried = range(1, 2 * math.prod(degrees) + 1)
    shares = {ep: expert_shares(ep, degrees) for ep in tried}
    assert expert_degrees(degrees) == [ep for ep in tried if shares[ep] is not None]
    for ep, found in shares.items():
        if found is not None:
            assert math.prod(found) == ep
            last = max((i for i, share in enumerate(found) if share > 1), default=0)
            assert found[:last] == list(degrees[:last])


def test_inner_degrees_are_used_up_first() -> None:
    assert expert_degrees((2, 3, 4)) == [1, 2, 6, 12, 24]
    assert expert_shares(12, (2, 3, 4)) == [2, 3, 2]
    assert expert_shares(4, (2, 3, 4)) is None
