"""The steps of one process: train, evaluate, save, until the last or until interrupted."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from telechat_moe.checkpoint import checkpoint
from telechat_moe.checkpoint.background import Saver
from telechat_moe.data.recipe import sources_of
from telechat_moe.interruption import can_stop
from telechat_moe.moe.loads import LoadRecorder
from telechat_moe.sharding.recipe import mesh_of
from telechat_moe.timings import StepTimer
from telechat_moe.train.callbacks import (
    Callback,
    ExpertLoads,
    Losses,
    PeriodicEvaluation,
    SkippedSteps,
    StepMetrics,
    StepResult,
)
from telechat_moe.train.guard import Limits, SkippedStep, max_in_a_row
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.run_state import RunState
from telechat_moe.train.schedule import RateSchedule
from telechat_moe.train.step import RunningStep, StepOutput


@dataclass(kw_only=True)
class Summary:
    """The result of a run; ``summary.json`` and ``telechat-moe train --json``.

    Attributes:
        finished: All steps of the recipe are done (False: interrupted).
        steps: Steps done, those before a resume included.
        skipped_steps: Steps skipped because loss or gradient was not finite.
        train_loss: Mean next-token loss of the last 20 steps, nats per token.
        validation_loss: Last evaluation, nats per token; None without evaluation.
        first_loss: Next-token loss of this process's first step.
        parameters: Trainable parameters.
        tokens_per_second: Median over this process's steps, without evaluation and saving.
        data_share: Share of the step time spent waiting for data.
        first_step_seconds: First step, compilation of the graph included.
        seconds: This process's training loop, everything included.
        checkpoint: Newest checkpoint, relative to ``output_dir``.
        save_stall_ms: How long a checkpoint paused training, milliseconds; median over this process's.
    """

    finished: bool
    steps: int
    skipped_steps: int
    train_loss: float | None
    validation_loss: float | None
    first_loss: float | None
    parameters: int
    tokens_per_second: float | None
    data_share: float | None
    first_step_seconds: float | None
    seconds: float
    checkpoint: str | None
    save_stall_ms: float | None = None


class LaunchedStep(NamedTuple):
    """A step that was given to the device.

    Attributes:
        next_sample: Where the loader was before it read the step's data.
        samples: How many it has.
        ids: Their token ids by micro-batch.
        order: How they were dealt; None: in their own order.
        limits: Gradient norm and loss must be below these.
        began: When the host began to read its data.
        waited: How long that took, seconds.
    """

    step: int
    next_sample: int
    samples: int
    ids: Sequence[np.ndarray]
    order: np.ndarray | None
    rate: float
    limits: Limits
    running: RunningStep
    began: float
    waited: float


class Loop:
    """The steps of one process: they advance the state of the run, and the monitor shows it.

    While a device computes a step the host launches the next one; then it waits for the first. What a step's update depends on
    is exact nevertheless: of the step before it only whether that update was applied can be unknown, and if it was not, the
    graph applies none (:func:`telechat_moe.train.step.limit_tensors`) and the step is run again.

    Attributes:
        running: The step that the device computes while the host does something else.
        ended: When the last step ended.
    """

    def __init__(
        self,
        state: RunState,
        schedule: RateSchedule,
        monitor: Monitor,
        timer: StepTimer | None = None,
    ) -> None:
        self.state, self.schedule, self.monitor = state, schedule, monitor
        self.recipe, self.timer = state.recipe, timer or StepTimer()
        self.sources = sources_of(self.recipe)
        self.steps = state.step + state.steps_left
        settings, limit = self.recipe.telechat_moe, max_in_a_row(self.recipe)
        self.loads = LoadRecorder(settings.moe.load_interval, self.steps)
        judged = (limit, state.guard, state, monitor, state.engine.culprit, state.root)
        self.skipped = SkippedSteps(*judged)
        self.evaluation = PeriodicEvaluation(monitor, settings.evaluation.interval, self.evaluate)
        loads, metrics = ExpertLoads(monitor, self.loads), StepMetrics(monitor, self.sources)
        self.callbacks: list[Callback] = [metrics, loads, self.skipped]
        self.began = time.perf_counter()
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.tokens_per_second: list[float] = []
        self.data_seconds: list[float] = []
        self.running: LaunchedStep | None = None
        self.ended = -math.inf
        self.saved_step: int | None = None
        self.stalls_ms: list[float] = []

    def run(self) -> None:
        """Run the remaining steps with their evaluations and checkpoints; the last one is complete then."""
        state, saver = self.state, self.state.saver if self.recipe.checkpoints else None
        if saver is not None:
            saver.say = self.monitor.message
        data, section = state.loader.state(), self.recipe.train_dataset.data_loader.config
        assert section is not None  # the loader was opened from it
        self.monitor.begin(
            {
                "step": state.step,
                **{k: data[k] for k in ("next_sample", "samples_per_epoch", "earlier_samples")},
                **self._sources(),
                "global_batch": self.recipe.global_batch,
                "unit": state.loader.epochs.unit,
                "dataset": data["dataset"],
                "data_path": section.data_path or section.train_data_path,
                **state.origin,
                "layout": mesh_of(self.recipe).describe(),
                "rollbacks": state.rollbacks,
            }
        )
        try:
            self._steps(saver)
        except Exception:
            if saver is not None:
                saver.abandon()
            raise
        if saver is not None:
            saver.wait(last=True)

    def _sources(self) -> dict[str, Any]:
        """Return the sources of the training data for the log, where there are several."""
        if (blend := self.state.loader.blend) is None:
            return {}
        mixture = self.state.loader.past(len(blend))
        return {"sources": self.sources} | ({} if mixture is None else {"mixture": mixture})

    def _steps(self, saver: Saver | None) -> None:
        state, section = self.state, self.recipe.checkpoints
        self.evaluation.begin(state.step)
        while self.running or (state.step < self.steps and not state.ranks.interrupted):
            result = self.train_step()
            spike = self.skipped.spike
            if state.ranks.leads:
                can_stop()  # there is something to save now
            if saver is not None:
                saver.poll()
            went_back = spike is not None and state.guard.rolls_back and self.roll_back(spike)
            last = state.step == self.steps
            if went_back and not last:
                continue
            self.timer.lap("host")
            self.evaluation.step_end(result._replace(step=state.step, last=last))
            self.timer.lap("evaluation")
            if section and (state.step % section.save_checkpoint_steps == 0 or last):
                self.save()
            self.timer.lap("save")
            self.timer.finish(state.step, state.engine.rows(result.output.load_LE))
        if state.ranks.interrupted and state.step < self.steps:
            line = f"interrupted after step {state.step}; this recipe saves no checkpoints"
            if saver is not None:
                self.save()
                saver.wait(last=True)
                line = f"interrupted: saved step {state.step}; continue with --resume"
            self.monitor.message(line)

    def evaluate(self) -> Losses:
        """Return the loss on the validation data, and by source."""
        self.state.ranks.at(f"step {self.state.step}, evaluating")
        return self.state.engine.evaluate()

    def save(self) -> None:
        """Save unless this step is saved already."""
        if self.saved_step != self.state.step:
            began = time.perf_counter()
            self.state.save(self.monitor.sync)
            self.stalls_ms.append((time.perf_counter() - began) * 1e3)
            self.saved_step = self.state.step
            self.monitor.saved(self.saved_step, self.stalls_ms[-1])

    def roll_back(self, spike: SkippedStep) -> bool:
        """Go back before a spike; False if there is no checkpoint to go back to."""
        if (record := self.state.roll_back(spike)) is None:
            line = f"no checkpoint before step {spike.step} to go back to; it is skipped"
            self.monitor.message(line)
            return False
        self.saved_step = record["to_step"]
        self.loads.clear()
        before, self.steps = self.steps, self.state.step + self.state.steps_left
        self.loads.last = self.monitor.total_steps = self.steps
        begin, end = record["left_out"]
        self.monitor.rolled_back(
            record,
            f"went back from step {spike.step} to the checkpoint of step {self.saved_step}: {spike.describe()}; "
            f"samples {begin} to {end - 1} are left out, so its epochs end at step {self.steps} instead of {before}",
        )
        return True

    def launch(self) -> LaunchedStep:
        """Read the data of the next step and give it to the device; a step that it still computes counts as applied."""
        state, recipe, before = self.state, self.recipe, self.running
        loader, began = state.loader, time.perf_counter()
        ahead = 0 if before is None else before.samples
        step = state.step + 1 + (before is not None)
        rate = self.schedule(state.lr_batches.position(state.applied_samples + ahead))
        state.ranks.at(f"step {step}, reading data")
        self.timer.lap("host")
        next_sample = loader.next_sample
        samples = recipe.batches.after(state.samples + ahead)
        batches = state.engine.read(loader, recipe.micro_batches * samples // recipe.global_batch)
        waited = time.perf_counter() - began
        self.timer.lap("data")
        state.ranks.begin_step(step, int(state.engine.runs_ahead))
        ids = [batch[0].asnumpy() for batch in batches]  # before the step has them
        limits = state.guard.limits() if before is None else state.guard.limits_ahead()
        state.ranks.at(f"step {step}, in the graph")
        number = state.updates + 1 + (before is not None)
        behind = None if before is None else before.running
        running = state.engine.launch(batches, number, rate, limits, behind)
        data = (next_sample, samples, ids, loader.order)
        return LaunchedStep(step, *data, rate, limits, running, began, waited)

    def compute_step(self) -> StepResult:
        """Run the next step; nothing is judged or reported."""
        return self._advance()[1]

    def _advance(self) -> tuple[LaunchedStep, StepResult]:
        """Run the next step, and launch the one after it where nothing is to be done between them."""
        launched = self.running = self.running or self.launch()
        following = self.launch() if self._may_launch_after(launched) else None
        self.state.ranks.at(f"step {launched.step}, in the graph")
        output = launched.running.fetch()
        self.running = following
        if not output.applied:
            if following is not None:
                self._forget(following)
            if launched.limits != self.state.guard.limits():
                # They were set before the step before it was known, and may have been too low.
                self._forget(launched)
                retried = self.launch()
                waited = launched.waited + retried.waited
                self.running = retried._replace(began=launched.began, waited=waited)
                return self._advance()
        return launched, self._result(launched, self.state.engine.after_step(output))

    def _may_launch_after(self, launched: LaunchedStep) -> bool:
        """Return whether the next step may be launched while one is running: nothing else uses the weights between them."""
        state, step, section = self.state, launched.step, self.recipe.checkpoints
        saves = section is not None and step % section.save_checkpoint_steps == 0
        following = self.recipe.batches.after(state.samples + launched.samples)
        return (
            state.engine.runs_ahead
            and step < self.steps
            and following
            == launched.samples  # else it has another graph, to which the weights move
            and not state.ranks.is_last(step)
            and not saves
            and not self.evaluation.is_due(step)
            and not state.engine.acts_after_step()
        )

    def _forget(self, launched: LaunchedStep) -> None:
        """Forget a step whose update was not applied, to read its data again."""
        self.running = None
        self.state.loader.seek(launched.next_sample)

    def _result(self, launched: LaunchedStep, output: StepOutput) -> StepResult:
        """Count a step that has ended."""
        state, recipe, step = self.state, self.recipe, launched.step
        lm, mtp, aux = (float(x) for x in output.losses)
        norm, applied = float(output.norm), bool(output.applied)
        ended = time.perf_counter()
        seconds, self.ended = ended - max(launched.began, self.ended), ended
        self.timer.lap("graph")
        state.ranks.end_step(step)
        state.step, state.samples = step, state.samples + launched.samples
        state.updates += applied
        state.applied_samples += applied * launched.samples
        tokens, last = launched.samples * recipe.model_config.seq_length, step == self.steps
        losses, times = (lm, mtp, aux), (seconds, launched.waited)
        return StepResult(
            step, last, tokens, output, losses, norm, applied, launched.rate, *times, launched.ids
        )

    def train_step(self) -> StepResult:
        """Run one step and report it."""
        launched, result = self._advance()
        loader, count = self.state.loader, launched.samples
        first = loader.epochs.begin(launched.next_sample)
        sources, order = loader.counts(first, count), launched.order
        samples = (first, count, launched.ids, result.applied, order, sources)
        self.monitor.samples(launched.step, *samples)
        self.tokens_per_second.append(result.tokens / result.seconds)
        self.losses.append(result.losses[0])
        self.step_seconds.append(result.seconds)
        self.data_seconds.append(result.data_seconds)
        for callback in self.callbacks:
            callback.step_end(result)
        return result

    def summary(self) -> Summary:
        """Return the result of the run, as far as it got."""
        state, root = self.state, self.state.root
        steady = self.step_seconds[1:] or self.step_seconds
        speeds = self.tokens_per_second[1:] or self.tokens_per_second
        newest = checkpoint.list_checkpoints(root)
        last = [x for x in self.losses[-20:] if np.isfinite(x)]
        return Summary(
            finished=state.step >= self.steps,
            steps=state.step,
            skipped_steps=state.skipped,
            train_loss=float(np.mean(last)) if last else None,
            validation_loss=self.evaluation.loss,
            first_loss=self.losses[0] if self.losses else None,
            parameters=state.engine.parameter_count,
            tokens_per_second=float(np.median(speeds)) if speeds else None,
            data_share=sum(self.data_seconds[1:]) / sum(steady) if len(steady) > 1 else None,
            first_step_seconds=self.step_seconds[0] if self.step_seconds else None,
            seconds=time.perf_counter() - self.began,
            checkpoint=str(newest[0].relative_to(root.parent)) if newest else None,
            save_stall_ms=float(np.median(self.stalls_ms)) if self.stalls_ms else None,
        )
