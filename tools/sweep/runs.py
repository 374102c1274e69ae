"""Train the runs of a sweep, each as ``telechat-moe train --resume`` in a process and a folder of its own.

What a run has done is read from its folder alone: `recipe.json`, `summary.json`, `metrics.jsonl`, its checkpoints. So a sweep
that was killed goes on where its runs' checkpoints are.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from telechat_moe import processes
from telechat_moe.checkpoint.weights import ReadWeights
from telechat_moe.interruption import can_stop
from telechat_moe.launch.affinity import Topology
from telechat_moe.narrowing import is_object
from telechat_moe.reading import json_or_none
from telechat_moe.recipe import Problem, RecipeError, load
from telechat_moe.tools.sweep.file import Sweep, SweepRun
from telechat_moe.train import metrics, preflight

LOG = "sweep.log"
"""What a run's processes printed, in its folder."""
_POLL_S = 0.3


@dataclass
class TrainingOutcome:
    """What became of the runs that were started.

    Attributes:
        failed: Why a run failed, by its folder.
    """

    failed: dict[Path, str] = field(default_factory=dict[Path, str])
    stopped: bool = False


def is_finished(run: SweepRun) -> bool:
    """Return whether all steps of a run are done."""
    summary = json_or_none(run.folder / "summary.json")
    return is_object(summary) and summary.get("finished") is True


def check(sweep: Sweep, weights: ReadWeights | None) -> None:
    """Refuse a sweep whose folders hold runs of other recipes, or whose runs lack something, such as data.

    Args:
        weights: What reads `load_checkpoint`; None: nothing will be trained, so nothing can be lacking.

    Raises:
        RecipeError: With everything that was found.
    """
    problems: dict[Problem, None] = {}
    for run in sweep.runs:
        try:  # loaded, a recipe has all keys, those that are newer than the run too
            before = load(path).to_dict() if (path := run.folder / "recipe.json").exists() else None
        except RecipeError as error:
            problems |= dict.fromkeys(error.problems)
            continue
        changed = [] if before is None else list(_differences(before, run.recipe.to_dict()))
        if changed:
            problem = f"{run.folder} holds a run of another recipe: {'; '.join(changed[:3])}"
            problem += f"; and {len(changed) - 3} more keys" if len(changed) > 3 else ""
            expected = "another output_dir or name of the variant, or remove that folder"
            problems[sweep.problem(run.variant, problem, expected)] = None
        elif weights is not None and not is_finished(run):
            _, lacks = preflight.examine(run.recipe, resume=True, weights=weights)
            problems |= dict.fromkeys(lacks)
    if problems:
        raise RecipeError(list(problems))


def _differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """Yield where two recipes differ, the place of the output excepted."""
    if isinstance(before, dict) and isinstance(now, dict):
        old, new = cast("dict[str, Any]", before), cast("dict[str, Any]", now)
        for name in dict.fromkeys([*old, *new]):
            if name != "output_dir" or key:
                yield from _differences(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
    elif json.dumps(before) != json.dumps(now):
        yield f"{key} was {_short(before)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."


def train(
    sweep: Sweep, jobs: int, show: Callable[[int, int, int, int], object] | None
) -> TrainingOutcome:
    """Train all runs that are not finished, ``jobs`` at a time; one that fails does not stop the others.

    Args:
        jobs: Processes at a time, which share this machine's cores evenly.
        show: Called repeatedly with the numbers of ended runs, all runs, finished steps and all steps; None: progress is not shown.
    """
    outcome, waiting = TrainingOutcome(), [run for run in sweep.runs if not is_finished(run)]
    running: dict[int, tuple[subprocess.Popen[Any], SweepRun]] = {}
    jobs, told_to_stop = min(jobs, len(waiting)), False
    shares = [share.cpus for share in Topology.read().shares(jobs)] if jobs > 1 else [None]

    def stop() -> None:
        outcome.stopped = True

    with processes.stop_on_signal(stop):
        can_stop()  # each run ends when it can
        try:
            while (waiting and not outcome.stopped) or running:
                for slot, cores in enumerate(shares):
                    if slot not in running and waiting and not outcome.stopped:
                        run = waiting.pop(0)
                        running[slot] = (_start(sweep, run, cores), run)
                time.sleep(_POLL_S)
                if outcome.stopped and not told_to_stop:
                    told_to_stop = True
                    for process, _ in running.values():
                        process.terminate()  # it saves its step
                for slot, (process, run) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[slot]
                        if not is_finished(run) and not outcome.stopped:
                            outcome.failed[run.folder] = _failure(run, code)
                if show is not None:
                    show(*_progress(sweep, [run for _, run in running.values()], waiting))
        finally:
            for process, _ in running.values():
                processes.end(process)
    return outcome


def _progress(
    sweep: Sweep, running: Sequence[SweepRun], waiting: Sequence[SweepRun]
) -> tuple[int, int, int, int]:
    """Return runs that are over, all runs, steps that are done, all steps; what waits counts as not begun."""
    over = len(sweep.runs) - len(running) - len(waiting)
    total = sum(run.recipe.train_steps for run in sweep.runs)
    left = sum(run.recipe.train_steps for run in [*running, *waiting])
    begun = sum(metrics.last_step(run.folder / metrics.FILE) for run in running)
    return over, len(sweep.runs), total - left + begun, total


def _start(sweep: Sweep, run: SweepRun, cores: list[int] | None) -> "subprocess.Popen[Any]":
    sets = [word for override in run.overrides for word in ("--set", override)]
    verb = ("-m", "telechat_moe.cli", "train")
    command = [sys.executable, *verb, sweep.keys.recipe, "--plain", "--resume", *sets]
    run.folder.mkdir(parents=True, exist_ok=True)

    def begin() -> None:
        processes.die_with_parent()
        if cores is not None:
            os.sched_setaffinity(0, cores)

    threads = {} if cores is None else {"OMP_NUM_THREADS": str(len(cores))}
    with (run.folder / LOG).open("ab") as log:
        return processes.start(
            command,
            env={**os.environ, **threads},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=begin,
        )


def _failure(run: SweepRun, code: int) -> str:
    log = run.folder / LOG
    lines = [x for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    message = (errors or lines or ["it printed nothing"])[-1]
    return f"{processes.death(code)}: {message.removeprefix('error: ')[:300]} ({log})"
