"""Learning rates against MindFormers' classes of the same name, step by step."""

import numpy as np
import pytest

pytest.importorskip("mindformers", reason="mindformers is not installed (extra `mindformers`)")
pytestmark = pytest.mark.mindformers

import mindspore as ms
from mindformers.core.lr import lr_schedule as theirs

from telechat_moe.train import schedule

TOTAL = 40


def rates(cell: object) -> np.ndarray:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        steps = [ms.Tensor(step, ms.float32) for step in range(TOTAL)]
        return np.array([float(cell.construct(step)) for step in steps])
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)


CASES = {
    "constant": (
        schedule.constant(3e-4, 10),
        theirs.ConstantWarmUpLR(learning_rate=3e-4, warmup_steps=10, total_steps=TOTAL),
    ),
    "constant, start above 0": (
        schedule.constant(3e-4, 10, 1e-4),
        theirs.ConstantWarmUpLR(
            learning_rate=3e-4, warmup_steps=10, warmup_lr_init=1e-4, total_steps=TOTAL
        ),
    ),
    "cosine": (
        schedule.cosine(3e-4, 1e-5, 7, TOTAL),
        theirs.CosineWithWarmUpLR(
            learning_rate=3e-4, lr_end=1e-5, warmup_steps=7, total_steps=TOTAL
        ),
    ),
    "cosine, ends early": (
        schedule.cosine(3e-4, 1e-5, 0, TOTAL, decay_steps=30),
        theirs.CosineWithWarmUpLR(
            learning_rate=3e-4, lr_end=1e-5, warmup_steps=0, total_steps=TOTAL, decay_steps=30
        ),
    ),
    "warm-up, stable, decay": (
        schedule.warmup_stable_decay(3e-4, 1e-5, 5, 25, TOTAL),
        theirs.WarmUpStableDecayLR(
            learning_rate=3e-4, lr_end=1e-5, warmup_steps=5, decay_start_steps=25, total_steps=TOTAL
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_mindformers_at_every_step(name: str) -> None:
    ours, cell = CASES[name]
    np.testing.assert_allclose([ours(step) for step in range(TOTAL)], rates(cell), rtol=2e-6)


def test_wsd_stays_at_its_end() -> None:
    assert schedule.warmup_stable_decay(3e-4, 1e-5, 5, 25, 40)(100) == pytest.approx(1e-5)
