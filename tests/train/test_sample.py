"""Drawing tokens."""

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from telechat_moe.train.sample import draw


def test_temperature_0_takes_the_most_probable() -> None:
    logits = np.array([0.0, 3.0, 2.9], np.float32)
    assert draw(logits, 0.0, 3, np.random.default_rng(0)) == 1


def test_draws_follow_the_softmax_of_the_best() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    generator = np.random.default_rng(0)
    drawn = np.bincount([draw(logits, 1.0, 2, generator) for _ in range(20000)], minlength=4)
    # Five standard deviations around 3/7 and 4/7 of 20,000.
    np.testing.assert_allclose(drawn / 20000, [0, 0, 3 / 7, 4 / 7], atol=5 * 0.5 / 20000**0.5)
