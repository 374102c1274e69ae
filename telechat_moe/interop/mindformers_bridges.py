"""Provide what MindFormers 1.9.0 needs and MindSpore's CPU backend lacks. Nothing here acts on Ascend.

Each has a test in ``tests/interop/test_mindformers_bridges.py`` that fails as soon as MindFormers runs without it:

==================================  =============================================================================
bridge                              without it
==================================  =============================================================================
:class:`TelechatMoeTrainOneStep`    ``NPUGetFloatStatusV2`` has no CPU kernel: training stops at the first step
:func:`bridge_barrier`              ``Barrier`` has no CPU kernel: two processes stop in the data loader
:func:`copy_losses`                 the loss monitor prints 0 for the terms of the loss: ``asnumpy`` shares memory on
                                    CPU, and it clears the parameters before it prints
==================================  =============================================================================
"""

import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper.wrapper import MFTrainOneStepCell
from mindspore import Tensor, nn, ops

from telechat_moe.sharding.cells.collective import SumOverProcesses

STEP = "TelechatMoeTrainOneStep"


def install(config: Any) -> None:
    """Install the bridges if this is CPU.

    Args:
        config: MindFormers' configuration; its step becomes :class:`TelechatMoeTrainOneStep`.
    """
    if ms.get_context("device_target") != "CPU":
        return
    bridge_barrier()
    copy_losses()
    if config.runner_wrapper.type == "MFTrainOneStepCell":
        config.runner_wrapper.type = STEP


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class TelechatMoeTrainOneStep(MFTrainOneStepCell):
    """MindFormers' step; it finds overflow of gradients by primitives that CPU has."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, **kwargs: Any) -> None:
        super().__init__(network, optimizer, **kwargs)
        self.finite, self.all, self.cast = ops.IsFinite(), ops.ReduceAll(), ops.Cast()

    def get_overflow_status(self, status: Tensor, compute_output: tuple[Tensor, ...]) -> Tensor:
        """Return True if a gradient is not finite; all processes hold the same reduced gradients."""
        good = Tensor(True)
        for gradient in compute_output:
            good = ops.logical_and(good, self.all(self.finite(gradient)))
        return ops.logical_not(good)


def _barrier(group: str | None = None, **_: Any) -> None:
    """Wait for all processes: none has the sum before all have added to it."""
    del group
    SumOverProcesses()(Tensor(np.ones(1, np.float32))).asnumpy()


def bridge_barrier() -> None:
    """Replace MindSpore's barrier wherever MindFormers and MindSpore hold it by name."""
    from mindspore.communication import comm_func

    old = comm_func.barrier
    if old is _barrier:
        return
    for name, module in list(sys.modules.items()):
        is_patched = name.split(".")[0] in ("mindformers", "mindspore")
        if is_patched and getattr(module, "barrier", None) is old:
            module.barrier = _barrier  # type: ignore[attr-defined]


def copy_losses() -> None:
    """Let the loss monitor copy the terms of the loss before it clears them."""
    import mindformers.core.callback.callback as callbacks
    from mindformers.utils.parameter_register import parameter_register

    def separate() -> tuple[np.ndarray, ...]:
        names = ("lm_loss", "aux_loss", "mtp_loss", "indexer_loss")
        values = tuple(parameter_register.get(name).asnumpy().copy() for name in names)
        for name in names:
            parameter_register.clear(name)
        return values

    callbacks._get_separate_loss = separate
