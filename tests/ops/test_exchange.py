"""Rows to their experts and back between devices, against their definition in NumPy, for every number of devices."""

import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.graph.links import ways
from telechat_moe.ops import native
from telechat_moe.ops.native import Kernel, NativeError
from telechat_moe.ops.permute import permute_reference

WIDTH, MOST = 3, 8


def peer(member: int, other: int) -> int:
    """Return the number by which a member knows another; all are in this process."""
    return 2000 + member * MOST + other


@pytest.fixture(scope="module", autouse=True)
def _ends() -> None:
    for a in range(MOST):
        for b in range(a):
            first, second = socket.socketpair()
            native.load().telechat_link(peer(a, b), first.detach())
            native.load().telechat_link(peer(b, a), second.detach())


def attributes(member: int, members: int) -> dict[str, int | list[int]]:
    return {
        "ranks": [peer(member, r) for r in range(members)],
        "member": member,
        "tag": -5,
        "times": members,
    }


def dispatch(member: int, members: int, x: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    rows = np.full((len(x) * members, WIDTH), np.nan, x.dtype)
    out = [rows, np.full(len(sizes) // members, -1, np.int32), np.full(len(sizes), -1, np.int32)]
    Kernel("MoeDispatch", attributes(member, members))([x, sizes], out)
    return out


def combine(member: int, members: int, y: np.ndarray, *sizes: np.ndarray) -> np.ndarray:
    out = np.full((len(y) // members, WIDTH), np.nan, y.dtype)
    Kernel("MoeCombine", attributes(member, members))([y, *sizes], [out])
    return out


@given(
    st.integers(1, MOST),
    st.integers(1, 3),
    st.integers(0, 9),
    st.sampled_from([np.float32, np.float16]),
    st.sampled_from(["any", "one", "own"]),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_rows_reach_their_experts_and_come_back(members, each, tokens, dtype, routing, random):
    experts = members * each
    choose = {"any": experts, "one": 1, "own": each}[
        routing
    ]  # the last: few experts, on one device
    index = [
        np.array([random.randrange(choose) for _ in range(tokens)], np.int32).reshape(-1, 1)
        for _ in range(members)
    ]
    rows = [
        (np.arange(tokens * WIDTH).reshape(-1, WIDTH) + 100 * r + 1).astype(dtype)
        for r in range(members)
    ]
    sent = [permute_reference(x, i)[0] for x, i in zip(rows, index, strict=True)]
    sizes = [np.bincount(i.reshape(-1), minlength=experts).astype(np.int32) for i in index]
    every = range(members)
    with ThreadPoolExecutor(members) as pool:
        got = list(pool.map(lambda r: dispatch(r, members, sent[r], sizes[r]), every))
        back = list(pool.map(lambda r: combine(r, members, got[r][0], sizes[r], got[r][2]), every))
    for r in every:
        own = range(r * each, (r + 1) * each)
        wanted = [x[i[:, 0] == e] for e in own for x, i in zip(rows, index, strict=True)]
        wanted = np.concatenate(wanted)
        np.testing.assert_array_equal(got[r][0][: len(wanted)], wanted)
        assert not got[r][0][len(wanted) :].any()
        counts = np.array([s[list(own)] for s in sizes])
        np.testing.assert_array_equal(got[r][2].reshape(counts.shape), counts)
        np.testing.assert_array_equal(got[r][1][:-1], counts.sum(0)[:-1])
        assert got[r][1].sum() == len(got[r][0])
        np.testing.assert_array_equal(back[r], sent[r])


def test_sizes_that_do_not_fit_are_refused() -> None:
    x = np.zeros((4, WIDTH), np.float32)
    with pytest.raises(NativeError, match="2 experts on 2 devices have 5 of 4 rows"):
        dispatch(0, 2, x, np.array([2, 3], np.int32))
    with pytest.raises(NativeError, match="expert 1 has -1 rows"):
        dispatch(0, 2, x, np.array([5, -1], np.int32))
    with pytest.raises(NativeError, match="sizes of 5 rows, and 8 rows"):
        combine(0, 2, np.zeros((8, WIDTH), np.float32), *[np.array([4, 1], np.int32)] * 2)
    with pytest.raises(NativeError, match="3 rows arrived, with room for 0"):
        Kernel("MoeDispatch", {**attributes(0, 1), "times": 0})(
            [x, np.array([3], np.int32)], [x[:0], np.zeros(1, np.int32), np.zeros(1, np.int32)]
        )


def test_rows_behind_those_of_the_experts_go_nowhere() -> None:
    """With room for as many rows as a device has, of which the first belong to experts."""
    rows = [
        (np.arange(4 * WIDTH).reshape(4, WIDTH) + 100 * r + 1).astype(np.float32) for r in (0, 1)
    ]
    sizes = [np.array([1, 1], np.int32), np.array([0, 2], np.int32)]
    attribute = [{**attributes(r, 2), "times": 1} for r in (0, 1)]
    got = [
        [np.full((4, WIDTH), np.nan, np.float32), np.zeros(1, np.int32), np.zeros(2, np.int32)]
        for _ in (0, 1)
    ]
    back = [np.full((4, WIDTH), np.nan, np.float32) for _ in (0, 1)]

    def there_and_back(r: int) -> None:
        Kernel("MoeDispatch", attribute[r])([rows[r], sizes[r]], got[r])
        Kernel("MoeCombine", attribute[r])([got[r][0], sizes[r], got[r][2]], [back[r]])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(there_and_back, (0, 1)))
    np.testing.assert_array_equal(got[0][0], [rows[0][0], *[[0] * WIDTH] * 3])
    np.testing.assert_array_equal(got[1][0], [rows[0][1], rows[1][0], rows[1][1], [0] * WIDTH])
    for r in (0, 1):
        assert got[r][1] == [4]
        np.testing.assert_array_equal(back[r][:2], rows[r][:2])
        assert not back[r][2:].any()


def halves(name: str, member: int, tag: int) -> tuple[Kernel, Kernel]:
    """Return the kernels that start and end an exchange of two devices."""
    given = {**attributes(member, 2), "tag": tag}
    return Kernel(f"{name}Start", given), Kernel(f"{name}Wait", given)


def test_devices_that_disagree_about_the_width_are_told_so() -> None:
    """Rank 1 has wider rows: what it sends cannot be the rows that it announces."""
    sizes, token = np.array([1, 1], np.int32), np.ones(1, np.float32)
    rows = [np.zeros((2, width), np.float32) for width in (WIDTH, 8)]
    both = [halves("MoeDispatch", r, -10) for r in (0, 1)]
    for r, (start, _) in enumerate(both):
        start([rows[r], sizes], [token])
    for r, (_, wait) in enumerate(both):
        out = [np.zeros((4, rows[r].shape[1]), np.float32), np.zeros(1, np.int32)]
        with pytest.raises(NativeError, match=f"sent {(36, 16)[r]} bytes for 1 of 2 rows"):
            wait([rows[r], sizes, token], [*out, np.zeros(2, np.int32)])


def test_exchanges_under_way_together_end_in_any_order() -> None:
    """Both devices start two exchanges, neither waiting for the other, and end them the other way round."""
    rows = [
        (np.arange(6 * WIDTH).reshape(6, WIDTH) + 100 * r + 1).astype(np.float32) for r in (0, 1)
    ]
    sizes = [np.array([2, 4], np.int32), np.array([5, 1], np.int32)]
    token = np.ones(1, np.float32)
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(dispatch, r, 2, rows[r], sizes[r]) for r in (0, 1)]
        wanted = [task.result() for task in tasks]
    started = {}
    for r in (0, 1):  # one after the other: a start waits for nothing
        for tag, sign in ((-7, 1), (-8, -1)):
            start, started[r, tag] = halves("MoeDispatch", r, tag)
            start([sign * rows[r], sizes[r]], [token])
            assert token == 0
            assert start.shapes([rows[r], sizes[r]]) == [(1,)]
    for tag, sign in ((-8, -1), (-7, 1)):
        for r in (1, 0):
            out = [np.full_like(x, 77) for x in wanted[r]]
            started[r, tag]([rows[r], sizes[r], token], out)
            np.testing.assert_array_equal(out[0], sign * wanted[r][0])
            np.testing.assert_array_equal(out[1], wanted[r][1])
            np.testing.assert_array_equal(out[2], wanted[r][2])
            shapes = started[r, tag].shapes([rows[r], sizes[r], token], 3)
            assert shapes == [x.shape for x in out]
    ends = [halves("MoeCombine", r, -9) for r in (0, 1)]
    for r in (0, 1):
        ends[r][0]([wanted[r][0], sizes[r], wanted[r][2]], [token])
    for r in (0, 1):
        back = np.full_like(rows[r], 77)
        given = [wanted[r][0], sizes[r], wanted[r][2], token]
        ends[r][1](given, [back])
        np.testing.assert_array_equal(back, rows[r])
        assert ends[r][1].shapes(given) == [back.shape]


def test_what_was_not_started_is_not_waited_for() -> None:
    rows, sizes, token = np.ones((2, WIDTH), np.float32), np.array([1, 1], np.int32), np.ones(1)
    start, _ = halves("MoeDispatch", 1, -11)
    _, wait = halves("MoeDispatch", 0, -11)
    start([rows, sizes], [token.astype(np.float32)])
    out = [np.zeros((4, WIDTH), np.float32), np.zeros(1, np.int32), np.zeros(2, np.int32)]
    with pytest.raises(NativeError, match="exchange -11 is waited for and was not started"):
        wait([rows, sizes, token.astype(np.float32)], out)


def test_a_slowed_link_delays_exchanges_and_says_when_they_were_there() -> None:
    """Two parts of 28 bytes on a link of 0.02 s and 0.001 s a byte: the second is behind the first."""
    library, times = native.load(), np.zeros(64)
    ways([peer(0, 1)])
    library.telechat_link_trial(0.02, 0.001, 1)
    rows, sizes = np.ones((2, WIDTH), np.float32), np.array([2, 0], np.int32)
    token, part = np.ones(1, np.float32), 4 + 2 * WIDTH * 4
    try:
        for tag, r in product((-12, -13), (0, 1)):
            halves("MoeDispatch", r, tag)[0]([rows, sizes], [token])
        for tag in (-12, -13):
            _, wait = halves("MoeDispatch", 0, tag)  # it started first
            out = [np.zeros((4, WIDTH), np.float32), np.zeros(1, np.int32), np.zeros(2, np.int32)]
            wait([rows, sizes, token], out)
        count = library.telechat_link_times(times.ctypes.data, len(times))
    finally:
        library.telechat_link_trial(0.0, 0.0, 0)
    ((pipeline, exchange),) = ways([peer(0, 1)])
    assert pipeline == 0.0
    assert exchange >= 2 * (0.02 + 0.001 * part)
    found = times[:count].reshape(-1, 6)
    assert found[:, 0].tolist() == [-12, -13]
    assert found[:, 1].tolist() == [part, part]
    started, arrived, waited, ended = found.T[2:]
    assert (arrived - started >= 0.02 + 0.001 * part).all()
    assert arrived[1] - started[0] >= 0.02 + 0.001 * 2 * part  # one after the other
    assert (started <= waited).all()
    assert (arrived <= ended).all()
