"""Initial weights: each value depends on the seed, its tensor's name and its position there only.

So the same recipe and seed give the same weights whatever the order in which cells are built, and a device that holds a
shard of a tensor draws the values that the whole tensor has there, and hardly more: a tensor is drawn in blocks of
:data:`BLOCK` values, each from its own range of the generator's counter.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common.initializer import One

from telechat_moe.recipe import ModelConfig

BLOCK = 1 << 22
"""Values of a tensor that are drawn in one go, in C order; of a block the first ones do not depend on the others."""

_THREADS = 4


def output_std(config: ModelConfig) -> float:
    """Return the initial standard deviation of the matrices that write to the residual stream.

    ``initializer_range / sqrt(2 * layers)``, so that the sum of all layers' outputs does not grow
    with depth (Radford et al. 2019; MindFormers and Megatron do the same).
    """
    return config.initializer_range / math.sqrt(2.0 * config.num_hidden_layers)


class InitialWeight(NamedTuple):
    """What a parameter of a model begins with.

    Attributes:
        std: Standard deviation of its values; None: all are ``constant``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: ms.Type
    std: float | None
    constant: float

    @staticmethod
    def of(parameter: Parameter) -> "InitialWeight":
        """Return what a parameter begins with, which need not have memory."""
        std, init = getattr(parameter, "init_std", None), getattr(parameter, "init_mode", None)
        constant = 0.0
        if init is not None and isinstance(init.init, One):
            constant = 1.0
        shape = tuple(int(n) for n in parameter.shape)
        return InitialWeight(parameter.name, shape, parameter.dtype, std, constant)

    def draw(self, seed: int, region: Sequence[tuple[int, int]] | None = None) -> np.ndarray:
        """Return the values in a region, by its (begin, end) in every dimension, None: in the whole tensor, in fp32."""
        region = [(0, n) for n in self.shape] if region is None else region
        if self.std is None:
            return np.full([end - begin for begin, end in region], self.constant, np.float32)
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        values = _normal(int.from_bytes(digest[:16], "little"), self.shape, region)
        values *= np.float32(self.std)
        return values


def _normal(key: int, shape: Sequence[int], region: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return a region of a tensor of standard normal values."""
    lengths = [end - begin for begin, end in region]
    # Runs of values that are next to each other in the tensor: dimensions from the last one that is cut on.
    cut = max((i for i, n in enumerate(shape) if lengths[i] != n), default=0)
    inner = math.prod(shape[cut + 1 :])
    length = lengths[cut] * inner if shape else 1
    starts = np.array([region[cut][0] * inner if shape else 0], np.int64)
    for i in reversed(range(cut)):
        stride = math.prod(shape[i + 1 :])
        starts = np.add.outer(np.arange(*region[i], dtype=np.int64) * stride, starts).reshape(-1)
    values = np.empty((len(starts), length), np.float32)
    if not values.size:
        return values.reshape(lengths)

    def fill(block: int) -> None:
        begin = block * BLOCK
        low = int(np.searchsorted(starts, begin - length, "right"))
        high = int(np.searchsorted(starts, begin + BLOCK, "left"))
        if low == high:
            return
        end = min(begin + BLOCK, int(starts[high - 1]) + length)
        drawn = _block(key, block, end - begin)
        for i, start in enumerate(starts[low:high].tolist(), low):
            a, b = max(start, begin), min(start + length, end)
            values[i, a - start : b - start] = drawn[a - begin : b - begin]

    blocks = range(int(starts[0]) // BLOCK, (int(starts[-1]) + length - 1) // BLOCK + 1)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(fill, blocks):
            pass
    return values.reshape(lengths)


def _block(key: int, block: int, count: int) -> np.ndarray:
    """Return the first values of a block; blocks are 2^128 numbers of the generator apart."""
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, block, 0]))
    return generator.standard_normal(count, dtype=np.float32)


def initialize(model: nn.Cell, seed: int) -> None:
    """Fill every weight made by :func:`telechat_moe.model.linear.weight` from N(0, std^2)."""
    for name, parameter in model.parameters_and_names():
        weight = InitialWeight.of(parameter)._replace(name=name)
        if weight.std is not None:
            parameter.set_data(Tensor(weight.draw(seed)).astype(parameter.dtype))


def count_parameters(model: nn.Cell) -> int:
    """Return the number of values of a model that are trained."""
    return sum(math.prod(p.shape) for p in model.trainable_params())
