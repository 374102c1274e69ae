"""The training loop: data, steps, evaluation, checkpoints, what the user sees.

Run by ``telechat-moe train RECIPE``.
"""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from telechat_moe import __version__
from telechat_moe.checkpoint import checkpoint as checkpoints
from telechat_moe.checkpoint import folder
from telechat_moe.checkpoint.background import Saver
from telechat_moe.checkpoint.snapshot import Groups
from telechat_moe.data import Loader, load_tokenizer, open_recipe
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.model import CausalLM, initialize
from telechat_moe.model.init import count_parameters
from telechat_moe.ops import select
from telechat_moe.ops.custom import reason
from telechat_moe.ops.rewrite import fuse_cells
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.recipe import mesh_of, micro_batches
from telechat_moe.train import guard, schedule, state
from telechat_moe.train.loop import Loop, Summary
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.optimizer import AdamW
from telechat_moe.train.sample import continue_prompts
from telechat_moe.train.step import Evaluate, StepOutput, TrainStep

STATE_VERSION = 1

# Settings of the model section that say how it is laid out, not what it computes.
LAYOUT_KEYS = ("batch_size", "offset", "pp_interleave_num")


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
        self.check(recipe)
        self.recipe, self.overwrite, self.plain = recipe, overwrite, plain
        self.output = Path(recipe.output_dir)
        self.root = self.output / "checkpoints"
        if not (resume or overwrite):
            refuse_old_checkpoints(self.root)
        self.data = open_recipe(recipe)
        self.steps = recipe.train_steps
        self.micro_batches = micro_batches(recipe)
        self.rows = recipe.runner_config.batch_size * mesh_of(recipe).dp
        # A pass is what the recipe asks for; Megatron's index holds 0.5 % more.
        self.loader = Loader(
            self.data,
            self.rows,
            epochs=None,
            epoch_samples=recipe.train_steps // recipe.runner_config.epochs * recipe.global_batch,
        )
        self.schedule = schedule.from_recipe(recipe)
        self.step = 0
        self.updates = 0
        self.skipped_in_a_row = 0
        self.skipped = 0
        self.interrupted = False
        self.guard = guard.of_recipe(recipe)
        self.limits = guard.Limits()
        self.rollbacks: list[dict[str, Any]] = []
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

    @staticmethod
    def check(recipe: Recipe) -> None:
        """Refuse a recipe that cannot be trained in one process.

        Raises:
            BadInputError: It is laid out for several devices, or has no step.
        """
        check_steps(recipe)
        if recipe.devices > 1:
            raise BadInputError(
                f"{recipe.source}: the recipe is laid out for {recipe.devices} devices, a Trainer is "
                "one process; `telechat-moe train` starts one for each device"
            )

    def _build(self, recipe: Recipe) -> None:
        """Build model, optimizer and the cells of a step."""
        ms.set_context(mode=ms.GRAPH_MODE, device_target=recipe.context.device_target)
        ms.set_seed(recipe.seed)
        own = recipe.telechat_moe
        faces = own.operators
        with select.using(faces.default, faces.faces(), recipe.context.device_target):
            self.model = CausalLM(recipe.model_config, own.moe_block_rows, own.moe_capacity_tokens)
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

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The part of the state that stays."""
        return {
            "version": STATE_VERSION,
            "telechat_moe": __version__,
            "mindspore": ms.__version__,
            "model_config": asdict(self.recipe.model_config),
            "training": _training_settings(self.recipe),
        }

    def _state(self) -> dict[str, Any]:
        return {
            **self._settings,
            "updates": self.updates,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "data": self.loader.state(),
            "guard": self.guard.state(),
            "rollbacks": self.rollbacks,
            "seed": self.recipe.seed,
        }

    def data_state(self) -> dict[str, Any]:
        """Return where the run stands in its data, for the record of samples."""
        loader = self.loader.state()
        return {
            "step": self.step,
            "next_sample": loader["next_sample"],
            "samples_per_epoch": loader["samples_per_epoch"],
            "global_batch": self.recipe.global_batch,
            "dataset": loader["dataset"],
            "layout": mesh_of(self.recipe).describe(),
            "rollbacks": self.rollbacks,
        }

    def _restore(self, saved: checkpoints.Checkpoint, in_place: bool = False) -> None:
        given = saved.state
        if given.get("version") != STATE_VERSION:
            raise BadInputError(
                f"{saved.path} has state version {given.get('version')}, expected {STATE_VERSION}: "
                "it was written by another version of telechat-moe"
            )
        before, now = given["model_config"], asdict(self.recipe.model_config)
        for key in LAYOUT_KEYS:
            before, now = ({k: v for k, v in c.items() if k != key} for c in (before, now))
        changes = checkpoints.diff_config(before, now)
        if changes:
            raise BadInputError(
                f"{self.recipe.source}: the model section is not the one that {saved.path} was "
                "trained with:\n  "
                + "\n  ".join(changes)
                + "\nput the old values back, or train from the start in another output_dir"
            )
        for change in checkpoints.diff_config(given["training"], _training_settings(self.recipe)):
            self.notes.append(f"changed since {saved.path.name}: {change}")
        self.put(saved, in_place)
        self.loader.load_state(given["data"])
        self.step, self.updates = saved.step, given["updates"]
        self.skipped, self.skipped_in_a_row = given["skipped"], given["skipped_in_a_row"]
        self.rollbacks = list(given.get("rollbacks", []))
        if "guard" in given:
            self.guard.load_state(given["guard"])
        self.notes.append(f"resumed from {saved.path} at step {self.step}")

    def put(self, saved: checkpoints.Checkpoint, in_place: bool = False) -> None:
        """Put weights and optimizer states of a checkpoint in; after the first step ``in_place``."""
        state.restore(self.model, self.optimizer, saved, in_place)

    def put_back(self, saved: checkpoints.Checkpoint) -> None:
        """Go back to a checkpoint of this run."""
        self._restore(saved, in_place=True)

    def agree(self, name: str, choose: Callable[[], str]) -> str:
        """Return what all processes go by; one of them chooses."""
        del name
        return choose()

    def meet(self, name: str) -> None:
        """Wait for the other processes."""

    @cached_property
    def saver(self) -> Saver:
        """What writes checkpoints; holds memory for a copy of all parameters."""
        section, own = self.recipe.checkpoints, self.recipe.telechat_moe.saving
        background = own.background or bool(section and section.async_save)
        return Saver(self.parameters(), background=background, max_failed=own.max_failed)

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """Return what a checkpoint holds (of this rank), by group and name."""
        return state.parameters(self.model, self.optimizer)

    def save(self, before: Callable[[], object] = lambda: None) -> None:
        """Write a checkpoint of the current step, while training goes on if the recipe says so.

        Args:
            before: What must be done before the checkpoint exists; takes place where the writing does.
        """
        write = self.writing()
        self.saver.save(
            f"the checkpoint of step {self.step}", lambda groups: (before(), write(groups))
        )

    def writing(self) -> Callable[[Groups], object]:
        """Return what writes a copy of the parameters as the checkpoint of the current step."""
        root, step, given, keep = self.root, self.step, self._state(), self.keep_last
        return lambda groups: checkpoints.save(root, step, groups, given, keep_last=keep)

    @property
    def keep_last(self) -> int | None:
        """How many checkpoints are kept."""
        return self.recipe.checkpoints.keep_checkpoint_max if self.recipe.checkpoints else None

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
        with self.alone():
            return self._run()

    def _run(self) -> Summary:
        self.output.mkdir(parents=True, exist_ok=True)
        if self.overwrite:
            shutil.rmtree(self.root, ignore_errors=True)
            shutil.rmtree(self.output / "tensorboard", ignore_errors=True)
            (self.output / "metrics.jsonl").unlink(missing_ok=True)
        self._write("recipe.json", json.dumps(self.recipe.to_dict(), indent=2) + "\n")
        tokens = self.recipe.global_batch * self.recipe.model_config.seq_length
        monitor = self.make_monitor(tokens)
        run = Loop(self, monitor)
        try:
            with self.loader, self.stopping():
                for note in self.notes:
                    monitor.message(note)
                monitor.message(
                    f"{count_parameters(self.model) / 1e6:.2f}M parameters, {self.steps} steps of "
                    f"{tokens} tokens; compiling the graph of a step (10 to 30 s)"
                )
                monitor.message(f"operators: {self.operators}")
                run.loop()
                if not self.interrupted:
                    self.sample(monitor)
        except RuntimeError as error:
            if said := reason(error):
                raise BadInputError(f"step {self.step + 1}: {said}") from error
            raise
        finally:
            monitor.close()
        summary = run.summary()
        self._write("summary.json", json.dumps(asdict(summary), indent=2) + "\n")
        return summary

    def make_monitor(self, tokens: int) -> Monitor:
        """Return what shows the run."""
        return Monitor(
            self.output, self.steps, tokens, resume_step=self.step, quiet=self.plain or None
        )

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which no other run writes into the output folder."""
        return folder.only_run(self.output)

    def stopping(self) -> AbstractContextManager[None]:
        """Return a context in which :attr:`interrupted` is set when the run is asked to stop."""
        return _stop_on_signal(self)

    def next_batches(self) -> list[tuple[Tensor, ...]]:
        """Return the micro-batches of the next step."""
        return [self.tensors(next(self.loader)) for _ in range(self.micro_batches)]

    def set_limits(self) -> None:
        """Let the graph know what counts as a spike in the next step."""
        if (limits := self.guard.limits()) != self.limits:
            self.put_limits(limits)
            self.limits = limits

    def put_limits(self, limits: guard.Limits) -> None:
        """Hand the limits to the graph."""
        self.train_step.set_limits(*limits)

    def update(self, batches: list[tuple[Tensor, ...]], rate: float) -> StepOutput:
        """Run one step at a learning rate."""
        self.set_limits()
        if self.train_step.accumulate is not None:
            for batch in batches[:-1]:
                self.train_step.accumulate(*batch)
        scalars = self.optimizer.scalars(self.updates + 1, rate)
        return StepOutput(*self.train_step(*scalars, *batches[-1]))

    def evaluate(self) -> float:
        """Return the next-token loss on the validation data, nats per token."""
        section = self.recipe.telechat_moe.evaluation
        data = open_recipe(self.recipe, "valid")
        batch = min(self.rows, len(data))
        total = weight = 0.0
        self.model.set_train(False)
        self.evaluate_cell.set_train(False)
        # Whole global batches, so that every layout evaluates the same samples.
        whole = len(data) // self.recipe.global_batch or 1
        count = min(section.batches, whole) * self.micro_batches
        with Loader(data, batch, epochs=1, prefetch=1) as loader:
            for _, columns in zip(range(count), loader, strict=False):
                tokens = float(columns["loss_mask"].sum())
                loss = self.evaluate_cell(*self.tensors(columns)).asnumpy()
                total, weight = total + float(loss[0]) * tokens, weight + tokens
        self.model.set_train()
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
        params, square_sums = self.optimizer.params, output.square_sums
        broken = [p.name for p in params if not np.isfinite(p.asnumpy()).all()]
        if broken:
            return f"the weight {broken[0]} is not finite" + _more(broken)
        if square_sums is None:
            return "the loss or a gradient is not finite although all weights are"
        bad = [
            p.name for p, x in zip(params, square_sums.asnumpy(), strict=True) if not np.isfinite(x)
        ]
        if not bad:
            return "the loss is not finite although all gradients are"
        if len(bad) == len(params):
            return f"the loss is not finite, and so is every gradient, {bad[-1]} the last"
        return f"the gradient of {bad[-1]} is not finite" + _more(bad[::-1])

    def sample(self, monitor: Monitor) -> None:
        """Let the model write."""
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


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _training_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings that change the course of a run, apart from model and data."""
    return {
        "optimizer": asdict(recipe.optimizer),
        "lr_schedule": asdict(recipe.lr_schedule) if recipe.lr_schedule else None,
        "global_batch": recipe.global_batch,
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


def refuse_old_checkpoints(root: Path) -> None:
    """Refuse to mix a new run with the checkpoints of an earlier one.

    Raises:
        UsageError: There are checkpoints in ``root``.
    """
    if checkpoints.list_checkpoints(root):
        raise UsageError(
            f"{root} holds checkpoints of an earlier run; go on from them with --resume, "
            "train from the start with --overwrite, or set another output_dir"
        )


def check_steps(recipe: Recipe) -> None:
    """Refuse a recipe without a training step.

    Raises:
        BadInputError: The samples do not fill one global batch.
    """
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
