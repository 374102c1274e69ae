"""Dealing samples by attention: the same samples, level ranks, near the optimum, and a loader that resumes."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.data import GptDataset, Loader, SampleOptions, open_blend, write_indexed
from telechat_moe.data.balance import deal, visible_pairs
from telechat_moe.data.sample import collate
from telechat_moe.errors import UsageError

EOD, S = 0, 16
OPTIONS = SampleOptions(eod=EOD, create_attention_mask=True, reset_attention_mask=True)


# --------------------------------------------------------------------------------------------- cost


@given(st.lists(st.lists(st.integers(0, 3), min_size=S + 1, max_size=S + 1), min_size=1))
@settings(max_examples=100, deadline=None)
def test_pairs_are_those_that_the_mask_shows(window: list[list[int]]) -> None:
    window_BS = np.array(window, np.int32)
    shown = collate(window_BS, S, OPTIONS)["attention_mask"] == 0
    np.testing.assert_array_equal(visible_pairs(window_BS[:, :S], EOD), shown.sum((1, 2, 3)))


# ---------------------------------------------------------------------------------------------- deal

costs = st.one_of(st.integers(0, 10**12), st.floats(0, 1e12), st.sampled_from([0, 1, 10**10]))


@given(st.data(), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_every_sample_is_dealt_once(data: st.DataObject, ranks: int, micro: int, n: int) -> None:
    count = ranks * micro * n
    cost = np.array(data.draw(st.lists(costs, min_size=count, max_size=count)), np.float64)
    dealt = deal(cost, ranks, micro)
    assert dealt.shape == (micro, ranks, n)
    assert sorted(dealt.ravel().tolist()) == list(range(count))
    np.testing.assert_array_equal(deal(cost.copy(), ranks, micro), dealt)
    # Not worse than rounds alone: the fullest rank has at most the heaviest sample more than the lightest.
    sums = cost[dealt].sum((0, 2))
    assert sums.max() - sums.min() <= cost.max() * (1 + 1e-9)


def test_a_batch_that_cannot_be_dealt_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="10 samples cannot be dealt evenly to 4 ranks x 2"):
        deal(np.ones(10), 4, 2)


def best_split(cost: np.ndarray, ranks: int) -> float:
    """Return the smallest possible largest sum of ``ranks`` sets of equal size, by trying all."""
    size = len(cost) // ranks
    best = np.inf
    if ranks == 1:
        return float(cost.sum())
    for others in itertools.combinations(range(1, len(cost)), size - 1):
        mine = [0, *others]
        rest = np.delete(cost, mine)
        best = min(best, max(float(cost[mine].sum()), best_split(rest, ranks - 1)))
    return best


@pytest.mark.parametrize(("ranks", "micro"), [(2, 3), (2, 5), (3, 2), (3, 3)])
def test_ranks_are_near_the_best_split_there_is(ranks: int, micro: int) -> None:
    generator, over = np.random.default_rng(ranks * 10 + micro), []
    for _ in range(60):
        cost = generator.lognormal(0, 1.5, ranks * micro)
        largest = cost[deal(cost, ranks, micro)].sum((0, 2)).max()
        over.append(largest / best_split(cost, ranks))
    assert min(over) >= 1 - 1e-12  # the search tried all
    assert np.mean(over) < 1.03
    assert np.max(over) < 1.25


def test_the_same_micro_batches_of_all_ranks_fit_best() -> None:
    """No other order of the ranks' own micro-batches waits less: the sum over micro-batches of the slowest rank."""
    generator = np.random.default_rng(4)
    for _ in range(20):
        cost = generator.lognormal(0, 1.5, 12)
        at = cost[deal(cost, 3, 4)][..., 0]
        orders = itertools.product(*[itertools.permutations(at[:, r]) for r in range(1, 3)])
        least = min(np.max([at[:, 0], *o], axis=0).sum() for o in orders)
        assert at.max(1).sum() <= least * (1 + 1e-12)


def test_a_step_grows_to_its_middle_and_shrinks() -> None:
    cost = np.arange(40.0) ** 2
    at = cost[deal(cost, 4, 10)].sum((1, 2))
    top = int(at.argmax())
    assert 4 <= top <= 5
    assert (np.diff(at[: top + 1]) > 0).all()
    assert (np.diff(at[top:]) < 0).all()


def test_micro_batches_of_several_samples_are_level() -> None:
    cost = np.random.default_rng(1).lognormal(0, 1.0, 4 * 4 * 16)
    at = cost[deal(cost, 4, 4)].sum(2)
    assert at.max() / at.mean() < 1.02
    plain = cost.reshape(4, 4, 16).sum(2)
    assert plain.max() / plain.mean() > 1.2


@pytest.mark.parametrize(
    ("ranks", "micro", "length", "spread"), [(4, 16, 131072, 2.0), (16, 8, 8192, 1.3)]
)
def test_heavy_tails_are_level(ranks: int, micro: int, length: int, spread: float) -> None:
    generator, samples = np.random.default_rng(7), ranks * micro
    level, plain = [], []
    for _ in range(20):
        documents = np.minimum(generator.lognormal(7.3, spread, samples * length // 500), length)
        ends = np.cumsum(documents.astype(np.int64) + 1)
        ends = ends[ends < samples * length]
        cuts = np.unique(np.concatenate((ends, np.arange(samples + 1) * length)))
        pairs = np.diff(cuts) * (np.diff(cuts) + 1) / 2
        cost = np.bincount(cuts[:-1] // length, pairs, samples)
        mean = cost.sum() / ranks
        level.append(cost[deal(cost, ranks, micro)].sum((0, 2)).max() / max(mean, cost.max()))
        plain.append(cost.reshape(micro, ranks).sum(0).max() / max(mean, cost.max()))
    assert np.mean(plain) > 1.1
    assert np.mean(level) < 1.02
    assert max(level) < 1.05


# ------------------------------------------------------------------------------------------- loader


@pytest.fixture
def dataset(tmp_path: Path) -> GptDataset:
    generator = np.random.default_rng(0)
    documents = []
    for length in np.minimum(generator.lognormal(1.5, 1.2, 400), 60).astype(int):
        documents.append(np.append(generator.integers(1, 60, length), EOD).astype(np.uint16))
    write_indexed(tmp_path / "train", documents, np.dtype(np.uint16))
    return GptDataset(tmp_path / "train", S, options=OPTIONS)


def test_a_blend_counts_pairs_as_its_datasets_do(dataset: GptDataset, tmp_path: Path) -> None:
    blend = open_blend(
        ["0.6", f"{tmp_path}/train", "0.4", f"{tmp_path}/train"],
        seq_length=S,
        size=40,
        options=OPTIONS,
    )
    wanted = [3, 17, 4, 30]
    shown = blend.batch(wanted)["attention_mask"] == 0
    np.testing.assert_array_equal(blend.visible_pairs(wanted), shown.sum((1, 2, 3)))


def batches(loader: Loader, count: int) -> list[np.ndarray]:
    return [next(loader)["input_ids"] for _ in range(count)]


@pytest.mark.parametrize("prefetch", [0, 2, 5])
def test_the_loader_deals_each_step(dataset: GptDataset, prefetch: int) -> None:
    ranks, micro, n = 2, 3, 2
    step = ranks * micro * n
    with Loader(
        dataset, ranks * n, prefetch, epochs=2, epoch_samples=2 * step, deal_to=(ranks, micro)
    ) as loader:
        for number in range(4):
            got = batches(loader, micro)
            order = loader.order
            assert order is not None
            assert order.shape == (micro, ranks, n)
            assert sorted(order.ravel().tolist()) == list(range(step))
            places = (number * step + order) % (2 * step)
            for m in range(micro):
                np.testing.assert_array_equal(got[m], dataset.batch(places[m].ravel())["input_ids"])
            sums = dataset.visible_pairs(places.ravel()).reshape(order.shape).sum((0, 2))
            in_order = dataset.visible_pairs(np.sort(places.ravel()))
            in_order = in_order.reshape(micro, ranks, n).sum((0, 2))
            assert sums.max() <= in_order.max()
        with pytest.raises(StopIteration):
            next(loader)


def test_a_loader_that_deals_resumes_after_any_step(dataset: GptDataset) -> None:
    def opened() -> Loader:
        return Loader(dataset, 4, epochs=None, epoch_samples=36, deal_to=(4, 3))

    with opened() as loader:
        stream = batches(loader, 12)
    for steps in range(4):
        with opened() as first, opened() as second:
            batches(first, steps * 3)
            second.load_state(json.loads(json.dumps(first.state())))
            for a, b in zip(batches(second, 12 - steps * 3), stream[steps * 3 :], strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_closed_loader_goes_on_within_a_step(dataset: GptDataset) -> None:
    with Loader(dataset, 4, deal_to=(4, 3)) as loader:
        stream = batches(loader, 6)
    with Loader(dataset, 4, deal_to=(4, 3)) as loader:
        got = []
        for _ in range(6):
            got += batches(loader, 1)
            loader.close()
        for a, b in zip(got, stream, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_state_within_a_dealt_step_is_refused(dataset: GptDataset) -> None:
    with Loader(dataset, 4, deal_to=(4, 3)) as loader:
        batches(loader, 2)
        with pytest.raises(UsageError, match="8 samples are no whole steps of 12"):
            loader.state()
