"""Train a recipe in this process: alone, or as one rank of several (``telechat-moe train RECIPE``).

A trainer is composed of an engine, which computes the steps, the state of the run, and the loop over the steps; each
knows only the ones before it.
"""

import json
import shutil
import signal
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

from telechat_moe import timings
from telechat_moe.checkpoint import folder
from telechat_moe.checkpoint.weights import ReadWeights, own_weights
from telechat_moe.errors import BadInputError
from telechat_moe.files import write_atomic
from telechat_moe.graph.cache import COMPILING
from telechat_moe.graph.links import ways
from telechat_moe.ops.custom import reason
from telechat_moe.processes import stop_on_signal
from telechat_moe.recipe import COMPUTED_WITH, Recipe
from telechat_moe.sharding.recipe import mesh_of
from telechat_moe.timings import StepTimer
from telechat_moe.train import guard, preflight, schedule
from telechat_moe.train.engine import Engine, OneProcess
from telechat_moe.train.loop import Loop, Summary
from telechat_moe.train.monitor import Monitor, SilentMonitor
from telechat_moe.train.ranks import RankCoordinator
from telechat_moe.train.run_state import RunState
from telechat_moe.train.sample import write_sample


class Trainer:
    """Train the model of a recipe in this process.

    Args:
        resume: Continue from the newest good checkpoint of ``output_dir``, if there is one.
        overwrite: Remove the checkpoints and metrics of an earlier run before the first step.
        plain: Print plain lines, also on a terminal.
        ranks: The processes of the run; None: this is the only one.
        job: Folder of the ranks' graphs, of which this process runs one; None: it trains the whole model.
        keep_graph: Take the compiled graph from an earlier start, or keep it for later ones (:mod:`telechat_moe.graph.cache`).
        weights: What reads `load_checkpoint`; :func:`telechat_moe.interop.hf.weights` knows Hugging Face's format, too.

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
        ranks: RankCoordinator | None = None,
        job: Path | None = None,
        keep_graph: bool = False,
        weights: ReadWeights = own_weights,
    ) -> None:
        if job is None and recipe.devices > 1:
            raise BadInputError(
                f"{recipe.source}: the recipe is laid out for {recipe.devices} devices, a Trainer is "
                "one process; `telechat-moe train` starts one for each device"
            )
        self.recipe, self.plain, self.ranks = recipe, plain, ranks or RankCoordinator()
        self.keep_graph = keep_graph
        self.overwrite = overwrite and self.ranks.leads
        self.output = Path(recipe.output_dir)
        ready = preflight.require(
            recipe,
            resume=resume,
            overwrite=overwrite,
            weights=weights,
            shared=self.ranks.share_batches(),
        )
        self.start, self.loader = ready.start, ready.loader
        self.engine = self._engine(job)
        rules = guard.of_recipe(recipe)
        self.state = RunState(recipe, self.engine, self.loader, rules, self.ranks)
        self._begin(weights)
        self.schedule = schedule.from_recipe(recipe, self.state.lr_batches)
        self.ranks.barrier("loaded")
        self.engine.begin()

    def _engine(self, job: Path | None) -> Engine:
        if job is None:
            return OneProcess(self.recipe, self.keep_graph)
        from telechat_moe.train.programs import programs_of
        from telechat_moe.train.rank_engine import RankEngine

        return RankEngine(self.recipe, programs_of(self.recipe, job, self.ranks), self.ranks)

    def _begin(self, weights: ReadWeights) -> None:
        """Put into engine and loader what the run begins with."""
        path, notes = self.start.path, self.state.notes
        if self.start.note:
            notes.append(self.start.note)
        if self.start.kind == "resume":
            self.state.resume(self.start)
        elif path is not None:
            # One process reads every byte; the others what they hold.
            tensors = weights(path, self.recipe.model_config, verify=self.ranks.leads, notes=notes)
            self.engine.load_weights(tensors, path)
            notes.append(f"weights from {path}")
            notes += preflight.end_tokens(self.recipe, path)
        else:
            self.engine.initialize(self.recipe.seed)

    def loop(self, monitor: Monitor, timer: StepTimer | None = None) -> Loop:
        """Return the loop over the remaining steps."""
        return Loop(self.state, self.schedule, monitor, timer)

    def _timer(self) -> StepTimer:
        """Return what measures and records the parts of this process's steps."""
        rank, resumed = self.ranks.rank, self.state.step * self.start.continues_run
        if self.ranks.leads and not self.start.continues_run:
            # Those of an earlier run, of more ranks perhaps.
            shutil.rmtree(self.output / timings.FOLDER, ignore_errors=True)
        self.ranks.barrier("timings")
        stage = mesh_of(self.recipe).stage(rank)
        about = {"rank": rank, "ranks": self.ranks.count, "stage": stage}
        peers = self.engine.peers
        links = timings.Links(peers, partial(ways, peers)) if peers else None
        return StepTimer(timings.file_of(self.output, rank), about, resumed, links)

    def run(self) -> Summary:
        """Train to the last step of the recipe, or until interrupted.

        A run whose steps are all done is left as it is.
        """
        file, step = self.output / "summary.json", self.state.step
        if self.start.continues_run and not self.state.steps_left and file.exists():
            left = f"{self.state.unread}; " if self.state.unread else ""
            sys.stderr.write(
                f"all {step} steps are done (checkpoint of step {step}); {left}"
                "train from the start with --overwrite\n"
            )
            summary = Summary(**json.loads(file.read_text(encoding="utf-8")))
        else:
            with folder.only_run(self.output) if self.ranks.leads else nullcontext():
                summary = self._run()
        self.ranks.barrier("finished")
        return summary

    def _run(self) -> Summary:
        self.output.mkdir(parents=True, exist_ok=True)
        if self.overwrite:
            shutil.rmtree(self.state.root, ignore_errors=True)
            shutil.rmtree(self.output / "tensorboard", ignore_errors=True)
            (self.output / "metrics.jsonl").unlink(missing_ok=True)
        resolved = self.recipe.to_dict() | {COMPUTED_WITH: {"operators": self.engine.operators}}
        self._write("recipe.json", json.dumps(resolved, indent=2) + "\n")
        steps = self.state.step + self.state.steps_left
        tokens = self.recipe.global_batch * self.recipe.model_config.seq_length
        monitor = SilentMonitor()
        if self.ranks.leads:
            resumed, quiet = self.state.step * self.start.continues_run, self.plain or None
            monitor = Monitor(self.output, steps, tokens, resume_step=resumed, quiet=quiet)
        timer = self._timer()
        loop = self.loop(monitor, timer)
        alone = self.ranks.count == 1  # else the parent process takes the signals
        stopping = stop_on_signal(self.ranks.interrupt, signal.SIG_DFL) if alone else nullcontext()
        try:
            with self.loader, timer, stopping:
                self.engine.say = monitor.message
                for note in self.state.notes:
                    monitor.message(note)
                monitor.message(
                    f"{self.engine.parameter_count / 1e6:.2f}M parameters, {steps} steps of "
                    f"{tokens} tokens" + ("" if self.keep_graph else f"; {COMPILING}")
                )
                if self.state.unread:
                    monitor.message(self.state.unread)
                monitor.message(f"operators: {self.engine.operators}")
                if self.engine.runs_ahead:
                    monitor.message("each step is reported once the next one has been launched")
                loop.run()
                if not self.ranks.interrupted:
                    self._sample(monitor)
        except RuntimeError as error:
            if cause := reason(error):
                raise BadInputError(f"step {self.state.step + 1}: {cause}") from error
            raise
        finally:
            monitor.close()
        summary = loop.summary()
        self._write("summary.json", json.dumps(asdict(summary), indent=2) + "\n")
        return summary

    def _sample(self, monitor: Monitor) -> None:
        """Let the model write."""
        write_sample(self.recipe, self.engine.continue_prompts, monitor.message, self.ranks.leads)

    def _write(self, name: str, text: str) -> None:
        if self.ranks.leads:
            write_atomic(self.output / name, text)
