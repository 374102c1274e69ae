"""Let MindFormers 2 save its DeepSeek-V3 of mode 1 with AdamW: ``mode1_checkpoint.py FOLDER CONFIG``.

hyper-parallel, which mode 1 needs to split a model, is not on PyPI; on one device nothing of it is called, so empty
classes take its place. CONFIG is a JSON object with the keys of MindFormers' model section. Beside the checkpoint
``expected.npz`` holds the float32 values of every parameter and moment, and ``mlp_input`` and ``mlp_output`` of the first
layer's MLP.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any


class Empty:
    """A class of hyper-parallel; isinstance of it is never true."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class HyperParallel(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules whose every name is an empty class."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] == "hyper_parallel":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Empty,), {})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, HyperParallel())

import mindspore as ms
import numpy as np
from mindformers.checkpoint.checkpoint import CommonInfo, save_checkpoint
from mindformers.models.deepseek3.configuration_deepseek_v3 import DeepseekV3Config
from mindformers.models.deepseek3.modeling_deepseek_v3_pynative import (
    PyNativeDeepseekV3ForCausalLM,
)
from mindformers.pynative.optimizer.adamw import AdamW


def model_of(config: dict[str, Any]) -> Any:
    """Return the model with its parameters drawn at random."""
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    model = PyNativeDeepseekV3ForCausalLM(DeepseekV3Config(**config))
    dice = np.random.default_rng(0)
    for parameter in model.get_parameters():
        values = dice.standard_normal(parameter.shape).astype(np.float32)
        parameter.set_data(ms.Tensor(values).astype(parameter.dtype))
    return model


def save(folder: Path, config: dict[str, Any]) -> None:
    model = model_of(config)
    optimizer = AdamW(model.trainable_params(), learning_rate=1e-3, weight_decay=0.1)
    dice = np.random.default_rng(1)
    for parameter in optimizer.get_parameters():
        noise = dice.random(parameter.shape).astype(np.float32)
        if parameter.name.startswith("adam_"):
            parameter.set_data(ms.Tensor(noise))
        elif parameter.name.startswith("main_param."):  # rounds to the weight, and is not it
            parameter.set_data(ms.Tensor(parameter.asnumpy() * (1 + 1e-4 * noise)))
    optimizer.global_step.set_data(ms.Tensor([3], optimizer.global_step.dtype))
    info = CommonInfo()
    info.epoch_num, info.step_num, info.global_step = 1, 100, 4
    info.loss_scale, info.global_batch_size, info.consumed_samples = 1.0, 8, 28
    save_checkpoint(4, model, optimizer, common_info=info, save_checkpoint_path=str(folder))
    parameters = {p.name: p for cell in (model, optimizer) for p in cell.get_parameters()}
    values: dict[str, Any] = {n: p.astype(ms.float32).asnumpy() for n, p in parameters.items()}
    values["mlp_input"] = dice.standard_normal((4, 1, config["hidden_size"])).astype(np.float32)
    plain = model_of(config | {"compute_dtype": "float32"})  # a CPU multiplies no bfloat16
    for parameter in plain.get_parameters():
        parameter.set_data(ms.Tensor(values[parameter.name]))
    output = plain.model.decoder.layers[0].mlp(ms.Tensor(values["mlp_input"]))
    values["mlp_output"] = output.astype(ms.float32).asnumpy()
    np.savez(folder / "expected.npz", **values)


if __name__ == "__main__":
    save(Path(sys.argv[1]), json.loads(sys.argv[2]))
