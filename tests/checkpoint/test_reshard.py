"""Checkpoints cut into the pieces of a layout and put together again."""

import json
import os
import re
import shutil
from pathlib import Path

import mini_recipe as mini
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telechat_moe import files, tensor_files
from telechat_moe.checkpoint import checkpoint, reshard
from telechat_moe.cli import main
from telechat_moe.recipe import Recipe, load
from telechat_moe.sharding.shards import WeightShards

TINY = "telechat3_moe/pretrain_tiny.yaml"


def overrides(
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    sp: bool = False,
    zero: bool = False,
    expert_tp: bool = False,
    threshold: int = 0,
    sharers: int = -1,
) -> list[str]:
    """Return the mini recipe of a layout as ``--set`` values."""
    given = {
        **mini.OVERRIDES,
        "model.model_config.num_attention_heads": 4,
        "model.model_config.num_key_value_heads": 4,
        "model.model_config.num_nextn_predict_layers": 1,
        "runner_config.batch_size": 2,
        "model.model_config.batch_size": 2,
        "use_parallel": dp * tp * pp > 1,
        "parallel.parallel_mode": 1,
        "parallel.full_batch": True,
        "parallel.enable_parallel_optimizer": zero,
        "parallel_config.data_parallel": dp,
        "parallel_config.model_parallel": tp,
        "parallel_config.pipeline_stage": pp,
        "parallel_config.expert_parallel": ep,
        "parallel_config.use_seq_parallel": sp,
        "parallel_config.micro_batch_num": 2 if pp > 1 else 1,
        "callbacks.1.micro_batch_num": 2 if pp > 1 else 1,
        "telechat_moe.sharding.expert_tensor_parallel": expert_tp,
    }
    if zero:
        given["parallel.parallel_optimizer_config.parallel_optimizer_threshold"] = threshold
        given["parallel.parallel_optimizer_config.optimizer_weight_shard_size"] = sharers
    return [f"{k}={v}" for k, v in given.items()]


def recipe(**layout: object) -> Recipe:
    return load(TINY, overrides(**layout))  # pyright: ignore


LAYOUTS = {
    "tp2": {"tp": 2},
    "dp2-ep2": {"dp": 2, "ep": 2},
    "dp2-zero": {"dp": 2, "zero": True},
    "dp2-tp2-sp-ep4": {"dp": 2, "tp": 2, "sp": True, "ep": 4},
    "dp2-tp2-sp-ep2-width": {"dp": 2, "tp": 2, "sp": True, "ep": 2, "expert_tp": True},
    "dp4-ep2-zero": {"dp": 4, "ep": 2, "zero": True, "threshold": 1},
    "tp2-pp2": {"tp": 2, "pp": 2, "sp": True},
    "dp2-pp2-zero": {"dp": 2, "pp": 2, "zero": True},
    "dp4-zero-of-2": {"dp": 4, "zero": True, "sharers": 2},
    "dp4-ep4-zero-of-2": {"dp": 4, "ep": 4, "zero": True, "sharers": 2},
    "dp2-tp2-pp2-ep4-zero": {"dp": 2, "tp": 2, "pp": 2, "sp": True, "ep": 4, "zero": True},
}


def tensors(of: Recipe, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Return weights, moments and averages with random bits, NaN and -0.0 among them."""
    random, cuts = np.random.default_rng(seed), WeightShards.of(of)
    groups: dict[str, dict[str, np.ndarray]] = {"model": {}, "optimizer": {}, "ema": {}}
    for name in [*cuts.names, *(f"ema.{name}" for name in cuts.weights)]:
        prefix = name.split(".")[0]
        group = {"adam_m": "optimizer", "adam_v": "optimizer", "ema": "ema"}.get(prefix, "model")
        shape = cuts.shapes[name if group == "model" else name.split(".", 1)[1]]
        bits = random.integers(0, 2**32, shape, np.uint32)
        groups[group][name] = bits.view(np.float32)
    return groups


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    return checkpoint.save(root, 12, tensors(recipe()), {"seed": 42, "data": {"position": 48}})


def same_files(a: Path, b: Path) -> None:
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    assert any(a.iterdir())
    for path in a.iterdir():
        assert path.read_bytes() == (b / path.name).read_bytes(), path.name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_byte_equal(layout: str, saved: Path, tmp_path: Path) -> None:
    content = reshard.reshard(saved, tmp_path / "pieces", recipe(**LAYOUTS[layout]))
    same_files(saved, reshard.merge(tmp_path / "pieces", tmp_path / "merged"))
    # Nothing is everywhere that is not needed everywhere.
    whole = sum(p.stat().st_size for p in saved.glob("*.safetensors"))
    largest = max(f["bytes"] for f in content["files"].values())
    assert largest < 0.85 * whole


@settings(max_examples=15, deadline=None)
@given(
    dp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4, 8]),
    zero=st.booleans(),
    threshold=st.sampled_from([0, 1, 4]),
)
def test_the_parts_of_any_layout_tile_every_tensor(
    dp: int, tp: int, pp: int, ep: int, zero: bool, threshold: int
) -> None:
    if dp * tp * pp == 1 or ep > dp * tp:
        return
    cuts = WeightShards.of(recipe(dp=dp, tp=tp, pp=pp, ep=ep, zero=zero, threshold=threshold))
    for name in cuts.names:
        shape = cuts.shapes[name.split(".", 1)[1] if name.startswith("adam_") else name]
        count = np.zeros(shape, np.int32)
        found = [cuts.shard(rank, name) for rank in range(cuts.mesh.devices)]
        for region in {r for r in found if r is not None}:
            count[tuple(slice(a, b) for a, b in region)] += 1
        assert (count == 1).all(), name


def test_each_piece_is_what_the_region_says(saved: Path, tmp_path: Path) -> None:
    whole = checkpoint.load(saved).tensors
    cuts = WeightShards.of(recipe(**LAYOUTS["dp2-tp2-sp-ep4"]))
    reshard.reshard(saved, tmp_path / "pieces", recipe(**LAYOUTS["dp2-tp2-sp-ep4"]))
    from safetensors import safe_open

    with safe_open(tmp_path / "pieces" / "rank_3.safetensors", "np") as file:
        assert file.metadata()["step"] == "12"
        piece = file.get_tensor("layers.1.moe.experts.up")
        query = file.get_tensor("adam_m.layers.0.attention.q_up.weight")
    assert cuts.shard(3, "layers.1.moe.experts.up") == ((6, 8), (0, 32), (0, 16))
    assert piece.tobytes() == whole["model"]["layers.1.moe.experts.up"][6:8].tobytes()
    wanted = whole["optimizer"]["adam_m.layers.0.attention.q_up.weight"]
    assert query.tobytes() == wanted[len(wanted) // 2 :].tobytes()


@pytest.fixture
def pieces(saved: Path, tmp_path: Path) -> Path:
    reshard.reshard(saved, tmp_path / "pieces", recipe(**LAYOUTS["dp2-tp2-sp-ep4"]))
    return tmp_path / "pieces"


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, exit_code: int = 3) -> str:
    assert main(["ckpt", *map(str, arguments)]) == exit_code
    return capsys.readouterr().err


def test_pieces_that_are_not_whole_are_refused(
    pieces: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pieces / "rank_2.safetensors").unlink()
    os.truncate(pieces / "rank_1.safetensors", 5000)
    raw = bytearray((pieces / "rank_0.safetensors").read_bytes())
    raw[-5] ^= 1
    (pieces / "rank_0.safetensors").write_bytes(raw)
    for action in (("merge", pieces, tmp_path / "merged"), ("show", pieces)):
        said = refused(capsys, *action)
        assert "rank_0.safetensors: checksum differs" in said
        assert "rank_1.safetensors: truncated, 5,000 bytes found" in said
        assert "rank_2.safetensors: missing" in said
    assert not (tmp_path / "merged").exists()


def test_pieces_of_another_step_are_refused(
    pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = checkpoint.save(tmp_path / "later", 13, tensors(recipe(), 1), {})
    reshard.reshard(later, tmp_path / "other", recipe(**LAYOUTS["dp2-tp2-sp-ep4"]))
    shutil.copy(tmp_path / "other" / "rank_1.safetensors", pieces)
    said = refused(capsys, "merge", pieces, tmp_path / "merged")
    assert "rank_1.safetensors: is of step 13, pieces.json of step 12" in said


def seal(folder: Path, **changes: object) -> None:
    """Change ``pieces.json`` and make its checksums right again."""
    content = {**json.loads((folder / reshard.FILE).read_text()), **changes, "sha256": "0" * 64}
    for file in content["files"]:
        content["files"][file] = files.checksum(folder / file)
    (folder / reshard.FILE).write_bytes(files.seal(content))


@pytest.mark.parametrize("key", ["format", "version"])
def test_pieces_of_another_format_or_version_are_refused(
    pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    seal(pieces, **{key: 99})
    said = refused(capsys, "merge", pieces, tmp_path / "merged")
    assert f"{key} 99" in said
    assert "this program reads 'telechat-moe pieces' version 1" in said


def test_pieces_of_another_layout_are_refused(
    pieces: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reshard.reshard(saved, tmp_path / "other", recipe(tp=2))
    shutil.copy(tmp_path / "other" / "rank_0.safetensors", pieces)
    said = refused(capsys, "merge", pieces, tmp_path / "merged")
    assert "rank_0.safetensors: checksum differs" in said
    # Also where checksums are right: a part of the experts is missing.
    content = json.loads((pieces / reshard.FILE).read_text())
    del content["files"]["rank_3.safetensors"]
    seal(pieces, files=content["files"], step=12)
    said = refused(capsys, "merge", pieces, tmp_path / "merged")
    assert "layers.1.moe.experts.up: the shards do not cover it" in said


def test_pieces_of_another_shape_or_value_are_refused(
    pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = files.read(pieces / "rank_1.safetensors", keep=True)
    assert found.data is not None
    words, held = tensor_files.metadata(found.data), dict(tensor_files.parse(found.data))
    held["norm.weight"] = held["norm.weight"] + np.float32(1)
    held["layers.0.ffn.up.weight"] = held["layers.0.ffn.up.weight"][:3]
    (pieces / "rank_1.safetensors").unlink()
    tensor_files.file_of("", held, words).write(pieces / "rank_1.safetensors")
    seal(pieces)
    said = refused(capsys, "merge", pieces, tmp_path / "merged")
    assert "norm.weight: differs from the copy of another rank" in said
    assert "layers.0.ffn.up.weight is [3, 32] at ((24, 48), (0, 32))" in said


@pytest.mark.parametrize("region", [[[1, 33]], [[-1, 31]], [[0, 32], [0, 1]], []])
def test_pieces_that_say_a_place_outside_their_tensor_are_refused(
    pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], region: list[list[int]]
) -> None:
    path = pieces / "rank_1.safetensors"
    found = files.read(path, keep=True)
    assert found.data is not None
    words, held = tensor_files.metadata(found.data), dict(tensor_files.parse(found.data))
    regions = {**json.loads(words["regions"]), "norm.weight": region, "more": [[0, 1]]}
    held["more"] = np.zeros(1, np.float32)
    path.unlink()
    tensor_files.file_of("", held, {**words, "regions": json.dumps(regions)}).write(path)
    seal(pieces)
    said = refused(capsys, "merge", pieces, tmp_path / "merged")
    assert "rank_1.safetensors: norm.weight is [32] at" in said
    assert "rank_1.safetensors: more is not in pieces.json" in said
    assert not (tmp_path / "merged").exists()


def test_the_model_and_what_exists_are_guarded(
    saved: Path, pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [x for value in overrides(tp=2) for x in ("--set", value)]
    other = [*sets, "--set", "model.model_config.intermediate_size=64"]
    said = refused(capsys, "reshard", saved, tmp_path / "x", "--recipe", TINY, *other)
    assert "layers.0.ffn.up.weight is [48, 32], the recipe's model has [64, 32]" in said
    said = refused(capsys, "reshard", saved, pieces, "--recipe", TINY, *sets, exit_code=2)
    assert f"{pieces} exists" in said
    said = refused(capsys, "merge", pieces, saved.parent, exit_code=2)
    assert f"{saved} exists" in said
    assert f"{tmp_path} holds no pieces.json" in refused(capsys, "merge", tmp_path, tmp_path / "m")
    (pieces / reshard.FILE).write_text((pieces / reshard.FILE).read_text().replace("12", "13", 1))
    assert "checksum differs" in refused(capsys, "merge", pieces, tmp_path / "m")
    assert "checkpoint.json: missing" in refused(capsys, "show", tmp_path)


def test_the_verbs(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [x for value in overrides(tp=2, pp=2) for x in ("--set", value)]
    out = tmp_path / "pieces"
    assert main(["ckpt", "reshard", str(saved), str(out), "--recipe", TINY, *sets]) == 0
    assert "step 12 for tp2 pp2, 4 files" in capsys.readouterr().out
    assert main(["ckpt", "show", str(out), "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["kind"], shown["step"], shown["layout"]) == ("pieces", 12, "tp2 pp2")
    assert len(shown["files"]) == shown["devices"] == 4
    assert main(["ckpt", "merge", str(out), str(tmp_path / "merged")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "merged" / saved.name)
    assert main(["ckpt", "show", str(saved), "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "checkpoint of step 12, whole tensors" in text
    assert re.search(r"optimizer +adam_v\.layers\.1\.moe\.experts\.up +F32 +\[8, 32, 16\]", text)
    assert "checksums agree" in text
    assert main(["ckpt", "show", str(saved.parent)]) == 3
    said = capsys.readouterr().err
    assert f"{saved.parent} is a folder of 1 checkpoint(s); name one, such as {saved}" in said
    assert "broken" not in said


@pytest.mark.slow
@pytest.mark.mindspore
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_are_those_of_the_compiled_graphs(layout: str) -> None:
    pytest.importorskip("mindspore")
    from telechat_moe.graph.parameter_layout import shard_slices
    from telechat_moe.train.rank_graph import compile_recipe

    of = recipe(**LAYOUTS[layout])
    cuts, seen = WeightShards.of(of), set()
    for graph in compile_recipe(of, target="CPU", full_batch=True):
        for name in cuts.names:
            entry, region = graph.layouts.get(name), cuts.shard(graph.rank, name)
            if entry is None:
                assert region is None, name
                continue
            assert region is not None, name
            where = shard_slices(entry.shape, graph, name)
            assert where is not None
            assert region == tuple((s.start, s.stop) for s in where), name
            seen.add(name)
    assert seen == set(cuts.names)
