"""Batches that one process reads and others map: those of a loader of one's own, whatever is sought, and no hang."""

import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from telechat_moe.data import Loader, shared
from telechat_moe.data.loader import Batches
from telechat_moe.data.shared import FollowingLoader, Publisher, SharedLoader, Subscriber
from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.processes import RankDiedError

PATIENCE_S = 60.0  # only reached where something is broken
shared._POLL_S = 0.01
Operations = list[tuple[str, int]]


class Rows:
    """A dataset whose sample n is a row of n, and which may be slow or broken at a sample."""

    def __init__(self, count: int, width: int = 3, fail_at: int | None = None) -> None:
        self.count, self.width, self.fail_at = count, width, fail_at

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self.fail_at is not None and self.fail_at in np.asarray(indices):
            raise BadInputError(f"sample {self.fail_at} is broken")
        rows = np.repeat(np.asarray(indices, np.int32)[:, None], self.width, 1)
        return {"n": rows, "mask": (rows % 3 == 0).astype(np.uint8)}

    def visible_pairs(self, indices: np.ndarray) -> np.ndarray:
        return np.asarray(indices) % 7 * 11 % 13

    def fingerprint(self) -> str:
        return f"rows {self.count}"


def run(loader: Batches, operations: Operations, pause: Callable[[], float]) -> list[Any]:
    """Take batches and change the position; return what was seen."""
    seen = list[Any]()
    for name, number in operations:
        time.sleep(pause() if name != "wait" else number / 1000)
        if name == "seek":
            loader.seek(number * loader.step_samples)
            continue
        for _ in range((name == "take") * number * loader.step_samples // loader.batch_size):
            batch = {key: (array.dtype.str, array.tolist()) for key, array in next(loader).items()}
            order = None if loader.order is None else loader.order.tolist()
            seen.append((batch, order, loader.next_sample))
        seen.append(loader.state())
    return seen


def together(
    dataset: Any, followers: int, work: Callable[[Batches], Any], prefetch: int = 2, **given: Any
) -> list[Any]:
    """Work on the batches of a reader and of its followers, each in a thread; return what each found or raised."""
    name = secrets.token_hex(4)
    publisher = Publisher(name, followers)

    def one(number: int) -> Any:
        try:
            if number:
                with FollowingLoader(Subscriber(name), 4, **given) as loader:
                    return work(loader)
            with SharedLoader(publisher, dataset, 4, prefetch=prefetch, **given) as loader:
                return work(loader)
        except TelechatMoeError as error:
            return error

    with ThreadPoolExecutor(followers + 1) as threads:
        found = [threads.submit(one, number) for number in range(followers + 1)]
        return [future.result(PATIENCE_S) for future in found]


operation = st.tuples(st.just("take"), st.integers(0, 6)) | st.tuples(
    st.just("seek"), st.integers(0, 9)
)


AHEAD: Operations = [("take", 3), ("wait", 50), ("seek", 9), ("take", 3)]


@example(AHEAD, 2, None, 0)
@example(AHEAD, 2, (2, 3), 0)
@given(
    operations=st.lists(operation, min_size=1, max_size=6),
    followers=st.integers(1, 3),
    deal_to=st.none() | st.just((2, 3)),
    seed=st.integers(0, 999),
)
@settings(max_examples=25, deadline=None)
def test_all_see_what_a_loader_of_their_own_gives(
    operations: Operations, followers: int, deal_to: tuple[int, int] | None, seed: int
) -> None:
    """Whoever is late, and wherever all of them go on."""
    given = {"epochs": None, "deal_to": deal_to}
    with Loader(Rows(50), 4, **given) as loader:
        expected = run(loader, operations, lambda: 0.0)
    generator = np.random.default_rng(seed)

    def work(loader: Batches) -> list[Any]:
        return run(loader, operations, lambda: float(generator.choice([0, 0, 0.002])))

    assert together(Rows(50), followers, work, **given) == [expected] * (followers + 1)


def test_the_end_of_the_data() -> None:
    def work(loader: Batches) -> list[list[int]]:
        return [batch["n"][:, 0].tolist() for batch in loader]

    found = together(Rows(50), 2, work, epochs=2)
    assert found == [work(Loader(Rows(50), 4, epochs=2))] * 3


def test_arrays_are_shared_and_not_to_be_written() -> None:
    def work(loader: Batches) -> bool:
        return next(loader)["n"].flags.writeable

    assert together(Rows(50), 1, work) == [True, False]


def test_how_samples_were_dealt_outlives_the_batch() -> None:
    def work(loader: Batches) -> bool:
        for _ in range(3):
            next(loader)
        order = loader.order
        assert order is not None
        before = order.tolist()
        for _ in range(9):
            next(loader)
        return order.tolist() == before

    assert together(Rows(500), 1, work, deal_to=(2, 3)) == [True, True]


def test_a_broken_sample_ends_all_of_them() -> None:
    """The reader says what is broken, also while nobody takes what it has prepared beyond; the others end when it does."""
    ended = threading.Event()

    def work(loader: Batches) -> None:
        follows = isinstance(loader, FollowingLoader)
        try:
            for count, _ in enumerate(loader):
                if follows and count == 3:  # as in a step that waits for the reader's share of it
                    assert ended.wait(PATIENCE_S)
        except BadInputError:
            ended.set()
            raise

    reader, *others = together(Rows(500, fail_at=17), 2, work, prefetch=12)
    assert isinstance(reader, BadInputError)
    assert "sample 17 is broken" in str(reader)
    for other in others:
        assert isinstance(other, RankDiedError)
        assert other.is_echo


def test_a_follower_that_ends_does_not_hold_up_the_others() -> None:
    first = threading.Lock()

    def work(loader: Batches) -> int:
        few = isinstance(loader, FollowingLoader) and first.acquire(blocking=False)
        taken = sum(1 for _, _ in zip(range(2 if few else 40), loader, strict=False))
        time.sleep(0.2 * few)  # the reader waits for its place by then
        return taken

    assert sorted(together(Rows(500), 2, work)) == [2, 40, 40]


def test_a_follower_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "PATIENCE_S", 0.1)
    name = secrets.token_hex(4)
    with closing(Publisher(name, 2)) as publisher, closing(Subscriber(name)):
        with pytest.raises(RankDiedError, match=r"1 of the 2 processes .* came in 0 s"):
            SharedLoader(publisher, Rows(50), 4)
        with pytest.raises(TelechatMoeError, match=f"shared as {name}: Address already in use"):
            Publisher(name, 2)


def test_a_reader_that_is_not_there() -> None:
    with pytest.raises(RankDiedError, match="the process that reads the training data"):
        Subscriber(secrets.token_hex(4))


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let files, and memory without a name, hold 64 KiB only."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_memory(small_files: None) -> None:
    reader, other = together(Rows(50, width=1 << 12), 1, next)
    assert type(reader) is TelechatMoeError
    assert "no memory for 3 batches of 80.00 KiB that the processes of a host share: File too large" in str(reader)  # fmt: skip
    assert isinstance(other, RankDiedError)
