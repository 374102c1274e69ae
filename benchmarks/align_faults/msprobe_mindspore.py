"""Dump our own model with the real msprobe, on MindSpore CPU: `python -m benchmarks.align_faults.msprobe_mindspore FOLDER [FAULT]`.

One forward and backward pass of two layers of `pretrain_tiny` in PyNative mode, level mix, with values. A fault is ``norm``
(another epsilon), ``router`` (its scaling factor by 1 %) or ``experts`` (the weights of one layer by 1 %).
"""

import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

# Its kernel is not registered for CPU; msprobe takes norms with it.
mint.norm = lambda x: ops.sqrt(ops.reduce_sum(ops.square(x.astype(ms.float32))))

from msprobe.mindspore import PrecisionDebugger

from telechat_moe.model import CausalLM, initialize
from telechat_moe.ops import select
from telechat_moe.recipe import load

LENGTH = 32
FAULTS = {
    "norm": "model.model_config.rms_norm_eps=0.001",
    "router": "model.model_config.routed_scaling_factor=1.515",
}


def main(folder: Path, fault: str = "") -> None:
    """Run and dump; ``fault`` is a key of :data:`FAULTS` or ``experts``."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_device("CPU")
    settings = {
        "model.model_config.num_hidden_layers": 2,
        "model.model_config.seq_length": LENGTH,
        "train_dataset.data_loader.config.seq_length": LENGTH,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    overrides += [FAULTS[fault]] if fault in FAULTS else []
    recipe = load("telechat3_moe/pretrain_tiny.yaml", overrides)
    config, kernels = recipe.model_config, recipe.telechat_moe
    with select.using("plain"):
        model = CausalLM(config, kernels.moe_block_rows, kernels.moe_capacity_tokens)
    initialize(model, 1)
    model.set_train()
    if fault == "experts":
        weight = next(p for p in model.get_parameters() if "experts" in p.name and p.ndim == 3)
        weight.set_data(Tensor(weight.asnumpy() * np.float32(1.01)))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH + 1), np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    batch = [tokens[:, :-1], tokens[:, 1:], np.ones((2, LENGTH), np.float32), positions]
    batch = [Tensor(np.ascontiguousarray(x)) for x in batch]

    folder.mkdir(parents=True)
    file = folder / "config.json"
    tensor = {"list": [], "scope": [], "data_mode": ["all"]}
    options = {"task": "tensor", "level": "mix", "rank": [], "step": [0], "tensor": tensor}
    file.write_text(json.dumps({**options, "dump_path": str(folder / "dump")}))
    debugger = PrecisionDebugger(config_path=str(file))
    step = ms.value_and_grad(lambda *x: model(*x)[0].sum(), None, model.trainable_params())
    debugger.start(model)
    step(*batch)
    debugger.stop()
    debugger.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
