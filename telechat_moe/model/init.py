"""Initial weights: each depends on the seed and its own name only.

So the same recipe and seed give the same weights whatever the order in which cells are built, and a
device that holds a shard of a tensor can make the same values.
"""

import hashlib
import math

import numpy as np
from mindspore import Tensor, nn

from telechat_moe.recipe import ModelConfig


def output_std(config: ModelConfig) -> float:
    """Return the initial standard deviation of the matrices that write to the residual stream.

    ``initializer_range / sqrt(2 * layers)``, so that the sum of all layers' outputs does not grow
    with depth (Radford et al. 2019; MindFormers and Megatron do the same).
    """
    return config.initializer_range / math.sqrt(2.0 * config.num_hidden_layers)


def initialize(model: nn.Cell, seed: int) -> None:
    """Fill every weight made by :func:`telechat_moe.model.linear.weight` from N(0, std^2)."""
    for name, parameter in model.parameters_and_names():
        std = getattr(parameter, "init_std", None)
        if std is None:
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        value = generator.standard_normal(parameter.shape, dtype=np.float32) * np.float32(std)
        parameter.set_data(Tensor(value).astype(parameter.dtype))


def count_parameters(model: nn.Cell) -> int:
    """Return the number of values of a model that are trained."""
    return sum(math.prod(p.shape) for p in model.trainable_params())
