"""Data in which the samples of chosen steps are noise, so that the loss jumps there."""

import itertools
from pathlib import Path

import mini_recipe as mini
import numpy as np

from telechat_moe.data import GptDataset, write_indexed
from telechat_moe.recipe import Recipe, load

LENGTH = 16  # of a document: that of a sample, so that a sample is one document and the next one's first token
BATCH = 4
STEPS = 80
SPIKE = 60


def write(folder: Path, steps: list[int], seed: int = 1) -> Path:
    """Write data for STEPS steps; the documents of some steps (from 1) are noise.

    Documents count upwards by one: easy to learn.
    """
    dice = np.random.default_rng(seed)
    count = STEPS * BATCH + 40
    documents = [(np.arange(LENGTH) + dice.integers(1, 64)) % 63 + 1 for _ in range(count)]
    path = folder / "train"
    for name in ("train", "valid"):
        write_indexed(folder / name, [d.astype(np.uint16) for d in documents], np.dtype(np.uint16))
    indices = GptDataset(path, LENGTH, STEPS * BATCH, 1234).indices
    for step in steps:
        for sample in range((step - 1) * BATCH, step * BATCH):
            place, begin = indices.samples[indices.shuffle[sample]]
            assert begin == 0
            documents[indices.documents[place]] = dice.integers(1, 64, LENGTH)
    write_indexed(path, [d.astype(np.uint16) for d in documents], np.dtype(np.uint16))
    return folder


def changes(**more: object) -> dict[str, object]:
    """Return what differs from the mini recipe."""
    return {
        "train_dataset__data_loader__sizes": f"[{STEPS * BATCH},0,0]",
        "callbacks__2__save_checkpoint_steps": 10,
        "callbacks__2__keep_checkpoint_max": 20,
        "lr_schedule__learning_rate": 0.01,
        **more,
    }


def recipe(data: Path, output: Path, **more: object) -> Recipe:
    """Return the recipe that ``mini.arguments`` would train."""
    words = mini.arguments(data, output, **changes(**more))
    overrides = [word for before, word in itertools.pairwise(words) if before == "--set"]
    return load(words[1], overrides=overrides)
