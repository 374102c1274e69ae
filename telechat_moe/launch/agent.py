"""The agent of one machine in a run on several: starts the machine's processes, watches them, reports.

``python -m telechat_moe.launch.agent``, started by :mod:`telechat_moe.launch.agents`. It reads its task and then ``go`` from standard
input and writes lines of JSON: ``up``, ``beat`` every second, and at the end an ``answer``. When standard input ends, it ends its
processes, so whatever cuts the connection stops them.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from telechat_moe.control import CONTROL, Control, RankDiedError, RankFailedError
from telechat_moe.errors import TelechatMoeError
from telechat_moe.launch.commands import Node, check_port
from telechat_moe.launch.processes import Cluster, last_step
from telechat_moe.private import keep_others_out

BEAT_S = 1.0


def main() -> None:
    """Do what the launcher asks; does not return."""
    keep_others_out()
    task = json.loads(sys.stdin.readline() or "null")
    if task is None:
        sys.exit("this is the agent of `telechat-moe launch`, which tells it what to do")
    gone = threading.Event()
    go = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if json.loads(line) == "go":
                go.set()
        gone.set()
        go.set()

    def beat() -> None:
        while True:
            _say({"beat": time.time()})
            time.sleep(BEAT_S)

    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=beat, daemon=True).start()
    answer = _work(task, go, gone)
    _say({"answer": answer})
    os._exit(0 if answer["kind"] == "done" else 1)  # a thread still reads standard input


def _work(task: dict[str, Any], go: threading.Event, gone: threading.Event) -> dict[str, Any]:
    """Run this machine's processes; return how it ended."""
    node = Node(**{**task["node"], "is_here": True})
    try:
        control = Control(Path(task["job"], CONTROL))
        if control.read("nonce") != task["nonce"]:
            return _failed(
                f"host {node.host} does not see {control.folder} as the launcher does; output_dir must be one "
                "folder that all hosts see",
                3,
            )
        if node.number == 0:
            check_port(node.master, node.port)
        control.write(f"node_{node.number}.up", os.uname().nodename)
        _say({"up": os.uname().nodename})
        go.wait()
        if gone.is_set():
            return {"kind": "echo", "message": "the launcher is gone"}
        metrics = Path(task["metrics"])
        Cluster(
            Path(task["job"]),
            node.total,
            Path(task["logs"]),
            program=task["program"],
            node=node,
            out=None,
            describe=lambda: f"in step {last_step(metrics) + 1}" if metrics.exists() else "",
            silence_s=task["silence_s"],
            abandoned=gone.is_set,
        ).run()
    except RankFailedError as error:
        return _failed(str(error), error.exit_code)
    except RankDiedError as error:
        return {"kind": "echo" if error.is_echo else "died", "message": str(error)}
    except TelechatMoeError as error:
        return _failed(f"host {node.host}: {error}", error.exit_code)
    except OSError as error:
        return _failed(f"host {node.host}: {error}", 1)
    return {"kind": "done"}


def _failed(message: str, code: int) -> dict[str, Any]:
    return {"kind": "failed", "message": message, "exit_code": code}


def _say(what: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):  # the launcher is gone; standard input says so, too
        pass


if __name__ == "__main__":
    main()
