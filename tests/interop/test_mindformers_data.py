"""`TelechatDataLoader` in MindFormers: each process gets what `telechat-moe train` gives to its data-parallel rank, with its masks."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import mindformers_runs as runs
import mini_recipe as mini
import numpy as np
import pytest

from telechat_moe.recipe import load
from telechat_moe.recipe.rules.data import produced
from telechat_moe.recipe.schema.train import GptDatasetConfig
from telechat_moe.sharding.recipe import mesh_of
from telechat_moe.train.preflight import open_loader

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
CHILD = Path(__file__).with_name("served_batches.py")
CONFIG = "train_dataset__data_loader__config__"
STEPS = 6
MASK = {
    f"{CONFIG}create_attention_mask": True,
    f"{CONFIG}reset_attention_mask": True,
    f"{CONFIG}reset_position_ids": True,
    "train_dataset__input_columns": "null",
    "train_dataset__construct_args_key": "null",
}
ENDS = {
    f"{CONFIG}create_compressed_eod_mask": True,
    f"{CONFIG}reset_attention_mask": True,
    f"{CONFIG}reset_position_ids": True,
    f"{CONFIG}eod_pad_length": 20,
    "model__model_config__use_eod_attn_mask_compression": True,
    "model__model_config__use_flash_attention": True,
    "train_dataset__input_columns": "null",
    "train_dataset__construct_args_key": "null",
}
MIXTURE = "[{from_sample: 0, weights: [3, 1]}, {from_sample: 10, weights: [0, 1]}]"
LEFT = {
    "cosine": lambda t: (np.cos(np.pi * t) + 1) / 2,
    "minus_sqrt": lambda t: 1 - np.sqrt(t),
    "exponential": lambda t: 2 * np.exp2(-t) - 1,
}
"""What a decay leaves (Megatron-LM, `optimizer_param_scheduler.py`)."""
DECAY = {"lr_schedule__type": "WarmUpStableDecayLR", "lr_schedule__decay_start_steps": 9}
SPLIT = {
    "use_parallel": True,
    "parallel__parallel_mode": 1,
    "parallel__full_batch": False,
    "parallel_config__data_parallel": 2,
    "parallel_config__model_parallel": 2,
    "parallel_config__use_seq_parallel": True,
    "parallel_config__pipeline_stage": 2,
    "parallel_config__micro_batch_num": 2,
    "callbacks__1__micro_batch_num": 2,
}
STRATEGY = "[[2, 1], [2, 1], [2, 1], [2, 1], [2, 1, 1, 1]]"


def write(folder: Path, **changes: object) -> Path:
    """Write a recipe of its own in a folder, beside the data of two sources that all share."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    data, other = folder.parent / "data", folder.parent / "other"
    if not other.exists():
        other.mkdir(parents=True)
        mini.write_data(other, seed=1)
        data.mkdir(exist_ok=True)
        mini.write_data(data)
    if "telechat_moe__mixture" in changes:
        changes[f"{CONFIG}data_path"] = f"['{data}/train', '{other}/train']"
    else:
        changes.setdefault(f"{CONFIG}data_path", f"['2', '{data}/train', '1', '{other}/train']")
    changes.setdefault("train_dataset__data_loader__sizes", f"[{STEPS * 16},0,0]")
    return runs.write_recipe(folder, **changes)


THEIRS = {
    "trainer__type": "CausalLanguageModelingTrainer",
    "trainer__auto_register": "null",
    "train_dataset__data_loader__type": "TelechatDataLoader",
    "train_dataset__data_loader__auto_register": "telechat_moe_plugin.TelechatDataLoader",
    "model__model_config__moe_z_loss_coeff": "null",
    "telechat_moe__evaluation": "{}",
}
"""MindFormers' own trainer, whose model is MindFormers'."""
CASES: dict[str, dict[str, object]] = {
    "the type alone": {
        "train_dataset__data_loader__type": "TelechatDataLoader",
        **DECAY,
        "telechat_moe__lr_wsd_decay_style": "cosine",
    },
    "mixture": {
        "telechat_moe__mixture": MIXTURE,
        **DECAY,
        "telechat_moe__lr_wsd_decay_style": "minus_sqrt",
    },
    "packing": {
        "telechat_moe__packing": "{window: 4}",
        **MASK,
        **DECAY,
        "telechat_moe__lr_wsd_decay_style": "exponential",
    },
}
"""Settings on one process."""
ENDS_OF_DOCUMENTS = {"ends of documents": {"telechat_moe__packing": "{window: 4}", **ENDS}}
"""The model of `TelechatMoeTrainer` takes a mask."""
RANKS: dict[str, dict[str, object]] = {
    "data parallel": {**runs.DATA_PARALLEL, "telechat_moe__mixture": MIXTURE},
    "data parallel, dealt": {**runs.DATA_PARALLEL, "telechat_moe__balance_attention": True, **MASK},
    "split, dealt": {
        **SPLIT,
        "parallel__dataset_strategy": STRATEGY,
        "telechat_moe__balance_attention": True,
        **MASK,
    },
    "split, whole batches": {
        **SPLIT,
        "parallel__full_batch": True,
        "telechat_moe__mixture": MIXTURE,
    },
}
"""Settings on several."""


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Any, tuple[Path, list[dict], np.ndarray]]:
    """Return recipe, batches and rates of every process by case, trainer, rank and steps that were skipped."""
    root, cases, keys = tmp_path_factory.mktemp("served"), list[dict[str, Any]](), list[Any]()

    def add(name: str, trainer: str, changes: dict[str, object], *skips: int) -> None:
        recipe = write(root / f"{name}-{trainer}".replace(" ", "-"), **changes)
        devices = load(recipe).devices
        for rank, skip in itertools.product(range(devices), skips):
            case = {"recipe": str(recipe), "trainer": trainer, "rank": rank, "ranks": devices}
            cases.append({**case, "skip": skip})
            keys.append((name, trainer, rank, skip))

    for name, changes in {**CASES, **RANKS, **ENDS_OF_DOCUMENTS}.items():
        if name not in ENDS_OF_DOCUMENTS:
            add(name, "ours", changes, 0, 4)
        masks = {"create_attention_mask": False, "create_compressed_eod_mask": False}
        masks |= {k: changes[CONFIG + k] for k in masks if CONFIG + k in changes}
        columns = str(produced(GptDatasetConfig(seq_length=16, **masks)))
        lines = {f"train_dataset__{k}": columns for k in ("input_columns", "construct_args_key")}
        if name in CASES:
            lines["lr_schedule__type"] = "TelechatDecayLR"
            lines["lr_schedule__auto_register"] = "telechat_moe_plugin.TelechatDecayLR"
        add(name, "theirs", changes | lines | THEIRS, 0)
    (root / "cases.json").write_text(json.dumps(cases))
    runs.run([sys.executable, str(CHILD), str(root / "cases.json"), str(root / "out.npz")], root)
    batches: list[list[dict[str, np.ndarray]]] = [[] for _ in cases]
    rates: dict[str, np.ndarray] = {}
    with np.load(root / "out.npz") as arrays:
        for name in arrays.files:
            case, step, *below = name.split(".")
            if not below:
                rates[case] = arrays[name]
                continue
            steps = batches[int(case)]
            steps.extend({} for _ in range(int(step) + 1 - len(steps)))
            steps[int(step)][below[0]] = arrays[name]
    return {
        key: (Path(case["recipe"]), batches[i], rates[str(i)])
        for i, (key, case) in enumerate(zip(keys, cases, strict=True))
    }


def expected_of(
    path: Path, rank: int, marks: bool, full_batch: bool = False
) -> list[dict[str, np.ndarray]]:
    """Return the batches of a rank, put together from those of `telechat-moe train`, which are micro-batches of all ranks."""
    recipe = load(path)
    with open_loader(recipe, marks=marks) as loader:
        parts = [{name: column.copy() for name, column in batch.items()} for batch in loader]
    count, rows = recipe.micro_batches, recipe.runner_config.batch_size
    first = mesh_of(recipe).index(rank, mesh_of(recipe).axes("dp")) * rows
    rank_rows = slice(None) if full_batch else slice(first, first + rows)
    steps = (parts[i : i + count] for i in range(0, len(parts), count))
    batches = [
        {name: np.concatenate([part[name][rank_rows] for part in step]) for name in step[0]}
        for step in steps
    ]
    for batch in batches:
        if "actual_seq_len" in batch:  # MindFormers puts the samples of a batch one after another
            ends = batch["actual_seq_len"]
            batch["actual_seq_len"] = ends + 16 * np.arange(len(ends), dtype=np.int32)[:, None]
    return batches


@pytest.mark.parametrize(
    ("name", "trainer"),
    [*itertools.product([*CASES, *RANKS], ["ours", "theirs"]), ("ends of documents", "theirs")],
)
def test_the_batches_of_each_process(served, name: str, trainer: str) -> None:
    ranks = [rank for case, kind, rank, skip in served if (case, kind, skip) == (name, trainer, 0)]
    for rank in ranks:
        path, batches, _ = served[name, trainer, rank, 0]
        # For our trainer's model MindFormers does as with Megatron's data, which it never reads whole.
        full_batch = "whole" in name and trainer == "theirs"
        expected = expected_of(path, rank, trainer == "ours" and "split" not in name, full_batch)
        assert len(batches) == len(expected) > 2
        for batch, columns in zip(batches, expected, strict=True):
            assert list(batch) == list(columns)
            for column, array in columns.items():
                assert batch[column].dtype == np.int32
                assert batch[column].shape == array.shape
                np.testing.assert_array_equal(batch[column], array, err_msg=f"{column} of {rank}")
    if ranks != [0]:  # the ranks do not all read the same, but where they read the whole batch
        first, last = (served[name, trainer, rank, 0][1][0]["input_ids"] for rank in (0, ranks[-1]))
        assert np.array_equal(first, last) == full_batch


@pytest.mark.parametrize("name", [*CASES, *RANKS])
def test_steps_that_are_skipped(served, name: str) -> None:
    """As MindFormers skips them where it resumes."""
    path, batches, _ = served[name, "ours", 0, 4]
    expected = expected_of(path, 0, "split" not in name)[4:]
    for batch, columns in zip(batches, expected, strict=True):
        for column, array in columns.items():
            np.testing.assert_array_equal(batch[column], array)


@pytest.mark.parametrize("trainer", ["ours", "theirs"])
@pytest.mark.parametrize("name", CASES)
def test_the_rate_of_each_step(served, name: str, trainer: str) -> None:
    """By the formula of the decay in float64, rounded once."""
    path, batches, rates = served[name, trainer, 0, 0]
    section, style = load(path).lr_schedule, load(path).telechat_moe.lr_wsd_decay_style
    step, end, peak = np.arange(len(rates)), len(batches), section.learning_rate
    left = LEFT[style](np.clip((step - 9) / (end - 9), 0, 1))
    rise = np.where(step < 5, peak * step / 5, peak)
    expected = np.where(step < 9, rise, section.lr_end + (peak - section.lr_end) * left)
    assert rates.dtype == np.float32
    np.testing.assert_allclose(rates, expected.astype(np.float32), rtol=1.2e-7, atol=0)
    assert len(rates) == end + 3
