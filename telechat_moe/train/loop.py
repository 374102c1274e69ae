"""The steps of one process: train, evaluate, save, until the last or until interrupted."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from telechat_moe.checkpoint import checkpoint as checkpoints
from telechat_moe.checkpoint.background import Saver
from telechat_moe.errors import CheckFailedError
from telechat_moe.model.init import count_parameters
from telechat_moe.train.guard import Spike, max_in_a_row, roll_back
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.step import StepOutput

if TYPE_CHECKING:
    from telechat_moe.train.trainer import Trainer


@dataclass(kw_only=True)
class Summary:
    """What a run came to; ``summary.json`` and ``telechat-moe train --json``.

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
        save_stall_ms: How long training stood still for a checkpoint, milliseconds; median over this process's.
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


class Loop:
    """The steps of one process."""

    def __init__(self, trainer: "Trainer", monitor: Monitor) -> None:
        self.trainer, self.monitor = trainer, monitor
        self.began = time.perf_counter()
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.data_seconds: list[float] = []
        self.validation_loss: float | None = None
        self.saved_step: int | None = None
        self.stalls_ms: list[float] = []

    def loop(self) -> None:
        """Run the remaining steps with their evaluations and checkpoints; the last one is complete then."""
        saver = self.trainer.saver if self.trainer.recipe.checkpoints else None
        if saver is not None:
            saver.say = self.monitor.message
        self.monitor.begin(self.trainer.data_state())
        try:
            self._steps(saver)
        except Exception:
            if saver is not None:
                saver.abandon()
            raise
        if saver is not None:
            saver.wait(last=True)

    def _steps(self, saver: Saver | None) -> None:
        trainer = self.trainer
        section = trainer.recipe.checkpoints
        interval = trainer.recipe.telechat_moe.evaluation.interval
        if interval and trainer.step == 0:
            self.monitor.evaluation(0, trainer.evaluate())
        while trainer.step < trainer.steps and not trainer.interrupted:
            spike = self.train_one()
            if saver is not None:
                saver.poll()
            if spike is not None and trainer.guard.rolls_back and self.roll_back(spike):
                continue
            last = trainer.step == trainer.steps
            if interval and (trainer.step % interval == 0 or last):
                self.validation_loss = trainer.evaluate()
                self.monitor.evaluation(trainer.step, self.validation_loss)
            if section and (trainer.step % section.save_checkpoint_steps == 0 or last):
                self.save()
        if trainer.interrupted and trainer.step < trainer.steps and section:
            self.save()
            trainer.saver.wait(last=True)
            self.monitor.message(f"interrupted: saved step {trainer.step}; go on with --resume")

    def save(self) -> None:
        """Save unless this step is saved."""
        if self.saved_step != self.trainer.step:
            began = time.perf_counter()
            self.trainer.save(self.monitor.sync)
            self.stalls_ms.append((time.perf_counter() - began) * 1e3)
            self.saved_step = self.trainer.step
            self.monitor.saved(self.saved_step, self.stalls_ms[-1])

    def roll_back(self, spike: Spike) -> bool:
        """Go back before a spike; False if there is no checkpoint to go back to."""
        record = roll_back(self.trainer, spike)
        if record is None:
            self.monitor.message(
                f"no checkpoint before step {spike.step} to go back to; it is skipped"
            )
            return False
        self.saved_step = record["to_step"]
        begin, end = record["left_out"]
        self.monitor.rolled_back(
            record,
            f"went back from step {spike.step} to the checkpoint of step {self.saved_step}: {spike.describe()}; "
            f"samples {begin} to {end - 1} are left out",
        )
        return True

    def train_one(self) -> Spike | None:
        """Run one step and report it; return what was wrong if its update was left out."""
        trainer = self.trainer
        rate = trainer.schedule(trainer.updates)
        first = trainer.loader.next_sample
        began = time.perf_counter()
        batches = trainer.next_batches()
        waited = time.perf_counter() - began
        output = trainer.update(batches, rate)
        lm, mtp, aux = (float(x) for x in output.losses.asnumpy())
        applied = bool(output.applied.asnumpy())
        seconds = time.perf_counter() - began
        trainer.step += 1
        count = trainer.loader.next_sample - first
        self.monitor.samples(trainer.step, first, count, (b[0] for b in batches), applied)
        self.losses.append(lm)
        self.step_seconds.append(seconds)
        self.data_seconds.append(waited)
        norm = float(output.norm.asnumpy())
        spike = trainer.guard.judge(trainer.step, lm + mtp + aux, norm, applied)
        imbalance, dropped = _balance(output)
        self.monitor.step(
            trainer.step,
            loss=lm + mtp + aux,
            lm_loss=lm,
            mtp_loss=mtp,
            aux_loss=aux,
            grad_norm=norm,
            learning_rate=rate,
            seconds=seconds,
            data_seconds=waited,
            skipped=not applied,
            expert_load_max_over_mean=max(imbalance, default=None),
            expert_load_by_layer=imbalance or None,
            drop_rate=dropped,
        )
        self.count(spike, output)
        return spike

    def count(self, spike: Spike | None, output: StepOutput) -> None:
        """Count updates and skipped steps; stop after too many skipped in a row."""
        trainer = self.trainer
        if spike is None:
            trainer.updates += 1
            trainer.skipped_in_a_row = 0
            return
        trainer.skipped += 1
        trainer.skipped_in_a_row += 1
        reason = trainer.culprit(output) if spike.limit is None else spike.describe()
        self.monitor.skipped(trainer.step, spike.numbers(), reason)
        limit, key = max_in_a_row(trainer.recipe)
        if trainer.skipped_in_a_row > limit:
            raise CheckFailedError(
                f"stopped at step {trainer.step}: {trainer.skipped_in_a_row} steps in a row had a "
                f"loss or gradient that is not finite or too high ({key} is {limit}); "
                f"{reason}. Checkpoints in {trainer.root} are from before; look at the data and "
                "the learning rate around this step"
            )

    def summary(self) -> Summary:
        """Return what the run came to."""
        trainer = self.trainer
        steady = self.step_seconds[1:] or self.step_seconds
        tokens = trainer.recipe.global_batch * trainer.recipe.model_config.seq_length
        newest = checkpoints.list_checkpoints(trainer.root)
        last = [x for x in self.losses[-20:] if np.isfinite(x)]
        return Summary(
            finished=trainer.step >= trainer.steps,
            steps=trainer.step,
            skipped_steps=trainer.skipped,
            train_loss=float(np.mean(last)) if last else None,
            validation_loss=self.validation_loss,
            first_loss=self.losses[0] if self.losses else None,
            parameters=count_parameters(trainer.model),
            tokens_per_second=tokens / float(np.median(steady)) if steady else None,
            data_share=sum(self.data_seconds[1:]) / sum(steady) if len(steady) > 1 else None,
            first_step_seconds=self.step_seconds[0] if self.step_seconds else None,
            seconds=time.perf_counter() - self.began,
            checkpoint=str(newest[0].relative_to(trainer.output)) if newest else None,
            save_stall_ms=float(np.median(self.stalls_ms)) if self.stalls_ms else None,
        )


def _balance(output: StepOutput) -> tuple[list[float], float | None]:
    """Return max over mean expert load of each MoE layer, and the share of pairs dropped."""
    load_LE = output.load_LE.asnumpy()
    if load_LE.ndim != 2 or not load_LE.sum():
        return [], 0.0
    by_layer = load_LE.max(1) / load_LE.mean(1)
    if output.dropped is None:
        return [round(float(x), 4) for x in by_layer], None
    dropped = float(output.dropped.asnumpy()[0]) / float(load_LE.sum())
    return [round(float(x), 4) for x in by_layer], dropped
