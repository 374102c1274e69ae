"""Functions for test_children.py; a new interpreter imports them."""

import os
import signal

from telechat_moe.errors import BadInputError
from telechat_moe.processes import in_children, in_clean_process


@in_clean_process
def answer(value, done=None):
    """Return two children's results and processes."""
    return in_children([(lambda i=i: (os.getppid(), value + i), "") for i in range(2)], done=done)


@in_clean_process
def refuse():
    raise BadInputError("no such layout")


@in_clean_process
def die():
    os.kill(os.getpid(), signal.SIGKILL)


@in_clean_process
def compile_none():
    """Compile a cell that divides None."""
    in_children([(_divide_none, "")])


def _divide_none():
    import mindspore as ms

    class Divides(ms.nn.Cell):
        def __init__(self):
            super().__init__()
            self.factor = None

        def construct(self, x):
            return x * (self.factor / 2)

    ms.set_context(mode=ms.GRAPH_MODE)
    Divides()(ms.Tensor([1.0]))
