"""Provide what MindFormers needs and MindSpore's CPU backend lacks. Nothing here acts on Ascend.

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
from mindformers.tools.utils import get_real_group_size
from mindformers.wrapper.wrapper import MFTrainOneStepCell
from mindspore import Tensor, nn, ops

from telechat_moe.graph.execute import LIMITS
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.cells.collective import SumOverProcesses
from telechat_moe.train.step import GlobalNorm, scalar_parameter

STEP = "TelechatMoeTrainOneStep"


def install(config: Any, recipe: Recipe) -> None:
    """Install the bridges if this is CPU.

    Args:
        config: MindFormers' configuration; its step becomes :class:`TelechatMoeTrainOneStep` on CPU, or for a loss guard.
    """
    on_cpu, guarded = recipe.context.device_target == "CPU", recipe.telechat_moe.loss_guard
    if on_cpu:
        bridge_barrier()
        copy_losses()
    if (on_cpu or guarded) and config.runner_wrapper.type == "MFTrainOneStepCell":
        config.runner_wrapper.type, config.runner_wrapper.guarded = STEP, guarded is not None


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class TelechatMoeTrainOneStep(MFTrainOneStepCell):
    """MindFormers' step; on CPU it finds overflow of gradients by primitives that CPU has.

    Args:
        guarded: Treat a step whose loss or gradient norm is not below the limits of :meth:`set_limits` like one that overflows: its update
            is not applied.
    """

    def __init__(
        self, network: nn.Cell, optimizer: nn.Cell, guarded: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(network, optimizer, **kwargs)
        self.on_cpu, self.guarded = ms.get_context("device_target") == "CPU", guarded
        self.finite, self.all, self.cast = ops.IsFinite(), ops.ReduceAll(), ops.Cast()
        if guarded:
            limits = (scalar_parameter(name, float("inf")) for name in LIMITS)
            self.norm_limit, self.loss_limit = limits
            self.norm = GlobalNorm(len(self.weights))
            self.share = Tensor(1.0 / get_real_group_size(), ms.float32)

    def set_limits(self, norm: float, loss: float) -> None:
        """Set the limits below which gradient norm and total loss must be for the next updates to be applied."""
        ops.assign(self.norm_limit, Tensor(norm, ms.float32))
        ops.assign(self.loss_limit, Tensor(loss, ms.float32))

    def start_overflow_check(self, pre_cond: Tensor, compute_input: Any) -> tuple[Any, Any]:
        """Hand the loss to :meth:`get_overflow_status`, too."""
        status, compute_input = super().start_overflow_check(pre_cond, compute_input)
        return (status, pre_cond), compute_input

    def get_overflow_status(self, status: Any, compute_output: tuple[Tensor, ...]) -> Tensor:
        """Return True if a gradient is not finite; all processes hold the same reduced gradients."""
        if self.on_cpu:
            good = Tensor(True)
            for gradient in compute_output:
                good = ops.logical_and(good, self.all(self.finite(gradient)))
            overflow = ops.logical_not(good)
        else:
            overflow = super().get_overflow_status(status[0], compute_output)
        if self.guarded:
            norm, _ = self.norm(compute_output)
            loss = ops.reshape(status[1], ())
            if self.is_distributed:
                loss = self.allreduce(loss) * self.share
            tame = ops.logical_and(norm < self.norm_limit, loss < self.loss_limit)
            overflow = ops.logical_or(overflow, ops.logical_not(tame))
        return overflow


def _barrier(group: str | None = None, **_: Any) -> None:
    """Wait for all processes: none has the sum before all have added to it."""
    del group
    SumOverProcesses()(Tensor(np.ones(1, np.float32))).asnumpy()


def bridge_barrier() -> None:
    """Replace MindSpore's barriers wherever MindFormers and MindSpore hold them by name."""
    from mindspore.communication import comm_func
    from mindspore.mint import distributed

    barriers = comm_func.barrier, distributed.barrier  # of MindFormers 1.9, of 2.1
    for name, module in list(sys.modules.items()):
        is_patched = name.split(".")[0] in ("mindformers", "mindspore")
        if is_patched and getattr(module, "barrier", None) in barriers:
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
