"""Checkpoints: what is saved comes back, what breaks is named, the previous one is used."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from saved import Groups, assert_equal, assert_made, make, names_in

from telechat_moe import tensor_files
from telechat_moe.checkpoint import checkpoint
from telechat_moe.checkpoint.checkpoint import BrokenCheckpointError
from telechat_moe.errors import BadInputError


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A root with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, make(step), {"step": step})
    return tmp_path


# --------------------------------------------------------------------------------- round trips

DTYPES = [np.dtype(x) for x in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1")]
DTYPES += [np.dtype(x) for x in ("?", ">f4", ">i8")] + [tensor_files.BFLOAT16]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAME = TEXT.filter(lambda name: name != "__metadata__")


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        raw = bytes(b & 1 for b in raw)
    return np.frombuffer(raw, dtype).reshape(shape)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups=st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True),
        st.dictionaries(NAME, arrays(), max_size=5),
        max_size=3,
    ),
    state=st.dictionaries(TEXT, JSON, max_size=3),
    shard_bytes=st.sampled_from([1, 64, 1 << 20]),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    groups: Groups,
    state: dict[str, Any],
    shard_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("root")
    path = checkpoint.save(root, 5, groups, state, shard_bytes=shard_bytes)
    found = checkpoint.latest(root)
    assert found is not None
    little = {
        g: {n: a.astype(a.dtype.newbyteorder("<")) for n, a in names.items()}
        for g, names in groups.items()
    }
    assert_equal(found.tensors, little)
    assert found.state == state
    assert all(
        a.flags.writeable and a.flags.aligned for g in found.tensors.values() for a in g.values()
    )
    # an independent reader finds the same bytes
    for group, names in little.items():
        independent = {}
        for file in path.glob(f"{group}-?????-of-*"):
            independent |= dict(safetensors.deserialize(file.read_bytes()))
        assert {n: (tuple(t["shape"]), bytes(t["data"])) for n, t in independent.items()} == {
            n: (a.shape, a.tobytes()) for n, a in names.items()
        }
        assert {n: t["dtype"] for n, t in independent.items()} == {
            n: tensor_files.dtype_name(a.dtype) for n, a in names.items()
        }
    shutil.rmtree(root)


def test_files_of_the_safetensors_package_can_be_read() -> None:
    tensors = {"b": np.arange(6, dtype=np.float64).reshape(2, 3), "a": np.array([1, 2], np.int8)}
    raw = safetensors.numpy.save(tensors, metadata={"format": "np"})
    assert_equal({"x": tensor_files.parse(np.frombuffer(raw, np.uint8))}, {"x": tensors})


def test_two_dtypes_in_one_file_keep_their_alignment(tmp_path: Path) -> None:
    tensors = {"a": np.ones(3, np.int8), "b": np.ones(3, np.float64), "c": np.ones(5, np.float16)}
    path = checkpoint.save(tmp_path, 0, {"model": tensors}, {})
    assert [p.name for p in sorted(path.iterdir())] == [
        "checkpoint.json",
        "model-00001-of-00001.safetensors",
    ]
    assert_equal(checkpoint.load(path).tensors, {"model": tensors})


@pytest.mark.mindspore
def test_bfloat16_of_mindspore(tmp_path: Path) -> None:
    mindspore = pytest.importorskip("mindspore", reason="mindspore is not installed")
    array = mindspore.Tensor([1.5, -2.0, 3e38], mindspore.bfloat16).asnumpy()
    found = checkpoint.load(checkpoint.save(tmp_path, 0, {"m": {"x": array}}, {})).tensors["m"]["x"]
    assert found.dtype == tensor_files.BFLOAT16
    # 1.5 = 0x3FC0 and -2 = 0xC000 in bfloat16
    assert found.view(np.uint16)[:2].tolist() == [0x3FC0, 0xC000]
    assert found.view(array.dtype).tobytes() == array.tobytes()


def test_same_content_gives_same_bytes(tmp_path: Path) -> None:
    groups = make(3, 20)
    backwards = {g: dict(reversed(names.items())) for g, names in reversed(groups.items())}
    a = checkpoint.save(tmp_path / "a", 3, groups, {"x": 1}, shard_bytes=100)
    b = checkpoint.save(tmp_path / "b", 3, backwards, {"x": 1}, shard_bytes=100)
    assert len(names_in(a)) > 10
    assert {p.name: p.read_bytes() for p in a.iterdir()} == {
        p.name: p.read_bytes() for p in b.iterdir()
    }


def test_checksums_are_those_of_the_files(two: Path) -> None:
    folder = two / "step-00000002"
    text = (folder / "checkpoint.json").read_text()
    content = json.loads(text)
    for name, entry in content["files"].items():
        raw = (folder / name).read_bytes()
        assert entry == {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    blank = text.replace(content["sha256"], "0" * 64)
    assert hashlib.sha256(blank.encode()).hexdigest() == content["sha256"]


@pytest.mark.parametrize(
    ("tensors", "state", "part"),
    [
        ({}, {"a": {"b": [1.0, float("nan")]}}, "state.a.b[1]: nan"),
        ({}, {"a": {1: 2}}, "state.a: key 1"),
        ({}, {"a": np.float64(1.0)}, "state.a: float64"),
        ({}, {"a": b"x"}, "state.a: bytes"),
        ({}, {"a": "\ud800"}, "state.a: "),
        ({"m": {"x\ud800": np.ones(1)}}, {}, "not valid Unicode"),
        ({"m": {"x": np.array([object()])}}, {}, "group 'm': dtype object"),
        ({"m": {"x": np.ones(1, np.complex64)}}, {}, "dtype complex64"),
        ({"m": {"__metadata__": np.ones(1)}}, {}, "__metadata__"),
        ({"../m": {"x": np.ones(1)}}, {}, "group name '../m'"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(
    tmp_path: Path, tensors: Groups, state: dict[str, Any], part: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        checkpoint.save(tmp_path / "root", 1, tensors, state)
    assert part in str(caught.value)
    assert not (tmp_path / "root").exists()


# ------------------------------------------------------------------------------ broken checkpoints


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "nowhere") is None
    with pytest.raises(BrokenCheckpointError, match="there is no folder"):
        checkpoint.load(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["model", "optimizer", "checkpoint.json"])
@pytest.mark.parametrize("fault", ["flip", "truncate", "append"])
def test_any_damage_to_any_file_is_found(
    tmp_path_factory: pytest.TempPathFactory, kind: str, fault: str
) -> None:
    root = tmp_path_factory.mktemp("root")
    folder = checkpoint.save(root, 2, make(2), {"step": 2})
    file = next(p for p in folder.iterdir() if p.name.startswith(kind))
    good = file.read_bytes()

    @settings(deadline=None, max_examples=60)
    @given(st.integers(0, len(good) - 1), st.integers(0, 7), st.binary(min_size=1, max_size=9))
    def check(offset: int, bit: int, more: bytes) -> None:
        if fault == "flip":
            bad = good[:offset] + bytes([good[offset] ^ 1 << bit]) + good[offset + 1 :]
        else:
            bad = good[:offset] if fault == "truncate" else good + more
        file.write_bytes(bad)
        for read in (checkpoint.load, checkpoint.verify):
            with pytest.raises(BrokenCheckpointError) as caught:
                read(folder)
            assert file.name in str(caught.value)
        if kind != "checkpoint.json":
            expected = {
                "flip": "checksum differs",
                "truncate": f"truncated, {len(bad):,} bytes found, {len(good):,} expected",
                "append": f"too long, {len(bad):,} bytes found, {len(good):,} expected",
            }
            assert caught.value.problems == [
                p for p in caught.value.problems if expected[fault] in p
            ]

    check()
    file.write_bytes(good)
    checkpoint.verify(folder)


def test_all_problems_are_reported_at_once(two: Path) -> None:
    folder = two / "step-00000002"
    (folder / "model-00001-of-00001.safetensors").unlink()
    with (folder / "optimizer-00001-of-00001.safetensors").open("r+b") as file:
        file.truncate(50)
    with pytest.raises(BrokenCheckpointError) as caught:
        checkpoint.load(folder)
    assert len(caught.value.problems) == 2
    assert "model-00001-of-00001.safetensors: missing" in str(caught.value)
    assert "optimizer-00001-of-00001.safetensors: truncated, 50 bytes found" in str(caught.value)


def reseal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change checkpoint.json and make its checksum right again, from the documented rule."""
    content = json.loads((folder / "checkpoint.json").read_text())
    change(content)
    content = {"sha256": "0" * 64} | {k: v for k, v in content.items() if k != "sha256"}
    text = json.dumps(content)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "checkpoint.json").write_text(text.replace("0" * 64, digest, 1))


def _weight(content: dict[str, Any]) -> dict[str, Any]:
    return content["tensors"]["model"]["layers.0.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: None, None),
        (lambda c: _weight(c).update(dtype="F16"), "has dtype F32, checkpoint.json says F16"),
        (
            lambda c: _weight(c).update(shape=[7, 1]),
            "has shape [1, 7], checkpoint.json says [7, 1]",
        ),
        (lambda c: c["tensors"]["model"].update(z=_weight(c)), "tensor 'z' is missing"),
        (lambda c: c["tensors"]["model"].pop("layers.0.weight"), "is not in checkpoint.json"),
        (lambda c: c.update(step=7), "is of step 7"),
        (lambda c: c.update(version=3), "version 3; this program reads versions 1 and 2"),
        (lambda c: c.update(format="x"), "not the description of a checkpoint"),
        (lambda c: c.pop("state"), "key 'state' is missing"),
        (lambda c: c["files"].update({"../x": {}}), "bad file name '../x'"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    two: Path, change: Callable[[dict[str, Any]], None], message: str | None
) -> None:
    folder = two / "step-00000002"
    reseal(folder, change)
    if message is None:
        assert_made(checkpoint.load(folder))
        return
    with pytest.raises(BrokenCheckpointError) as caught:
        checkpoint.load(folder)
    assert message in str(caught.value)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_damaged_header_is_an_error_and_nothing_else(data: st.DataObject) -> None:
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.int8)}
    [(_, shard)] = checkpoint.plan({"m": arrays}, 999)
    raw = bytearray(shard.header + bytes(shard.nbytes - len(shard.header)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    with contextlib.suppress(ValueError):
        found = tensor_files.parse(np.frombuffer(bytes(raw), np.uint8))
        assert sum(a.nbytes for a in found.values()) <= 2 * len(raw)


def test_latest_goes_back_to_the_newest_good_one(two: Path) -> None:
    checkpoint.save(two, 3, make(3), {"step": 3})
    (two / "step-00000003" / "checkpoint.json").write_text("{")
    (two / "step-00000002" / "model-00001-of-00001.safetensors").unlink()
    warnings: list[str] = []
    assert assert_made(checkpoint.latest(two, warn=warnings.append)) == 1
    assert len(warnings) == 2
    assert "step-00000003:\n  checkpoint.json: not valid JSON" in warnings[0]
    assert "step-00000002:\n  model-00001-of-00001.safetensors: missing" in warnings[1]
    assert all(f"going on from {two}/step-00000001" in w for w in warnings)


def test_latest_refuses_if_all_are_broken(two: Path) -> None:
    for folder in checkpoint.list_checkpoints(two):
        (folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(BadInputError) as caught:
        checkpoint.latest(two)
    assert "all 2 are broken" in str(caught.value)
    assert "step-00000001" in str(caught.value)
    assert "step-00000002" in str(caught.value)
    assert caught.value.exit_code == 3


# ----------------------------------------------------------------------------- keeping and replacing


def test_keep_last(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, make(step), {"step": step}, keep_last=2)
    assert names_in(tmp_path) == ["step-00000003", "step-00000010"]


def test_broken_checkpoints_do_not_push_out_good_ones(two: Path) -> None:
    checkpoint.save(two, 3, make(3), {"step": 3})
    with (two / "step-00000003" / "model-00001-of-00001.safetensors").open("r+b") as file:
        file.truncate(10)
    checkpoint.save(two, 4, make(4), {"step": 4}, keep_last=2)
    assert names_in(two) == ["step-00000002", "step-00000003", "step-00000004"]


def test_later_steps_are_never_removed(two: Path) -> None:
    checkpoint.save(two, 9, make(9), {"step": 9})
    checkpoint.save(two, 3, make(3), {"step": 3}, keep_last=1)
    assert names_in(two) == ["step-00000003", "step-00000009"]


def test_a_step_can_be_saved_again(two: Path) -> None:
    (two / "step-00000002" / "checkpoint.json").unlink()
    checkpoint.save(two, 2, make(2), {"step": 2})
    assert assert_made(checkpoint.load(two / "step-00000002")) == 2
    assert names_in(two) == ["step-00000001", "step-00000002"]


def test_everything_is_on_the_disk_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        log.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        log.append(f"rename to {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    path = checkpoint.save(tmp_path / "root", 1, make(1), {"step": 1}, shard_bytes=1)
    at = log.index("rename to step-00000001")
    assert set(log[:at]) >= {p.name for p in path.iterdir()}
    assert log[at - 1].startswith(".saving-step-00000001")
    assert log[at + 1] == "root"


# -------------------------------------------------------------------------------------- configuration


def test_a_file_named_as_what_a_killed_save_leaves_stops_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, make(1), {"step": 1})
    for name in (".saving-step-00000001-x", ".removing-step-00000001"):
        (tmp_path / name).write_text("")
    checkpoint.save(tmp_path, 2, make(2), {"step": 2})
    found = checkpoint.latest(tmp_path)
    assert assert_made(found) == 2


def test_diff_config() -> None:
    saved = {
        "hidden_size": 256,
        "rope_theta": 10000.0,
        "moe": {"top_k": 4, "bias": True},
        "gone": [],
    }
    now = {"hidden_size": 512, "rope_theta": 10000, "moe": {"top_k": 4, "bias": 1}, "new": "é"}
    assert checkpoint.diff_config(saved, now) == [
        "gone: [] -> (absent)",
        "hidden_size: 256 -> 512",
        "moe.bias: true -> 1",
        'new: (absent) -> "é"',
    ]


@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_diff_config_of_what_a_checkpoint_gives_back_is_empty(config: dict[str, Any]) -> None:
    assert checkpoint.diff_config(json.loads(json.dumps(config)), config) == []
