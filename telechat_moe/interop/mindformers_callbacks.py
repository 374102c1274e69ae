"""Our callbacks in MindFormers' trainer: what `telechat-moe train` does beside the steps, by the same objects and into the same files.

MindSpore calls a list of callbacks in its order. Ours come first, to fetch what a step returned before MindFormers' loss monitor and bias
callback clear it; before the checkpoint, with the expert biases moved; around it; and last.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mindformers.core.callback import CheckpointMonitor, MFLossMonitor
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_output_root_path, get_real_group_size, get_real_rank
from mindformers.utils.parameter_register import parameter_register
from mindspore import Tensor, get_auto_parallel_context
from mindspore.train import Callback as MindSporeCallback
from safetensors import SafetensorError

from telechat_moe import timings
from telechat_moe.checkpoint import checkpoint, folder
from telechat_moe.checkpoint.background import FailedSaves, Saver
from telechat_moe.checkpoint.folder import CheckpointError
from telechat_moe.data.recipe import sources_of
from telechat_moe.files import write_atomic
from telechat_moe.moe.loads import LoadRecorder
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.cells.collective import SumOverProcesses
from telechat_moe.sharding.recipe import mesh_of
from telechat_moe.sharding.shards import EMA
from telechat_moe.train import guard, parameters
from telechat_moe.train.average import WeightAverage
from telechat_moe.train.callbacks import (
    Callback,
    ExpertLoads,
    PeriodicEvaluation,
    SkippedSteps,
    StepMetrics,
    StepResult,
)
from telechat_moe.train.evaluate import validation_loss
from telechat_moe.train.monitor import Monitor, SilentMonitor
from telechat_moe.train.sample import continue_prompts, write_sample
from telechat_moe.train.step import Evaluate, StepOutput

STATE_FOLDER = "callbacks"
"""Folder of `output_dir` with checkpoints of what MindFormers' do not hold: averages of the weights, window of the loss guard."""


class Hook(MindSporeCallback):
    """Callables in the places of the methods of ``mindspore.train.Callback`` that they are named after."""

    def __init__(self, close: Callable[[], object] = lambda: None, **calls: Any) -> None:
        self.close = close
        for name, call in calls.items():
            setattr(self, name, call)

    def __exit__(self, *error: object) -> None:
        """Close what is open, also after an error."""
        self.close()


@dataclass
class Counters:
    """Steps of a run that were applied and skipped."""

    updates: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


class TrainingHooks:
    """The callbacks of one run in MindFormers' trainer.

    Args:
        model: The ``TelechatMoeForCausalLM`` that is trained.
        begun: Steps done before this process.
        split: Whether semi-automatic parallelism splits the model. Then no process has all of it or the losses of a step: only skipped
            steps are counted, and times taken.
    """

    def __init__(self, recipe: Recipe, model: Any, begun: int, split: bool) -> None:
        self.recipe, self.model, self.begun, self.split = recipe, model, begun, split
        self.rank, self.output = int(get_real_rank()), Path(recipe.output_dir)
        settings = self.settings = recipe.telechat_moe
        self.guard, self.counters = guard.of_recipe(recipe), Counters()
        say = partial(print, file=sys.stderr, flush=True)  # each process writes files of its own
        self.failures = FailedSaves(settings.saving.max_failed, say)
        self.sum = SumOverProcesses() if recipe.devices > 1 and not split else None
        self.limits = guard.Limits()
        self.tokens = recipe.global_batch * recipe.model_config.seq_length
        self.timer, self.monitor = timings.StepTimer(), SilentMonitor()
        self.average: WeightAverage | None = None
        self.saver: Saver | None = None

    def among(self, callbacks: Sequence[MindSporeCallback]) -> list[MindSporeCallback]:
        """Return MindFormers' callbacks in their order, with ours between them."""
        step_begin, fetch = self._step_begin, self._fetch
        hooks: list[MindSporeCallback] = [
            Hook(begin=self._begin, step_begin=step_begin, step_end=fetch)
        ]
        beside = Hook(step_end=self._beside)
        for callback in callbacks:
            if isinstance(callback, CheckpointMonitor):
                saving: dict[str, Any] = {"on_train_begin": callback.on_train_begin}
                saving["on_train_step_begin"] = callback.on_train_step_begin
                saving["on_train_step_end"] = partial(self._save, callback, last=False)
                saving["on_train_end"] = partial(self._save, callback, last=True)
                hooks += [beside, Hook(**saving)]
            else:
                hooks.append(callback)
        hooks += [] if beside in hooks else [beside]
        return [*hooks, Hook(self._close, step_end=self._step_done, end=self._end)]

    def _begin(self, _: Any) -> None:
        """Open the files of the run and go on with what its checkpoint holds."""
        recipe, settings, rank = self.recipe, self.settings, self.rank
        file = timings.file_of(self.output, rank)
        for path in file.parent.glob("rank_*.bin") if rank == 0 else ():
            if int(path.stem.removeprefix("rank_")) >= recipe.devices:  # of an earlier run
                path.unlink()
        about = {"rank": rank, "ranks": recipe.devices, "stage": mesh_of(recipe).stage(rank)}
        self.timer = timings.StepTimer(file, about, self.begun)
        if rank == 0 and not self.split:
            write_atomic(self.output / "recipe.json", json.dumps(recipe.to_dict(), indent=2) + "\n")
            steps = recipe.train_steps
            self.monitor = Monitor(self.output, steps, self.tokens, self.begun, quiet=True)
        if settings.ema is not None:
            weights = parameters.saved_weights(self.model.model)
            self.average = WeightAverage(weights, settings.ema.decay)
        self._go_on()
        limit, about = guard.max_in_a_row(recipe), (self.guard, self.counters, self.monitor)
        loads = LoadRecorder(settings.moe.load_interval, recipe.train_steps)
        skipped = SkippedSteps(limit, *about, self._culprit, self.output / "checkpoint")
        reports = [StepMetrics(self.monitor, sources_of(recipe)), ExpertLoads(self.monitor, loads)]
        self.callbacks: list[Callback] = [*([] if self.split else reports), skipped]
        interval = 0 if self.split else settings.evaluation.interval
        cell = Evaluate(self.model.model)  # each process evaluates by itself
        evaluate = partial(validation_loss, recipe, self.model.model, cell)
        self.evaluation = PeriodicEvaluation(self.monitor, interval, evaluate)
        self.evaluation.begin(self.begun)
        self.ended = time.perf_counter()

    def _go_on(self) -> None:
        """Take averages, window and counters from where the run resumes; later checkpoints of them are removed."""
        root = self.output / STATE_FOLDER
        for path in folder.list_checkpoints(root) if self.rank == 0 else ():
            if folder.step_of(path) > self.begun or not self.begun:
                shutil.rmtree(path)
        path = folder.checkpoint_path(root, self.begun)
        if not self.begun or not self._has_state:
            return
        if not path.is_dir():
            self.monitor.message(f"no {path}: averages of weights and windows of losses begin anew")
            return
        saved = checkpoint.load(path)
        if self.average is not None and EMA in saved.tensors:
            parameters.put({EMA: self.average.averages}, saved.tensors, path)
        self.counters = Counters(**saved.state["counters"])
        self.guard.load_state(saved.state["guard"])

    @property
    def _has_state(self) -> bool:
        return self.average is not None or self.settings.loss_guard is not None

    def _step_begin(self, context: Any) -> None:
        self.timer.lap("data")
        self.waited = time.perf_counter() - self.ended
        if self.settings.loss_guard is not None and self.guard.limits() != self.limits:
            self.limits = self.guard.limits()
            context.original_args().train_network.set_limits(*self.limits)

    def _fetch(self, context: Any) -> None:
        """Bring what a step returned to the host."""
        recipe, params = self.recipe, context.original_args()
        total, norm, rate, applied = fetched(params.net_outputs)
        if recipe.use_skip_data_by_global_norm:
            applied = applied and bool(norm < np.float32(self.guard.fixed_norm))
        self.timer.lap("graph")
        times = time.perf_counter() - self.ended, self.waited
        self.model.applied = applied
        self.counters.updates += applied
        losses, load_LE = np.array([total, 0.0, 0.0], np.float32), np.zeros(1, np.float32)
        dropped = load_LE
        if not self.split or self.model.needs_loads:
            load_LE, dropped = self.model.step_counts = self.model.take_loads()
        if not self.split:
            names = ("lm_loss", "mtp_loss", "aux_loss")
            lm, mtp, aux = (float(parameter_register.get(name).asnumpy()[0]) for name in names)
            scale = params.train_network.aux_loss_scale  # MindFormers divides by it, unless it is 0
            losses = np.array([lm, mtp, aux * scale if scale else total - lm - mtp], np.float32)
            if self.sum is not None:
                losses = self.sum(Tensor(losses)).asnumpy() / recipe.devices
        output = StepOutput(losses, np.array(norm), None, np.array(applied), load_LE, dropped)
        output = output._replace(by_source=self.model.by_source())
        step, (lm, mtp, aux) = self.begun + params.cur_step_num, map(float, losses)
        about = (step, step == recipe.train_steps, self.tokens, output, (lm, mtp, aux))
        self.result = StepResult(*about, norm, applied, rate, *times)

    def _beside(self, _: Any) -> None:
        """Report the step, average and evaluate the weights."""
        for callback in self.callbacks:
            callback.step_end(self.result)
        if self.average is not None:
            self.average.update(self.counters.updates, Tensor(self.result.applied))
        self.timer.lap("host")
        self.evaluation.step_end(self.result)
        self.timer.lap("evaluation")

    def _save(self, monitor: CheckpointMonitor, context: Any, last: bool) -> None:
        """Let MindFormers save where that is due; outlive a failure, or save beside it what its checkpoint does not hold."""
        self.timer.lap("host")
        began, before, failure = time.perf_counter(), monitor._last_triggered_step, None
        try:
            (monitor.on_train_end if last else monitor.on_train_step_end)(context)
        except (OSError, SafetensorError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not isinstance(error.__cause__, OSError):
                raise  # of the device, for example
            failure = CheckpointError(f"MindFormers could not write the checkpoint: {error}.")
        if failure is not None or monitor._last_triggered_step != before:
            self.failures.judge(failure, last=last)
        if failure is None and monitor._last_triggered_step != before:
            self.monitor.saved(self.result.step, (time.perf_counter() - began) * 1e3)
            self._save_state()
        self.timer.lap("save")

    def _save_state(self) -> None:
        if self.rank or not self._has_state:
            return
        root, step, saving = self.output / STATE_FOLDER, self.result.step, self.settings.saving
        if self.saver is None:
            averages = {} if self.average is None else {EMA: self.average.averages}
            self.saver = Saver(
                averages,
                background=saving.background,
                memory_share=saving.memory_share,
                max_failed=saving.max_failed,
                say=self.monitor.message,
            )
        state = {"counters": asdict(self.counters), "guard": self.guard.state()}
        last = self.recipe.checkpoints.keep_checkpoint_max if self.recipe.checkpoints else None
        name = f"the state of our callbacks after step {step}"
        save = partial(checkpoint.save, root, step, state=state, keep_last=last)
        self.saver.save(name, lambda groups, copied: save(groups, copied=copied))

    def _step_done(self, _: Any) -> None:
        load_LE = self.result.output.load_LE
        is_known = load_LE.ndim == 2 and not self.split
        rows = float(load_LE.sum()) / self.recipe.devices if is_known else None
        self.timer.finish(self.result.step, rows)
        self.ended = time.perf_counter()

    def _end(self, _: Any) -> None:
        if self.saver is not None:
            self.saver.wait(last=True)
        if self.rank == 0 and not self.split:
            write = partial(continue_prompts, self.model.model)
            write_sample(self.recipe, write, self.monitor.message)

    def _close(self) -> None:
        self.timer.close()
        self.monitor.close()

    def _culprit(self, _: StepOutput) -> str:
        weights = parameters.saved_weights(self.model.model).items()
        broken = (name for name, x in weights if not np.isfinite(x.asnumpy()).all())
        name = next(broken, None)
        return f"the weight {name} is not finite" if name else "a gradient is not finite"


def fetched(outputs: Sequence[Any]) -> tuple[float, float, float, bool]:
    """Return what a step cell of MindFormers returned: total loss, gradient norm (NaN: not computed), learning rate, no overflow."""
    loss, overflow, _, rate, norm = outputs[:5]
    norm = float("nan") if norm is None else float(norm.asnumpy())
    rate = float(np.asarray(rate.asnumpy() if isinstance(rate, Tensor) else rate))
    return float(np.mean(loss.asnumpy())), norm, rate, not bool(np.any(overflow.asnumpy()))


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class TelechatMoeMonitor(Hook):
    """Record the steps of any model in MindFormers' trainer, and end a run that skips too many in a row.

    Recipes whose `trainer.type` is MindFormers' own name it in `callbacks`. Where it is called MindFormers has cleared the terms of the loss:
    ``metrics.jsonl`` has the total alone, of the last stage, and of one process where these only share the data.
    """

    def __init__(self, max_skipped_steps: int = 10) -> None:
        super().__init__(lambda: self.monitor.close(), begin=self._begin, step_end=self._step_end)
        limit = max_skipped_steps, "max_skipped_steps of TelechatMoeMonitor in callbacks"
        self.output, self.monitor = Path(get_output_root_path()), SilentMonitor()
        about = (guard.Guard(None), Counters(), self.monitor, lambda _: "a gradient is not finite")
        self.skipped = SkippedSteps(limit, *about, self.output / "checkpoint")

    def _begin(self, context: Any) -> None:
        params, stages = context.original_args(), get_auto_parallel_context("pipeline_stages")
        self.begun, self.ended = params.train_dataset.get_init_step(), time.perf_counter()
        if get_real_rank() == (get_real_group_size() - 1 if stages > 1 else 0):
            steps = params.epoch_num * params.batch_num
            self.monitor = self.skipped.monitor = Monitor(
                self.output, steps, 0, self.begun, quiet=True
            )

    def _step_end(self, context: Any) -> None:
        params = context.original_args()
        loss, norm, rate, applied = fetched(params.net_outputs)
        monitors = (c for c in params.list_callback if isinstance(c, MFLossMonitor))
        loss = next((float(c.loss_list[-1]) for c in monitors), loss)  # of all micro-batches
        step, seconds = self.begun + params.cur_step_num, time.perf_counter() - self.ended
        terms = dict.fromkeys(("lm_loss", "mtp_loss", "aux_loss"), float("nan"))
        numbers: dict[str, Any] = {"loss": loss, **terms, "grad_norm": norm, "learning_rate": rate}
        self.monitor.step(step, seconds=seconds, skipped=not applied, **numbers)
        none = np.zeros(1, np.float32)
        output = StepOutput(none, none, None, none, none, None)
        about = (step, False, 0, output, (loss, 0.0, 0.0), norm, applied, rate, seconds, 0.0)
        self.skipped.step_end(StepResult(*about))
        self.ended = time.perf_counter()
