"""A step of two lines under `cache.compile_cache`, as a process of its own: `tiny_step.py FACTOR WEIGHT [die]`.

FACTOR is a constant of the graph, WEIGHT what its parameter begins with. Prints what is said, then the second result.
"""

import os
import signal
import sys

os.environ.setdefault("GLOG_v", "3")  # before mindspore is imported

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from telechat_moe import files
from telechat_moe.graph import cache


class Step(nn.Cell):
    """Multiplies its weight and adds to it."""

    def __init__(self, factor: float, weight: float) -> None:
        super().__init__()
        self.factor = Tensor(np.full(1000, factor, np.float32))
        self.weight = Parameter(Tensor(np.full(1000, weight, np.float32)), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        """Return the sum of the new weight."""
        ms.ops.assign(self.weight, self.weight * self.factor + x)
        return self.weight.sum()


def die(file: object) -> None:
    """Die where a file would be on the disk."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    cache.COMMAND = ("tiny_step.py",)
    factor, weight, *rest = sys.argv[1:]
    if rest == ["die"]:
        files.sync_file = die
    step, x = Step(float(factor), float(weight)), Tensor(np.ones(1000, np.float32))
    with cache.compile_cache(factor, 1, print):
        step(x)
    sys.stdout.write(f"{float(step(x).asnumpy())}\n")
