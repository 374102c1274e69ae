"""The state of a run: how far it is, what its checkpoints hold besides tensors, resuming, saving, going back before a spike."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import cached_property
from typing import Any

import mindspore as ms

from telechat_moe import __version__
from telechat_moe.checkpoint import checkpoint, folder
from telechat_moe.checkpoint.background import Saver, WriteSave
from telechat_moe.checkpoint.checkpoint import Copied
from telechat_moe.checkpoint.snapshot import ArrayGroups
from telechat_moe.data.loader import Batches
from telechat_moe.errors import CheckFailedError
from telechat_moe.recipe import Recipe, RecipeError
from telechat_moe.recipe.batch_schedule import BatchSchedule
from telechat_moe.recipe.schema.optimizer import LrSchedule
from telechat_moe.sharding.shards import EMA
from telechat_moe.train.consumed import consumed_of, lr_batches, steps_left
from telechat_moe.train.engine import Engine
from telechat_moe.train.guard import Guard, SkippedStep
from telechat_moe.train.ranks import RankCoordinator
from telechat_moe.train.schedule import from_recipe, of_section, total_steps
from telechat_moe.train.start import STATE_VERSION, RunStart, folder_of, misfits

_COUNTERS = ("updates", "skipped", "skipped_in_a_row", "samples", "applied_samples")


class RunState:
    """The state of one run: how far it is, what computes it, and the checkpoints from which it goes on.

    Args:
        loader: Its position in the data is saved.
        guard: Its window is saved.
        ranks: The processes, which save and go back together.

    Attributes:
        step: Finished steps.
        updates: Steps whose update was applied.
        skipped: Steps whose update was not applied.
        skipped_in_a_row: Skipped steps since the last update.
        samples: Samples of the steps.
        applied_samples: Samples of the steps whose update was applied.
        rollbacks: A record of each time that the run went back.
        origin: Of a run that resumed: ``new_data``, True if its data begin anew, and ``continues``, the checkpoint of
            another folder.
        lr_batches: The batches in whose steps the learning rate is counted.
        notes: Lines for the user.
    """

    def __init__(
        self, recipe: Recipe, engine: Engine, loader: Batches, guard: Guard, ranks: RankCoordinator
    ) -> None:
        self.recipe, self.engine, self.loader = recipe, engine, loader
        self.guard, self.ranks = guard, ranks
        self.root = folder_of(recipe)
        self.step = self.updates = self.skipped = self.skipped_in_a_row = 0
        self.samples = self.applied_samples = 0
        self.rollbacks: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.origin: dict[str, Any] = {}
        self.lr_batches = recipe.batches

    @property
    def steps_left(self) -> int:
        """Steps that the samples of the recipe still give."""
        return steps_left(self.recipe, self.loader, self.samples)

    @property
    def unread(self) -> str:
        """How many samples will not be read; empty: none."""
        left = max(0, int(self.loader.epochs.end) - self.loader.next_sample)
        count = left + self.samples - self.recipe.batches.consumed(self.steps_left, self.samples)
        end = "samples are not read: at the end of an epoch they do not fill a step"
        return f"{count} of {left} {end}" if count else ""

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint of the current step holds besides tensors, JSON values."""
        return {
            "version": STATE_VERSION,
            "telechat_moe": __version__,
            "mindspore": ms.__version__,
            "model_config": asdict(self.recipe.model_config),
            "training": self._training_settings(),
            **{key: getattr(self, key) for key in _COUNTERS},
            "lr_batches": [self.lr_batches.entries, self.lr_batches.unit],
            "data": self.loader.state(),
            "guard": self.guard.state(),
            "rollbacks": self.rollbacks,
            "seed": self.recipe.seed,
        }

    def resume(self, start: RunStart) -> None:
        """Continue from the checkpoint of a start.

        Raises:
            BadInputError: It is broken, or does not fit the recipe.
        """
        saved = start.load(self.notes.append, self.engine.open_checkpoint)
        if problems := misfits(self.recipe, saved.path, saved.state):
            raise RecipeError(problems)
        training = saved.state["training"]
        before = consumed_of(self.recipe, saved.step, saved.state).lr_batches
        self.lr_batches = lr_batches(self.recipe, before, training)
        for change in checkpoint.diff_config(training, self._training_settings()):
            self.notes.append(f"changed since {saved.path.name}: {change}")
        self.restore(saved)
        self.notes += self._rate_notes(before, training)
        if not start.continues_run:
            self.origin["continues"] = str(saved.path)

    def restore(self, saved: checkpoint.Checkpoint, in_place: bool = False) -> None:
        """Continue from a checkpoint; after the first step ``in_place``.

        Raises:
            BadInputError: It does not fit the recipe.
        """
        state = saved.state
        consumed = consumed_of(self.recipe, saved.step, state)
        if EMA in saved.tensors and self.recipe.telechat_moe.ema is None:
            self.notes.append(
                f"the average of the weights in {saved.path.name} ends (telechat_moe.ema)"
            )
        if note := self.engine.put(saved, in_place):
            self.notes.append(note)
        if self.loader.load_state(state["data"], self.recipe.telechat_moe.resume_data == "new"):
            self.origin["new_data"] = True
            self.notes.append(f"new data begin after step {saved.step} (telechat_moe.resume_data)")
        self.step, self.updates = saved.step, state["updates"]
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]
        self.samples, self.applied_samples = consumed.samples, consumed.applied_samples
        self.rollbacks = list(state.get("rollbacks", []))
        if "guard" in state:
            self.guard.load_state(state["guard"])
        self.notes.append(f"resumed from {saved.path} at step {self.step}")

    def _rate_notes(self, before: BatchSchedule, training: Mapping[str, Any]) -> Iterator[str]:
        """Yield in which steps the learning rate counts, where these are not the recipe's, and where it jumps."""
        if self.lr_batches.entries != self.recipe.batches.entries:
            sizes = " and ".join(str(batch) for _, batch in self.lr_batches.entries)
            yield f"lr_schedule goes on at the samples where it was: it counts steps of {sizes} samples"
        names, samples = {f.name for f in fields(LrSchedule)}, self.applied_samples
        section = LrSchedule(**{k: v for k, v in training["lr_schedule"].items() if k in names})
        rate = of_section(section, training["steps"], training.get("lr_wsd_decay_style"))
        now = from_recipe(self.recipe, self.lr_batches)(self.lr_batches.position(samples))
        if rate is not None and (then := rate(before.position(samples))) != now:
            yield f"the learning rate is {now:.4g} from here on; it would be {then:.4g} with the settings of the checkpoint"

    def _training_settings(self) -> dict[str, Any]:
        """Return the settings that change the course of a run, apart from model and data."""
        recipe = self.recipe
        return {
            "optimizer": asdict(recipe.optimizer),
            "lr_schedule": asdict(recipe.lr_schedule) if recipe.lr_schedule else None,
            "global_batch": recipe.global_batch,
            "step_batch_size_schedule": recipe.telechat_moe.step_batch_size_schedule,
            "lr_wsd_decay_style": recipe.telechat_moe.lr_wsd_decay_style,
            "max_grad_norm": recipe.runner_wrapper.max_grad_norm,
            "use_clip_grad": recipe.runner_wrapper.use_clip_grad,
            "weight_decay_exclude": recipe.telechat_moe.weight_decay_exclude,
            "steps": total_steps(recipe, self.lr_batches),
            "seed": recipe.seed,
        }

    @cached_property
    def saver(self) -> Saver:
        """What writes checkpoints; it may hold memory for a copy of all parameters."""
        section, saving = self.recipe.checkpoints, self.recipe.telechat_moe.saving
        background = saving.background or bool(section and section.async_save)
        return Saver(
            self.engine.parameters(),
            background=background,
            memory_share=saving.memory_share,
            max_failed=saving.max_failed,
        )

    def save(self, before: Callable[[], object] = lambda: None) -> None:
        """Write a checkpoint of the current step, while training continues if the recipe says so.

        ``before`` is called before the checkpoint exists, where the writing is done.
        """

        def save(groups: ArrayGroups, copied: Copied) -> None:
            if copied is None:
                before()
                write(groups, None)
            else:
                write(groups, lambda: (copied(), before()))

        self.ranks.at(f"step {self.step}, saving")
        write, name = self.writer(), f"the checkpoint of step {self.step}"
        self.saver.follow(self.engine.parameters())  # a growing batch changes the graph
        self.saver.save(name, save)

    def writer(self) -> WriteSave:
        """Return a function that writes the parameters as the checkpoint of the current step."""
        section = self.recipe.checkpoints
        keep_last = section.keep_checkpoint_max if section else None
        return self.engine.writer(self.root, self.step, self.to_json(), keep_last)

    def roll_back(self, spike: SkippedStep) -> dict[str, Any] | None:
        """Go back to the newest good checkpoint before a spike and leave out the data from there to the spike.

        Returns what was done, for the logs; None if there is no checkpoint to go back to.

        The checkpoint is written once more with the new position in the data, and later ones are removed, so that a
        run that is killed now resumes from here. All ranks call this together.

        Raises:
            CheckFailedError: It went back as often as the recipe allows.
        """
        rules, earlier = self.guard.rules, list(self.rollbacks)
        assert rules is not None
        if len(earlier) >= rules.max_rollbacks:
            raise CheckFailedError(
                f"stopped at step {spike.step}: {spike.describe()}, and the run has gone back {len(earlier)} time(s) "
                f"already (telechat_moe.loss_guard.max_rollbacks is {rules.max_rollbacks}). Checkpoints in "
                f"{self.root} are from before; look at the data and the learning rate around this step"
            )
        self.saver.wait()
        limit = spike.step - rules.rollback_steps
        position = f"step {self.step}, going back"
        name = self.ranks.agree(position, lambda: self._choose_before(limit))
        if not name:
            return None
        saved = self.engine.open_checkpoint(self.root / name)
        after = self.loader.next_sample
        self.restore(saved, in_place=True)
        before = self.loader.next_sample
        self.loader.seek(after)
        record = {"to_step": saved.step, "from_step": spike.step, "left_out": [before, after]}
        record |= spike.numbers()
        self.rollbacks = [*earlier, record]
        self.save()
        self.saver.wait()
        # Alike on all: what rank 0 announced before, all have seen; it announces nothing before they meet.
        self.ranks.end_step(spike.step + 2)
        self.ranks.meet(f"step {self.step}, went back")
        return record

    def _choose_before(self, step: int) -> str:
        """Return the name of the newest good checkpoint before a step, empty if none; remove the later ones."""
        for path in folder.list_checkpoints(self.root):
            if folder.step_of(path) >= step:
                continue
            try:
                checkpoint.verify(path)
            except checkpoint.BrokenCheckpointError:
                continue
            for later in folder.list_checkpoints(self.root):
                if folder.step_of(later) > folder.step_of(path):
                    hidden = self.root / f".removing-{later.name}"
                    later.rename(hidden)
                    shutil.rmtree(hidden, ignore_errors=True)
            folder.sync_folder(self.root)
            return path.name
        return ""
