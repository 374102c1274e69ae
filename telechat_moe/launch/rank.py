"""Run the process of one rank, which ``msrun`` starts: meet the others, work under supervision.

As a program, ``python -m telechat_moe.launch.rank JOB``, it runs the steps of the task in the job's control folder
(``telechat-moe run-sharded``); training is started by :mod:`telechat_moe.run`. The scheduler that ``msrun`` starts runs
the same program, and only lets the others meet.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from telechat_moe.errors import TelechatMoeError
from telechat_moe.files import check_private, keep_others_out
from telechat_moe.interruption import die_with_parent
from telechat_moe.launch.binding import Binding, note, note_end, use_cores
from telechat_moe.processes import CONTROL, SCHEDULER, Control, RankDiedError, describe_failure

ECHO_S = 2.0
"""For the launcher to find the process whose end another one noticed."""


def is_scheduler() -> bool:
    """Return whether ``msrun`` started this process to let the others meet."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


def main(job: Path, run: Callable[[Path, int, Any], None] | None = None) -> int:
    """Meet the other processes and run the steps of a job's task; return the exit code.

    Args:
        run: What to do instead, with the job's folder, the rank and the task.
    """
    keep_others_out()
    use_cores(int(os.environ["MS_WORKER_NUM"]), 0, bind=False)
    die_with_parent()
    control = Control(job / CONTROL)
    if is_scheduler():
        control.begin(SCHEDULER)
        meet()
        return 0
    rank = int(os.environ["RANK_ID"])

    def work() -> None:
        from telechat_moe.launch.sharded_run import run_rank

        meet()
        check_private(job / "ranks.json")
        (run or run_rank)(job, rank, control.task())

    return run_supervised(control, rank, work)


def run_supervised(
    control: Control,
    rank: int,
    work: Callable[[], None],
    *,
    can_stop: bool = True,
    binding: Binding | None = None,
) -> int:
    """Run a function under supervision through the control folder; return the exit code.

    Does not return if it fails.

    Args:
        can_stop: It looks whether it should stop between two steps.
        binding: What this process was bound to, for the launcher to verify; None: it was not.
    """
    control.begin(f"rank_{rank}")
    if binding is not None:
        note(control, rank, binding)

    if can_stop:  # all after the same step, so one that is asked to asks for all
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: control.ask_to_stop())
    try:
        work()
    except BaseException as error:
        if isinstance(error, RankDiedError) and error.is_echo:
            time.sleep(ECHO_S)
        if isinstance(error, TelechatMoeError):
            sys.stderr.write(f"error: {error}\n")
        else:
            traceback.print_exc()
        sys.stderr.flush()
        failure = describe_failure(error)
        control.write(f"rank_{rank}.failed", json.dumps(failure))
        os._exit(failure["exit_code"])  # MindSpore would wait for the others first
    if binding is not None:
        note_end(control, rank, binding)
    control.barrier("end", rank, int(os.environ["MS_WORKER_NUM"]))
    control.write(f"rank_{rank}.done")
    return 0


def meet(target: str = "CPU", device: Mapping[str, Any] | None = None) -> None:
    """Wait for the other processes, which compute on the same kind of device; the scheduler waits here to the end.

    Args:
        device: For ``set_context``: what MindSpore asks for as it opens the device.
    """
    import mindspore as ms
    from mindspore.communication import init

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device(target)
    if device:
        ms.set_context(**device)
    init()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
