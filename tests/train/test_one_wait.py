"""A step of our trainer waits for the device at one place, and fetches what it needs there."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ms = pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")
pytestmark = pytest.mark.mindspore

import key_effects
import mini_recipe as mini
import numpy as np

from telechat_moe.recipe import load
from telechat_moe.train import step
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.trainer import Trainer

FETCH = step.__file__, "_copy"
LAUNCH = "launch"


class Launches:
    """Stands for a step, or its cell for a micro-batch, and notes when it is called."""

    def __init__(self, cell: Any, events: list[object]) -> None:
        self.cell, self.events = cell, events

    def __call__(self, *args: Any) -> Any:
        self.events.append(LAUNCH)
        return self.cell(*args)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.cell, name)
        is_cell = name == "accumulate" and found is not None
        return Launches(found, self.events) if is_cell else found


def events_of(
    data: Path, output: Path, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> list[list[object]]:
    """Return launches of a graph and fetches (file and function) of each of three steps."""
    arguments = mini.arguments(data, output, **changes)
    trainer = Trainer(load(arguments[1], arguments[4::2], use="train"), plain=True)
    events: list[object] = []
    fetch = ms.Tensor.asnumpy

    def counted(self: ms.Tensor):
        frames = inspect.stack(context=0)[1:]
        where = next(f for f in frames if f.function not in ("<listcomp>", "<genexpr>"))
        events.append((where.filename, where.function))
        return fetch(self)

    trainer.engine.train_step = Launches(trainer.engine.train_step, events)
    found: list[list[object]] = []
    with Monitor(output, 3, 64, quiet=True) as monitor, trainer.loader:
        loop = trainer.loop(monitor)
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(ms.Tensor, "asnumpy", counted)
                loop.train_step()
            found.append(events[:])
            events.clear()
    return found


def test_the_loop_fetches_nothing_by_itself(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an engine that computes nothing, and spikes that are judged: four numbers a step, all by one function."""
    callers: list[str] = []

    def value(x: object) -> SimpleNamespace:
        def fetch() -> np.ndarray:
            callers.append(inspect.stack(context=0)[1].function)
            return np.asarray(x, np.float32)

        return SimpleNamespace(asnumpy=fetch)

    monkeypatch.setattr(key_effects, "_value", value)
    arguments = mini.arguments(data, tmp_path / "run")
    said = key_effects.run(load(arguments[1], arguments[4::2], use="train"))
    steps = [one for one in said if one[0] == "update"]
    assert len(steps) == mini.STEPS
    assert callers == ["_copy"] * 4 * mini.STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "launched"),
    [
        ({}, 1),
        (
            {
                "runner_config__gradient_accumulation_steps": 2,
                "model__model_config__calculate_per_token_loss": True,
            },
            2,
        ),
    ],
    ids=["plain", "micro-batches with weights of tokens"],
)
def test_a_step_waits_once(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    launched: int,
) -> None:
    """What is fetched before the first launch is on the host; after the last, all is fetched by one function."""
    if launched > 1:
        changes = {**changes, "callbacks__1__gradient_accumulation_steps": launched}
    steps = events_of(data, tmp_path / "run", monkeypatch, **changes)
    for events in steps[1:]:  # in the first MindSpore's compiler looks at constants
        first = events.index(LAUNCH)
        last = len(events) - 1 - events[::-1].index(LAUNCH)
        assert events[first : last + 1] == [LAUNCH] * launched
        assert set(events[last + 1 :]) == {FETCH}
        assert len(events) - last - 1 == 5  # losses, norm, applied, expert loads, dropped pairs
