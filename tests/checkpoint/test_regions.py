"""Regions of tensors in files: what the whole tensor has there, and of the file nothing else."""

from pathlib import Path

import numpy as np
import pytest

from telechat_moe import tensor_files
from telechat_moe.checkpoint import checkpoint
from telechat_moe.checkpoint.manifest import BrokenCheckpointError
from telechat_moe.checkpoint.stored import merged_region, open_shards
from telechat_moe.interop.hf import _stacked_region
from telechat_moe.tensor_files import file_of, read_header


def random_regions(shape: tuple[int, ...], seed: int, count: int = 20):
    random = np.random.default_rng(seed)
    for _ in range(count):
        begins = [int(random.integers(0, n)) for n in shape]
        yield [(b, int(random.integers(b, n + 1))) for b, n in zip(begins, shape, strict=True)]


def slices(region):
    return tuple(slice(*bounds) for bounds in region)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (4, 3, 8)])
@pytest.mark.parametrize("limit", [1, 40, 16 << 20])
def test_a_region_of_a_file(tmp_path: Path, monkeypatch, shape: tuple[int, ...], limit: int):
    monkeypatch.setattr(tensor_files, "READ_BYTES", limit)
    tensor = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    file_of("x", {"x": tensor}).write(tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors")["x"]
    for region in random_regions(shape, 1):
        np.testing.assert_array_equal(entry.read_region(region), tensor[slices(region)])


def test_a_region_of_shards(tmp_path: Path):
    tensor = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    bounds = [((a, a + 4), (b, b + 3)) for a in (0, 4) for b in (0, 3)]
    shards = []
    for i, region in enumerate(bounds):
        file = tmp_path / f"{i}.safetensors"
        file_of("x", {"x": tensor[slices(region)]}).write(file)
        shards.append((read_header(file)["x"], region))
    for region in random_regions(tensor.shape, 2):
        values = merged_region(shards, tuple(region))
        np.testing.assert_array_equal(values, tensor[slices(region)])


def test_a_region_of_experts_that_are_a_tensor_each(tmp_path: Path):
    stack = np.random.default_rng(0).standard_normal((4, 6, 5)).astype(np.float32)
    names = [f"e{i}" for i in range(4)]
    matrices = {name: np.ascontiguousarray(m.T) for name, m in zip(names, stack, strict=True)}
    file_of("x", matrices).write(tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    for region in random_regions(stack.shape, 3):
        if region[0][0] < region[0][1]:
            values = _stacked_region([entries[name] for name in names], region)
            np.testing.assert_array_equal(values, stack[slices(region)])


def test_an_open_checkpoint_reads_what_a_loaded_one_holds(tmp_path: Path):
    random = np.random.default_rng(0)
    groups = {
        "model": {"a": random.standard_normal((6, 4)).astype(np.float32)},
        "optimizer": {"adam_m.a": random.standard_normal((6, 4)).astype(np.float32)},
    }
    path = checkpoint.save(tmp_path, 3, groups, {"x": 1})
    opened = open_shards(path)
    assert (opened.step, opened.state) == (3, {"x": 1})
    for group, tensors in groups.items():
        assert opened.tensors[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            for region in random_regions(tensor.shape, 4):
                values = opened.tensors[group][name].read_region(tuple(region))
                np.testing.assert_array_equal(values, tensor[slices(region)])


def test_shares_of_the_checksums_see_every_file(tmp_path: Path):
    groups = {g: {"a": np.ones(1000, np.float32)} for g in ("model", "optimizer", "ema")}
    path = checkpoint.save(tmp_path, 1, groups, {})
    for file in sorted(path.glob("*.safetensors")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        problems = []
        for share in ((0, 3), (1, 3), (2, 3)):
            try:
                checkpoint.verify(path, share)
            except BrokenCheckpointError as error:
                problems += error.problems
        assert len(problems) == 1, problems
        assert file.name in problems[0]
        with pytest.raises(BrokenCheckpointError):
            open_shards(path)
        file.write_bytes(content)
    open_shards(path)
