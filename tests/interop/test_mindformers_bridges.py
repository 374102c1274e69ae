"""What MindFormers lacks on CPU, without our bridges: a test that fails here says that a bridge can go.

Each runs in a process of its own, because MindFormers changes MindSpore's state.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import mindformers_runs as runs
import pytest

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]
GONE = "MindFormers runs without this bridge now; remove it from mindformers_bridges.py"

STEP = """
import numpy as np, mindspore as ms
from mindspore import nn, Tensor
from mindformers.core.optim import AdamW
from mindformers.core.context.build_context import set_context
from mindformers.wrapper.wrapper import MFTrainOneStepCell
import mindformers.wrapper.wrapper as wrapper
from telechat_moe.interop.mindformers_bridges import TelechatMoeTrainOneStep
ms.set_context(mode=0, device_target="CPU")
wrapper.is_legacy_model = lambda: True
class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = ms.Parameter(Tensor(np.ones((2, 2), np.float32)), name="w")
    def construct(self, x):
        return (x * self.w).sum().reshape((1,))
def step(kind, x):
    net = Net()
    cell = kind(net, AdamW(net.trainable_params()), use_clip_grad=True, scale_sense=1.0)
    cell.set_train()
    overflow = bool(cell(Tensor(np.full((2, 2), x, np.float32)))[1].asnumpy())
    return overflow, net.w.asnumpy().copy()
try:
    step(MFTrainOneStepCell, 1.0)
    print("THEIRS ran")
except Exception as error:
    print("THEIRS", "NPUGetFloatStatus" in str(error))
good, moved = step(TelechatMoeTrainOneStep, 1.0)
bad, kept = step(TelechatMoeTrainOneStep, np.inf)
print("OURS", good, bool((moved != 1).all()), bad, bool((kept == 1).all()))
"""

LOSSES = """
import numpy as np, mindspore as ms
import mindformers.core.callback.callback as callbacks
from mindformers.utils.parameter_register import parameter_register as register
from mindspore import Tensor, ops
from telechat_moe.interop.mindformers_bridges import copy_losses
ms.set_context(mode=0, device_target="CPU")
NAMES = ("lm_loss", "aux_loss", "mtp_loss", "indexer_loss")
for name in NAMES:
    register.register(name, Tensor([0], ms.float32))
def read():
    for i, name in enumerate(NAMES):
        ops.assign(register.get(name), Tensor([i + 1.0], ms.float32))
    return [float(x[0]) for x in callbacks._get_separate_loss()]
print("THEIRS", read())
copy_losses()
print("OURS", read(), [float(register.get(n).asnumpy()[0]) for n in NAMES])
"""

BARRIER = """
import os, sys, time
import mindspore as ms
from mindspore.communication import comm_func, init
ms.set_context(mode=0, device_target="CPU")
init()
if os.environ["MS_ROLE"] != "MS_SCHED":
    import mindformers.dataset.blended_datasets.utils as blended
    rank = int(os.environ["RANK_ID"])
    try:
        comm_func.barrier()
        print("THEIRS ran", flush=True)
    except Exception as error:
        print("THEIRS", "Barrier" in str(error), flush=True)
    from telechat_moe.interop import mindformers_bridges as bridges
    bridges.bridge_barrier()
    print("OURS", comm_func.barrier is bridges._barrier, flush=True)
    time.sleep(2 * rank)
    before = time.time()
    comm_func.barrier()
    print("ENTERED", rank, before, "LEFT", time.time(), flush=True)
"""


def printed(code: str, tmp_path: Path) -> str:
    path = tmp_path / "code.py"
    path.write_text(code)
    return runs.run([sys.executable, str(path)], tmp_path)


@pytest.mark.slow
def test_step_stops_at_a_kernel_that_cpu_lacks(tmp_path: Path) -> None:
    text = printed(STEP, tmp_path)
    assert "THEIRS ran" not in text, GONE
    assert "THEIRS True" in text
    assert "OURS False True True True" in text  # no overflow, moved; overflow, kept


def test_loss_monitor_reads_zeros(tmp_path: Path) -> None:
    text = printed(LOSSES, tmp_path)
    assert "THEIRS [0.0, 0.0, 0.0, 0.0]" in text, GONE
    assert "OURS [1.0, 2.0, 3.0, 4.0] [0.0, 0.0, 0.0, 0.0]" in text


@pytest.mark.slow
def test_barrier_has_no_kernel(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(BARRIER)
    runs.run([*runs.msrun(2, tmp_path), str(tmp_path / "code.py")], tmp_path)
    logs = [(tmp_path / f"log/worker_{i}.log").read_text() for i in range(2)]
    entered, left = [], []
    for log in logs:
        assert "THEIRS ran" not in log, GONE
        assert "THEIRS True" in log
        assert "OURS True" in log
        words = next(line for line in log.splitlines() if line.startswith("ENTERED")).split()
        entered.append(float(words[2]))
        left.append(float(words[4]))
    assert min(left) >= max(entered)  # nobody left before everybody was there


@pytest.mark.slow
def test_nothing_is_bridged_elsewhere() -> None:
    """`install` does nothing where the target is not CPU."""
    code = (
        "import mindspore as ms\n"
        "from telechat_moe.interop import mindformers_bridges as b\n"
        "from mindspore.communication import comm_func\n"
        "old, ms.get_context = comm_func.barrier, lambda name: 'Ascend'\n"
        "from telechat_moe.recipe import load\n"
        "b.install(None, load('telechat3_moe/pretrain_tiny.yaml', ['context.device_target=Ascend']))\n"
        "assert comm_func.barrier is old\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=runs.environment())
