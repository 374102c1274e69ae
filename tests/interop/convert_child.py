"""Converts weights in a process of its own and prints what it took: SRC DST TO SHARD_BYTES CONFIG(JSON) [paced].

With "paced" it says so before every piece, and waits for a line.
"""

import json
import os
import sys
import time
from pathlib import Path

from telechat_moe.interop.hf import convert
from telechat_moe.recipe import ModelConfig


def peak() -> int:
    """Return the peak of this process's resident memory, in bytes; rusage begins with the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    src, dst, to, shard_bytes, config = sys.argv[1:6]
    paced = "paced" in sys.argv[6:]
    start, begin = peak(), time.monotonic()

    def wait(text: str, finished: int, total: int) -> None:
        if paced:
            os.write(1, b"piece\n")
            sys.stdin.readline()

    result = convert(src, dst, ModelConfig(**json.loads(config)), to, int(shard_bytes), wait)
    report = {
        "start": start,
        "peak": peak(),
        "seconds": time.monotonic() - begin,
        **vars(result),
    }
    sys.stdout.write(json.dumps(report) + "\n")
