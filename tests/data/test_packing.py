"""Packing by best fit: against brute force, the bounds of its window, every token once, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe.data import GptDataset, Loader, SampleOptions, open_blend, write_indexed
from telechat_moe.data.document_packing import BestFit, WholeDataset
from telechat_moe.errors import BadInputError
from telechat_moe.recipe import RecipeError, load

OPTIONS = SampleOptions(
    eod=0, reset_position_ids=True, create_attention_mask=True, reset_attention_mask=True
)
S = 16


def brute_force(lengths: list[int], size: int, window: int) -> list[int]:
    """Return the sample of each document: of the last ``window`` ones the fullest that has room, else a new one."""
    left, placed = list[int](), list[int]()
    for length in lengths:
        last = range(max(0, len(left) - window), len(left))
        fitting = [(left[sample], sample) for sample in last if left[sample] >= length]
        sample = min(fitting)[1] if fitting else len(left)
        if sample == len(left):
            left.append(size)
        left[sample] -= length
        placed.append(sample)
    return placed


def next_fit(lengths: list[int], size: int) -> list[int]:
    """Return the sample of each document, one after another."""
    placed, sample, left = list[int](), -1, 0
    for length in lengths:
        if length > left:
            sample, left = sample + 1, size
        left -= length
        placed.append(sample)
    return placed


@given(
    lengths=st.lists(st.integers(1, 24), max_size=150),
    window=st.sampled_from([1, 2, 3, 8, 1000]),
    cut=st.integers(0, 150),
)
@settings(max_examples=150, deadline=None)
def test_best_fit_is_brute_force_within_its_bounds(lengths: list[int], window: int, cut: int):
    packer = BestFit(24, window)
    both = [packer.place(np.array(part, int)) for part in (lengths[:cut], lengths[cut:])]
    placed = np.concatenate(both)
    assert placed.tolist() == brute_force(lengths, 24, window)
    assert packer.samples == len(set(placed.tolist()))
    in_order = np.array(next_fit(lengths, 24), int)
    assert (placed <= in_order).all()  # never later, so never more samples either
    newest = np.maximum.accumulate(placed) if lengths else placed
    assert (newest - placed < window).all()
    if window == 1:
        assert placed.tolist() == in_order.tolist()


def write_documents(folder: Path, lengths: list[int]) -> tuple[str, list[np.ndarray]]:
    """Write documents of the numbers from 1 on, each once."""
    ends = np.cumsum(lengths)
    documents = np.split(np.arange(1, ends[-1] + 1, dtype=np.uint16), ends[:-1])
    write_indexed(folder / "train", documents, np.uint16)
    return str(folder / "train"), documents


@given(
    lengths=st.lists(st.integers(0, 3 * S), min_size=1, max_size=25).filter(any),
    window=st.sampled_from([2, 5, 64]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_every_token_comes_once_with_what_its_document_says(
    lengths: list[int], window: int, seed: int, tmp_path_factory
) -> None:
    prefix, documents = write_documents(tmp_path_factory.mktemp("whole"), lengths)
    data = WholeDataset(prefix, S, None, seed, options=OPTIONS, window=window)
    batch = data.batch(range(len(data)))
    owner = np.repeat(np.arange(len(lengths)), lengths)  # of token 1, 2, ...
    place = np.concatenate([np.arange(len(d)) for d in documents])
    real = batch["input_ids"] > 0
    assert sorted(batch["input_ids"][real].tolist()) == list(range(1, len(owner) + 1))
    pairs = list[tuple[int, int]]()
    for row, ids in enumerate(batch["input_ids"]):
        tokens = ids[real[row]]
        assert real[row, : len(tokens)].all()  # the padding is at the end
        # A document is cut every S tokens and nowhere else.
        piece = list(
            zip(owner[tokens - 1].tolist(), (place[tokens - 1] // S).tolist(), strict=True)
        )
        assert batch["position_ids"][row, real[row]].tolist() == (place[tokens - 1] % S).tolist()
        piece += [(-1, 0)] * (S - len(piece))
        same = np.array([[a == b for b in piece] for a in piece])
        sees = same & np.tri(S, dtype=bool)
        np.testing.assert_array_equal(batch["attention_mask"][row, 0], ~sees)
        assert data.visible_pairs([row])[0] == sees.sum()
        learned = batch["loss_mask"][row] > 0
        pairs += zip(ids[learned].tolist(), batch["labels"][row, learned].tolist(), strict=True)
    # Learned is what follows a token in its document, over cuts, too.
    inner = [t for t in range(1, len(owner)) if owner[t - 1] == owner[t]]
    assert sorted(pairs) == [(t, t + 1) for t in inner]
    assert data.index_problems() == []


def test_plain_concatenation_cuts_documents_and_best_fit_does_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, S + 1, 400).tolist()
    prefix, documents = write_documents(tmp_path, lengths)

    def cut(rows: np.ndarray) -> int:
        sample = {t: n for n, row in enumerate(rows) for t in row.tolist() if t}
        return sum(len({sample.get(t) for t in d.tolist()}) > 1 for d in documents)

    plain = GptDataset(prefix, S, options=OPTIONS)
    packed = WholeDataset(prefix, S, options=OPTIONS, window=64)
    assert cut(plain.batch(range(len(plain)))["input_ids"]) > 100
    assert cut(packed.batch(range(len(packed)))["input_ids"]) == 0
    least = -(-sum(lengths) // S)
    one_by_one = WholeDataset(prefix, S, options=OPTIONS)
    assert least <= len(packed) < 1.06 * least < 1.2 * least < len(one_by_one)


def test_epochs_are_shuffled_and_a_loader_resumes(tmp_path: Path) -> None:
    prefix, _ = write_documents(tmp_path, [5, 40, 16, 3, 0, 9, 12, 7] * 5)

    def opened(window: int | None) -> Any:
        given = {"size": 70, "split": None, "options": OPTIONS}
        return open_blend([prefix], seq_length=S, window=window, **given)

    blend = opened(4)
    assert isinstance(blend, WholeDataset)
    assert len(blend) >= 70
    assert blend.epochs > 1
    assert blend.index_problems() == []
    first = [blend.pieces(i)[:, :2].tolist() for i in (0, len(blend) // 2)]
    assert first[0] != first[1]
    again = opened(4)
    assert again.fingerprint() == blend.fingerprint()
    with Loader(blend, 4, epochs=None) as loader, Loader(again, 4, epochs=None) as resumed:
        batches = [next(loader) for _ in range(4)]
        resumed.load_state({**loader.state(), "next_sample": 8})
        for name, array in next(resumed).items():
            np.testing.assert_array_equal(array, batches[2][name])
        for other in (5, None):
            with pytest.raises(BadInputError, match="other training data"):
                Loader(opened(other), 4).load_state(loader.state())


def test_index_problems_are_found(tmp_path: Path) -> None:
    prefix, _ = write_documents(tmp_path, [5, 9, 12, 7, 30])
    data = WholeDataset(prefix, S, options=OPTIONS, window=4)
    data._row[0] = data._row[1]
    assert "2 document(s) are not served 1 time(s)" in data.index_problems()[0]
    data = WholeDataset(prefix, S, options=OPTIONS, window=4)
    data._cuts = np.delete(data._cuts, 1)
    assert "1 sample(s) hold more than 16 tokens" in data.index_problems()[0]


def test_data_that_cannot_be_packed_are_refused(tmp_path: Path) -> None:
    write_indexed(tmp_path / "talks", [np.array([~1, ~2, 3])], np.int32)
    options = replace(OPTIONS, vocab_size=9)
    data = WholeDataset(tmp_path / "talks", S, options=options, window=4)
    with pytest.raises(BadInputError, match="need the section telechat_moe"):
        data.batch([0])
    write_indexed(tmp_path / "empty", [np.array([], int)], np.uint16)
    with pytest.raises(BadInputError, match="no tokens to train on"):
        WholeDataset(tmp_path / "empty", S, options=OPTIONS, window=4)


CONFIG = "train_dataset.data_loader.config."
PACKED = {
    "telechat_moe.packing": "{}",
    "train_dataset.input_columns": "null",
    "train_dataset.construct_args_key": "null",
    CONFIG + "create_attention_mask": "True",
    CONFIG + "reset_attention_mask": "True",
    CONFIG + "reset_position_ids": "True",
}


@pytest.mark.parametrize(
    ("changes", "key", "found"),
    [
        (
            {CONFIG + "reset_attention_mask": "False"},
            "reset_attention_mask",
            "must see only itself",
        ),
        ({CONFIG + "reset_position_ids": "False"}, "reset_position_ids", "must see only itself"),
        ({CONFIG + "eod_mask_loss": "True"}, "eod_mask_loss", "predicts nothing anyway"),
        ({CONFIG + "add_extra_token_to_sequence": "False"}, "add_extra_token", "are whole"),
        ({"telechat_moe.packing": "{window: 1}"}, "packing.window", "1"),
        (
            {
                CONFIG + "data_path": "['a/train', 'b/train']",
                "telechat_moe.mixture": "[{from_sample: 0, weights: [1, 2]}]",
            },
            "telechat_moe.mixture",
            "with telechat_moe.packing, whose passes differ",
        ),
        (
            {
                "trainer.type": "CausalLanguageModelingTrainer",
                "trainer.auto_register": "null",
                "model.model_config.moe_z_loss_coeff": "null",
            },
            "telechat_moe.packing",
            "a section, a setting of this package, which MindFormers drops",
        ),
    ],
)
def test_a_recipe_that_cannot_pack_is_refused(changes: dict, key: str, found: str) -> None:
    sets = [f"{k}={v}" for k, v in {**PACKED, **changes}.items()]
    with pytest.raises(RecipeError) as error:
        load("telechat3_moe/pretrain_tiny.yaml", sets, use="written")
    assert [p for p in error.value.problems if key in p.key and found in p.found]
