"""What is done beside the steps of a run: each callback is called after every step and does not know by whose loop.

:class:`telechat_moe.train.loop.Loop` calls them, and MindFormers' trainer (:mod:`telechat_moe.interop.mindformers_callbacks`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from telechat_moe.errors import CheckFailedError
from telechat_moe.moe.loads import LoadRecorder
from telechat_moe.train.guard import Guard, SkippedStep
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.step import StepOutput

Losses = tuple[float, Mapping[str, float]]
"""The loss on the validation data, and that of each source by its prefix; none where there is one only."""


class StepResult(NamedTuple):
    """A step that was computed.

    Attributes:
        last: Whether the run ends with it.
        tokens: Tokens that it learned from.
        losses: Next-token, MTP, balance and z-loss.
        norm: Global norm of the gradient before clipping.
        applied: Whether the weights were updated.
        seconds: Time of the step, data included.
        data_seconds: Time spent waiting for data.
        ids: Token ids of its micro-batches, where they are known.
    """

    step: int
    last: bool
    tokens: int
    output: StepOutput
    losses: tuple[float, float, float]
    norm: float
    applied: bool
    rate: float
    seconds: float
    data_seconds: float
    ids: Sequence[np.ndarray] = ()

    @property
    def loss(self) -> float:
        """Total loss, nats: next-token, MTP and auxiliary terms."""
        lm, mtp, aux = self.losses
        return lm + mtp + aux


class Callback(Protocol):
    """Something that is done after each step."""

    def step_end(self, result: StepResult) -> None:
        """Act on a step."""
        ...


@dataclass
class StepMetrics:
    """Show and record each step; ``sources`` are the prefixes of the training data."""

    monitor: Monitor
    sources: Sequence[str] = ()

    def step_end(self, result: StepResult) -> None:
        """Record losses, balance of the experts, and experts that moved."""
        lm, mtp, aux = result.losses
        imbalance, dropped = _balance(result.output)
        self.monitor.tokens_per_step = result.tokens
        self.monitor.step(
            result.step,
            loss=result.loss,
            lm_loss=lm,
            mtp_loss=mtp,
            aux_loss=aux,
            grad_norm=result.norm,
            learning_rate=result.rate,
            seconds=result.seconds,
            data_seconds=result.data_seconds,
            skipped=not result.applied,
            expert_load_max_over_mean=max(imbalance, default=None),
            expert_load_by_layer=imbalance or None,
            drop_rate=dropped,
            by_source=self._by_source(result.output),
        )
        for record in result.output.moves:
            self.monitor.moved(result.step, record)

    def _by_source(self, output: StepOutput) -> dict[str, tuple[float, int]]:
        """Return next-token loss and tokens of each source in a step, by its prefix; none where there is one."""
        if output.by_source is None:
            return {}
        sums = zip(self.sources, *output.by_source.tolist(), strict=True)
        return {name: (loss / tokens, round(tokens)) for name, loss, tokens in sums if tokens}


def _balance(output: StepOutput) -> tuple[list[float], float | None]:
    """Return max over mean expert load of each MoE layer, and the share of pairs dropped."""
    load_LE = output.load_LE
    if load_LE.ndim != 2 or not load_LE.sum():
        return [], 0.0
    by_layer = [round(float(x), 4) for x in load_LE.max(1) / load_LE.mean(1)]
    if output.dropped is None:
        return by_layer, None
    return by_layer, float(output.dropped[0]) / float(load_LE.sum())


@dataclass
class ExpertLoads:
    """Record the load of every expert where it is due, and how long that takes."""

    monitor: Monitor
    recorder: LoadRecorder

    def step_end(self, result: StepResult) -> None:
        """Add the loads of a step."""
        began = time.perf_counter()
        record = self.recorder.add(result.step, result.output.load_LE)
        if record is not None:
            self.monitor.expert_loads(result.step, record)
        self.recorder.seconds += time.perf_counter() - began


class StepCounters(Protocol):
    """Counters of a run: its skipped steps, and those since the last update."""

    skipped: int
    skipped_in_a_row: int


@dataclass
class SkippedSteps:
    """Judge each step; count and report those that were skipped, and stop after too many in a row.

    Attributes:
        limit: Steps in a row that may be skipped, and the key that says so.
        culprit: Names the tensor from which NaN or Inf came into a step.
        checkpoints: Folder that a message names.
        spike: What was wrong with the last step; None: its update was applied.
    """

    limit: tuple[int, str]
    guard: Guard
    counters: StepCounters
    monitor: Monitor
    culprit: Callable[[StepOutput], str]
    checkpoints: Path
    spike: SkippedStep | None = None

    def step_end(self, result: StepResult) -> None:
        """Raise CheckFailedError if more steps in a row were skipped than are allowed."""
        step, counters, (limit, key) = result.step, self.counters, self.limit
        self.spike = self.guard.judge(step, result.loss, result.norm, result.applied)
        if self.spike is None:
            counters.skipped_in_a_row = 0
            return
        counters.skipped += 1
        counters.skipped_in_a_row += 1
        is_finite = self.spike.limit is not None
        reason = self.spike.describe() if is_finite else self.culprit(result.output)
        self.monitor.skipped(step, self.spike.numbers(), reason)
        if counters.skipped_in_a_row > limit:
            raise CheckFailedError(
                f"stopped at step {step}: {counters.skipped_in_a_row} steps in a row had a "
                f"loss or gradient that is not finite or too high ({key} is {limit}); "
                f"{reason}. Checkpoints in {self.checkpoints} are from before; look at the data and "
                "the learning rate around this step"
            )


@dataclass
class PeriodicEvaluation:
    """Evaluate every ``interval`` steps and after the last; 0: never. ``loss`` is the newest, nats per token."""

    monitor: Monitor
    interval: int
    evaluate: Callable[[], Losses]
    loss: float | None = None

    def begin(self, step: int) -> None:
        """Evaluate what a run begins with."""
        if self.interval and step == 0:
            self.monitor.evaluation(0, *self.evaluate())

    def is_due(self, step: int) -> bool:
        """Return whether it evaluates after a step, be it the last or not."""
        return self.interval > 0 and step % self.interval == 0

    def step_end(self, result: StepResult) -> None:
        """Evaluate where that is due."""
        if self.interval and (self.is_due(result.step) or result.last):
            self.loss, by_source = self.evaluate()
            self.monitor.evaluation(result.step, self.loss, by_source)
