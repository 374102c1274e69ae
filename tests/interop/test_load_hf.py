"""`load_checkpoint` of a Hugging Face folder: what `telechat-moe convert` gives, or what does not fit."""

import json
from pathlib import Path

import numpy as np
import pytest
from weights import layout, write_hf

from telechat_moe.checkpoint.weights import read_weights
from telechat_moe.errors import BadInputError
from telechat_moe.interop import hf

CONFIG = layout(hidden_size=64, vocab_size=256, num_hidden_layers=2, n_routed_experts=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_hf(tmp_path / "hf", CONFIG, 100_000, sparse=False)
    write_config(tmp_path / "hf")
    return tmp_path / "hf"


def write_config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps(hf.hf_config(CONFIG, "bfloat16") | changes))


def test_the_same_as_a_conversion_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    hf.convert(folder, tmp_path / "ours", CONFIG, "telechat")
    converted = read_weights(tmp_path / "ours")
    for verify in (True, False):
        found = {w.name: w for w in hf.weights(folder, CONFIG, verify=verify)}
        assert found.keys() == converted.keys()
        for name, entry in converted.items():
            assert (found[name].dtype, found[name].shape) == (entry.dtype, entry.shape)
            np.testing.assert_array_equal(np.concatenate([*found[name].chunks()]), entry.read())
    ours = {w.name: w for w in hf.weights(tmp_path / "ours", CONFIG)}
    assert ours.keys() == converted.keys()


def test_another_model_in_one_line(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    wider = layout(hidden_size=64, vocab_size=300, num_hidden_layers=3, n_routed_experts=4)
    with pytest.raises(BadInputError) as error:
        hf.weights(folder, wider, verify=False)
    said = str(error.value)
    assert f"{folder} does not fit the model" in said
    assert " more" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 5e5), ("num_experts_per_tok", 2), ("rope_scaling", {"factor": 40})],
)
def test_a_configuration_that_computes_something_else(
    folder: Path, key: str, value: object
) -> None:
    write_config(folder, **{key: value})
    with pytest.raises(BadInputError, match=f"config.json: {key} is "):
        hf.weights(folder, CONFIG, verify=False)


def test_settings_that_change_nothing_may_differ(folder: Path) -> None:
    write_config(folder, initializer_range=0.5, max_position_embeddings=163840, use_cache=True)
    assert hf.weights(folder, CONFIG, verify=False)


def test_without_safetensors(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(
        BadInputError, match=r"without safetensors \(config.json, pytorch_model.bin\)"
    ):
        hf.weights(folder, CONFIG)


def test_a_missing_or_truncated_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(BadInputError, match=f"{shard.name}: truncated"):
        hf.weights(folder, CONFIG, verify=False)
    shard.unlink()
    with pytest.raises(BadInputError, match=f"file {shard.name} is missing"):
        hf.weights(folder, CONFIG, verify=False)


def test_a_broken_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(BadInputError, match=r"config.json: no configuration"):
        hf.weights(folder, CONFIG, verify=False)
