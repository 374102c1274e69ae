"""The loader: order, ranks, resume, and a thread that never hangs or hides an error."""

import gc
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.data import GptDataset, Loader, open_blend
from telechat_moe.errors import BadInputError, UsageError

PATIENCE_S = 60.0  # only reached where something is broken


class Numbers:
    """A dataset whose n-th sample is the number n."""

    def __init__(self, count: int, fail_at: int | None = None) -> None:
        self.count, self.fail_at, self.made = count, fail_at, 0

    def __len__(self) -> int:
        return self.count

    def batch(self, indices) -> dict[str, np.ndarray]:
        self.made += 1
        if self.fail_at is not None and self.fail_at in np.asarray(indices):
            raise BadInputError(f"sample {self.fail_at} is broken")
        return {"n": np.array(indices)}

    def visible_pairs(self, indices) -> np.ndarray:
        return np.asarray(indices, np.int64) * 7 % 5

    def fingerprint(self) -> str:
        return f"numbers {self.count}"


@pytest.fixture
def threads() -> Callable[[], int]:
    """Count the loaders' threads that the test started."""
    before = set(threading.enumerate())
    return lambda: sum(
        thread.name.startswith("telechat-moe-data")
        for thread in set(threading.enumerate()) - before
    )


def served(loader: Loader) -> list[list[int]]:
    return [batch["n"].tolist() for batch in loader]


@given(count=st.integers(1, 60), batch=st.integers(1, 7), epochs=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_every_epoch_is_served_in_order(count: int, batch: int, epochs: int) -> None:
    if count < batch:
        return
    steps = served(Loader(Numbers(count), batch, 0, epochs=epochs))
    whole = count // batch * batch
    assert len(steps) == epochs * whole // batch
    for number, step in enumerate(steps):
        first = number * batch % whole
        assert step == list(range(first, first + batch))


@given(
    count=st.integers(8, 60),
    batch=st.integers(1, 7),
    start=st.integers(0, 130),
    prefetch=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_resume_at_any_sample(count: int, batch: int, start: int, prefetch: int) -> None:
    """From any sample on the steps are those that remain of its epoch, and then those of the next."""
    expected = []
    for epoch in range(2):
        place = max(start, epoch * count)
        while place + batch <= (epoch + 1) * count:
            expected.append([n % count for n in range(place, place + batch)])
            place += batch
    with Loader(Numbers(count), batch, prefetch, epochs=2) as loader:
        loader.seek(start)
        assert served(loader) == expected


batches = st.tuples(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 9))


@given(
    count=st.integers(9, 50),
    epochs=st.integers(1, 3),
    legs=st.lists(batches, min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_every_sample_once_whatever_the_batches(count, epochs, legs) -> None:
    """A loader goes on at the place of one with other batches, dealt or not: what is left out does not fill a step."""
    read, expected, place, state = list[int](), list[list[int]](), 0, None
    for rows, micro_batches, dealt, steps in [*legs, (2, 1, False, 1000)]:
        unit, deal_to = rows * micro_batches, (rows, micro_batches) if dealt else None
        loader = Loader(Numbers(count), rows, 1, epochs=epochs, deal_to=deal_to, unit=unit)
        with loader:
            if state is not None:
                loader.load_state(json.loads(json.dumps(state)))
            for _ in range(steps):
                left = count - place % count
                begin = place + left if left < unit else place
                taken = [
                    n
                    for _, batch in zip(range(micro_batches), loader, strict=False)
                    for n in batch["n"]
                ]
                if begin + unit > epochs * count:
                    assert taken == []
                    break
                place = begin + unit
                expected.append([n % count for n in range(begin, place)])
                assert (sorted(taken) if dealt else taken) == expected[-1]
                read += [begin - begin % count + n for n in taken]
            state = loader.state()
            assert state["next_sample"] == place
    assert len(set(read)) == len(read)
    assert epochs * count - len(read) < epochs * 9


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_state_counts_what_was_taken(prefetch: int) -> None:
    whole = served(Loader(Numbers(40), 4, prefetch=prefetch))
    for taken in range(len(whole) + 1):
        with Loader(Numbers(40), 4, prefetch=prefetch) as loader:
            head = [next(loader)["n"].tolist() for _ in range(taken)]
            time.sleep(0.002)  # let the thread run ahead
            state = json.loads(json.dumps(loader.state()))
        assert state["next_sample"] == 4 * taken
        with Loader(Numbers(40), 4, prefetch=prefetch) as other:
            other.load_state(state)
            assert head + served(other) == whole


def test_state_with_another_batch_size() -> None:
    loader = Loader(Numbers(40), 4)
    next(loader)
    state = loader.state()
    loader.close()
    other = Loader(Numbers(40), 6)
    other.load_state(state)
    assert list(itertools.chain.from_iterable(served(other))) == list(range(4, 40))


@pytest.mark.parametrize(("before", "place"), [(36, 36), (39, 39), (42, 44), (78, 80)])
def test_state_of_a_version_whose_epochs_were_whole_steps(before: int, place: int) -> None:
    """In steps of three, 39 of 41 samples were an epoch; its last two are still to be read at its end."""
    state = Loader(Numbers(41), 3).state() | {"next_sample": before, "samples_per_epoch": 39}
    del state["earlier_samples"]
    loader = Loader(Numbers(41), 1, epochs=3)
    loader.load_state(state)
    assert loader.next_sample == place
    rest = list(itertools.chain.from_iterable(served(loader)))
    assert rest == [n % 41 for n in range(place, 123)]


def test_state_of_other_data_is_refused(prefixes: dict[str, str]) -> None:
    first = Loader(GptDataset(prefixes["long"], 16, 40, seed=1), 2)
    second = Loader(GptDataset(prefixes["long"], 16, 40, seed=2), 2)
    with pytest.raises(BadInputError, match="made with other training data"):
        second.load_state(first.state())
    for wrong in ({}, {"version": 2, "next_sample": 0, "dataset": "x"}):
        with pytest.raises(BadInputError, match="cannot be read"):
            first.load_state(wrong)


def test_batches_equal_single_samples(prefixes: dict[str, str]) -> None:
    dataset = open_blend(
        ["2", prefixes["long"], "1", prefixes["short"]], seq_length=16, size=60, seed=1
    )
    number = 0
    for batch in Loader(dataset, 5):
        for row in range(5):
            for name, values in dataset[number].items():
                np.testing.assert_array_equal(batch[name][row], values)
            number += 1
    assert number == len(dataset) // 5 * 5


def test_error_in_the_thread_reaches_the_consumer(threads: Callable[[], int]) -> None:
    loader = Loader(Numbers(40, fail_at=9), 4)
    assert next(loader)["n"].tolist() == [0, 1, 2, 3]
    assert next(loader)["n"].tolist() == [4, 5, 6, 7]
    with pytest.raises(BadInputError, match="sample 9 is broken"):
        next(loader)
    assert threads() == 0
    # The position has not moved: the same error again, not a skipped batch.
    with pytest.raises(BadInputError, match="sample 9 is broken"):
        next(loader)


def test_threads_end(threads: Callable[[], int]) -> None:
    loader = Loader(Numbers(4000), 4)
    next(loader)
    assert threads() == 1
    loader.close()
    assert threads() == 0
    assert next(loader)["n"].tolist() == [4, 5, 6, 7]  # usable on
    del loader
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == 0
    exhausted = Loader(Numbers(12), 4)
    assert len(served(exhausted)) == 3
    assert threads() == 0
    with pytest.raises(StopIteration):
        next(exhausted)


def test_prefetch_hides_the_work() -> None:
    """While the consumer works, the thread prepares the next batches, and no more than was asked for."""
    numbers = Numbers(400)
    with Loader(numbers, 4, prefetch=2) as loader:
        for taken in range(1, 6):
            next(loader)
            deadline = time.monotonic() + PATIENCE_S
            while numbers.made < taken + 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            assert taken + 2 <= numbers.made <= taken + 3  # one is in hand while the queue is full


def test_process_exits_with_a_running_thread(prefixes: dict[str, str]) -> None:
    code = (
        "import sys; from telechat_moe.data import GptDataset, Loader\n"
        "loader = Loader(GptDataset(sys.argv[1], 16, 4000), 2)\n"
        "next(loader); print('taken')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, prefixes["long"]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "taken\n", "")


def test_bad_sizes() -> None:
    with pytest.raises(BadInputError, match=r"7 samples do not fill one batch of 8"):
        Loader(Numbers(7), 8)
    for wrong in ({"batch_size": 0}, {"prefetch": -1}):
        with pytest.raises(UsageError):
            Loader(Numbers(40), **({"batch_size": 4} | wrong))
    with pytest.raises(UsageError):
        Loader(Numbers(40), 4).seek(-1)
    endless = Loader(Numbers(8), 4, epochs=None, epoch_samples=4, prefetch=0)
    assert [next(endless)["n"].tolist() for _ in range(3)] == [[0, 1, 2, 3]] * 3
