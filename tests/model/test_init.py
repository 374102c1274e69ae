"""Initial weights: any region of a tensor has the bits that the whole tensor has there."""

import hashlib

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

import mindspore as ms
from tiny_models import tiny_config

from telechat_moe.model import CausalLM, initialize
from telechat_moe.model import init as init_module
from telechat_moe.model.init import InitialWeight

pytestmark = pytest.mark.mindspore

SEED = 5


def stream(name: str, count: int, block: int = 0) -> np.ndarray:
    """Return the first numbers of a block of a tensor, by NumPy alone."""
    digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
    philox = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    philox.advance(block << 128)
    return np.random.Generator(philox).standard_normal(count, dtype=np.float32)


def by_blocks(name: str, shape: tuple[int, ...], block: int) -> np.ndarray:
    count = int(np.prod(shape))
    numbers = [stream(name, min(block, count - i), i // block) for i in range(0, count, block)]
    return np.concatenate(numbers).reshape(shape) * np.float32(0.02)


@pytest.mark.parametrize("seed", range(40))
def test_a_region_has_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random = np.random.default_rng(seed)
    block = int(random.choice([1, 7, 64, 1000, 1 << 22]))
    monkeypatch.setattr(init_module, "BLOCK", block)
    shape = tuple(int(n) for n in random.integers(1, 13, random.integers(1, 4)))
    weight = InitialWeight("w", shape, ms.float32, 0.02, 0.0)
    expected = by_blocks("w", shape, block)
    np.testing.assert_array_equal(weight.draw(SEED), expected)
    for _ in range(5):
        begins = [int(random.integers(0, n)) for n in shape]
        region = [(b, int(random.integers(b, n + 1))) for b, n in zip(begins, shape, strict=True)]
        drawn = weight.draw(SEED, region)
        np.testing.assert_array_equal(drawn, expected[tuple(slice(*bounds) for bounds in region)])


def test_only_the_blocks_of_a_region_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    draw = init_module._block

    def counted(key: int, block: int, count: int) -> np.ndarray:
        drawn.append(block)
        return draw(key, block, count)

    monkeypatch.setattr(init_module, "BLOCK", 100)
    monkeypatch.setattr(init_module, "_block", counted)
    InitialWeight("w", (64, 10, 10), ms.float32, 1.0, 0.0).draw(SEED, [(32, 40), (0, 10), (5, 10)])
    assert sorted(drawn) == list(range(32, 40))


def test_a_tensor_of_one_block_keeps_the_stream_of_earlier_versions() -> None:
    model = CausalLM(tiny_config())
    initialize(model, SEED)
    for parameter in model.trainable_params():
        std = getattr(parameter, "init_std", None)
        if std is None:
            expected = np.ones(parameter.shape, np.float32)  # a norm
        else:
            count = int(np.prod(parameter.shape))
            expected = stream(parameter.name, count).reshape(parameter.shape) * np.float32(std)
        np.testing.assert_array_equal(parameter.asnumpy(), expected)
