"""`convert --recipe-out`: a recipe that fits the weights of a Hugging Face folder."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from test_convert import write

from telechat_moe.cli import main
from telechat_moe.interop import hf
from telechat_moe.interop.names import pairs
from telechat_moe.recipe import find, hugging_face, load

TINY = "telechat3_moe/pretrain_tiny.yaml"
OTHER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2, "q_lora_rank": 0,
    "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 20, "v_head_dim": 12, "n_routed_experts": 8,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": None, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 2, "norm_topk_prob": False, "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0, "rope_interleave": False, "tie_word_embeddings": True, "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as transformers 5 writes it, of a model that shares little with the tiny recipe's."""
    config = dataclasses.replace(load(TINY).model_config, **OTHER)
    dice = np.random.default_rng(0)
    tensors = {
        p.name: ("F32", (0.1 * dice.standard_normal(p.shape)).astype(np.float32).view(np.uint32))
        for p in pairs(config)
    }
    hf.convert(write(tmp_path / "a.safetensors", tensors), tmp_path / "hf", config, "hf")
    fields = json.loads((tmp_path / "hf/config.json").read_text())
    fields["rope_parameters"] = {"rope_theta": fields.pop("rope_theta"), "rope_type": "default"}
    del fields["rope_scaling"]
    (tmp_path / "hf/config.json").write_text(json.dumps(fields))
    return tmp_path / "hf"


def convert(folder: Path, *options: str) -> int:
    return main(
        [
            "convert",
            str(folder),
            str(folder.with_name("ours")),
            "--recipe",
            TINY,
            "--to",
            "telechat",
            *options,
        ]
    )


def test_the_recipe_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.with_name("mine.yaml")
    assert convert(folder) == 3
    printed = capsys.readouterr().err
    for key in ("hidden_size", "rope_theta", "rope_interleave", "n_group", "tie_word_embeddings"):
        assert f": model.model_config.{key}: " in printed
    assert "pretrain_tiny.yaml:" in printed
    assert not folder.with_name("ours").exists()
    assert convert(folder, "--recipe-out", str(out)) == 0
    recipe = load(out, use="train")
    expected = dataclasses.replace(load(TINY).model_config, **OTHER)
    assert hugging_face.of_recipe(recipe.model_config) == hugging_face.of_recipe(expected)
    assert recipe.load_checkpoint == str(folder.with_name("ours"))
    assert {w.name for w in hf.weights(folder.with_name("ours"), recipe.model_config)}
    assert hf.weights(folder, recipe.model_config, verify=False)
    changed = recipe.to_dict() | {"model": None, "load_checkpoint": ""}
    assert changed == load(TINY).to_dict() | {"model": None, "load_checkpoint": ""}
    text = (
        out.read_text()
    )  # comments and anchors are there, so an override acts wherever the value stands
    assert "dataset_config: *train_dataset" in text
    assert "qk_pos_emb_head_dim: *rope_dim" in text
    comments = [
        line.partition("#")[2] for line in find(TINY).read_text().splitlines()[1:] if "#" in line
    ]
    assert all(comment in text for comment in comments)
    assert load(
        out, ["train_dataset.data_loader.sizes.0=32", "lr_schedule.warmup_steps=2"], use="train"
    ).train_steps
    assert convert(folder, "--recipe-out", str(out)) == 2


def test_the_number_of_mtp_layers_is_the_tensors(folder: Path) -> None:
    recipe = load(
        TINY,
        [
            "model.model_config.num_nextn_predict_layers=0",
            "model.model_config.mtp_loss_factor=null",
        ],
    )
    found = hf.fitting(folder, recipe)
    assert "model.model_config.num_nextn_predict_layers=1" in found
    assert "model.model_config.mtp_loss_factor=0.3" in found


def test_what_no_recipe_can_say(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.with_name("mine.yaml")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"hidden_act": "gelu"}))
    assert convert(folder, "--recipe-out", str(out)) == 3
    assert 'hidden_act is "gelu"' in capsys.readouterr().err
    (folder / "config.json").unlink()
    assert convert(folder, "--recipe-out", str(out)) == 3
    assert "no config.json beside the weights" in capsys.readouterr().err
    assert not out.exists()


def test_wrong_usage(folder: Path, tmp_path: Path) -> None:
    assert convert(folder, "--recipe-out", str(tmp_path / "no/mine.yaml")) == 2
    there = ["convert", "a.safetensors", str(tmp_path / "x"), "--recipe", TINY, "--to", "hf"]
    assert main([*there, "--recipe-out", str(tmp_path / "m.yaml")]) == 2
    assert main(["convert", "--verify", str(folder), "--recipe-out", str(tmp_path / "m.yaml")]) == 2


def test_a_recipe_whose_text_cannot_be_edited(folder: Path) -> None:
    """Flow style: the resolved recipe is written instead."""
    flow = folder.with_name("flow.json")
    flow.write_text(json.dumps(load(TINY).to_dict()))
    out = folder.with_name("mine.yaml")
    options = ["--recipe", str(flow), "--to", "telechat", "--recipe-out", str(out)]
    assert main(["convert", str(folder), str(folder.with_name("ours")), *options]) == 0
    assert load(out).model_config.hidden_size == 64
