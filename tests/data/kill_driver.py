"""Kill a build at many moments, each in a process of its own, and finish it; used by test_build.

``python kill_driver.py CORPUS OUT event N`` kills itself with SIGKILL before the N-th file operation
of the build, ``... time S`` after S seconds of it, ``... count`` not at all. A build that is not
killed prints one line of JSON, the number of its file operations among others.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from telechat_moe.data import build, scan
from telechat_moe.data.corpus import open_corpus

OPERATIONS = 0


def before_each_operation(act) -> None:
    """Call ``act`` with 1, 2, ... before every fsync, rename and removal."""

    def wrap(function):
        def wrapped(*args, **kwargs):
            global OPERATIONS
            OPERATIONS += 1
            act(OPERATIONS)
            return function(*args, **kwargs)

        return wrapped

    os.fsync = wrap(os.fsync)
    Path.replace = wrap(Path.replace)
    Path.unlink = wrap(Path.unlink)
    # What rmtree removes one by one.
    os.unlink = wrap(os.unlink)


def main() -> None:
    corpus, out, how, *value = sys.argv[1:]
    scan.SHARD_BYTES = 8000
    if how == "event":
        last = int(value[0])
        before_each_operation(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == last else None)
    elif how == "time":
        timer = threading.Timer(float(value[0]), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    else:
        before_each_operation(lambda n: None)
    begin = time.monotonic()
    result = build(out, open_corpus([corpus]), vocab_size=400, seed=3)
    seconds = time.monotonic() - begin
    report = {
        "operations": OPERATIONS,
        "seconds": seconds,
        "shards": result.shards,
        "resumed": result.resumed_shards,
        "reused": result.reused,
    }
    sys.stdout.write(json.dumps(report) + "\n")


main()
