"""Converts weights in a process of its own and prints what it took: SRC DST TO SHARD_BYTES CONFIG(JSON) [PAUSE].

With PAUSE it says when it begins and rests so many seconds at every piece.
"""

import json
import os
import resource
import sys
import time

from telechat_moe.interop.hf import convert
from telechat_moe.recipe import ModelConfig


def peak() -> int:
    """Return the peak of this process's resident memory, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    src, dst, to, shard_bytes, config = sys.argv[1:6]
    pause = float(sys.argv[6]) if len(sys.argv) > 6 else None
    start, begin = peak(), time.monotonic()

    def rest(what: str, done: int, total: int) -> None:
        if pause is not None:
            os.write(1, b"moved\n")
            time.sleep(pause)

    result = convert(src, dst, ModelConfig(**json.loads(config)), to, int(shard_bytes), rest)
    report = {
        "start": start,
        "peak": peak(),
        "seconds": time.monotonic() - begin,
        **result.to_dict(),
    }
    sys.stdout.write(json.dumps(report) + "\n")
