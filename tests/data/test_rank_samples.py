"""The samples of a rank by number are those that the batches of all ranks hold for it."""

import itertools

import numpy as np
import pytest

from telechat_moe.data import Loader, SampleOptions, open_blend, open_mixture
from telechat_moe.data.rank_samples import RankSamples
from telechat_moe.errors import BadInputError

S, ROWS, SIZE = 16, 2, 50
MASKS = {
    "plain": SampleOptions(eod=0),
    "mask": SampleOptions(eod=0, create_attention_mask=True, reset_attention_mask=True),
    "ends": SampleOptions(eod=0, create_compressed_eod_mask=True, reset_position_ids=True),
}


def dataset_of(kind: str, prefixes: dict[str, str], options: SampleOptions) -> object:
    common = {"seq_length": S, "size": 2 * SIZE, "seed": 3, "options": options}
    if kind == "mixture":
        paths = [prefixes["long"], prefixes["middle"]]
        return open_mixture(paths, [(0, [3, 1]), (23, [0, 1])], **common)
    return open_blend(["1", prefixes["long"]], window=4 if kind == "packing" else None, **common)


def loader_of(data: object, ranks: int, parts: int, dealt: bool, epochs: int = 1) -> Loader:
    """Return a loader as `telechat-moe train` opens it."""
    rows = ROWS * ranks
    deal_to = (ranks, parts) if dealt else None
    unit = rows * parts
    return Loader(data, rows, epochs=epochs, epoch_samples=SIZE, deal_to=deal_to, unit=unit)


@pytest.mark.parametrize("kind", ["text", "packing", "mixture"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("dealt", [False, True], ids=["in order", "dealt"])
def test_each_rank_gets_its_rows(
    prefixes, kind: str, mask: str, ranks: int, parts: int, dealt: bool
) -> None:
    data = dataset_of(kind, prefixes, MASKS[mask])
    batches = [
        {name: column.copy() for name, column in batch.items()}
        for batch in loader_of(data, ranks, parts, dealt)
    ]
    steps = SIZE // (ROWS * ranks * parts)
    assert len(batches) == steps * parts
    for rank in range(ranks):
        samples = RankSamples(loader_of(data, ranks, parts, dealt), parts, 0, (rank, ranks))
        assert len(samples) == steps * parts * ROWS
        for number, (batch, row) in enumerate(itertools.product(batches, range(ROWS))):
            columns = [column[rank * ROWS + row] for column in batch.values()]
            for name, expected, column in zip(batch, columns, samples[number], strict=True):
                assert column.dtype == np.int32
                np.testing.assert_array_equal(column, expected, err_msg=f"{name} {number}")


def test_a_process_that_reads_the_whole_batch_gets_its_micro_batches_in_order(prefixes) -> None:
    data = dataset_of("text", prefixes, MASKS["plain"])
    expected = np.concatenate([batch["input_ids"] for batch in loader_of(data, 3, 2, False)])
    samples = RankSamples(loader_of(data, 3, 2, False), 2, 0, None)
    np.testing.assert_array_equal([samples[i][0] for i in range(len(samples))], expected)


@pytest.mark.parametrize("first", [0, 9, 17])
def test_it_goes_on_at_the_position_of_the_loader(prefixes, first: int) -> None:
    """As after other data, or where a run left samples out; steps before are not read."""
    data, step = dataset_of("text", prefixes, MASKS["plain"]), 2 * ROWS
    loader = loader_of(data, 2, 1, dealt=True)
    loader.seek(first)
    samples = RankSamples(loader, 1, 5, (1, 2))
    reference = loader_of(data, 2, 1, dealt=True)
    reference.seek(first)
    expected = [batch["input_ids"][ROWS:].copy() for batch in reference]
    assert len(samples) == (5 + (SIZE - first) // step) * ROWS
    served = [samples[i][0] for i in range(5 * ROWS, len(samples))]
    np.testing.assert_array_equal(served, np.concatenate(expected))


def test_every_pass_is_the_same_and_whole(prefixes) -> None:
    """MindFormers counts from 0 in each pass; a place that is not that of its steps would be another in the second."""
    data, step = dataset_of("text", prefixes, MASKS["plain"]), 2 * ROWS
    loader = loader_of(data, 2, 1, dealt=False, epochs=2)
    loader.seek(SIZE + 2 * step)  # in the second pass, after two steps of it
    samples = RankSamples(loader, 1, SIZE // step + 2, (0, 2))
    first = [batch["input_ids"][:ROWS].copy() for batch in loader_of(data, 2, 1, False)]
    served = [samples[i][0] for i in range(len(samples))]
    np.testing.assert_array_equal(served, np.concatenate(first))
    loader.seek(3)
    with pytest.raises(BadInputError, match=r"at sample 3 after 1 steps of 4, .* several passes"):
        RankSamples(loader, 1, 1, (0, 2))
