"""`align` on checkpoints that were cut for layouts and changed, and recipe layouts against what `reshard` cut."""

import json
from pathlib import Path

import numpy as np
import pytest
import test_reshard as saved

from telechat_moe import files, tensor_files
from telechat_moe.checkpoint import checkpoint, reshard
from telechat_moe.checkpoint.stored import open_checkpoint
from telechat_moe.cli.align import bisect
from telechat_moe.cli.verb import VerbParser
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.tools.align.compare import tensors as blockwise
from telechat_moe.tools.align.dump import recipe_layout
from telechat_moe.tools.align.dump.logical import Shard, logical


def run(*argv: str) -> int:
    args = VerbParser(bisect.VERB).parse_args(argv)
    return args.run(args)


def compared(capsys, *argv: str | Path) -> tuple[int, dict]:
    """Return the exit code and, by name, what the report says of each tensor."""
    code = run(*map(str, argv), "--json", "-")
    report = json.loads(capsys.readouterr().out)
    assert code == {"pass": 0, "diverged": 1, "inconclusive": 4}[report["verdict"]]
    return code, {t["operator"]: t for t in report["standard"]["tensors"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of the tiny model on one device."""
    of = saved.recipe()
    path = checkpoint.save(tmp_path_factory.mktemp("ckpt"), 7, saved.tensors(of), {"seen": 1})
    return path, checkpoint.load(path)


@pytest.mark.parametrize("layout", list(saved.LAYOUTS))
def test_pieces_of_a_layout_equal_the_checkpoint(whole, layout, tmp_path, capsys) -> None:
    reshard.reshard(whole[0], tmp_path / "pieces", saved.recipe(**saved.LAYOUTS[layout]))
    code, found = compared(capsys, whole[0], tmp_path / "pieces")
    assert code == 0
    assert {t["status"] for t in found.values()} == {"pass"}
    assert {n: t["tensor"] for n, t in found.items()} == {
        n: group for group, names in whole[1].tensors.items() for n in names
    }


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
            assert logical(pieces, how).values.tobytes() == x.tobytes(), name


def test_gradients_of_a_recipe(whole) -> None:
    del whole
    cuts = WeightShards.of(saved.recipe(dp=2, tp=2, pp=2, sp=True, ep=4))
    name = "layers.0.attention.out.weight"
    how, shape = recipe_layout.weight(cuts, name, reduce="sum")
    assert set(how.partial) == {"dp_inner"}
    half = shape[1] // 2
    g = np.ones((shape[0], half), np.float32)
    found = logical([Shard(r, g * (r // 2 + 1)) for r in range(4)], how)
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
    code, found = compared(capsys, a, b)
    assert code == 1
    assert [n for n, t in found.items() if t["status"] == "diverged"] == [name]
    tensor, shape = found[name], whole[1].tensors["model"][name].shape
    at = [int(i) for i in np.unravel_index(5, shape)]
    assert tensor["element"] == at
    assert tensor["checks"][0]["observed"] == 1
    assert tensor["reason"].endswith(f"at {at}: {1 + 2**-23}, reference 1.0")
    assert run(str(a), str(b), "--standard", "ulp:max=1") == 0
    assert run(str(a), str(b), "--standard", "close:rtol=1e-6,atol=0,equal_nan") == 0
    assert run(str(a), str(b), "--standard", "close:rtol=1e-12,atol=0,equal_nan") == 1
    assert name in capsys.readouterr().out
    html, junit = tmp_path / "a.html", tmp_path / "a.xml"
    assert run(str(a), str(b), "--html", str(html), "--junit", str(junit)) == 1
    assert f"diverged: 1 of {len(found)} tensors do not meet bitwise" in capsys.readouterr().out
    assert name in html.read_text(encoding="utf-8")
    assert "do not meet bitwise" in junit.read_text(encoding="utf-8")


def test_nan_on_one_side_is_infinitely_far(whole, tmp_path, capsys) -> None:
    name = next(iter(whole[1].tensors["model"]))

    def nan(tensors):
        tensors["model"][name].reshape(-1)[0] = np.nan

    def one(tensors):
        tensors["model"][name].reshape(-1)[0] = 1.0

    paths = changed(whole, tmp_path / "a", one), changed(whole, tmp_path / "b", nan)
    for bound in ("ulp:max=1e9", "close:rtol=1e9,atol=1e9,equal_nan"):
        _, found = compared(capsys, *paths, "--standard", bound)
        assert [n for n, t in found.items() if t["status"] == "diverged"] == [name]
        assert found[name]["observed_over_limit"] is None
        assert found[name]["checks"][0]["observed"] is None
        assert "nan, reference 1.0" in found[name]["reason"]


def test_missing_tensors_are_not_comparable(whole, tmp_path, capsys) -> None:
    name = next(iter(whole[1].tensors["optimizer"]))
    other = changed(whole, tmp_path / "b", lambda t: t["optimizer"].pop(name))
    for paths in ((whole[0], other), (other, whole[0])):
        code, found = compared(capsys, *paths)
        assert code == 4
        left = {n: t["reason"] for n, t in found.items() if t["status"] != "pass"}
        assert left == {name: f"only in {whole[0]}"}


def test_broken_checkpoints_are_bad_input(whole, tmp_path) -> None:
    reshard.reshard(whole[0], tmp_path / "pieces", saved.recipe(**saved.LAYOUTS["tp2"]))
    file = tmp_path / "pieces" / reshard.rank_file(1)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadInputError, match="truncated"):
        open_checkpoint(tmp_path / "pieces")
    with pytest.raises(BadInputError, match="no folder"):
        open_checkpoint(tmp_path / "nothing")


def test_bfloat16_is_measured_in_its_own_ulps(tmp_path, capsys) -> None:
    bits = np.array([0x3F80, 0x4000, 0xFFC0], np.uint16)
    far = bits.copy()
    far[0] += 2  # 1.0 -> 1.015625
    paths = [
        checkpoint.save(tmp_path / str(i), 1, {"model": {"w": x.view(tensor_files.BFLOAT16)}}, {})
        for i, x in enumerate((bits, far))
    ]
    tensor = compared(capsys, *paths)[1]["w"]
    assert (tensor["element"], tensor["checks"][0]["observed"]) == ([0], 1)
    assert tensor["reason"].endswith("at [0]: 1.015625, reference 1.0")
    code, found = compared(capsys, *paths, "--standard", "ulp:max=1")
    assert (code, found["w"]["checks"][0]["observed"]) == (1, 2)
    assert compared(capsys, *paths, "--standard", "ulp:max=2")[0] == 0
    found = compared(capsys, *paths, "--standard", "close:rtol=0,atol=0,equal_nan")[1]
    assert found["w"]["checks"][0]["observed"] == 2**-6


def test_scalars_compare(tmp_path, capsys) -> None:
    paths = [
        checkpoint.save(tmp_path / str(i), 1, {"model": {"w": np.array(x)}}, {})
        for i, x in enumerate((2.0, 2.5))
    ]
    tensor = compared(capsys, *paths, "--standard", "close:rtol=0,atol=0")[1]["w"]
    assert (tensor["element"], tensor["checks"][0]["observed"]) == ([], 0.5)
    assert tensor["reason"].endswith("at []: 2.5, reference 2.0")


@pytest.mark.parametrize("other", [np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float64)])
def test_other_shapes_and_types_are_not_comparable(tmp_path, capsys, other) -> None:
    paths = [
        checkpoint.save(tmp_path / str(i), 1, {"model": {"w": x, "v": np.zeros(2)}}, {})
        for i, x in enumerate((np.zeros((2, 3), np.float32), other))
    ]
    code, found = compared(capsys, *paths)
    assert code == 4
    assert {n: t["status"] for n, t in found.items()} == {"w": "not judged", "v": "pass"}
    assert "reference" in found["w"]["reason"]


def test_what_needs_dumps_is_refused_for_checkpoints(whole) -> None:
    for option in ("--rtol", "--map", "--map-out", "--layouts", "--reproducer"):
        flags = [option, "1"]
        with pytest.raises(UsageError, match=f"{option} needs dumps"):
            run(str(whole[0]), str(whole[0]), *flags)


def test_a_checkpoint_and_another_folder_are_bad_input(whole, tmp_path) -> None:
    with pytest.raises(BadInputError):
        run(str(whole[0]), str(tmp_path))


def test_large_shards_are_read_in_blocks(tmp_path, capsys, monkeypatch) -> None:
    """A difference in a later block is found at its place in the whole tensor."""
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 1 << 10)
    x = np.arange(6000, dtype=np.float32).reshape(60, 100)
    y = x.copy()
    y[47, 3] += 1
    paths = [
        checkpoint.save(tmp_path / str(i), 1, {"model": {"w": v}}, {}) for i, v in enumerate((x, y))
    ]
    found = compared(capsys, *paths)[1]["w"]
    assert found["element"] == [47, 3]
    assert found["reason"].endswith("at [47, 3]: 4704.0, reference 4703.0")
