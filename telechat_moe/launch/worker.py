"""One process of a run that is spread over CPU processes: what ``msrun`` starts.

As a script, ``worker.py JOB``, it does the task in the job's control folder (``telechat-moe run-sharded``); training is
started by :mod:`telechat_moe.run`. The scheduler that ``msrun`` starts runs the same, and only lets the others meet.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent.resolve()]

from telechat_moe.children import die_with_parent
from telechat_moe.control import CONTROL, Control, Task
from telechat_moe.errors import TelechatMoeError
from telechat_moe.launch.affinity import settle
from telechat_moe.private import check_private, keep_others_out


def is_scheduler() -> bool:
    """Return whether ``msrun`` started this process to let the others meet."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


def main(job: Path) -> int:
    """Meet the other processes and do the task of a job; return the exit code."""
    keep_others_out()
    settle(int(os.environ["MS_WORKER_NUM"]), 0, bind=False)
    die_with_parent()
    if is_scheduler():
        meet()
        return 0
    rank = int(os.environ["RANK_ID"])
    control = Control(job / CONTROL)

    def do() -> None:
        meet()
        work(control.task(), job, rank)

    return follow(control, rank, do)


def follow(control: Control, rank: int, do: Callable[[], None], *, can_stop: bool = True) -> int:
    """Do something so that it can be followed through the control folder; return the exit code.

    Does not return if it fails.

    Args:
        control: The folder.
        rank: This process.
        do: What to do.
        can_stop: It looks whether it should stop between two steps.
    """
    control.begin(rank)

    # All processes must stop after the same step, so one that is asked to asks for all.
    def stop(number: int, frame: object) -> None:
        control.ask_to_stop()

    if can_stop:
        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
    try:
        do()
    except BaseException as error:
        code = report(control, rank, error)
        os._exit(code)  # MindSpore would wait for the others first
    control.barrier("end", rank, int(os.environ["MS_WORKER_NUM"]))
    control.write(f"rank_{rank}.done")
    return 0


def report(control: Control, rank: int, error: BaseException) -> int:
    """Say in the control folder and on standard error why this process gives up; return its exit code."""
    traceback.print_exc()
    known = isinstance(error, TelechatMoeError)
    if known:
        sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    code = error.exit_code if isinstance(error, TelechatMoeError) else 1
    said = {
        "message": str(error) if known else f"{type(error).__name__}: {error}"[:2000],
        "exit_code": code,
        "known": known,
        "time": time.time(),
    }
    control.write(f"rank_{rank}.failed", json.dumps(said))
    return code


def meet() -> None:
    """Wait for the other processes; the scheduler stays here to the end."""
    import mindspore as ms
    from mindspore.communication import init

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()


def work(task: Task, job: Path, rank: int) -> None:
    """Do the task."""
    check_private(job / "ranks.pickle")
    if task.kind == "train":
        from telechat_moe.train.sharded_trainer import ShardedTrainer

        trainer = ShardedTrainer(
            task.recipe, job=job, rank=rank, resume=task.resume, overwrite=task.overwrite
        )
        trainer.run()
        return
    from telechat_moe.launch.sharded_run import run_rank

    run_rank(task.recipe, job, rank, **task.options)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
