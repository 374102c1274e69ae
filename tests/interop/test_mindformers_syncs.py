"""How often MindFormers' callbacks fetch from the device: the numbers of docs/performance.md."""

import importlib.util
import json
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.mindspore,
    pytest.mark.mindformers,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None, reason="mindformers is not installed"
    ),
]

COUNT = """
import json
from types import SimpleNamespace as Space
import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindformers.core.callback import callback
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
count = 0
def counted(fetch):
    def run(self):
        global count
        count += 1
        return fetch(self)
    return run
Tensor.asnumpy, Tensor.__bool__ = counted(Tensor.asnumpy), counted(Tensor.__bool__)
def fetches(call):
    global count
    count = 0
    call()
    return count
def value(x=1.0):
    return Tensor(x, ms.float32)
outputs = value(), Tensor(False), value(), value(), value()
for name in ("aux_loss", "mtp_loss", "lm_loss", "indexer_loss"):
    callback.parameter_register.register(name, Tensor([1.0], ms.float32))
monitor = object.__new__(callback.TrainingStateMonitor)
load = ms.Parameter(Tensor(np.ones(4, np.float32)), name="load")
none = ms.Parameter(Tensor(np.zeros(4, np.float32)), name="none")
router = Space(expert_load=load, expert_bias=load, fi_parameter=none)
def gpt(layers):
    block = Space(mlp=Space(router=router))
    config = Space(moe_router_enable_expert_bias=True, num_layers=layers, first_k_dense_replace=1, mtp_num_layers=1, moe_layer_freq=1)
    return Space(config=config, decoder=Space(layers=[block] * layers), mtp=Space(layers=[Space(transformer_layer=block)]), step_over_expert_num=Tensor([1.0], ms.float32), moe_router_bias_update_rate=0.1, assign=lambda *x: None, zeros_tensor=None)
drop = object.__new__(callback.MoEDropRateCallback)
drop.capacity_factor_over_expert_num, drop.num_layers = 0.5, 3
layer = Space(feed_forward=Space(routed_experts=Space(router=Space(router=router))))
print("found", json.dumps({
    "loss": fetches(lambda: callback._get_loss_output(outputs)),
    "separate": fetches(callback._get_separate_loss),
    "state": fetches(lambda: monitor._get_loss_output(outputs)),
    "bias": fetches(lambda: GPTModel.update_topk_bias(gpt(5), 1)),
    "drop": fetches(lambda: drop._callback_droprate(Space(model=Space(layers=[layer] * 3)))),
}))
"""


def test_fetches_of_mindformers_callbacks() -> None:
    """Five outputs of a step; a model of five layers, the first dense, with one MTP layer; three layers that count tokens."""
    process = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, check=True
    )
    [line] = [x for x in process.stdout.splitlines() if x.startswith("found ")]
    report = json.loads(line.removeprefix("found "))
    assert report == {"loss": 6, "separate": 4, "state": 3, "bias": 5, "drop": 3}
