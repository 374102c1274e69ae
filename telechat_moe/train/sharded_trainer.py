"""The training loop of one rank: :class:`telechat_moe.train.trainer.Trainer` with a rank's graph as its step.

Every rank reads all data, runs its graph and writes its share of the checkpoints; rank 0 reports, evaluates with the
whole weights and completes the checkpoints.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor

from telechat_moe.checkpoint import checkpoint as checkpoints
from telechat_moe.checkpoint.multi_rank import Together
from telechat_moe.checkpoint.rank_shards import Exchange, Sharing, grouped
from telechat_moe.checkpoint.snapshot import Groups
from telechat_moe.errors import BadInputError
from telechat_moe.graph.execute import Job, RankProgram
from telechat_moe.ops import select
from telechat_moe.processes import CONTROL, Control
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.recipe import mesh_of
from telechat_moe.train import state
from telechat_moe.train.guard import Limits
from telechat_moe.train.monitor import Monitor
from telechat_moe.train.sharded import adamw
from telechat_moe.train.step import Evaluate, StepOutput
from telechat_moe.train.trainer import Summary, Trainer, check_steps

MOMENTS = ("adam_m", "adam_v")
SUMS = "accu_grads"  # zero between steps


class ShardedTrainer(Trainer):
    """Train one rank's part of a model.

    Args:
        recipe: Loaded recipe.
        job: Folder of the job; MindSpore's communication is initialised.
        rank: This process.
        resume: See :class:`Trainer`.
        overwrite: See :class:`Trainer`.
    """

    def __init__(
        self, recipe: Recipe, *, job: Path, rank: int, resume: bool = False, overwrite: bool = False
    ) -> None:
        self.rank, self.ranks = rank, recipe.devices
        self.job, self.control = Job.read(job), Control(job / CONTROL)
        self.saves = self.agreed = self.meetings = 0
        self.moments: dict[str, np.ndarray] = {}
        super().__init__(recipe, resume=resume, overwrite=overwrite, plain=True)
        if rank:
            self.overwrite = False  # rank 0 does it
        self.control.barrier("loaded", rank, self.ranks)
        self._cut()

    @staticmethod
    def check(recipe: Recipe) -> None:
        """See :meth:`Trainer.check`; any layout goes."""
        check_steps(recipe)

    def _build_step(self, recipe: Recipe) -> None:
        self.program = RankProgram(self.job, self.rank)
        self.weights = {p.name: p for p in self.model.get_parameters()}
        with select.using("plain"):
            self.optimizer = adamw(recipe, [])  # for the host's part of it
        self.evaluate_cell = Evaluate(self.model)
        self.names = [name for name in self.program.parameters if self._kept(name)]
        self.sharing = Sharing(self.job, self._kept)
        place = Path(recipe.output_dir) / ".pieces"
        self.exchange = Exchange(self.sharing, self.rank, place, self.control)

    def _kept(self, name: str) -> bool:
        """Return whether a parameter of the graph belongs into a checkpoint."""
        transient = name.split(".")[-1] in state.TRANSIENT or name.startswith(SUMS)
        return _base(name) in self.weights and not transient

    def _cut(self, in_place: bool = False) -> None:
        """Put this rank's part of weights and moments into its graph."""
        values: dict[str, np.ndarray] = {}
        for name in self.program.parameters:
            base = _base(name)
            if name in self.moments:
                values[name] = self.moments[name]
            elif base in self.weights:
                weight = self.weights[base]
                transient = base != name or base.split(".")[-1] in state.TRANSIENT
                values[name] = np.zeros(weight.shape, np.float32) if transient else _copy(weight)
        self.program.set_parameters(values, in_place)
        self.moments = {}

    def put(self, saved: checkpoints.Checkpoint, in_place: bool = False) -> None:
        """See :meth:`Trainer.put`; :meth:`_cut` is what reaches the graph."""
        del in_place
        state.restore_weights(self.model, saved)
        wanted = [f"{m}.{p.name}" for m in MOMENTS for p in self.model.trainable_params()]
        self.moments = saved.tensors.get("optimizer", {})
        missing = sorted(set(wanted) - set(self.moments))
        if missing:
            raise BadInputError(f"{saved.path} does not fit the model: {missing[0]} is missing")

    def put_back(self, saved: checkpoints.Checkpoint) -> None:
        """See :meth:`Trainer.put_back`."""
        super().put_back(saved)
        self._cut(in_place=True)

    def agree(self, name: str, choose: Callable[[], str]) -> str:
        """See :meth:`Trainer.agree`; rank 0 chooses."""
        self.agreed += 1
        file = f"agreed-{self.agreed}-{name}"
        self.meet(name)  # all have come here: none is still saving
        if self.rank == 0:
            self.control.write(file, choose())
        self.meet(name)
        return self.control.read(file) or ""

    def meet(self, name: str) -> None:
        """See :meth:`Trainer.meet`."""
        self.meetings += 1
        self.control.set_position(self.rank, f"step {self.step}, {name}")
        self.control.barrier(f"met-{self.meetings}", self.rank, self.ranks)

    # ------------------------------------------------------------------ whole tensors

    def collect_weights(self) -> None:
        """Put the whole weights into rank 0's model."""
        weights = [name for name in self.names if name.split(".")[0] not in MOMENTS]
        whole = self.exchange.gather({n: _copy(self.program.parameters[n]) for n in weights})
        if whole is not None:
            for name, value in whole.items():
                self.weights[name].set_data(Tensor(value))

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """See :meth:`Trainer.parameters`."""
        return grouped({name: self.program.parameters[name] for name in self.names}, MOMENTS)

    def save(self, before: Callable[[], object] = lambda: None) -> None:
        """See :meth:`Trainer.save`."""
        self.control.set_position(self.rank, f"step {self.step}, saving")
        super().save(before)

    def writing(self) -> Callable[[Groups], object]:
        """Return what writes this rank's share of a copy; no rank waits for another one but in its thread."""
        self.saves += 1
        together = Together(
            self.root,
            self.step,
            f"{self.control.read('nonce')}-{self.saves}",
            self.rank,
            self.ranks,
            self.control,
            {"layout": mesh_of(self.recipe).describe()},
            self.keep_last,
        )
        given = self._state() if self.rank == 0 else {}

        def write(groups: Groups) -> None:
            pieces = {
                group: {name: self.sharing.piece(self.rank, name, x) for name, x in found.items()}
                for group, found in groups.items()
            }
            together.write(pieces, given)

        return write

    def evaluate(self) -> float:
        """Return the loss on the validation data, on rank 0; the others wait."""
        self.control.set_position(self.rank, f"step {self.step}, evaluating")
        self.collect_weights()
        loss = super().evaluate() if self.rank == 0 else float("nan")
        self.meet("evaluated")
        return loss

    def sample(self, monitor: Monitor) -> None:
        """Let the model write, on rank 0."""
        self.collect_weights()
        if self.rank == 0:
            super().sample(monitor)

    # ------------------------------------------------------------------ a step

    def next_batches(self) -> list[tuple[Tensor, ...]]:
        """Return the whole batch; the graph cuts micro-batches and this rank's rows out of it."""
        self.control.set_position(self.rank, f"step {self.step + 1}, reading data")
        parts = [next(self.loader) for _ in range(self.micro_batches)]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return [self.tensors(whole)]

    def update(self, batches: list[tuple[Tensor, ...]], rate: float) -> StepOutput:
        """Run one step; all ranks together decide whether it is the last."""
        step = self.step + 1
        if self.rank == 0 and not self.control.read("last") and self.control.stop_asked():
            # Seen by all others before they end this step, since they need rank 0 for its collectives.
            self.control.write("last", str(step))
        scalars = self.optimizer.scalars(self.updates + 1, rate)
        self.set_limits()
        self.control.set_position(self.rank, f"step {step}, in the graph")
        losses, norm, applied, loads = self.program(*scalars, *batches[0])
        output = StepOutput(losses, norm, None, applied, loads, None)
        applied.asnumpy()
        last = self.control.read("last")
        self.interrupted = last is not None and step >= int(last)
        return output

    def put_limits(self, limits: Limits) -> None:
        """See :meth:`Trainer.put_limits`."""
        self.program.set_limits(*limits)

    def culprit(self, output: StepOutput) -> str:
        """Say which weight of this rank is not finite."""
        pieces = self.program.parameters
        for name in self.names:
            if not np.isfinite(_copy(pieces[name])).all():
                return f"the weight {name} is not finite"
        return "the loss or a gradient is not finite although all weights of rank 0 are"

    # ------------------------------------------------------------------ what rank 0 does alone

    def alone(self) -> AbstractContextManager[None]:
        """See :meth:`Trainer.alone`; rank 0 does it."""
        return nullcontext() if self.rank else super().alone()

    def stopping(self) -> AbstractContextManager[None]:
        """See :meth:`Trainer.stopping`; signals go to the parent process."""
        return nullcontext()

    def make_monitor(self, tokens: int) -> Any:
        """Return the monitor of rank 0, elsewhere one that shows nothing."""
        if self.rank:
            return _Silent()
        self.operators = (
            f"plain, in the graphs of {self.ranks} ranks ({mesh_of(self.recipe).describe()})"
        )
        return super().make_monitor(tokens)

    def run(self) -> Summary:
        """See :meth:`Trainer.run`."""
        summary = super().run()
        self.control.barrier("finished", self.rank, self.ranks)
        return summary

    def _write(self, name: str, text: str) -> None:
        if self.rank == 0:
            super()._write(name, text)


class _Silent:
    """A monitor that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _base(name: str) -> str:
    """Return the weight that a moment or a sum belongs to; of a weight, itself."""
    prefix, _, rest = name.partition(".")
    return rest if prefix in (*MOMENTS, SUMS) else name


def _copy(parameter: Parameter) -> np.ndarray:
    return parameter.asnumpy().copy()
