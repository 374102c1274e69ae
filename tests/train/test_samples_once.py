"""Runs that go on with other batches, epochs and schedules, and go back: which samples they read, and at which rate.

The product's own loop, checkpoints, log and audit, with an engine that computes no model, against a model of samples and rates
that is written here and counts them one by one.
"""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

import key_effects
import mini_recipe as mini
import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from telechat_moe.checkpoint import checkpoint
from telechat_moe.data.audit import audit
from telechat_moe.data.recipe import open_recipe
from telechat_moe.recipe import Recipe, load
from telechat_moe.train import guard, preflight, run_state, schedule
from telechat_moe.train.loop import Loop
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.ranks import RankCoordinator

PEAK, WARMUP, EVERY = 3e-3, 2, 3
MIXTURE = "[{from_sample: 0, weights: [3, 1]}, {from_sample: 5, weights: [0, 1]}]"


@dataclass(frozen=True)
class Leg:
    """What a process does until it is stopped, or to the end of the run."""

    rows: int
    micro_batches: int
    grows_at: (
        int | None
    )  # consumed samples from which a step has all micro-batches; before it has one
    epochs: int
    stop_after: int | None
    spikes: frozenset[int]  # which of its steps have a loss that is not finite

    def batch(self, consumed: int) -> int:
        """Return the samples of the step that begins after so many."""
        grown = self.grows_at is None or consumed >= self.grows_at
        return self.rows * (self.micro_batches if grown else 1)

    @property
    def unit(self) -> int:
        """Samples of which none is of another epoch."""
        return self.rows if self.grows_at is not None else self.rows * self.micro_batches


legs = st.lists(
    st.builds(
        Leg,
        rows=st.integers(1, 3),
        micro_batches=st.integers(2, 3),
        grows_at=st.one_of(st.none(), st.integers(1, 20)),
        epochs=st.integers(1, 3),
        stop_after=st.integers(1, 12),
        spikes=st.frozensets(st.integers(2, 12), max_size=2),
    ),
    min_size=1,
    max_size=4,
)


# ------------------------------------------------------------------------------------------ the model


@dataclass
class Place:
    """Where a run is."""

    epoch: int = 0
    sample: int = 0
    step: int = 0
    consumed: int = 0
    applied: int = 0


@dataclass
class Run:
    """A run, sample by sample: of each step that counts its samples as (epoch, sample), and its rate."""

    size: int
    place: Place = field(default_factory=Place)
    steps: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    left_out: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    saved: dict[int, Place] = field(default_factory=dict)

    def take(self, leg: Leg, count: int) -> list[tuple[int, int]] | None:
        """Return the next samples and move behind them; None: the run ends before."""
        epoch, sample = self.place.epoch, self.place.sample
        taken: list[tuple[int, int]] = []
        for _ in range(count // leg.unit):
            if self.size - sample < leg.unit:
                epoch, sample = epoch + 1, 0
            if epoch >= leg.epochs:
                return None
            taken += [(epoch, sample + i) for i in range(leg.unit)]
            sample += leg.unit
        self.place = replace(self.place, epoch=epoch, sample=sample)
        return taken

    def do(self, leg: Leg, first: Leg) -> None:
        """Do the steps of a leg; rates count in steps of the first one."""
        for number in range(1, leg.stop_after + 1 if leg.stop_after else 10**6):
            before, batch = self.place, leg.batch(self.place.consumed)
            taken = self.take(leg, batch)
            if taken is None:
                break
            good = number not in leg.spikes
            place = replace(self.place, step=before.step + 1, consumed=before.consumed + batch)
            self.place = replace(place, applied=before.applied + good * batch)
            self.steps[place.step] = taken
            self.rates[place.step] = rate(before.applied, leg, first, self.size)
            earlier = [step for step in self.saved if step < place.step]
            if not good and earlier:
                self.go_back(max(earlier))
            elif place.step % EVERY == 0:
                self.saved[place.step] = self.place
            if replace(self).take(leg, leg.batch(self.place.consumed)) is None:
                break
        self.saved[self.place.step] = self.place

    def go_back(self, step: int) -> None:
        """Go back to a checkpoint, without the samples in between."""
        now, then = self.place, self.saved[step]
        self.left_out.append(((then.epoch, then.sample), (now.epoch, now.sample)))
        self.place = replace(then, epoch=now.epoch, sample=now.sample)
        self.saved = {s: p for s, p in self.saved.items() if s <= step} | {step: self.place}
        self.forget()

    def forget(self) -> None:
        """Forget the steps that do not count."""
        self.steps = {s: x for s, x in self.steps.items() if s <= self.place.step}
        self.rates = {s: x for s, x in self.rates.items() if s <= self.place.step}


def rate(applied: int, leg: Leg, first: Leg, size: int) -> float:
    """Return the cosine after so many samples; the first leg's steps are its measure."""
    run, total = Run(size), 0
    whole = replace(first, epochs=leg.epochs)
    consumed = [0]
    while run.take(whole, batch := whole.batch(consumed[-1])):
        consumed.append(consumed[-1] + batch)
        total += 1
    while consumed[-1] <= applied:
        consumed.append(consumed[-1] + whole.batch(consumed[-1]))
    step = sum(c <= applied for c in consumed) - 1
    at = step + (applied - consumed[step]) / (consumed[step + 1] - consumed[step])
    if at >= max(1, total):
        return 0.0
    if at < WARMUP:
        return PEAK * at / WARMUP
    return PEAK * max(0, 0.5 * (1 + math.cos(math.pi * (at - WARMUP) / max(1, total - WARMUP))))


# ---------------------------------------------------------------------------------------- the product


class Engine(key_effects.Recorder):
    """Computes nothing, and saves one number; keeps the token ids of every step."""

    def __init__(
        self, recipe: Recipe, leg: Leg, ranks: RankCoordinator, seen: list[np.ndarray]
    ) -> None:
        super().__init__(recipe, [])
        self.leg, self.ranks, self.seen, self.updates = leg, ranks, seen, 0

    def read(self, columns: Any, micro_batches: int) -> list[Any]:
        """Read the micro-batches of a step."""
        batches = [next(columns)["input_ids"].copy() for _ in range(micro_batches)]
        self.seen.append(np.concatenate(batches))
        return [(key_effects._value(ids),) for ids in batches]

    def launch(
        self, batches: Any, number: int, rate: float, limits: Any, before: None
    ) -> key_effects.RunningStep:
        """Take a step, of which some are not finite, and stop after the last one."""
        self.updates += 1
        if self.updates == self.leg.stop_after:
            self.ranks.interrupt()
        good, x = self.updates not in self.leg.spikes, key_effects._value
        output = (x([4.0 if good else math.nan, 0, 0]), x(1.0), None, x(good), x([[1.0]]), None)
        return key_effects.RunningStep(*output)

    def put(self, saved: Any, in_place: bool = False) -> str:
        """Take a checkpoint."""
        return ""

    def writer(self, root: Path, step: int, given: Any, keep_last: Any) -> Any:
        """Return a function that writes one."""
        tensors = {"model": {"w": np.zeros(1, np.float32)}}
        return lambda groups, copied: checkpoint.save(root, step, tensors, given)


class Saver(key_effects.FakeSaver):
    """Saves at once."""

    def __init__(self, sources: Any, **options: Any) -> None:
        pass

    def save(self, what: str, write: Any) -> None:
        """Save."""
        write({}, None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Recipe]:
    """Return the recipe of one source, or of a mixture."""
    root = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("web", "code")):
        (root / name).mkdir()
        mini.write_data(root / name, seed=seed)
    more: dict[str, object] = {
        "telechat_moe__loss_guard": "{action: rollback, max_rollbacks: 100, window: 5, min_steps: 5}",
        "telechat_moe__max_skipped_steps": 100,
        "callbacks__2__save_checkpoint_steps": EVERY,
        "callbacks__2__keep_checkpoint_max": 100,
        "lr_schedule__learning_rate": PEAK,
        "lr_schedule__lr_end": 0.0,
        "lr_schedule__warmup_steps": WARMUP,
    }
    mixed = {
        "train_dataset__data_loader__config__data_path": f"['{root}/web/train', '{root}/code/train']",
        "telechat_moe__mixture": MIXTURE,
    }
    found: dict[bool, Recipe] = {}
    for mixture in (False, True):
        words = mini.arguments(root / "web", root, **more, **(mixed if mixture else {}))
        found[mixture] = load(words[1], words[4::2])
    return found.__getitem__


def recipe_of(base: Recipe, leg: Leg, size: int, output: Path) -> Recipe:
    runner = replace(
        base.runner_config,
        batch_size=leg.rows,
        gradient_accumulation_steps=leg.micro_batches,
        epochs=leg.epochs,
    )
    loader = replace(base.train_dataset.data_loader, sizes=[size, 0, 0])
    own = base.telechat_moe
    if leg.grows_at is not None:
        batches = f"0:{leg.rows} {16 * leg.grows_at}:{leg.rows * leg.micro_batches}"
        own = replace(own, step_batch_size_schedule=batches)
    return replace(
        base,
        runner_config=runner,
        train_dataset=replace(base.train_dataset, data_loader=loader),
        telechat_moe=own,
        output_dir=str(output),
    )


def train(recipe: Recipe, leg: Leg, resume: bool) -> list[np.ndarray]:
    """Train in one process; return the token ids of all its steps."""
    seen, ranks = list[np.ndarray](), RankCoordinator()
    ready = preflight.require(recipe, resume=resume)
    with ready.loader as loader:
        engine: Any = Engine(recipe, leg, ranks, seen)
        state = run_state.RunState(recipe, engine, loader, guard.of_recipe(recipe), ranks)
        if ready.start.kind == "resume":
            state.resume(ready.start)
        done = state.step
        monitor = Monitor(Path(recipe.output_dir), 0, 0, done, quiet=True, tensorboard=False)
        rates = schedule.from_recipe(recipe, state.lr_batches)
        Loop(state, rates, monitor).run()
        monitor._metrics.close()
    return seen


def logged(output: Path, event: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = map(json.loads, (output / file).read_text().splitlines())
    return [line for line in lines if line["event"] == event]


@given(
    legs=legs,
    size=st.integers(10, 40),
    mixture=st.booleans(),
    more_epochs=st.integers(0, 1),
)
@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
def test_every_sample_once_and_the_rate_of_its_place(
    base: Callable[[bool], Recipe], legs: list[Leg], size: int, mixture: bool, more_epochs: int
) -> None:
    """However a run is stopped and goes on, and wherever it goes back."""
    most = max(leg.epochs for leg in legs)
    legs = [replace(leg, epochs=min(most, 1 + n)) for n, leg in enumerate(legs)]  # never fewer
    last = replace(legs[-1], stop_after=None, epochs=legs[-1].epochs + more_epochs)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(run_state, "Saver", Saver)
        output, run = Path(folder) / "run", Run(size)
        for number, leg in enumerate([*legs, last]):
            recipe = recipe_of(base(mixture), leg, size, output)
            begun = len(logged(output, "step", "samples.jsonl")) if number else 0
            seen = train(recipe, leg, resume=number > 0)
            run.do(leg, legs[0])
            new = logged(output, "step", "samples.jsonl")[begun:]
            dataset = open_recipe(recipe)
            for line, ids in zip(new, seen, strict=True):
                places = np.arange(line["first"], line["first"] + line["count"])
                if places[-1] // size == places[0] // size:
                    np.testing.assert_array_equal(ids, dataset.batch(places % size)["input_ids"])
            found = audit(output, recipe)
            assert found.problems == []
        by_step = {line["step"]: line for line in logged(output, "step", "samples.jsonl")}
        first = {step: divmod(line["first"], size) for step, line in by_step.items()}
        assert {s: x for s, x in first.items() if s in run.steps} == {
            step: taken[0] for step, taken in run.steps.items()
        }
        assert {s: by_step[s]["count"] for s in run.steps} == {
            step: len(taken) for step, taken in run.steps.items()
        }
        rates = {r["step"]: r["learning_rate"] for r in logged(output, "step")}
        assert rates == pytest.approx(run.rates, rel=1e-12, abs=1e-15)
    read = [sample for taken in run.steps.values() for sample in taken]
    assert len(read) == len(set(read)) == found.samples
    assert found.to_come == 0
    out = {n for a, b in run.left_out for n in range(a[0] * size + a[1], b[0] * size + b[1])}
    assert not out & {epoch * size + sample for epoch, sample in read}
    missing = last.epochs * size - len(read) - len(out)
    assert 0 <= missing < last.epochs * max(leg.rows * leg.micro_batches for leg in legs)
    assert max(epoch for epoch, _ in read) < last.epochs


def test_unchanged_settings_keep_the_last_bit_of_the_rate(base: Callable[[bool], Recipe]) -> None:
    """The rate of a step is that of its number, as before samples were counted."""
    leg = Leg(3, 3, None, 2, None, frozenset())
    recipe = recipe_of(base(False), leg, 100, Path("nowhere"))
    rates, batches = schedule.from_recipe(recipe), recipe.batches
    for step in range(recipe.train_steps):
        assert rates(batches.position(step * 9)) == rates(step)
        assert isinstance(batches.position(step * 9), int)
