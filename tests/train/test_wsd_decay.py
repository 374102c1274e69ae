"""How the rate of WSD falls: closed formulas in float64, and that it reaches its end, 0 included."""

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from telechat_moe.recipe import RecipeError, load
from telechat_moe.train import schedule

TINY = "telechat3_moe/pretrain_tiny.yaml"
WSD = ("lr_schedule.type=WarmUpStableDecayLR", "lr_schedule.decay_start_steps=600")
QUARTER = {"linear": 0.75, "cosine": 0.8536, "exponential": 0.6818, "minus_sqrt": 0.5}
"""What is left after a quarter of the decay (Megatron-LM, `optimizer_param_scheduler.py`)."""


def formula(style: str, t: np.ndarray) -> np.ndarray:
    return {
        "linear": 1.0 - t,
        "cosine": (np.cos(np.pi * t) + 1.0) / 2.0,
        "exponential": 2.0 * np.exp2(-t) - 1.0,
        "minus_sqrt": 1.0 - t**0.5,
    }[style]


@pytest.mark.parametrize("end", [0.0, 3e-5])
@pytest.mark.parametrize("style", QUARTER)
def test_decay_of_a_recipe(style: str, end: float) -> None:
    sets = [*WSD, f"lr_schedule.lr_end={end:.1e}", f"telechat_moe.lr_wsd_decay_style={style}"]
    rate = schedule.from_recipe(load(TINY, sets))
    assert rate(50) == pytest.approx(1.5e-3)
    assert rate(100) == rate(599) == 3e-3
    assert (rate(700) - end) / (3e-3 - end) == pytest.approx(QUARTER[style], abs=5e-5)
    steps = np.arange(600, 1001)
    expected = end + (3e-3 - end) * formula(style, (steps - 600) / 400)
    np.testing.assert_allclose(
        [rate(step) for step in steps.tolist()], expected, rtol=1e-12, atol=1e-18
    )
    assert rate(1000) == rate(2000) == pytest.approx(end, abs=1e-18)


def test_other_schedules_refuse_a_style() -> None:
    with pytest.raises(RecipeError, match=r"cosine with CosineWithWarmUpLR.*WarmUpStableDecayLR"):
        load(TINY, ["telechat_moe.lr_wsd_decay_style=cosine"])
