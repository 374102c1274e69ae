"""Checkpoints of several ranks and of MindFormers' dynamic mode, as ``ckpt``, ``convert`` and ``load_checkpoint`` read them."""

import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mindspore", reason="mindspore is not installed (extra `train`)")
pytestmark = pytest.mark.mindspore

from telechat_moe.cli import main
from telechat_moe.errors import BadInputError
from telechat_moe.interop import hf, mindformers_checkpoint, upstream_names
from telechat_moe.interop.mindformers_tensors import read
from telechat_moe.recipe import Recipe, load
from telechat_moe.tensor_files import DTYPES, TensorOutput, file_of, read_entries
from telechat_moe.versions import installed

TINY = "telechat3_moe/pretrain_tiny.yaml"
MODEL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 1,
    "qk_layernorm": True,
}
"""What both models read under the same names."""
OURS = {"moe_shared_expert_intermediate_size": 16, "mtp_loss_factor": 0.3}
MODE_1 = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 64,
    "seq_length": 16,
    "moe_router_enable_expert_bias": True,
    "add_bias_linear": False,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}


def recipe_of(**settings: Any) -> Recipe:
    """Return a recipe of the model."""
    overrides = {
        f"model.model_config.{key}": value for key, value in (MODEL | OURS | settings).items()
    }
    return load(TINY, [f"{key}={json.dumps(value)}" for key, value in overrides.items()])


def values_of(outputs: list[TensorOutput]) -> dict[str, np.ndarray]:
    """Return the values of tensors that are to be written."""
    return {
        o.name: np.concatenate([*o.chunks()]).view(DTYPES[o.dtype]).reshape(o.shape)
        for o in outputs
    }


# ---------------------------------------------------------------------------------------- mode 1


@pytest.fixture(scope="module")
def mode_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which MindFormers 2 saved its own model of mode 1."""
    if not (installed("mindformers") or "").startswith("2."):
        pytest.skip("it takes MindFormers 2")
    folder = tmp_path_factory.mktemp("mode1") / "checkpoint"
    child = Path(__file__).with_name("mode1_checkpoint.py")
    command = [sys.executable, str(child), str(folder), json.dumps(MODEL | MODE_1)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    return folder


def expected_of(saved: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return our weights, or moments, of what mode 1 has in memory: the layout as its code reads it, written out here."""

    def value(name: str) -> np.ndarray:
        master = f"main_param.{name}"
        return saved[master] if not prefix and master in saved else saved[prefix + name]

    weights: dict[str, np.ndarray] = {
        "embedding.weight": value("embedding.word_embeddings.weight"),
        "norm.weight": value("decoder.final_layernorm.weight"),
        "head.weight": value("output_layer.weight"),
        "mtp.0.embed_norm.weight": value("mtp.layers.0.enorm.weight"),
        "mtp.0.hidden_norm.weight": value("mtp.layers.0.hnorm.weight"),
        "mtp.0.proj.weight": value("mtp.layers.0.eh_proj.weight"),
        "mtp.0.norm.weight": value("mtp.layers.0.final_layernorm.weight"),
    }
    blocks = {
        "layers.0": "decoder.layers.0",
        "layers.1": "decoder.layers.1",
        "mtp.0.block": "mtp.layers.0.transformer_layer",
    }
    for block, prefix_of_block in blocks.items():
        attention, mlp = f"{prefix_of_block}.self_attention", f"{prefix_of_block}.mlp"
        qkv = value(f"{attention}.linear_qkv.weight")
        layer = {
            "input_norm.weight": value(f"{prefix_of_block}.input_layernorm.weight"),
            "ffn_norm.weight": value(f"{prefix_of_block}.pre_mlp_layernorm.weight"),
            "attention.q_down.weight": qkv[:16],
            "attention.kv_down.weight": qkv[16:],
            "attention.q_norm.weight": value(f"{attention}.q_layernorm.weight"),
            "attention.kv_norm.weight": value(f"{attention}.k_layernorm.weight"),
            "attention.q_up.weight": value(f"{attention}.linear_qb.weight"),
            "attention.kv_up.weight": value(f"{attention}.linear_kvb.weight"),
            "attention.out.weight": value(f"{attention}.linear_proj.weight"),
        }
        dense, place = (
            ("ffn", mlp) if block == "layers.0" else ("moe.shared", f"{mlp}.shared_experts")
        )
        gate_up = value(f"{place}.linear_fc1.weight")
        layer |= {
            f"{dense}.gate.weight": gate_up[0::2],
            f"{dense}.up.weight": gate_up[1::2],
            f"{dense}.down.weight": value(f"{place}.linear_fc2.weight"),
        }
        if dense != "ffn":
            experts = value(f"{mlp}.experts.weight1")
            layer |= {
                "moe.router.weight": value(f"{mlp}.router.weight"),
                "moe.experts.gate": experts[..., :16],
                "moe.experts.up": experts[..., 16:],
                "moe.experts.down": value(f"{mlp}.experts.weight2"),
            }
            if not prefix:
                layer["moe.router.expert_bias"] = value(f"{mlp}.expert_bias")
        weights |= {f"{block}.{name}": tensor for name, tensor in layer.items()}
    return {prefix + name: tensor for name, tensor in weights.items()}


@pytest.mark.slow
@pytest.mark.mindformers
@pytest.mark.parametrize("layout", [True, False])
def test_what_mode_1_saved(mode_1: Path, layout: bool) -> None:
    """Step, samples, weights (the float32 copies) and moments, bit for bit; the recipe's own layout does not matter."""
    recipe = recipe_of(mla_qkv_concat=layout, use_interleaved_weight_layout_mlp=layout)
    checkpoint = mindformers_checkpoint.read(mode_1, recipe)
    assert (checkpoint.step, checkpoint.updates, checkpoint.samples) == (4, 3, 28)
    saved = np.load(mode_1 / "expected.npz")
    expected = {
        "model": expected_of(saved, ""),
        "optimizer": expected_of(saved, "adam_m.") | expected_of(saved, "adam_v."),
    }
    for group, tensors in expected.items():
        assert checkpoint.tensors[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(checkpoint.tensors[group][name], tensor, name)


@pytest.mark.slow
@pytest.mark.mindformers
def test_an_mlp_of_mode_1_computes_the_same(mode_1: Path) -> None:
    """Its first MLP, run by MindFormers; float32 copies differ from the weights by 1e-4."""
    saved = np.load(mode_1 / "expected.npz")
    weights = mindformers_checkpoint.read(mode_1, recipe_of()).tensors["model"]
    gate, up, down = (
        weights[f"layers.0.ffn.{n}.weight"].astype(np.float64) for n in ("gate", "up", "down")
    )
    x_SBH = saved["mlp_input"].astype(np.float64)
    h_SBF = x_SBH @ gate.T
    y_SBH = (h_SBF / (1 + np.exp(-h_SBF)) * (x_SBH @ up.T)) @ down.T
    np.testing.assert_allclose(saved["mlp_output"], y_SBH, rtol=0, atol=1e-3 * np.abs(y_SBH).max())


@pytest.mark.slow
@pytest.mark.mindformers
def test_weights_of_mode_1_to_both_formats(mode_1: Path, tmp_path: Path) -> None:
    config, saved = recipe_of().model_config, np.load(mode_1 / "expected.npz")
    expected = expected_of(saved, "")
    for source in (mode_1, mode_1 / "iteration_00000004"):
        loaded = values_of(hf.weights(source, config))
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(loaded[name], tensor, name)
    hf.convert(mode_1, tmp_path / "ours", config, "telechat")
    hf.convert(tmp_path / "ours", tmp_path / "hf", config, "hf")
    hf.convert(mode_1, tmp_path / "direct", config, "hf")
    converted, direct = (read_entries(tmp_path / name) for name in ("hf", "direct"))
    assert converted.keys() == direct.keys()
    assert all(
        entry.read().tobytes() == direct[name].read().tobytes() for name, entry in converted.items()
    )


# ---------------------------------------------------------------------------------------- shards


def shards_of(
    tensors: Mapping[str, np.ndarray], folder: Path, layout: Mapping[str, Any] | None = None
) -> Path:
    """Write tensors in the shards of four ranks with the description that MindFormers reads; matrices in a grid of 2 x 2."""
    folder.mkdir(parents=True)
    described: dict[str, Any] = {}
    storage: dict[str, list[dict[str, Any]]] = {}
    ranks: list[dict[str, np.ndarray]] = [{} for _ in range(4)]
    for name, tensor in tensors.items():
        grid = [2 if n % 2 == 0 and i < 2 else 1 for i, n in enumerate(tensor.shape)]
        local = [n // parts for n, parts in zip(tensor.shape, grid, strict=True)]
        chunks = []
        for rank, place in enumerate(product(*map(range, grid))):
            offset = tuple(i * n for i, n in zip(place, local, strict=True))
            box = tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))
            ranks[rank][name] = np.ascontiguousarray(tensor[box])
            file = f"run-model-{rank:07d}-0000004.safetensors"
            entry = {"file_name": file, "storage_rank": rank, "rank_group": [rank]}
            storage[str((name, offset))] = [entry]
            chunks.append({"global_offset": offset, "local_shape": local})
        described[name] = {
            "properties": {"dtype": "Float32", "replica_id": None},
            "global_shape": tensor.shape,
            "axis_fragmentations": grid,
            "layout": layout and {**layout, "tensor_map": [-1] * tensor.ndim},
            "chunk": chunks,
        }
    for rank, arrays in enumerate(ranks):
        file = f"run-model-{rank:07d}-0000004.safetensors"
        file_of(file, arrays, {"format": "ms"}).write(folder / file)
    metadata = {"state_dict_metadata": described, "storage_data": storage}
    (folder / "metadata.json").write_text(json.dumps(metadata, separators=(",", ":")))
    (folder / "common.json").write_text(json.dumps({"global_step": 4, "global_batch_size": 8}))
    return folder


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """Weights of MindFormers' graph class."""
    dice = np.random.default_rng(0)
    table = upstream_names.pairs(recipe_of().model_config)
    return {p.upstream: dice.standard_normal(p.shape).astype(np.float32) for p in table}


def test_shards_are_joined(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    folder = shards_of(tensors, tmp_path / "iteration_00000004")
    entries = read(folder).entries
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert entries[name].read().tobytes() == tensor.tobytes(), name
    config = recipe_of().model_config
    expected = upstream_names.to_ours(tensors, config)
    for name, tensor in values_of(hf.weights(folder, config)).items():
        np.testing.assert_array_equal(tensor, expected[name], name)


@pytest.mark.mindformers
def test_mindformers_reads_the_same_description(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """What the tests write is what MindFormers' own reader takes for shards of these tensors."""
    pytest.importorskip("mindformers", reason="mindformers is not installed")
    layout = None
    if not (installed("mindformers") or "").startswith("2."):  # the older one needs a layout
        layout = {
            "device_matrix": [4],
            "tensor_map": [],
            "interleaved_parallel": False,
            "alias_name": ["dp"],
            "rank_list": [0, 1, 2, 3],
        }
    folder = shards_of(tensors, tmp_path / "iteration_00000004", layout)
    code = (
        "import sys\nfrom mindformers.checkpoint.metadata import load_metadata\n"
        "metas, storage = load_metadata(sys.argv[1])\n"
        "print('SHARDS', sum(map(len, metas.values())), len(storage), all(str((m.key, tuple(m.global_offset))) in storage\n"
        "      for shards in metas.values() for m in shards))"
    )
    command = [sys.executable, "-c", code, str(folder / "metadata.json")]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-2000:]
    count = sum(
        len(e) for e in json.loads((folder / "metadata.json").read_text())["storage_data"].values()
    )
    assert f"SHARDS {count} {count} True" in process.stdout


def edited(folder: Path, change: Any) -> Path:
    """Change the description of a folder of shards."""
    file = folder / "metadata.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return folder


def drop_chunk(content: dict[str, Any]) -> None:
    content["state_dict_metadata"]["output_layer.weight"]["chunk"].pop()


def move_chunk(content: dict[str, Any]) -> None:
    chunks = content["state_dict_metadata"]["output_layer.weight"]["chunk"]
    chunks[1]["global_offset"] = chunks[0]["global_offset"]


def lose_file(content: dict[str, Any]) -> None:
    next(iter(content["storage_data"].values()))[0]["file_name"] = "../other.safetensors"


def no_chunks(content: dict[str, Any]) -> None:
    del content["state_dict_metadata"]["output_layer.weight"]["chunk"]


def other_shape(content: dict[str, Any]) -> None:
    content["state_dict_metadata"]["output_layer.weight"]["chunk"][0]["local_shape"] = [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            drop_chunk,
            r"metadata.json: the 3 shards of output_layer.weight hold 1,536 of its 2,048 values",
        ),
        (move_chunk, r"the 4 shards of output_layer.weight .* some more than once"),
        (lose_file, r"other.safetensors is not in the folder"),
        (no_chunks, r"metadata.json: does not describe the shards of a checkpoint \(.*chunk"),
        (other_shape, r"output_layer.weight at \[0, 0\], \[1, 1\]: \[32, 16\] there"),
    ],
)
def test_broken_shards(
    tensors: dict[str, np.ndarray], tmp_path: Path, change: Any, message: str
) -> None:
    folder = edited(shards_of(tensors, tmp_path / "iteration_00000004"), change)
    with pytest.raises(BadInputError, match=message):
        read(folder)


def test_other_bad_folders(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    folder = shards_of(tensors, tmp_path / "iteration_00000004")
    (folder / "metadata.json").unlink()
    with pytest.raises(BadInputError, match=r"need metadata.json, which is missing"):
        read(folder)
    adapter = shards_of(tensors, tmp_path / "adapter")
    (adapter / "mindformers_adapter_config.json").write_text('{"format": "x"}')
    for use in (lambda: hf.weights(adapter, recipe_of().model_config), lambda: read(adapter)):
        with pytest.raises(
            BadInputError, match=r"mindformers_adapter_config.json: .*adapter \(LoRA\)"
        ):
            use()
    for name in ("decoder.layers.0.mlp.linear_fc1.lora_a", "layers.0.ffn.gate_lora_b"):
        merged = shards_of({**tensors, name: np.ones((2, 2), np.float32)}, tmp_path / name)
        with pytest.raises(BadInputError, match=rf"{name} is a weight of an adapter"):
            hf.weights(merged, recipe_of().model_config)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("8")
    with pytest.raises(
        BadInputError, match=r"iteration.txt: 8, but there is no iteration_00000008"
    ):
        hf.weights(tmp_path, recipe_of().model_config)
    muon = shards_of(
        {**tensors, "muon_m.output_layer.weight": tensors["output_layer.weight"]}, tmp_path / "muon"
    )
    with pytest.raises(BadInputError, match=r"muon_m.output_layer.weight is a state of Muon"):
        mindformers_checkpoint.read(muon, recipe_of())
    assert hf.weights(muon, recipe_of().model_config)
    other = shards_of(
        {**tensors, "decoder.odd.weight": np.ones((2, 2), np.float32)}, tmp_path / "odd"
    )
    with pytest.raises(BadInputError, match=r"decoder.odd.weight is unknown"):
        hf.weights(other, recipe_of().model_config)


def test_a_folder_with_our_names_fits_the_model_or_is_refused(
    tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    config = recipe_of().model_config
    weights = upstream_names.to_ours(tensors, config)
    converted = hf.convert(
        shards_of(weights, tmp_path / "whole"), tmp_path / "out", config, "telechat"
    )
    moments = {f"adam_m.{name}": tensor for name, tensor in weights.items()}
    states = {"global_step": np.array([4]), "learning_rate": np.array(1.0)}
    rank_file = tmp_path / "run_rank_0-1_4.safetensors"
    file_of(rank_file.name, {**weights, **moments, **states}, {"format": "ms"}).write(rank_file)
    assert values_of(hf.weights(rank_file, config)).keys() == weights.keys()
    assert hf.convert(rank_file, tmp_path / "rank", config, "hf").parameters == converted.parameters
    trained = [tensor.size for name, tensor in weights.items() if not name.endswith("expert_bias")]
    assert converted.parameters == sum(trained)
    head = weights["head.weight"]
    for change, message in (
        ({"head.weight": None}, "head.weight is missing"),
        ({"head.weight": head[:32]}, r"head.weight is \[32, 32\] instead of \[64, 32\]"),
        ({"foot.weight": head}, "foot.weight is unknown"),
    ):
        broken = {name: t for name, t in (weights | change).items() if t is not None}
        folder = shards_of(broken, tmp_path / f"broken-{len(list(tmp_path.iterdir()))}")
        with pytest.raises(BadInputError, match=message):
            hf.convert(folder, tmp_path / "none", config, "telechat")
    assert not (tmp_path / "none").exists()


def test_ckpt_show_says_whose_checkpoint_it_is(
    tensors: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "show", str(shards_of(tensors, tmp_path / "iteration_00000004"))]) == 3
    assert (
        "a checkpoint of MindFormers; `telechat-moe ckpt from-mindformers`"
        in capsys.readouterr().err
    )
