"""The training loop: data, steps, evaluation, checkpoints, what the user sees.

Run by ``telechat-moe train RECIPE``.
"""

import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from telechat_moe import __version__
from telechat_moe.data import Loader, load_tokenizer, open_recipe
from telechat_moe.errors import BadInputError, CheckFailedError, UsageError
from telechat_moe.model import CausalLM, initialize
from telechat_moe.model.init import count_parameters
from telechat_moe.ops import select
from telechat_moe.ops.custom import reason
from telechat_moe.ops.rewrite import fuse_cells
from telechat_moe.recipe import Recipe
from telechat_moe.train import checkpoint as checkpoints
from telechat_moe.train import schedule, state
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.sample import continue_prompts
from telechat_moe.train.step import Evaluate, StepOutput, TrainStep

STATE_VERSION = 1


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


class Trainer:
    """Train the model of a recipe on this machine.

    Args:
        recipe: Loaded recipe.
        resume: Go on from the newest good checkpoint of ``output_dir``, if there is one.
        overwrite: Remove the checkpoints and metrics of an earlier run before the first step.
        plain: Print plain lines, also on a terminal.

    Raises:
        BadInputError: The recipe cannot be trained here, or a checkpoint does not fit.
        UsageError: ``output_dir`` holds another run's checkpoints and ``resume`` is not set.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        resume: bool = False,
        overwrite: bool = False,
        plain: bool = False,
    ) -> None:
        _check_runnable(recipe)
        self.recipe, self.overwrite, self.plain = recipe, overwrite, plain
        self.output = Path(recipe.output_dir)
        self.root = self.output / "checkpoints"
        if not (resume or overwrite) and checkpoints.list_checkpoints(self.root):
            raise UsageError(
                f"{self.root} holds checkpoints of an earlier run; go on from them with --resume, "
                "train from the start with --overwrite, or set another output_dir"
            )
        self.data = open_recipe(recipe)
        self.steps = recipe.train_steps
        self.micro_batches = recipe.runner_config.gradient_accumulation_steps
        # A pass is what the recipe asks for; Megatron's index holds 0.5 % more.
        self.loader = Loader(
            self.data,
            recipe.runner_config.batch_size,
            epochs=None,
            epoch_samples=recipe.train_steps // recipe.runner_config.epochs * recipe.global_batch,
        )
        self.schedule = schedule.from_recipe(recipe)
        self.step = 0
        self.updates = 0
        self.skipped_in_a_row = 0
        self.skipped = 0
        self.interrupted = False
        self._build(recipe)
        self.notes: list[str] = []
        saved = checkpoints.latest(self.root, warn=self.notes.append) if resume else None
        if saved is not None:
            self._restore(saved)
        elif recipe.load_checkpoint:
            state.load_weights(self.model, recipe.load_checkpoint)
            self.notes.append(f"weights from {recipe.load_checkpoint}")
        else:
            initialize(self.model, recipe.seed)

    def _build(self, recipe: Recipe) -> None:
        """Build model, optimizer and the cells of a step."""
        ms.set_context(mode=ms.GRAPH_MODE, device_target=recipe.context.device_target)
        ms.set_seed(recipe.seed)
        own = recipe.telechat_moe
        faces = own.operators
        with select.using(faces.default, faces.faces(), recipe.context.device_target):
            self.model = CausalLM(recipe.model_config, own.moe_block_rows)
            fused = fuse_cells(self.model) if faces.fuse_plain else []
            self._build_step(recipe)
            self.operators = select.summary()
            if fused:
                regions = sum(region.program is not None for region in fused)
                self.operators += f"; the fuser replaced {regions} regions"

    def _build_step(self, recipe: Recipe) -> None:
        own = recipe.telechat_moe
        self.model.set_train()
        optimizer = recipe.optimizer
        self.optimizer = AdamW(
            self.model.trainable_params(),
            (optimizer.betas[0], optimizer.betas[1]),
            optimizer.eps,
            optimizer.weight_decay,
            own.weight_decay_exclude,
        )
        wrapper, config = recipe.runner_wrapper, recipe.model_config
        use_bias = config.moe_router_enable_expert_bias
        self.train_step = TrainStep(
            self.model,
            self.optimizer,
            wrapper.max_grad_norm if wrapper.use_clip_grad else None,
            self.micro_batches,
            config.moe_router_bias_update_rate if use_bias else 0.0,
        )
        self.train_step.set_train()
        self.evaluate_cell = Evaluate(self.model)

    # ------------------------------------------------------------------ checkpoints

    def _state(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "telechat_moe": __version__,
            "mindspore": ms.__version__,
            "model_config": asdict(self.recipe.model_config),
            "training": _training_settings(self.recipe),
            "updates": self.updates,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "data": self.loader.state(),
            "seed": self.recipe.seed,
        }

    def _restore(self, saved: checkpoints.Checkpoint) -> None:
        given = saved.state
        if given.get("version") != STATE_VERSION:
            raise BadInputError(
                f"{saved.path} has state version {given.get('version')}, expected {STATE_VERSION}: "
                "it was written by another version of telechat-moe"
            )
        changes = checkpoints.diff_config(given["model_config"], asdict(self.recipe.model_config))
        if changes:
            raise BadInputError(
                f"{self.recipe.source}: the model section is not the one that {saved.path} was "
                "trained with:\n  "
                + "\n  ".join(changes)
                + "\nput the old values back, or train from the start in another output_dir"
            )
        for change in checkpoints.diff_config(given["training"], _training_settings(self.recipe)):
            self.notes.append(f"changed since {saved.path.name}: {change}")
        state.restore(self.model, self.optimizer, saved)
        self.loader.load_state(given["data"])
        self.step, self.updates = saved.step, given["updates"]
        self.skipped, self.skipped_in_a_row = given["skipped"], given["skipped_in_a_row"]
        self.notes.append(f"resumed from {saved.path} at step {self.step}")

    def save(self) -> Path:
        """Write a checkpoint of the current step."""
        section = self.recipe.checkpoints
        return checkpoints.save(
            self.root,
            self.step,
            state.collect(self.model, self.optimizer),
            self._state(),
            keep_last=section.keep_checkpoint_max if section else None,
        )

    # ------------------------------------------------------------------ the loop

    def run(self) -> Summary:
        """Train to the last step of the recipe, or until interrupted.

        A run whose steps are all done is left as it is.
        """
        done = self.output / "summary.json"
        if self.step >= self.steps and done.exists():
            sys.stderr.write(
                f"all {self.steps} steps are done (checkpoint of step {self.step}); "
                "train from the start with --overwrite\n"
            )
            return Summary(**json.loads(done.read_text(encoding="utf-8")))
        self.output.mkdir(parents=True, exist_ok=True)
        if self.overwrite:
            shutil.rmtree(self.root, ignore_errors=True)
            shutil.rmtree(self.output / "tensorboard", ignore_errors=True)
            (self.output / "metrics.jsonl").unlink(missing_ok=True)
        self._write("recipe.json", json.dumps(self.recipe.to_dict(), indent=2) + "\n")
        tokens = self.recipe.global_batch * self.recipe.model_config.seq_length
        monitor = Monitor(
            self.output, self.steps, tokens, resume_step=self.step, quiet=self.plain or None
        )
        run = _Run(self, monitor)
        try:
            with self.loader, _stop_on_signal(self):
                for note in self.notes:
                    monitor.message(note)
                monitor.message(
                    f"{count_parameters(self.model) / 1e6:.2f}M parameters, {self.steps} steps of "
                    f"{tokens} tokens; compiling the graph of a step (10 to 30 s)"
                )
                monitor.message(f"operators: {self.operators}")
                run.loop()
                if not self.interrupted:
                    self._sample(monitor)
        except RuntimeError as error:
            if said := reason(error):
                raise BadInputError(f"step {self.step + 1}: {said}") from error
            raise
        finally:
            monitor.close()
        summary = run.summary()
        self._write("summary.json", json.dumps(asdict(summary), indent=2) + "\n")
        return summary

    def evaluate(self) -> float:
        """Return the next-token loss on the validation data, nats per token."""
        section = self.recipe.telechat_moe.evaluation
        data = open_recipe(self.recipe, "valid")
        batch = min(self.recipe.runner_config.batch_size, len(data))
        total = weight = 0.0
        self.model.set_train(False)
        self.evaluate_cell.set_train(False)
        with Loader(data, batch, epochs=1, prefetch=1) as loader:
            for _, columns in zip(range(section.batches), loader, strict=False):
                count = float(columns["loss_mask"].sum())
                loss = self.evaluate_cell(*self.tensors(columns)).asnumpy()
                total, weight = total + float(loss[0]) * count, weight + count
        self.train_step.set_train()
        return total / max(weight, 1.0)

    def tensors(self, columns: dict[str, np.ndarray]) -> tuple[Tensor, ...]:
        """Return the columns in the order of the model's arguments."""
        names = ("input_ids", "labels", "loss_mask", "position_ids", "attention_mask")
        return tuple(Tensor(columns[name]) for name in names if name in columns)

    def culprit(self, output: StepOutput) -> str:
        """Say which tensor a step that is not finite goes back to.

        A weight that is not finite, or else the gradient nearest to the loss: the backward pass
        carries NaN and Inf from there to all layers below.
        """
        params = self.optimizer.params
        broken = [p.name for p in params if not np.isfinite(p.asnumpy()).all()]
        if broken:
            return f"the weight {broken[0]} is not finite" + _more(broken)
        bad = [
            p.name
            for p, x in zip(params, output.square_sums.asnumpy(), strict=True)
            if not np.isfinite(x)
        ]
        if not bad:
            return "the loss is not finite although all gradients are"
        if len(bad) == len(params):
            return f"the loss is not finite, and so is every gradient, {bad[-1]} the last"
        return f"the gradient of {bad[-1]} is not finite" + _more(bad[::-1])

    def _sample(self, monitor: Monitor) -> None:
        section = self.recipe.telechat_moe.sample
        path = _tokenizer_path(self.recipe)
        if section is None or path is None:
            return
        texts = continue_prompts(
            self.model,
            load_tokenizer(path),
            section.prompts,
            section.max_new_tokens,
            temperature=section.temperature,
            top_k=section.top_k,
            seed=self.recipe.seed,
        )
        lines = [p + t for p, t in zip(section.prompts, texts, strict=True)]
        text = "\n\n---\n\n".join(lines) + "\n"
        self._write("sample.txt", text)
        monitor.message(f"the model writes:\n\n{text}")

    def _write(self, name: str, text: str) -> None:
        temporary = self.output / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.output / name)


class _Run:
    """The steps of one process."""

    def __init__(self, trainer: Trainer, monitor: Monitor) -> None:
        self.trainer, self.monitor = trainer, monitor
        self.began = time.perf_counter()
        self.losses: list[float] = []
        self.step_seconds: list[float] = []
        self.data_seconds: list[float] = []
        self.validation_loss: float | None = None
        self.saved_step: int | None = None

    def loop(self) -> None:
        """Run the remaining steps with their evaluations and checkpoints."""
        trainer = self.trainer
        section = trainer.recipe.checkpoints
        interval = trainer.recipe.telechat_moe.evaluation.interval
        if interval and trainer.step == 0:
            self.monitor.evaluation(0, trainer.evaluate())
        while trainer.step < trainer.steps and not trainer.interrupted:
            self.train_one()
            last = trainer.step == trainer.steps
            if interval and (trainer.step % interval == 0 or last):
                self.validation_loss = trainer.evaluate()
                self.monitor.evaluation(trainer.step, self.validation_loss)
            if section and (trainer.step % section.save_checkpoint_steps == 0 or last):
                self.save()
        if trainer.interrupted and trainer.step < trainer.steps and section:
            self.save()
            self.monitor.message(f"interrupted: saved step {trainer.step}; go on with --resume")

    def save(self) -> None:
        """Save unless this step is saved."""
        if self.saved_step != self.trainer.step:
            self.trainer.save()
            self.saved_step = self.trainer.step

    def train_one(self) -> None:
        """Run one step and report it."""
        trainer = self.trainer
        rate = trainer.schedule(trainer.updates)
        began = time.perf_counter()
        batches = [trainer.tensors(next(trainer.loader)) for _ in range(trainer.micro_batches)]
        waited = time.perf_counter() - began
        if trainer.train_step.accumulate is not None:
            for batch in batches[:-1]:
                trainer.train_step.accumulate(*batch)
        scalars = trainer.optimizer.scalars(trainer.updates + 1, rate)
        output = StepOutput(*trainer.train_step(*scalars, *batches[-1]))
        lm, mtp, aux = (float(x) for x in output.losses.asnumpy())
        applied = bool(output.applied.asnumpy())
        seconds = time.perf_counter() - began
        trainer.step += 1
        self.losses.append(lm)
        self.step_seconds.append(seconds)
        self.data_seconds.append(waited)
        imbalance, dropped = _balance(output)
        self.monitor.step(
            trainer.step,
            loss=lm + mtp + aux,
            lm_loss=lm,
            mtp_loss=mtp,
            aux_loss=aux,
            grad_norm=float(output.norm.asnumpy()),
            learning_rate=rate,
            seconds=seconds,
            data_seconds=waited,
            skipped=not applied,
            expert_load_max_over_mean=max(imbalance, default=None),
            expert_load_by_layer=imbalance or None,
            drop_rate=dropped,
        )
        self.count(applied, output)

    def count(self, applied: bool, output: StepOutput) -> None:
        """Count updates and skipped steps; stop after too many skipped in a row."""
        trainer = self.trainer
        if applied:
            trainer.updates += 1
            trainer.skipped_in_a_row = 0
            return
        trainer.skipped += 1
        trainer.skipped_in_a_row += 1
        reason = trainer.culprit(output)
        self.monitor.message(f"step {trainer.step} skipped: {reason}")
        limit = trainer.recipe.telechat_moe.max_skipped_steps
        if trainer.skipped_in_a_row > limit:
            raise CheckFailedError(
                f"stopped at step {trainer.step}: {trainer.skipped_in_a_row} steps in a row had a "
                f"loss or gradient that is not finite (telechat_moe.max_skipped_steps is {limit}); "
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
        )


def _balance(output: StepOutput) -> tuple[list[float], float]:
    """Return max over mean expert load of each MoE layer, and the share of pairs dropped."""
    load_LE = output.load_LE.asnumpy()
    if load_LE.ndim != 2 or not load_LE.sum():
        return [], 0.0
    by_layer = load_LE.max(1) / load_LE.mean(1)
    dropped = float(output.dropped.asnumpy()[0]) / float(load_LE.sum())
    return [round(float(x), 4) for x in by_layer], dropped


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _training_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that change the course of a run, apart from model and data."""
    return {
        "optimizer": asdict(recipe.optimizer),
        "lr_schedule": asdict(recipe.lr_schedule) if recipe.lr_schedule else None,
        "batch_size": recipe.runner_config.batch_size,
        "gradient_accumulation_steps": recipe.runner_config.gradient_accumulation_steps,
        "max_grad_norm": recipe.runner_wrapper.max_grad_norm,
        "use_clip_grad": recipe.runner_wrapper.use_clip_grad,
        "weight_decay_exclude": recipe.telechat_moe.weight_decay_exclude,
        "steps": recipe.train_steps,
        "seed": recipe.seed,
    }


def _tokenizer_path(recipe: Recipe) -> Path | None:
    """Return the tokenizer beside the training data, if it is there."""
    config = recipe.train_dataset.data_loader.config
    given = config.data_path if config else None
    prefixes = [item for item in given or [] if not item.replace(".", "").isdigit()]
    path = Path(prefixes[0]).parent / "tokenizer.json" if prefixes else None
    return path if path and path.exists() else None


def _check_runnable(recipe: Recipe) -> None:
    if recipe.devices > 1:
        raise BadInputError(
            f"{recipe.source}: the recipe is laid out for {recipe.devices} devices, "
            "`telechat-moe train` runs on one; start a recipe with use_parallel False, for example "
            "telechat3_moe/pretrain_tiny.yaml"
        )
    if recipe.train_steps < 1:
        raise BadInputError(
            f"{recipe.source}: train_dataset.data_loader.sizes gives no training step "
            f"(global batch {recipe.global_batch})"
        )


@contextmanager
def _stop_on_signal(trainer: Trainer) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into a stop after the current step."""

    def stop(number: int, frame: object) -> None:
        trainer.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
