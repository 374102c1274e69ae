"""Blends against Megatron's algorithm, and schedules of weights against that algorithm run segment by segment."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_data import make_documents

from telechat_moe.data import GptDataset, Loader, open_mixture, pack, write_indexed
from telechat_moe.data.mixture import MixedDataset, MixtureSchedule, Passes
from telechat_moe.errors import BadInputError

SIZE = 16


def megatron(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    """Return dataset and sample of each sample of a blend, as ``build_blending_indices`` of Megatron-LM finds them."""
    shares = np.array(weights, np.float64) / np.sum(weights, dtype=np.float64)
    current, chosen, within = np.zeros(len(weights), np.int64), [], []
    for sample in range(size):
        error = shares * max(float(sample), 1.0) - current
        chosen.append(int(np.argmax(error)))  # the first of several largest
        within.append(int(current[chosen[-1]]))
        current[chosen[-1]] += 1
    return chosen, within


def blend(weights: list[float], size: int, part: int = 1 << 20) -> tuple[np.ndarray, np.ndarray]:
    """Return what ``blend_indices`` yields, put together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_PART", part)
        chosen, within = zip(*pack.blend_indices(weights, size), strict=True)
    assert all(len(one) <= part for one in chosen)
    return np.concatenate(chosen), np.concatenate(within)


VECTORS = {
    (0.5, 0.3, 0.2): [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1],
    (0.7, 0.3): [0, 1, 0, 0, 1, 0, 0, 1, 0, 0],
}


@pytest.mark.parametrize("weights", VECTORS)
def test_known_blends(weights: tuple[float, ...]) -> None:
    expected = VECTORS[weights]
    chosen, within = blend(list(weights), len(expected))
    assert chosen.tolist() == megatron(list(weights), len(expected))[0] == expected
    for which in range(len(weights)):
        assert within[chosen == which].tolist() == list(range(expected.count(which)))


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    size=st.integers(1, 300),
    part=st.sampled_from([7, 100, 1 << 20]),
)
@settings(max_examples=60, deadline=None)
def test_any_blend_is_megatrons(weights: list[float], size: int, part: int) -> None:
    shares = (np.array(weights) / np.sum(weights)).tolist()
    chosen, within = blend(shares, size, part)
    assert (chosen.tolist(), within.tolist()) == megatron(shares, size)


def test_blends_of_megatrons_own_code() -> None:
    """The compiled function of an installed Megatron-LM, without the package around it, which needs torch."""
    spec = importlib.util.find_spec("megatron")
    places = spec.submodule_search_locations if spec else None
    files = [f for p in places or () for f in Path(p).glob("core/datasets/helpers_cpp*.so")]
    if not files:
        pytest.skip("Megatron-LM is not installed")
    spec = importlib.util.spec_from_file_location("helpers_cpp", files[0])
    assert spec is not None
    assert spec.loader is not None
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)
    generator = np.random.default_rng(0)
    for count in (1, 2, 3, 7, 40):
        weights = generator.exponential(size=count)
        shares = (weights / weights.sum()).tolist()
        theirs, numbers = np.zeros(2000, np.int16), np.zeros(2000, np.int64)
        helpers.build_blending_indices(theirs, numbers, np.array(shares), count, 2000, False)
        chosen, within = blend(shares, 2000)
        np.testing.assert_array_equal(chosen, theirs)
        np.testing.assert_array_equal(within, numbers)


# -------------------------------------------------------------------------------------- schedules


class Numbers:
    """A source whose n-th sample is the number n of the source."""

    source = None

    def __init__(self, name: int) -> None:
        self.name, self.seq_length = name, SIZE

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"n": np.stack((np.full(len(indices), self.name), indices), axis=1)}

    def fingerprint(self) -> str:
        return f"numbers {self.name}"


weights_of = st.lists(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]), min_size=3, max_size=3).filter(
    sum
)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[MixtureSchedule, int]:
    starts = draw(st.lists(st.integers(1, 80), max_size=4, unique=True).map(sorted))
    size = draw(st.integers((starts or [0])[-1] + 1, 120))
    return [(start, draw(weights_of)) for start in [0, *starts]], size


def mixed(schedule: MixtureSchedule, size: int, sources: int = 3) -> MixedDataset:
    return MixedDataset([Numbers(i) for i in range(sources)], schedule, size)  # type: ignore[misc]


def served(dataset: MixedDataset) -> list[tuple[int, int]]:
    """Return source and number of each sample."""
    return [tuple(row) for row in dataset.batch(np.arange(len(dataset)))["n"].tolist()]


def by_hand(schedule: MixtureSchedule, size: int) -> list[tuple[int, int]]:
    """Blend each segment by itself, among the sources that it has; every source goes on counting."""
    ends = [start for start, _ in schedule[1:]] + [size]
    taken, rows = [0, 0, 0], []
    for (start, weights), end in zip(schedule, ends, strict=True):
        live = [i for i, weight in enumerate(weights) if weight]
        for which in megatron([weights[i] for i in live], end - start)[0]:
            rows.append((live[which], taken[live[which]]))
            taken[live[which]] += 1
    return rows


@given(drawn=schedules())
@settings(max_examples=150, deadline=None)
def test_every_segment_is_exact_and_no_sample_is_lost(drawn: tuple[MixtureSchedule, int]) -> None:
    schedule, size = drawn
    dataset = mixed(schedule, size)
    rows = served(dataset)
    assert rows == by_hand(schedule, size)
    for source in range(3):
        numbers = [n for which, n in rows if which == source]
        assert numbers == list(range(len(numbers)))
    for start, end, weights in dataset.segments():
        counts = dataset.counts(np.arange(start, end))
        assert sum(counts) == end - start
        assert all(
            bool(count) <= bool(weight) for count, weight in zip(counts, weights, strict=True)
        )
        # Who lags most is served next, so none is ever further off than there are others.
        assert all(abs(c - w * (end - start)) < 3 for c, w in zip(counts, weights, strict=True))


@given(drawn=schedules(), batch=st.integers(1, 5), at=st.integers(0, 120))
@settings(max_examples=60, deadline=None)
def test_resume_anywhere(drawn: tuple[MixtureSchedule, int], batch: int, at: int) -> None:
    """From any step on the stream is the uninterrupted one, whatever the batch size was before."""
    schedule, size = drawn
    at = min(at, size - 1)
    whole = [row for row, _ in zip(served(mixed(schedule, size)), range(size), strict=True)]
    with Loader(mixed(schedule, size), 1) as first:
        for _ in range(at):
            next(first)
        state = json.loads(json.dumps(first.state()))
    if size < batch:
        return
    with Loader(mixed(schedule, size), batch, 1, epochs=1) as loader:
        loader.load_state(state)
        rest = [tuple(row) for step in loader for row in step["n"].tolist()]
    assert rest == whole[at : at + len(rest)]


@given(
    drawn=schedules(),
    other=schedules(),
    at=st.integers(0, 120),
    longer=st.integers(0, 40),
)
@settings(max_examples=120, deadline=None)
def test_the_future_may_change_and_the_past_may_not(
    drawn: tuple[MixtureSchedule, int], other: tuple[MixtureSchedule, int], at: int, longer: int
) -> None:
    schedule, size = drawn
    at = min(at, size)
    loader = Loader(mixed(schedule, size), 1)
    loader.seek(at)
    state = json.loads(json.dumps(loader.state()))
    before = [segment for segment in schedule if segment[0] < at]
    later = [(start + at, weights) for start, weights in other[0]]
    # Sources that come later are added at the end.
    changed = [(start, [*weights, 0.0]) for start, weights in before]
    changed += [(start, [*weights, 1.0]) for start, weights in later]
    total = max(at, later[-1][0]) + 1 + longer
    follow = mixed(changed, total, sources=4)
    assert served(follow)[:at] == served(mixed(schedule, size))[:at]
    assert Loader(follow, 1).load_state(state) is False

    for wrong in _other_pasts(before, at):
        with pytest.raises(BadInputError, match=f"saw {at} samples of another mixture"):
            Loader(mixed(wrong, at + 1), 1).load_state(state)
        assert Loader(mixed(wrong, at + 1), 1).load_state(state, other_data=True) is True


def _other_pasts(before: MixtureSchedule, at: int) -> list[MixtureSchedule]:
    """Return schedules that served other samples before one, or would not know whether they did."""
    if not before:
        return []
    start, weights = before[-1]
    more = [w + (0.7 if i == 0 else 0.0) for i, w in enumerate(weights)]
    wrong: list[MixtureSchedule] = [[*before[:-1], (start, [more[0] + 9, more[1] + 1, more[2]])]]
    if at - start > 1:
        wrong.append([*before, (at - 1, weights)])
    if len(before) > 1:
        wrong.append(before[:-1])
    return wrong


def test_a_source_without_weight_is_never_taken() -> None:
    """With weights 0 and 1 Megatron's rule alone would take one: all are level, and the first wins."""
    assert megatron([0.0, 1.0], 3)[0] == [1, 0, 1]
    assert [source for source, _ in served(mixed([(0, [0, 1, 0])], 20))] == [1] * 20


@pytest.mark.parametrize(
    ("schedule", "size"),
    [
        ([], 4),
        ([(1, [1, 1, 1])], 4),
        ([(0, [1, 1])], 4),
        ([(0, [1, 1, 1])] * 2, 4),
        ([(0, [1, 1, 1]), (4, [1, 1, 1])], 4),
    ],
)
def test_a_schedule_that_cannot_be_served(schedule: MixtureSchedule, size: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        mixed(schedule, size)


# ------------------------------------------------------------------------------------------ files


def test_passes_of_a_source(prefixes: dict[str, str]) -> None:
    """Every pass has each sample once; the first is Megatron's epoch, and none depends on how many there are."""
    source = Passes(prefixes["short"], SIZE, 7)
    count = source.samples_per_pass
    epoch = GptDataset(prefixes["short"], SIZE, None, 7)
    numbers = np.arange(3 * count)
    ids = source.batch(numbers)["input_ids"]
    np.testing.assert_array_equal(ids[:count], epoch.batch(np.arange(count))["input_ids"])
    np.testing.assert_array_equal(
        ids[count : 2 * count],
        GptDataset(prefixes["short"], SIZE, None, 8).batch(np.arange(count))["input_ids"],
    )
    assert not np.array_equal(ids[:count], ids[count : 2 * count])
    backwards = source.batch(numbers[::-1])["input_ids"]
    np.testing.assert_array_equal(backwards[::-1], ids)
    pairs = source.visible_pairs(numbers)
    assert pairs.tolist() == [*epoch.visible_pairs(np.arange(count)), *pairs[count:]]


def test_sources_of_files(prefixes: dict[str, str], tmp_path: Path) -> None:
    """Samples are those of the sources; a source that is other data is another past."""
    names = [prefixes["short"], prefixes["long"]]
    schedule = [(0, [1, 0]), (10, [1, 3])]
    dataset = open_mixture(names, schedule, seq_length=SIZE, size=90, seed=5)
    sources = [Passes(name, SIZE, 5) for name in names]
    for index in range(len(dataset)):
        which, number = int(dataset.chosen[index]), int(dataset.within[index])
        expected = sources[which].batch(np.array([number]))
        for column, value in dataset[index].items():
            np.testing.assert_array_equal(value, expected[column][0])
    assert dataset.counts(np.arange(10)) == [10, 0]
    state = Loader(dataset, 2).state() | {"next_sample": 20, "mixture": dataset.past(20)}
    write_indexed(tmp_path / "other", make_documents(9, 40, 50), np.uint16)
    other = open_mixture(
        [names[0], str(tmp_path / "other")], schedule, seq_length=SIZE, size=90, seed=5
    )
    with pytest.raises(BadInputError, match="another mixture"):
        Loader(other, 2).load_state(state)
    early = state | {"next_sample": 10, "mixture": dataset.past(10)}
    assert Loader(other, 2).load_state(early) is False  # not read so far
    for changed in ({"seed": 6}, {"seq_length": 8}):
        given = {"seq_length": SIZE, "size": 90, "seed": 5} | changed
        with pytest.raises(BadInputError, match=r"another mixture|other training data"):
            Loader(open_mixture(names, schedule, **given), 2).load_state(early)
    with pytest.raises(BadInputError, match=r"telechat_moe\.mixture: segments from samples"):
        open_mixture(names, [(3, [1, 1])], seq_length=SIZE, size=90)
