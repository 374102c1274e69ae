"""Packed samples against definitions written out here token by token."""

import collections
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telechat_moe.data import GptDataset, IndexedDataset, SampleOptions, open_blend, write_indexed
from telechat_moe.data import dataset as dataset_module
from telechat_moe.data.recipe import valid_prefix
from telechat_moe.errors import BadInputError
from telechat_moe.recipe.data_path import parse_data_path, parse_split

documents_of = st.lists(st.lists(st.integers(1, 50), max_size=12), min_size=1, max_size=12)


@given(
    bodies=documents_of,
    seq_length=st.integers(1, 9),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
    few_pieces=st.sampled_from([0, dataset_module.FEW_PIECES]),
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_token_once_per_epoch(
    tmp_path: Path,
    bodies: list[list[int]],
    seq_length: int,
    epochs: int,
    seed: int,
    few_pieces: int,
) -> None:
    """The samples, in the order of their cuts, are the row of documents less a short tail."""
    documents = [[*body, 0] for body in bodies]
    write_indexed(tmp_path / "d", documents, np.uint16)
    total = sum(map(len, documents))
    wanted = (epochs * total - 1) // seq_length
    if (total - 1) // seq_length < 1 or wanted < 1:
        return
    dataset = GptDataset(tmp_path / "d", seq_length, wanted, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_module, "FEW_PIECES", few_pieces)
        windows = dataset.windows(np.arange(len(dataset)))
    in_order = windows[np.argsort(dataset.indices.shuffle)]

    row = [token for place in dataset.indices.documents.tolist() for token in documents[place]]
    assert in_order[0, 0] == row[0]
    served = np.concatenate((in_order[0, :1], in_order[:, 1:].reshape(-1))).tolist()
    assert served == row[: len(served)]
    assert 0 <= len(row) - len(served) < seq_length
    np.testing.assert_array_equal(in_order[1:, 0], in_order[:-1, -1])

    repeats = collections.Counter(dataset.indices.documents.tolist())
    assert set(repeats) == set(range(len(documents)))
    assert set(repeats.values()) == {dataset.indices.epochs}
    assert sorted(dataset.indices.shuffle.tolist()) == list(range(len(dataset)))
    assert wanted <= len(dataset)


@pytest.mark.parametrize("pad", [-1, 7])
def test_masks_and_positions(prefixes: dict[str, str], pad: int) -> None:
    options = SampleOptions(
        eod=0,
        pad=pad,
        eod_mask_loss=True,
        reset_position_ids=True,
        create_attention_mask=True,
        reset_attention_mask=True,
    )
    dataset = GptDataset(prefixes["short"], 24, 40, options=options)
    batch = dataset.batch(np.arange(len(dataset)))
    windows = dataset.windows(np.arange(len(dataset)))
    assert batch["input_ids"].dtype == batch["labels"].dtype == np.int32
    assert batch["position_ids"].dtype == np.int32
    assert batch["loss_mask"].dtype == np.float32
    assert batch["attention_mask"].dtype == np.uint8
    assert batch["attention_mask"].shape == (len(dataset), 1, 24, 24)
    for row, window in enumerate(windows.tolist()):
        position, document, own = 0, 0, []
        for place in range(24):
            token, label = window[place], window[place + 1]
            assert batch["input_ids"][row, place] == (0 if token == pad else token)
            assert batch["labels"][row, place] == (0 if label == pad else label)
            assert batch["loss_mask"][row, place] == (token != 0 and label != pad)
            assert batch["position_ids"][row, place] == position
            own.append(document)
            position += 1
            if token == 0:
                position, document = 0, document + 1
        for i in range(24):
            for j in range(24):
                visible = j <= i and own[i] == own[j]
                assert batch["attention_mask"][row, 0, i, j] == (not visible)


def test_bad_settings_are_refused(prefixes: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="need the end-of-document token, but eod is -1"):
        SampleOptions(reset_position_ids=True)
    with pytest.raises(BadInputError, match="seq_length must be 1 or more"):
        GptDataset(prefixes["short"], 0)
    with pytest.raises(BadInputError, match="fewer than the 10001 of one sample"):
        GptDataset(prefixes["short"], 10000)
    write_indexed(tmp_path / "empty", [], np.uint16)
    with pytest.raises(BadInputError, match="hold no tokens"):
        GptDataset(tmp_path / "empty", 4, 4)
    dataset = GptDataset(prefixes["short"], 16, options=SampleOptions(vocab_size=50))
    with pytest.raises(BadInputError, match=r"holds token \d+, but the model's vocab_size is 50"):
        dataset.batch(np.arange(len(dataset)))
    with pytest.raises(IndexError):
        dataset.batch([len(dataset)])
    options = SampleOptions(eod=0, create_compressed_eod_mask=True, eod_pad_length=1)
    dataset = GptDataset(prefixes["short"], 64, options=options)
    with pytest.raises(BadInputError, match="raise eod_pad_length"):
        dataset.batch(np.arange(len(dataset)))


def test_data_path(prefixes: dict[str, str]) -> None:
    assert parse_data_path(["a"]) == (["a"], None)
    assert parse_data_path(["1", "a"]) == (["a"], [1.0])
    assert parse_data_path([3, "a", "1", " b "]) == (["a", "b"], [3, 1])
    assert parse_data_path(["a", "b", "c"]) == (["a", "b", "c"], None)
    for wrong in ([], ["1"], ["a", "1"], ["1", "a", "b"], ["0", "a"], ["-1", "a"], ["nan", "a"]):
        with pytest.raises(ValueError, match=r"weight and prefix in turn|weights above 0"):
            parse_data_path(wrong)
        with pytest.raises(BadInputError, match="data_path is"):
            open_blend(wrong, seq_length=16, size=4)


def test_split(prefixes: dict[str, str]) -> None:
    source = IndexedDataset(prefixes["long"])
    half = open_blend([prefixes["long"]], seq_length=16, size=30, split="50, 50, 0")
    assert set(half.indices.documents) == set(range(round(0.5 * len(source))))
    assert parse_split("90, 10, 0") == [90, 10, 0]
    assert parse_split("1") == [1]
    for wrong in ("", "a, b", "1, 2, 3, 4", "-1, 2", "0, 0, 0", "0, 1, 0", "inf"):
        with pytest.raises(ValueError, match="the first above 0"):
            parse_split(wrong)


def test_validation_beside_training() -> None:
    assert valid_prefix("out/data/train") == "out/data/valid"
    assert valid_prefix("train/wiki_train_text") == "train/wiki_valid_text"
    with pytest.raises(BadInputError, match="does not contain 'train'"):
        valid_prefix("train/wiki")


def test_blend_keeps_shares(prefixes: dict[str, str]) -> None:
    blend = open_blend(
        ["3", prefixes["short"], "1", prefixes["long"]], seq_length=16, size=400, seed=5
    )
    counts = np.bincount(blend.chosen)
    assert abs(counts[0] / counts.sum() - 0.75) < 0.01
    for which, dataset in enumerate(blend.datasets):
        rows = np.flatnonzero(blend.chosen == which)
        np.testing.assert_array_equal(blend.within[rows], np.arange(len(rows)))
        mixed = blend.batch(rows)["input_ids"]
        np.testing.assert_array_equal(mixed, dataset.batch(np.arange(len(rows)))["input_ids"])


def test_fingerprint_tells_settings_apart(prefixes: dict[str, str]) -> None:
    source = IndexedDataset(prefixes["short"])
    datasets = [
        GptDataset(source, 16, 30, 1),
        GptDataset(source, 16, 30, 2),
        GptDataset(source, 16, 31, 1),
        GptDataset(source, 8, 30, 1),
        GptDataset(source, 16, 30, 1, documents=(0, 30)),
        GptDataset(source, 16, 30, 1, options=SampleOptions(eod=0, eod_mask_loss=True)),
        GptDataset(prefixes["long"], 16, 30, 1),
        open_blend(["1", prefixes["short"]], seq_length=16, size=30, seed=1),
    ]
    prints = [dataset.fingerprint() for dataset in datasets]
    assert len(set(prints)) == len(prints)
    assert GptDataset(prefixes["short"], 16, 30, 1).fingerprint() == prints[0]
