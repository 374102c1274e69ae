"""Conversion of weights without mindspore or torch: round trips, refusals, the command line."""

import dataclasses
import json
import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from telechat_moe.checkpoint import checkpoint
from telechat_moe.cli import main
from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError
from telechat_moe.interop import hf
from telechat_moe.interop.hf import WeightsError, convert
from telechat_moe.interop.names import pairs
from telechat_moe.recipe import ModelConfig, load

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=3,
    num_attention_heads=2,
    q_lora_rank=10,
    kv_lora_rank=6,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=3,
    qk_layernorm=True,
    first_k_dense_replace=1,
    n_routed_experts=12,
    num_experts_per_tok=2,
    n_shared_experts=2,
    moe_intermediate_size=7,
    num_nextn_predict_layers=2,
    mtp_loss_factor=0.3,
    max_position_embeddings=32,
)
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "no_q_compression_no_shared": {"q_lora_rank": 0, "n_shared_experts": 0},
    "all_dense_no_mtp": {"first_k_dense_replace": 3, "num_nextn_predict_layers": 0},
}
BITS = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16}


def variant(name):
    return dataclasses.replace(CONFIG, **VARIANTS[name])


def write(path, tensors):
    """Write raw bits under data type names, by a writer of the test's own."""
    header, offset, blobs = {}, 0, []
    for name, (dtype, array) in tensors.items():
        blobs.append(np.ascontiguousarray(array).tobytes())
        end = offset + len(blobs[-1])
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    return path


def read(path):
    """Read raw bits of one file or of all files of a folder, by a reader of the test's own."""
    found = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, e in json.loads(raw[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + n for n in e["data_offsets"])
            assert name not in found
            array = np.frombuffer(raw[begin:end], BITS[e["dtype"]]).reshape(e["shape"])
            found[name] = (e["dtype"], array)
    return found


def random_tensors(config, dtype="F32", seed=0):
    """Return random bits, NaNs among them, under our names; norms and biases in F32."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for p in pairs(config):
        kind = "F32" if len(p.shape) == 1 else dtype
        bits = rng.integers(0, np.iinfo(BITS[kind]).max, p.shape, BITS[kind], endpoint=True)
        tensors[p.name] = (kind, bits)
    return tensors


def same(a, b):
    assert a.keys() == b.keys()
    for name, (dtype, bits) in a.items():
        assert b[name][0] == dtype, name
        np.testing.assert_array_equal(b[name][1], bits, err_msg=name)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "ours.safetensors", random_tensors(CONFIG))


@pytest.fixture
def hf_folder(tmp_path, source):
    convert(source, tmp_path / "hf_folder", CONFIG, "hf")
    return tmp_path / "hf_folder"


# ------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip_is_bitwise(tmp_path, name, dtype):
    config, tensors = variant(name), random_tensors(variant(name), dtype)
    write(tmp_path / "ours.safetensors", tensors)
    converted = convert(
        tmp_path / "ours.safetensors", tmp_path / "hf", config, "hf", shard_bytes=4000
    )
    assert len(converted.files) > 3
    restored = convert(tmp_path / "hf", tmp_path / "back.safetensors", config, "telechat")
    assert restored.files == ["back.safetensors", "back.safetensors.checksums.json"]
    same(read(tmp_path / "back.safetensors"), tensors)
    convert(tmp_path / "back.safetensors", tmp_path / "hf.safetensors", config, "hf")
    same(read(tmp_path / "hf.safetensors"), read(tmp_path / "hf"))
    convert(tmp_path / "hf.safetensors", tmp_path / "ours", config, "telechat", shard_bytes=1000)
    same(read(tmp_path / "ours"), tensors)


def test_experts_are_unstacked_and_transposed(source, hf_folder):
    ours, theirs = read(source), read(hf_folder)
    _, stack = ours["layers.2.moe.experts.down"]
    _, matrix = theirs["model.layers.2.mlp.experts.10.down_proj.weight"]
    assert stack.shape == (12, 7, 12)
    np.testing.assert_array_equal(matrix, stack[10].T)
    for d in (0, 1):
        _, copy = theirs[f"model.layers.{3 + d}.shared_head.head.weight"]
        np.testing.assert_array_equal(copy, ours["head.weight"][1])
        _, copy = theirs[f"model.layers.{3 + d}.embed_tokens.weight"]
        np.testing.assert_array_equal(copy, ours["embedding.weight"][1])


def test_shards_and_index(tmp_path, source):
    limit = 4000
    result = convert(source, tmp_path / "hf", CONFIG, "hf", shard_bytes=limit)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    tensors = read(tmp_path / "hf")
    assert index["metadata"]["total_size"] == sum(a.nbytes for _, a in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    files = sorted(set(index["weight_map"].values()))
    assert files == [f for f in result.files if f.endswith(".safetensors")]
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        held = load_file(tmp_path / "hf" / file)
        assert held.keys() == {n for n, f in index["weight_map"].items() if f == file}
        assert sum(a.nbytes for a in held.values()) <= limit or len(held) == 1


def test_the_safetensors_library_reads_bfloat16(tmp_path):
    tensors = random_tensors(CONFIG, "BF16")
    write(tmp_path / "ours.safetensors", tensors)
    convert(tmp_path / "ours.safetensors", tmp_path / "hf", CONFIG, "hf")
    with safetensors.safe_open(tmp_path / "hf/model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        piece = file.get_slice("model.layers.0.mlp.up_proj.weight")
        assert (piece.get_dtype(), piece.get_shape()) == ("BF16", [20, 12])
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_from_a_training_checkpoint(tmp_path):
    tensors = random_tensors(CONFIG)
    model = {n: a.view(np.float32) for n, (_, a) in tensors.items()}
    model["layers.1.moe.router.expert_load"] = np.ones(12, np.float32)
    model["layers.2.moe.dispatch.dropped"] = np.ones(1, np.float32)
    moments = {f"adam_m.{n}": a for n, a in model.items()}
    groups = {"model": model, "optimizer": moments}
    path = checkpoint.save(tmp_path / "run", 7, groups, {"x": 1}, shard_bytes=5000)
    result = convert(path, tmp_path / "hf", CONFIG, "hf")
    assert result.ignored == ["layers.1.moe.router.expert_load", "layers.2.moe.dispatch.dropped"]
    convert(tmp_path / "hf", tmp_path / "back", CONFIG, "telechat")
    same(read(tmp_path / "back"), tensors)
    with pytest.raises(BadInputError, match="step-00000007"):
        convert(tmp_path / "run", tmp_path / "other", CONFIG, "hf")
    file = next(path.glob("model-*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(BadInputError, match="checksum"):
        convert(path, tmp_path / "other", CONFIG, "hf")


def test_counts(source, tmp_path):
    result = convert(source, tmp_path / "hf", CONFIG, "hf")
    ours = {n: a for n, (_, a) in read(source).items()}
    assert result.parameters == sum(a.size for n, a in ours.items() if "expert_bias" not in n)
    assert result.tensors == len(read(tmp_path / "hf"))
    assert result.dtypes == {"F32": result.tensors}


def test_memory_stays_small(tmp_path):
    config = dataclasses.replace(
        CONFIG, hidden_size=256, moe_intermediate_size=512, n_routed_experts=32, vocab_size=256,
        num_nextn_predict_layers=0,
    )  # fmt: skip
    write(tmp_path / "ours.safetensors", random_tensors(config))
    stack = 32 * 256 * 512 * 4
    tracemalloc.start()
    for src, dst, to in (("ours.safetensors", "hf", "hf"), ("hf", "back", "telechat")):
        tracemalloc.reset_peak()
        convert(tmp_path / src, tmp_path / dst, config, to)
        assert tracemalloc.get_traced_memory()[1] < stack / 4
    tracemalloc.stop()


# -------------------------------------------------------------------------------------- refusals


def problems(src, dst, config=CONFIG, to="hf"):
    with pytest.raises(WeightsError) as caught:
        convert(src, dst, config, to)
    assert caught.value.exit_code == 3
    assert not dst.exists()
    assert all(p in str(caught.value) for p in caught.value.problems)
    assert not [p for p in dst.parent.iterdir() if p.name.startswith(f".{dst.name}")]
    return caught.value.problems


def test_all_problems_are_listed(tmp_path):
    tensors = random_tensors(CONFIG)
    del tensors["norm.weight"]
    tensors["normal.weight"] = ("F32", np.zeros(3, np.uint32))
    tensors["layers.0.ffn.gate.bias"] = ("F32", np.zeros(3, np.uint32))
    dtype, array = tensors["layers.1.attention.out.weight"]
    tensors["layers.1.attention.out.weight"] = (dtype, array.T)
    write(tmp_path / "ours.safetensors", tensors)
    raw = (tmp_path / "ours.safetensors").read_bytes()
    raw = raw.replace(b'"head.weight": {"dtype": "F32"', b'"head.weight": {"dtype": "I32"')
    (tmp_path / "ours.safetensors").write_bytes(raw)
    assert problems(tmp_path / "ours.safetensors", tmp_path / "hf") == [
        "unknown tensor normal.weight",
        "unknown tensor layers.0.ffn.gate.bias",
        "missing tensor norm.weight",
        "layers.1.attention.out.weight has shape [6, 12], the recipe needs [12, 6]",
        "head.weight has type I32; weights must be one of F32, BF16, F16",
    ]


def test_missing_experts_are_listed_in_one_line(tmp_path, hf_folder):
    tensors = read(hf_folder)
    for j in (1, 2, 3, 7):
        del tensors[f"model.layers.1.mlp.experts.{j}.up_proj.weight"]
    del tensors["model.layers.2.mlp.experts.4.down_proj.weight"]
    write(tmp_path / "hf.safetensors", tensors)
    assert problems(tmp_path / "hf.safetensors", tmp_path / "ours", to="telechat") == [
        "missing tensor model.layers.1.mlp.experts.*.up_proj.weight (* = 1-3, 7)",
        "missing tensor model.layers.2.mlp.experts.4.down_proj.weight",
    ]


def test_a_model_of_another_size(tmp_path, hf_folder):
    deeper = dataclasses.replace(CONFIG, num_hidden_layers=4, n_routed_experts=10)
    (hf_folder / "config.json").unlink()
    reported = problems(hf_folder, tmp_path / "ours", deeper, "telechat")
    assert "unknown tensor model.layers.1.mlp.experts.*.up_proj.weight (* = 10-11)" in reported
    assert "missing tensor model.layers.5.enorm.weight" in reported
    assert (
        "model.layers.1.mlp.gate.weight has shape [12, 12], the recipe needs [10, 12]" in reported
    )


def test_experts_of_different_types(tmp_path, hf_folder):
    tensors = read(hf_folder)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = ("F16", tensors[name][1].astype(np.uint16))
    write(tmp_path / "hf.safetensors", tensors)
    (problem,) = problems(tmp_path / "hf.safetensors", tmp_path / "ours", to="telechat")
    assert problem.endswith("(* = 0-11) are of different types: 11 F32, 1 F16")


@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_copies_in_mtp_layers(tmp_path, hf_folder, copy):
    """They may be absent; another content is refused, as this model shares the two."""
    tensors, name = read(hf_folder), f"model.layers.4.{copy}"
    kept = tensors.pop(name)
    write(tmp_path / "absent.safetensors", tensors)
    convert(tmp_path / "absent.safetensors", tmp_path / "ours", CONFIG, "telechat")
    tensors[name] = (kept[0], kept[1] ^ np.uint32(kept[1] == kept[1].max()))
    write(tmp_path / "other.safetensors", tensors)
    (problem,) = problems(tmp_path / "other.safetensors", tmp_path / "ours2", to="telechat")
    assert problem.startswith(f"{name} differs from ")


def test_tied_head(tmp_path):
    """lm_head of a tied model is not written; it may stand in a checkpoint if it is the same."""
    config = variant("tied")
    write(tmp_path / "ours.safetensors", random_tensors(config))
    convert(tmp_path / "ours.safetensors", tmp_path / "hf", config, "hf")
    tensors = read(tmp_path / "hf")
    assert "lm_head.weight" not in tensors
    dtype, table = tensors["model.embed_tokens.weight"]
    write(tmp_path / "same.safetensors", {**tensors, "lm_head.weight": (dtype, table)})
    convert(tmp_path / "same.safetensors", tmp_path / "back", config, "telechat")
    write(tmp_path / "other.safetensors", {**tensors, "lm_head.weight": (dtype, table + 1)})
    (problem,) = problems(tmp_path / "other.safetensors", tmp_path / "x", config, "telechat")
    assert problem.startswith("lm_head.weight differs from model.embed_tokens.weight")


def test_a_bias_that_the_recipe_switches_off(tmp_path, source):
    off = dataclasses.replace(CONFIG, moe_router_enable_expert_bias=False)
    reported = problems(source, tmp_path / "hf", off)
    assert reported[0].startswith("layers.1.moe.router.expert_bias is not 0")
    tensors = random_tensors(CONFIG)
    for name in [n for n in tensors if n.endswith("expert_bias")]:
        tensors[name] = ("F32", np.zeros(12, np.uint32))
    write(tmp_path / "zero.safetensors", tensors)
    convert(tmp_path / "zero.safetensors", tmp_path / "hf", off, "hf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_layernorm": False}, "qk_layernorm is False"),
        ({"moe_shared_expert_intermediate_size": 10}, r"\(10\) must be a multiple of .* \(7\)"),
        ({"n_group": 12, "topk_group": 2}, "a group has 1 expert"),
        ({"n_group": 4, "topk_group": 2}, "ranked by its best 1 .* by its best 2"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type is yarn"),
    ],
)
def test_what_hugging_face_cannot_compute(tmp_path, source, changes, message):
    with pytest.raises(BadInputError, match=message):
        convert(source, tmp_path / "hf", dataclasses.replace(CONFIG, **changes), "hf")
    assert not (tmp_path / "hf").exists()


def test_wrong_direction_is_hinted(source, tmp_path):
    with pytest.raises(WeightsError, match="already has the names of format 'telechat'"):
        convert(source, tmp_path / "x", CONFIG, "telechat")


def test_unreadable_sources(tmp_path, source, hf_folder):
    def refused(path, message):
        with pytest.raises(BadInputError, match=message):
            convert(path, tmp_path / "out", CONFIG, "telechat")
        assert not (tmp_path / "out").exists()

    refused(tmp_path / "nowhere", "no such file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "neither model.safetensors")
    raw = source.read_bytes()
    (tmp_path / "short.safetensors").write_bytes(raw[:-100])
    refused(tmp_path / "short.safetensors", "truncated or broken")
    (tmp_path / "tiny.safetensors").write_bytes(raw[:5])
    refused(tmp_path / "tiny.safetensors", "truncated")
    (tmp_path / "text.safetensors").write_bytes(b"x" * 1000)
    refused(tmp_path / "text.safetensors", "not a safetensors file")
    (tmp_path / "json.safetensors").write_bytes(
        (20).to_bytes(8, "little") + b"[1, 2, 3]" + b" " * 11
    )
    refused(tmp_path / "json.safetensors", "broken safetensors header")
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / f"{name}.safetensors").write_bytes(raw)
    refused(tmp_path / "two", "2 safetensors files .* but no model.safetensors.index.json")


def test_broken_indexes(tmp_path, source):
    convert(source, tmp_path / "hf", CONFIG, "hf", shard_bytes=9000)
    index = tmp_path / "hf/model.safetensors.index.json"
    good = json.loads(index.read_text())
    names = sorted(good["weight_map"])

    def refused(weight_map, message):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(BadInputError, match=message):
            convert(tmp_path / "hf", tmp_path / "out", CONFIG, "telechat")

    absent = {n: f for n, f in good["weight_map"].items() if n != names[0]}
    refused(absent, f"{names[0]} is in .* not listed")
    refused(
        {**good["weight_map"], "x": good["weight_map"][names[0]]}, "x is listed in .* not there"
    )
    refused({**good["weight_map"], "x": "no.safetensors"}, "file no.safetensors is missing")
    refused({**good["weight_map"], "x": "../ours.safetensors"}, "outside the folder")
    index.write_text("{")
    with pytest.raises(BadInputError, match="no valid index"):
        convert(tmp_path / "hf", tmp_path / "out", CONFIG, "telechat")


def test_nothing_is_overwritten_or_left_behind(tmp_path, source):
    (tmp_path / "hf").mkdir()
    with pytest.raises(UsageError, match="exists"):
        convert(source, tmp_path / "hf", CONFIG, "hf")
    before = sorted(tmp_path.iterdir())
    calls = []

    def fail(text, finished, total):
        calls.append((text, finished, total))
        if text == "writing" and finished:
            raise OSError(28, "No space left on device")

    with pytest.raises(TelechatMoeError, match=r"No space left.*Nothing was left behind") as caught:
        convert(source, tmp_path / "new", CONFIG, "hf", shard_bytes=4000, progress=fail)
    assert caught.value.exit_code == 1
    assert sorted(tmp_path.iterdir()) == before
    size = source.stat().st_size
    assert calls[0] == ("checking the source", size, size)
    assert calls[-1][2] == sum(a.nbytes for _, a in read(source).values()) + 4 * 40 * 12 * 4


# ---------------------------------------------------------------------------------- command line


TINY = "telechat3_moe/pretrain_tiny.yaml"


@pytest.fixture(scope="module")
def tiny_source(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "ours.safetensors"
    tensors = random_tensors(load(TINY).model_config)
    save_file({n: a.view(np.float32) for n, (_, a) in tensors.items()}, path)
    return path


def test_command_line(tmp_path, tiny_source, capsys):
    there = ["convert", str(tiny_source), str(tmp_path / "hf"), "--recipe", TINY, "--to", "hf"]
    assert main([*there, "--shard-size", "1MB", "--json", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    assert out.startswith(str(tmp_path / "hf"))
    assert set(report) == {
        "source", "destination", "to", "files", "tensors", "parameters", "total_bytes", "dtypes",
        "ignored", "notes", "resumed_files", "seconds",
    }  # fmt: skip
    assert len(report["files"]) > math.floor(report["total_bytes"] / 1e6)
    back = ["convert", str(tmp_path / "hf"), str(tmp_path / "b.safetensors"), "--recipe", TINY]
    assert main([*back, "--to", "telechat", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["files"][0] == "b.safetensors"
    same(read(tmp_path / "b.safetensors"), read(tiny_source))


def test_exit_codes(tmp_path, tiny_source, capsys):
    def run(*args):
        code = main(["convert", *map(str, args)])
        return code, capsys.readouterr().err

    ok = (tiny_source, tmp_path / "hf", "--recipe", TINY, "--to", "hf")
    assert run(*ok[:4])[0] == 2
    code, err = run(*ok, "--shard-size", "five")
    assert (code, "--shard-size five: expected a size" in err) == (2, True)
    assert run(*ok, "--shard-size", "0")[0] == 2
    code, err = run(*ok[:2], "--recipe", "nothing.yaml", "--to", "hf")
    assert (code, err.startswith("error: ")) == (3, True)
    code, err = run(*ok, "--set", "model.model_config.num_hidden_layers=5")
    assert (code, "missing tensor" in err, "Traceback" in err) == (3, True, False)
    (tmp_path / "file").write_text("")
    assert run(tiny_source, tmp_path / "file/hf", *ok[2:])[0] == 1
    assert run(*ok)[0] == 0
    code, err = run(*ok)
    assert (code, "exists" in err) == (2, True)
    assert main(["convert", "--help"]) == 0
    help_text = capsys.readouterr().out
    assert "example:" in help_text
    assert "exit codes:" in help_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5GB", 5 * 10**9), ("2GiB", 2 << 30), ("1.5 mb", 1_500_000), ("700", 700), ("3K", 3000)],
)
def test_sizes(text, expected):
    from telechat_moe.units import parse_size

    assert parse_size("--shard-size", text, bare=True) == expected


def test_imports_neither_mindspore_nor_torch():
    code = "import sys, telechat_moe.interop.hf; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"mindspore", "torch", "transformers"} & set(out.stdout.split())
    assert hf.SHARD_BYTES == 5_000_000_000
