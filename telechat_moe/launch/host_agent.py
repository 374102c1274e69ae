"""The agent on one host of a run on several: start the host's processes, watch them, report.

``python -m telechat_moe.launch.host_agent``, started by :mod:`telechat_moe.launch.multi_host`. It reads its task and
then ``go`` from standard input and writes lines of JSON: ``up``, ``beat`` every second, what it has ``said``, and at the end an ``answer``.
When standard input ends, it ends its processes, so whatever breaks the connection stops them.
"""

import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from telechat_moe.errors import TelechatMoeError
from telechat_moe.files import keep_others_out
from telechat_moe.launch.commands import LaunchNode, check_port
from telechat_moe.launch.host_processes import HostProcesses
from telechat_moe.processes import CONTROL, Control, RankDiedError, RankFailedError, beat
from telechat_moe.train.metrics import last_step


def main() -> None:
    """Do what the launcher asks; does not return."""
    keep_others_out()
    task = json.loads(sys.stdin.readline() or "null")
    if task is None:
        sys.exit("this is the agent of `telechat-moe launch`, which tells it what to do")
    gone, go = threading.Event(), threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if json.loads(line) == "go":
                go.set()
        gone.set()
        go.set()

    threading.Thread(target=listen, daemon=True).start()
    beat(lambda: _say({"beat": time.time()}))
    answer = _work(task, go, gone)
    _say({"answer": answer})
    os._exit(0 if answer["kind"] == "done" else 1)  # a thread still reads standard input


def _work(task: dict[str, Any], go: threading.Event, gone: threading.Event) -> dict[str, Any]:
    """Run this host's processes; return how it ended."""
    node = LaunchNode(**{**task["node"], "is_here": True})
    job, metrics = Path(task["job"]), Path(task["metrics"])
    control = Control(job / CONTROL)
    try:
        if control.read("nonce") != task["nonce"]:
            text = f"host {node.host} does not see {control.folder} as the launcher does"
            return _failed(f"{text}; output_dir must be one folder that all hosts see", 3)
        if node.number == 0:
            check_port(node.master, node.port)
        control.write(f"node_{node.number}.up", os.uname().nodename)
        _say({"up": os.uname().nodename})
        go.wait()
        if gone.is_set():
            return {"kind": "echo", "message": "the launcher is gone"}
        HostProcesses(
            job,
            node,
            Path(task["logs"]),
            task["program"],
            out=None,
            say=lambda text: _say({"said": text}),
            describe=lambda: f"in step {last_step(metrics) + 1}" if metrics.exists() else "",
            silence_s=task["silence_s"],
            abandoned=gone.is_set,
        ).run()
    except RankFailedError as error:
        return _failed(str(error), error.exit_code)
    except RankDiedError as error:
        return {"kind": "echo" if error.is_echo else "died", "message": str(error)}
    except (TelechatMoeError, OSError) as error:
        return _failed(f"host {node.host}: {error}", getattr(error, "exit_code", 1))
    return {"kind": "done"}


def _failed(message: str, code: int) -> dict[str, Any]:
    return {"kind": "failed", "message": message, "exit_code": code}


def _say(message: dict[str, Any]) -> None:
    # If the launcher is gone, standard input says so, too.
    with suppress(BrokenPipeError, ValueError):
        sys.stdout.write(json.dumps(message) + "\n")  # two threads write: a line at once
        sys.stdout.flush()


if __name__ == "__main__":
    main()
