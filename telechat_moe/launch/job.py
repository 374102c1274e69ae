"""Launch a recipe: compile the graph of each rank, write a job folder, start the processes, restart them.

A job folder holds ``recipe.yaml`` (all overrides put in), ``rank_N.mindir`` and ``ranks.json``
(:class:`telechat_moe.graph.execute.Job`), ``key`` (a hash of what the graphs were compiled from), the same files in
``micro_batches_N/`` for each smaller step of a batch schedule and in ``forward/`` for evaluation and samples, and ``control/`` (:class:`telechat_moe.processes.Control`).

Where the recipe chooses a pipeline schedule, the caller hands in the order of each rank's passes.
"""

import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from telechat_moe.checkpoint import checkpoint
from telechat_moe.checkpoint.stored import open_shards
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.files import check_private, keep_others_out, locked, write_atomic
from telechat_moe.interop import hf
from telechat_moe.launch.binding import conflicts
from telechat_moe.launch.commands import SSH, LaunchNode, check_port, make_nodes
from telechat_moe.launch.host_processes import HostProcesses
from telechat_moe.launch.hosts import Host
from telechat_moe.launch.last_run import LAUNCHER
from telechat_moe.launch.multi_host import MultiHostProcesses
from telechat_moe.processes import (
    CONTROL,
    Control,
    RankDiedError,
    RankFailedError,
    describe_failure,
)
from telechat_moe.recipe import Recipe, RecipeError
from telechat_moe.recipe.swap import require_pool
from telechat_moe.recipe.uses import graph_settings
from telechat_moe.recipe.written import check_written_paths
from telechat_moe.sharding.recipe import forward_of, mesh_of, runs_natively, smaller_steps
from telechat_moe.train import preflight
from telechat_moe.train.metrics import last_step
from telechat_moe.units import size_text

LOGS = "log"
RESOLVED = "recipe.yaml"
Orders = Mapping[int, Sequence[tuple[str, int, int] | tuple[str, int, int, int, int]]]
"""For each rank the order of its passes (:data:`telechat_moe.graph.reorder.PassKey`) and pairs of them."""

# ------------------------------------------------------------------------------ graphs


def write_job(recipe: Recipe, folder: Path, orders: Orders | None = None) -> Path:
    """Compile the step of every rank for CPU and write the job; graphs of an earlier run are reused if they fit.

    Args:
        orders: See :meth:`telechat_moe.graph.execute.Job.write`.

    Raises:
        RecipeError: The recipe chooses the order of passes and no orders are given, or more is swapped than it allows.
        RankFailedError: The layout does not fit the model, or MindSpore refuses it.
    """
    from telechat_moe.graph.execute import FORWARD

    keep_others_out()
    _require_orders(recipe, orders)
    for count, smaller in smaller_steps(recipe).items():
        _require_orders(smaller, None)
        _write_graphs(smaller, folder / f"micro_batches_{count}")
    if forward_of(recipe):
        _write_graphs(recipe, folder / FORWARD, graph="forward")
    _write_graphs(recipe, folder, orders)
    return folder


def _require_orders(recipe: Recipe, orders: Orders | None) -> None:
    """Refuse a recipe that chooses the order of passes where none is given."""
    sharding = recipe.telechat_moe.sharding
    chosen = {key: getattr(sharding, key) for key in ("overlap_exchange", "pipeline_schedule")}
    key = next((key for key, value in chosen.items() if value), None)
    if key is not None and orders is None:
        problem = f"{chosen[key]}, which this command does not take"
        expected = "remove it, or use `telechat-moe train`, `launch` or `run-sharded`"
        raise RecipeError([recipe.problem(f"telechat_moe.sharding.{key}", problem, expected)])


def _write_graphs(
    recipe: Recipe,
    folder: Path,
    orders: Orders | None = None,
    graph: Literal["step", "forward"] = "step",
) -> None:
    """Compile one graph of every rank, unless the folder has them."""
    from telechat_moe.graph.cache import source_hash

    samples = graph == "forward" and recipe.telechat_moe.sample is not None
    settings = {**graph_settings(recipe), "orders": orders, "graph": graph, "logits": samples}
    key, written = source_hash(json.dumps(settings, sort_keys=True, default=str)), folder / "key"
    if written.exists() and check_private(written).read_text() == key:
        _say(f"graphs of {recipe.devices} ranks: compiled before, in {folder}")
    else:
        for path in (written, *folder.glob("rank*")):
            path.unlink(missing_ok=True)
        _compile_job(recipe, folder.absolute(), orders, graph)
        written.write_text(key)
    _check_swapped(recipe, folder)


def _check_swapped(recipe: Recipe, job: Path) -> None:
    """Say what the graphs of a job swap.

    Raises:
        RecipeError: More than the recipe lets a process have outside of its graph.
    """
    from telechat_moe.graph.execute import Job
    from telechat_moe.graph.swapping import room

    swapped = {rank: swapping for rank, swapping in enumerate(Job.read(job).swapped) if swapping}
    if not swapped:
        return
    rank, largest = max(swapped.items(), key=lambda item: item[1].pool)
    if largest.tensors:
        _say(
            f"rank {rank}: {largest.tensors} activations of {size_text(largest.moved)} go out of its memory and back in a step, "
            f"{size_text(largest.pool - sum(room(s.nbytes) for s in largest.states))} at once; {size_text(largest.peak)} are in it at most"
        )
    if largest.states:
        moments = size_text(sum(state.nbytes for state in largest.states))
        text = f"{len(largest.states)} moments of {moments} are out of its memory between updates"
        _say(f"rank {rank}: {text}")
    require_pool(recipe, largest.pool, f"rank {rank}")


def _compile_job(
    recipe: Recipe, folder: Path, orders: Orders | None, graph: Literal["step", "forward"]
) -> None:
    from telechat_moe.graph.execute import Job
    from telechat_moe.train.rank_graph import compile_recipe

    ranks = recipe.devices
    purpose = f"{recipe.micro_batches} micro-batches a step" if graph == "step" else "evaluation"
    text = f"compiling the graphs of {ranks} ranks, {purpose}"
    _say(f"layout {mesh_of(recipe).describe()}: {text}")
    began, count = time.perf_counter(), 0

    def one_more() -> None:
        nonlocal count
        count += 1
        _say(f"compiled {count} of {ranks} ranks ({time.perf_counter() - began:.0f} s)")

    graphs = compile_recipe(recipe, target="CPU", full_batch=True, done=one_more, graph=graph)
    Job.write(folder, graphs, orders, recipe.optimizer.swap and graph == "step")


def ascend_operators(recipe: Recipe) -> dict[str, int]:
    """Return the primitives of the first rank of each stage in the graphs for Ascend, and how many."""
    from telechat_moe.graph.mindir import kinds
    from telechat_moe.train.rank_graph import compile_recipe

    settings = recipe.telechat_moe
    if settings.operators.attention == "fused":  # Ascend has its own
        operators = replace(settings.operators, attention=None)
        recipe = replace(recipe, telechat_moe=replace(settings, operators=operators))
    graphs = compile_recipe(recipe, mesh_of(recipe).first_ranks(), full_batch=True)
    return dict(sum((kinds(graph.mindir) for graph in graphs), Counter()))


# ------------------------------------------------------------------------------ training


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How a run is started.

    Attributes:
        nodes: Hosts; the first runs the scheduler.
        through: Whose trainer: ``own`` or ``mindformers``.
        bind: Bind each process to its own cores, and watch that it stays there.
        restarts: How often in a row to restart after a process died or hung without a new checkpoint in between.
        shell: Remote shell; see :func:`telechat_moe.launch.commands.remote`.
        logs: Folder for logs; None: ``output_dir/log``.
    """

    nodes: Sequence[LaunchNode]
    through: str = "own"
    bind: bool = False
    restarts: int = 0
    shell: str = SSH
    logs: Path | None = None
    allow_outside: bool = False

    def program(
        self, resolved: Path, *, resume: bool, overwrite: bool, nonce: str | None = None
    ) -> list[str]:
        """Return what the processes run; the nonce tells them that the control folder and the graphs are there."""
        flags = {"--resume": resume, "--overwrite": overwrite}
        flags |= {"--bind-cores": self.bind, "--allow-outside": self.allow_outside}
        return [
            *("python", "-u", "-m", "telechat_moe.run", str(resolved.absolute())),
            *(f"--through={self.through}", f"--local-processes={self.nodes[0].local}"),
            *(flag for flag, is_set in flags.items() if is_set),
            *([f"--nonce={nonce}"] if nonce else []),
        ]


def this_machine(processes: int) -> list[Host]:
    """Return this machine as the only host of a run."""
    return [Host(platform.node(), processes, "127.0.0.1")]


def plan_here(recipe: Recipe, *, allow_outside: bool = False) -> LaunchPlan:
    """Return how to start a recipe with our trainer on this machine."""
    nodes = make_nodes(this_machine(recipe.devices), None)
    return LaunchPlan(nodes=nodes, allow_outside=allow_outside)


def check(
    recipe: Recipe, plan: LaunchPlan, *, resume: bool = False, overwrite: bool = False
) -> None:
    """Refuse what cannot be launched.

    Raises:
        BadInputError: The recipe cannot be trained, lacks something on this machine (if it is one of the hosts), or
            writes outside of its folder.
        UsageError: See :func:`train`.
    """
    if not plan.allow_outside:
        check_written_paths(recipe)
    if plan.through == "own" and not plan.nodes[0].is_here:
        return
    if plan.through == "own":
        run = preflight.require(recipe, resume=resume, overwrite=overwrite, weights=hf.weights)
        if run.start.kind == "resume":  # refused here, not after minutes by every rank
            run.start.load(lambda _: None, open_shards)
    else:
        from telechat_moe.interop.mindformers_config import check_launch

        check_launch(recipe, plan.nodes[0].total)
        if plan.bind and (problems := conflicts(recipe)):
            raise RecipeError(problems)
        if plan.nodes[0].is_here and (problems := preflight.machine(recipe)):
            raise RecipeError(problems)


def write_resolved(recipe: Recipe, folder: Path) -> Path:
    """Write the recipe with all overrides into a job's folder, where the processes read it; return the file."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESOLVED
    text = yaml.safe_dump(recipe.given, sort_keys=False, allow_unicode=True, width=100)
    write_atomic(path, f"# {recipe.source}, with all overrides put in.\n{text}")
    return path


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    plan: LaunchPlan | None = None,
    orders: Orders | None = None,
) -> dict[str, Any]:
    """Train a recipe, one process for each of its devices.

    Args:
        resume: See :class:`telechat_moe.train.trainer.Trainer`.
        plan: Where and how; None: on this machine.
        orders: See :func:`write_job`.

    Returns:
        The summary, as in ``summary.json``; of another trainer, only ``finished``.

    Raises:
        BadInputError: The recipe cannot be trained here.
        UsageError: ``output_dir`` holds another run's checkpoints and ``resume`` is not set; a port is in use.
        RankDiedError: A process died or hangs, once more than ``plan.restarts``; the message names the last good
            checkpoint.
    """
    keep_others_out()
    plan = plan or plan_here(recipe)
    if plan.through != "own":
        resume = (resume or bool(recipe.resume_training)) and not overwrite
    check(recipe, plan, resume=resume, overwrite=overwrite)
    if plan.nodes[0].is_here:
        check_port(plan.nodes[0].master, plan.nodes[0].port)
    with only_launch(Path(recipe.output_dir)):
        resolved = write_resolved(recipe, Path(recipe.output_dir) / ".job")
        if plan.through == "own" and recipe.devices > 1 and not runs_natively(recipe):
            write_job(recipe, resolved.parent, orders)
        _train_to_the_end(recipe, plan, resolved, resume, overwrite)
    if plan.through != "own":
        return {"finished": True}
    return json.loads((Path(recipe.output_dir) / "summary.json").read_text(encoding="utf-8"))


def _train_to_the_end(
    recipe: Recipe, plan: LaunchPlan, resolved: Path, resume: bool, overwrite: bool
) -> None:
    """Start the processes; restart them after each death as often as the plan says."""
    root = Path(recipe.output_dir) / "checkpoints"
    logs = plan.logs or Path(recipe.output_dir) / LOGS
    set_aside(logs, None)
    before = newest(recipe, plan)
    attempt = left = 0
    while True:
        checkpoint = newest(recipe, plan)
        try:
            _start(recipe, plan, resolved, logs, resume, overwrite)
            return
        except RankDiedError as error:
            now = newest(recipe, plan)
            left = plan.restarts if now != checkpoint or not attempt else left
            last = _last_good(root) if plan.through == "own" else f"MindFormers' newest: {now}"
            message = f"{error}\n{last}"
            if not left:
                raise RankDiedError(message) from None
        left, attempt = left - 1, attempt + 1
        # What was to be overwritten may still be there.
        resume, overwrite = (False, True) if overwrite and now == before else (True, False)
        _say(f"{message}\nrestart {attempt} ({left} more without a new checkpoint)")
        set_aside(logs, attempt)


def _start(
    recipe: Recipe, plan: LaunchPlan, resolved: Path, logs: Path, resume: bool, overwrite: bool
) -> None:
    job = resolved.parent
    nonce = Control.fresh(job).read("nonce")
    logs.mkdir(parents=True, exist_ok=True)
    program = plan.program(resolved, resume=resume, overwrite=overwrite, nonce=nonce)
    can_stop, metrics = plan.through == "own", Path(recipe.output_dir) / "metrics.jsonl"

    def describe() -> str:
        return f"in step {last_step(metrics) + 1}" if can_stop else ""

    nodes, shell = plan.nodes, plan.shell
    if len(nodes) > 1 or not nodes[0].is_here:
        run = MultiHostProcesses(job, nodes, logs, program, metrics, shell, can_stop=can_stop)
    else:
        command = (job, nodes[0], logs, program)
        run = HostProcesses(*command, describe=describe, can_stop=can_stop)
    try:
        run.run()
    except (RankDiedError, RankFailedError) as error:  # name the file that the user knows
        text = str(error).replace(str(resolved.absolute()), str(recipe.source))
        error.args = (text,)
        first = {**describe_failure(error), "message": text.partition("\n")[0]}
        Control(job / CONTROL).write(LAUNCHER, json.dumps(first))
        raise


def set_aside(logs: Path, attempt: int | None) -> None:
    """Move the logs of an attempt into their own folder; None: remove all that earlier launches left."""
    patterns = ("worker_*.log", "msrun*.log", "agent_*.log", "scheduler.log")
    if attempt is None:
        for pattern in patterns:
            for path in (*logs.glob(pattern), *logs.glob(f"attempt_*/{pattern}")):
                path.unlink()
        return
    folder = logs / f"attempt_{attempt}"
    folder.mkdir(exist_ok=True)
    for path in [path for pattern in patterns for path in logs.glob(pattern)]:
        path.rename(folder / path.name)


def newest(recipe: Recipe, plan: LaunchPlan) -> str | None:
    """Return something that changes when a checkpoint is written: the newest one's path and time; None: none."""
    if plan.through == "own":
        paths = checkpoint.list_checkpoints(Path(recipe.output_dir) / "checkpoints")
    else:
        from telechat_moe.interop import mindformers_checkpoint as theirs

        folder = theirs.newest(Path(recipe.output_dir) / theirs.FOLDER, recipe.devices)
        paths = [folder] if folder is not None else []
    for path in paths:
        with suppress(FileNotFoundError):
            return f"{path} ({time.strftime('%F %T', time.localtime(path.stat().st_mtime))})"
    return None


@contextmanager
def only_launch(output: Path) -> Iterator[None]:
    """Hold an output folder, so that no second launch writes into it.

    Raises:
        UsageError: One does already.
    """
    folder = output / ".job"
    folder.mkdir(parents=True, exist_ok=True)
    check_private(folder)
    busy = f"{output}: another launch trains into it; wait, stop it, or set another output_dir"
    with locked(folder / "launched", UsageError(busy)):
        yield


def _last_good(root: Path) -> str:
    for path in checkpoint.list_checkpoints(root):
        with suppress(BadInputError):
            checkpoint.verify(path)
            return f"the last good checkpoint is {path} (checksums verified); continue from it with --resume"
    return f"there is no checkpoint in {root} yet; start from the beginning"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
