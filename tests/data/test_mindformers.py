"""Files and samples against MindFormers' own readers."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.data import IndexedDataset, Loader, SampleOptions, build, open_blend
from telechat_moe.data.corpus import open_corpus
from telechat_moe.versions import mindformers_version

pytestmark = pytest.mark.mindformers

OPTIONS = {
    "plain": {},
    "eod_mask_loss": {"eod_mask_loss": True},
    "causal_mask": {"create_attention_mask": True, "eod_mask_loss": True},
    "reset": {
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "create_attention_mask": True,
        "pad": 5,
    },
    # MindFormers 1.9.0 needs one of the other options here.
    "compressed": {
        "create_compressed_eod_mask": True,
        "reset_position_ids": True,
        "eod_pad_length": 40,
    },
    "no_extra_token": {"add_extra_token_to_sequence": False, "eod_mask_loss": True},
    "pad_is_eod": {"eod_mask_loss": True, "pad": 0},
}
BLENDS = {
    "prefix": ["middle"],
    "weight": ["1", "middle"],
    "two_weights": ["3", "middle", "2", "short"],
    "three_weights": ["0.5", "middle", "0.1", "short", "0.7", "long"],
    "two_prefixes": ["middle", "short"],
    "three_prefixes": ["middle", "short", "long"],
}
# seq_length, samples, seed: less than an epoch, a few, a separate last epoch, many.
SIZES = [(16, 10, 1), (16, 200, 1), (8, 517, 7), (33, 1000, 1234)]


@pytest.fixture(scope="module")
def reference():
    """Return MindFormers' classes, its C++ index builder compiled."""
    os.environ.setdefault("GLOG_v", "3")
    pytest.importorskip("mindformers", reason="mindformers is not installed")
    from mindformers.dataset.blended_datasets import gpt_dataset, utils
    from mindformers.dataset.blended_datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    # MindFormers' Makefile asks the python3 on the PATH for pybind11; ours may run unactivated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    utils.compile_helpers()

    def open_reference(data_path, sizes, cache, *, seq_length, seed, split, **options):
        values = {
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "create_attention_mask": False,
            "pad": -1,
            "eod": 0,
        } | options
        config = gpt_dataset.GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_length,
            blend=utils.get_blend_from_list(data_path),
            blend_per_split=[None] * 3,
            split=split,
            path_to_cache=str(cache),
            mmap_bin_files=True,
            **values,
        )
        builder = BlendedMegatronDatasetBuilder(gpt_dataset.GPTDataset, sizes, lambda: True, config)
        return builder.build()

    return open_reference


def assert_same_samples(mine, theirs) -> None:
    assert len(mine) == len(theirs)
    batch = mine.batch(np.arange(len(mine)))
    names = list(batch)
    for index in range(len(mine)):
        for name, expected in zip(names, theirs[index], strict=True):
            np.testing.assert_array_equal(
                batch[name][index], expected, err_msg=f"{name} of sample {index}"
            )


@pytest.mark.parametrize(
    ("blend", "option", "size"),
    [
        *itertools.product(BLENDS, ["plain"], SIZES),
        *itertools.product(["weight", "two_weights"], list(OPTIONS)[1:], SIZES[1:3]),
    ],
)
def test_samples_equal_mindformers(
    reference, prefixes, tmp_path: Path, blend: str, option: str, size: tuple[int, int, int]
) -> None:
    seq_length, samples, seed = size
    data_path = [prefixes.get(item, item) for item in BLENDS[blend]]
    for split in ("1, 0, 0", "90,10,0"):
        expected = reference(
            data_path,
            [samples, 5, 0],
            tmp_path / split,
            seq_length=seq_length,
            seed=seed,
            split=split,
            **OPTIONS[option],
        )
        mine = open_blend(
            data_path,
            seq_length=seq_length,
            size=samples,
            seed=seed,
            split=split,
            options=SampleOptions(eod=0, **OPTIONS[option]),
        )
        assert_same_samples(mine, expected[0])


def test_masks_that_one_version_keeps(reference, prefixes, tmp_path: Path) -> None:
    """With a ``pad`` that occurs and no mask option, MindFormers 1.9.0 keeps earlier samples' masks; 2.1.0 does not."""
    common = {"seq_length": 16, "seed": 1, "split": "1, 0, 0"}
    theirs = reference([prefixes["long"]], [100, 0, 0], tmp_path, pad=5, **common)[0]
    mine = open_blend([prefixes["long"]], size=100, options=SampleOptions(eod=0, pad=5), **common)
    if mindformers_version() != "1.9.0":
        assert_same_samples(mine, theirs)
        return
    batch = mine.batch(np.arange(len(mine)))
    leaked = np.stack([theirs[index][2] for index in range(len(theirs))])
    assert (leaked[-1] == 0).sum() > (batch["loss_mask"][-1] == 0).sum()
    for index in range(len(mine)):
        theirs.masks_and_position_ids_are_cached = False
        for name, expected in zip(batch, theirs[index], strict=True):
            np.testing.assert_array_equal(batch[name][index], expected)


def test_ends_of_documents_without_another_option(reference, prefixes, tmp_path: Path) -> None:
    """MindFormers 1.9.0 fails at the second sample; 2.1.0 gives ours."""
    common = {"seq_length": 16, "seed": 1, "split": "1, 0, 0"}
    options = {"create_compressed_eod_mask": True, "eod_pad_length": 40}
    theirs = reference([prefixes["long"]], [100, 0, 0], tmp_path, **options, **common)[0]
    options = SampleOptions(eod=0, **options)
    mine = open_blend([prefixes["long"]], size=100, options=options, **common)
    if mindformers_version() != "1.9.0":
        assert_same_samples(mine, theirs)
        return
    assert len(theirs[0]) == 5
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'astype'"):
        theirs[1]


def test_built_files_are_read_by_mindformers(reference, corpus: Path, tmp_path: Path) -> None:
    from mindformers.dataset.blended_datasets.indexed_dataset import IndexedDataset as Theirs

    result = build(tmp_path / "out", open_corpus([corpus]), vocab_size=400)
    for side in ("train", "valid"):
        prefix = str(result.out / side)
        mine, theirs = IndexedDataset(prefix), Theirs(prefix)
        assert len(mine) == len(theirs) == result.manifest[side]["documents"]
        np.testing.assert_array_equal(mine.document_indices, theirs.document_indices)
        for index in range(len(mine)):
            np.testing.assert_array_equal(mine[index], theirs[index])
    names = ["eod_mask_loss", "reset_position_ids", "reset_attention_mask"]
    options = dict.fromkeys(names, True) | {"create_attention_mask": True}
    common = {"seq_length": 64, "seed": 11, "split": "1, 0, 0"}
    path = ["1", str(result.out / "train")]
    theirs = reference(path, [500, 0, 0], tmp_path / "cache", **common, **options)[0]
    mine = open_blend(path, size=500, options=SampleOptions(eod=0, **options), **common)
    assert_same_samples(mine, theirs)


RANKS = """
import json, sys
from mindformers.dataset.dataloader.blended_megatron_dataloader import (
    BlendedMegatronDatasetDataLoader,
)
prefix, cache, ranks, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = dict(seed=4, seq_length=16, split="1, 0, 0", eod=0, pad=-1, create_attention_mask=False,
              data_path=["1", prefix], path_to_cache=cache, mmap_bin_files=True)
names = ["input_ids", "labels", "loss_mask", "position_ids"]
found = []
for rank in range(ranks):
    data = BlendedMegatronDatasetDataLoader("GPTDataset", [200, 0, 0], config, column_names=names,
                                            num_shards=ranks, shard_id=rank)
    rows = data.batch(batch, drop_remainder=True).create_dict_iterator(output_numpy=True,
                                                                       num_epochs=1)
    found.append([{name: row[name].tolist() for name in names} for row in rows])
print("RESULT" + json.dumps(found))
"""


def test_ranks_get_what_mindformers_gives_them(reference, prefixes, tmp_path: Path) -> None:
    """Against MindFormers' data loader with ``num_shards``, in a process of its own."""
    import json

    ranks, batch = 3, 2
    done = subprocess.run(
        [sys.executable, "-c", RANKS, prefixes["long"], str(tmp_path), str(ranks), str(batch)],
        capture_output=True,
        text=True,
        env=os.environ | {"GLOG_v": "3"},
        check=False,
    )
    assert "RESULT" in done.stdout, done.stderr[-2000:]
    theirs = json.loads(done.stdout.split("RESULT")[1].splitlines()[0])
    dataset = open_blend(["1", prefixes["long"]], seq_length=16, size=200, seed=4)
    whole = list(Loader(dataset, batch * ranks))
    for rank in range(ranks):
        mine = [{name: rows[rank::ranks] for name, rows in step.items()} for step in whole]
        # MindFormers fills up the last shards with samples served before; we drop those.
        assert 0 <= len(theirs[rank]) - len(mine) <= 1
        assert len(mine) == len(dataset) // (ranks * batch)
        for ours, expected in zip(mine, theirs[rank], strict=False):
            for name, values in expected.items():
                np.testing.assert_array_equal(ours[name], values)
