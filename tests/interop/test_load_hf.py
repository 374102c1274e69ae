"""`load_checkpoint` of a Hugging Face folder: what `telechat-moe convert` gives, or what does not fit."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from test_convert import BITS, read, same, write
from weights import layout, write_hf

from telechat_moe.checkpoint.weights import read_weights
from telechat_moe.errors import BadInputError
from telechat_moe.interop import hf
from telechat_moe.interop.names import pairs
from telechat_moe.interop.writing import Destination
from telechat_moe.recipe.hugging_face import OtherModelError

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
        loaded = {w.name: w for w in hf.weights(folder, CONFIG, verify=verify)}
        assert loaded.keys() == converted.keys()
        for name, entry in converted.items():
            assert (loaded[name].dtype, loaded[name].shape) == (entry.dtype, entry.shape)
            np.testing.assert_array_equal(np.concatenate([*loaded[name].chunks()]), entry.read())
    ours = {w.name: w for w in hf.weights(tmp_path / "ours", CONFIG)}
    assert ours.keys() == converted.keys()


def test_another_model_in_one_line(folder: Path) -> None:
    (folder / "config.json").unlink()
    wider = layout(hidden_size=64, vocab_size=300, num_hidden_layers=3, n_routed_experts=4)
    with pytest.raises(BadInputError) as error:
        hf.weights(folder, wider, verify=False)
    message = str(error.value)
    assert f"{folder} does not fit the model" in message
    assert " more" in message
    assert "There is no config.json" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 5e5), ("num_experts_per_tok", 2), ("rope_scaling", {"factor": 40})],
)
def test_a_configuration_that_computes_something_else(
    folder: Path, tmp_path: Path, key: str, value: object
) -> None:
    write_config(folder, **{key: value})
    with pytest.raises(OtherModelError, match=f"config.json: {key} is ") as error:
        hf.weights(folder, CONFIG, verify=False)
    assert len(error.value.differences) == 1
    with pytest.raises(OtherModelError, match=f"config.json: {key} is "):
        hf.convert(folder, tmp_path / "ours", CONFIG, "telechat")
    assert not (tmp_path / "ours").exists()


def test_settings_that_change_nothing_may_differ(folder: Path) -> None:
    write_config(folder, initializer_range=0.5, max_position_embeddings=163840, use_cache=True)
    assert hf.weights(folder, CONFIG, verify=False)


def test_where_the_settings_are_looked_for(folder: Path, tmp_path: Path) -> None:
    """Beside a file, in a folder behind a link or `..`, and behind a link to a file; without any it is said."""
    hf.convert(folder, tmp_path / "ours", CONFIG, "telechat")
    hf.convert(tmp_path / "ours", folder / "one.safetensors", CONFIG, "hf")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "link.safetensors").symlink_to(folder / "one.safetensors")
    places = [folder, tmp_path / "link", folder / ".." / "hf", folder / "one.safetensors"]
    places.append(tmp_path / "link.safetensors")
    for place in places:
        write_config(folder)
        notes: list[str] = []
        assert hf.weights(place, CONFIG, verify=False, notes=notes)
        assert not any("no config.json" in note for note in notes)
        write_config(folder, rope_theta=5e5)
        with pytest.raises(OtherModelError, match=r"rope_theta is 500000\.0"):
            hf.weights(place, CONFIG, verify=False)
    (folder / "config.json").unlink()
    notes = []
    for theta, expected in (
        (1e4, []),
        (5e4, ["rope_theta is 50000.0, but the weights were trained with 10000.0"]),
    ):
        found = list[str]()
        changed = dataclasses.replace(CONFIG, rope_theta=theta)
        assert hf.weights(tmp_path / "ours", changed, verify=False, notes=found)
        assert [note.removeprefix(f"{tmp_path}/ours: ") for note in found] == expected
    section = dataclasses.asdict(CONFIG)
    for broken, why in (
        ("[", "not valid JSON"),
        ("[1]", "list found, expected an object"),
        ('{"nonsense": 1}', "no model section .it has no hidden_size"),
        (json.dumps(section | {"moe_intermediate_size": 0}), "no model section"),
        (json.dumps(section | {"n_group": "8"}), "n_group is '8'"),
        (json.dumps(section | {"rope_theta": "x"}), "rope_theta is 'x'"),
        (json.dumps(section | {"hidden_size": [1]}), r"hidden_size is"),
        (json.dumps(section | {"rope_theta": float("nan")}), "NaN"),
    ):
        (tmp_path / "ours/model_config.json").write_text(broken)
        with pytest.raises(BadInputError, match=why):
            hf.weights(tmp_path / "ours", CONFIG, verify=False)
    (tmp_path / "ours/model_config.json").unlink()
    for place in (*places, tmp_path / "ours"):
        notes = []
        assert hf.weights(place, CONFIG, verify=False, notes=notes)
        assert any(f"{place}: no config.json beside the weights" in note for note in notes)


def test_a_number_of_mtp_layers_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(OtherModelError) as error:
        hf.weights(folder, dataclasses.replace(CONFIG, num_nextn_predict_layers=0), verify=False)
    (difference,) = error.value.differences
    assert difference.key == "num_nextn_predict_layers"
    assert "0, but" in difference.found
    assert "holds 1 MTP layers" in difference.found


@pytest.mark.parametrize(
    ("dtype", "codes"),
    [("F32", (0x7FC00001, 0xFF800000)), ("BF16", (0x7FFF, 0xFF80)), ("F16", (0x7E00, 0xFC00))],
)
def test_nan_and_infinity_are_named(tmp_path: Path, dtype: str, codes: tuple[int, int]) -> None:
    """Loading refuses them, converting keeps every bit and says where they are."""
    tensors = {p.name: (dtype, np.full(p.shape, 0x3C00, BITS[dtype])) for p in pairs(CONFIG)}
    bits = tensors["layers.1.moe.experts.up"][1]
    bits[2, 3, 5], bits[2, 40, 7], bits[3, 0, 0] = codes[0], codes[1], codes[0]
    ours = write(tmp_path / "ours.safetensors", tensors)
    place = "layers.1.moe.experts.up holds 2 NaN and 1 infinite values, the first at [2, 3, 5]"
    with pytest.raises(BadInputError, match=re.escape(place)):
        hf.weights(ours, CONFIG, verify=False)
    up = next(w for w in hf.weights(ours, CONFIG) if w.name == "layers.1.moe.experts.up")
    with pytest.raises(BadInputError, match=re.escape(place)):
        list(up.chunks())
    converted = hf.convert(ours, tmp_path / "hf", CONFIG, "hf")
    expected = "layers.1.moe.experts.up holds 1 NaN and 1 infinite values, the first at [2, 3, 5]"
    assert [expected in note for note in converted.notes].count(True) == 1
    restored = hf.convert(tmp_path / "hf", tmp_path / "back.safetensors", CONFIG, "telechat")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    assert any(
        f"{name} holds 1 NaN and 1 infinite values, the first at [5, 3]" in n
        for n in restored.notes
    )
    same(read(tmp_path / "back.safetensors"), tensors)


def test_nan_in_a_file_that_an_interrupted_conversion_had_finished(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(first.read_bytes())
    content[-2:] = b"\xff\x7f"
    first.write_bytes(content)
    write_shard, count = Destination._write_shard, 0

    def stop(*args: object) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        write_shard(*args)  # type: ignore[arg-type]

    given = (folder, tmp_path / "ours", CONFIG, "telechat", 200_000)
    monkeypatch.setattr(Destination, "_write_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        hf.convert(*given)
    monkeypatch.undo()
    result = hf.convert(*given)
    assert result.resumed_files == 2
    assert any(f"{first}: model." in n and "holds 1 NaN and 0 inf" in n for n in result.notes)


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
    with pytest.raises(BadInputError, match=r"config.json: list found, expected an object"):
        hf.weights(folder, CONFIG, verify=False)
