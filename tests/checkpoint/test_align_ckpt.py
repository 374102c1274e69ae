"""`align ckpt` on checkpoints that were cut for layouts and changed, and recipe layouts against what `reshard` cut."""

import json
from pathlib import Path

import numpy as np
import pytest
import test_reshard as saved

from telechat_moe import files, tensor_files
from telechat_moe.checkpoint import checkpoint, reshard
from telechat_moe.cli.align import ckpt
from telechat_moe.cli.verb import VerbParser
from telechat_moe.errors import BadInputError
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.tools.align.compare.checkpoints import compare_checkpoints, open_checkpoint
from telechat_moe.tools.align.dump import recipe_layout
from telechat_moe.tools.align.dump.logical import Shard, logical, merge


def run(*argv: str) -> int:
    args = VerbParser(ckpt.VERB).parse_args(argv)
    return args.run(args)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of the tiny model on one device."""
    of = saved.recipe()
    path = checkpoint.save(tmp_path_factory.mktemp("ckpt"), 7, saved.tensors(of), {"seen": 1})
    return path, checkpoint.load(path)


@pytest.mark.parametrize("layout", list(saved.LAYOUTS))
def test_pieces_of_a_layout_equal_the_checkpoint(whole, layout, tmp_path, capsys) -> None:
    reshard.reshard(whole[0], tmp_path / "pieces", saved.recipe(**saved.LAYOUTS[layout]))
    assert run(str(whole[0]), str(tmp_path / "pieces"), "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "pass"
    assert all(t["bitwise"] for t in found["tensors"].values())
    assert len(found["tensors"]) == sum(map(len, whole[1].tensors.values()))


@pytest.mark.parametrize("layout", list(saved.LAYOUTS))
def test_the_recipe_says_how_pieces_merge(whole, layout, tmp_path) -> None:
    """Layouts from the recipe, on the files that another program cut: every tensor comes back, bit for bit."""
    of = saved.recipe(**saved.LAYOUTS[layout])
    reshard.reshard(whole[0], tmp_path / "pieces", of)
    cuts = WeightShards.of(of)
    by_rank = {}
    for rank in range(cuts.mesh.devices):
        data = files.read(tmp_path / "pieces" / reshard.rank_file(rank), keep=True).data
        by_rank[rank] = tensor_files.parse(data)
    for tensors in whole[1].tensors.values():
        for name, x in tensors.items():
            how, shape = recipe_layout.weight(cuts, name, x.dtype.itemsize)
            pieces = [Shard(r, found[name]) for r, found in by_rank.items() if name in found]
            assert logical(pieces, how, shape).shape == x.shape
            assert merge(pieces, how).values.tobytes() == x.tobytes(), name


def test_gradients_of_a_recipe(whole) -> None:
    del whole
    cuts = WeightShards.of(saved.recipe(dp=2, tp=2, pp=2, sp=True, ep=4))
    name = "layers.0.attention.out.weight"
    how, shape = recipe_layout.weight(cuts, name, reduce="sum")
    assert set(how.partial) == {"dp_inner"}
    half = shape[1] // 2
    g = np.ones((shape[0], half), np.float32)
    found = merge([Shard(r, g * (r // 2 + 1)) for r in range(4)], how)
    assert found.values.shape == shape
    assert (found.values == 3).all()


def changed(whole, folder: Path, change) -> Path:
    tensors = {g: {n: x.copy() for n, x in found.items()} for g, found in whole[1].tensors.items()}
    change(tensors)
    return checkpoint.save(folder, 7, tensors, {"seen": 1})


def test_a_changed_value_is_found_and_measured(whole, tmp_path, capsys) -> None:
    name = "layers.1.ffn.down.weight"
    name = name if name in whole[1].tensors["model"] else next(iter(whole[1].tensors["model"]))

    def one_ulp(tensors):
        x = tensors["model"][name]
        x[:] = 1.0
        x.reshape(-1)[5] = np.nextafter(np.float32(1), np.float32(2))

    def ones(tensors):
        tensors["model"][name][:] = 1.0

    a, b = changed(whole, tmp_path / "a", ones), changed(whole, tmp_path / "b", one_ulp)
    assert run(str(a), str(b), "--json", "-") == 1
    found = json.loads(capsys.readouterr().out)
    tensor = found["tensors"][name]
    assert found["beyond"] == [name]
    assert (tensor["different"], tensor["max_abs"]) == (1, 2**-23)
    assert tensor["ulp_histogram"] == {"0": tensor["elements"] - 1, "<=1": 1}
    assert tensor["first"][1:] == [1.0, 1 + 2**-23]
    assert tensor["relative_l2"] == pytest.approx(2**-23 / tensor["elements"] ** 0.5)
    assert run(str(a), str(b), "--ulp", "1") == 0
    assert run(str(a), str(b), "--rtol", "1e-6") == 0
    assert run(str(a), str(b), "--rtol", "1e-12") == 1
    assert name in capsys.readouterr().out


def test_nan_on_one_side_is_infinitely_far(whole, tmp_path) -> None:
    name = next(iter(whole[1].tensors["model"]))

    def nan(tensors):
        tensors["model"][name].reshape(-1)[0] = np.nan

    def one(tensors):
        tensors["model"][name].reshape(-1)[0] = 1.0

    report = compare_checkpoints(
        changed(whole, tmp_path / "a", one), changed(whole, tmp_path / "b", nan)
    )
    assert report.compared[name].max_abs == np.inf
    assert report.beyond(1e9, 1e9) == [name]


def test_missing_tensors_are_not_comparable(whole, tmp_path, capsys) -> None:
    name = next(iter(whole[1].tensors["optimizer"]))
    other = changed(whole, tmp_path / "b", lambda t: t["optimizer"].pop(name))
    assert run(str(whole[0]), str(other)) == 4
    assert f"{name}: only in {whole[0]}" in capsys.readouterr().out
    assert run(str(whole[0]), str(other), "--group", "model") == 0


def test_broken_checkpoints_are_bad_input(whole, tmp_path) -> None:
    reshard.reshard(whole[0], tmp_path / "pieces", saved.recipe(**saved.LAYOUTS["tp2"]))
    file = tmp_path / "pieces" / reshard.rank_file(1)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadInputError, match="truncated"):
        open_checkpoint(tmp_path / "pieces")
    with pytest.raises(BadInputError, match="no folder"):
        open_checkpoint(tmp_path / "nothing")


def test_bfloat16_is_measured_in_its_own_ulps(tmp_path) -> None:
    bits = np.array([0x3F80, 0x4000, 0xFFC0], np.uint16)
    far = bits.copy()
    far[0] += 2  # 1.0 -> 1.015625
    paths = [
        checkpoint.save(tmp_path / str(i), 1, {"model": {"w": x.view(tensor_files.BFLOAT16)}}, {})
        for i, x in enumerate((bits, far))
    ]
    report = compare_checkpoints(*paths)
    assert report.compared["w"].histogram == {"0": 2, "<=2": 1}
    assert report.compared["w"].max_abs == 2**-6
    assert report.compared["w"].first == ((0,), 1.0, 1.015625)


def test_scalars_compare(tmp_path) -> None:
    paths = [
        checkpoint.save(tmp_path / str(i), 1, {"model": {"w": np.array(x)}}, {})
        for i, x in enumerate((2.0, 2.5))
    ]
    found = compare_checkpoints(*paths).compared["w"]
    assert (found.max_abs, found.relative_l2, found.first) == (0.5, 0.25, ((), 2.0, 2.5))


@pytest.mark.parametrize("other", [np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float64)])
def test_other_shapes_and_types_are_not_comparable(tmp_path, other) -> None:
    paths = [
        checkpoint.save(tmp_path / str(i), 1, {"model": {"w": x, "v": np.zeros(2)}}, {})
        for i, x in enumerate((np.zeros((2, 3), np.float32), other))
    ]
    report = compare_checkpoints(*paths)
    assert set(report.problems) == {"w"}
    assert set(report.compared) == {"v"}
    assert run(*map(str, paths)) == 4
