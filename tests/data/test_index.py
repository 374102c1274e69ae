"""Indices on the disk: those of Megatron's algorithm in one piece, built once by any number of processes, whole or absent."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_data import make_documents

from telechat_moe.data import (
    GptDataset,
    IndexedDataset,
    SampleOptions,
    blend,
    document_packing,
    index,
    indexed,
    open_blend,
    open_mixture,
    pack,
    write_indexed,
)
from telechat_moe.data.document_packing import WholeDataset
from telechat_moe.errors import BadInputError, TelechatMoeError

S = 16


def in_one_piece(
    lengths: np.ndarray, seq_length: int, num_samples: int | None, seed: int, extra: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the three indices as Megatron's ``GPTDataset`` defines them, each array made at once."""
    per_epoch = int(lengths.sum())
    epochs = 1
    while num_samples is not None and (epochs * per_epoch - extra) // seq_length < num_samples:
        epochs += 1
    separate = False
    if epochs > 1:
        full = ((epochs - 1) * per_epoch - extra) // seq_length
        separate = num_samples - full < int(0.8 * ((per_epoch - extra) // seq_length))
    generator = np.random.RandomState(seed)
    rows = []
    for times in (epochs - 1, 1) if separate else (epochs,):
        rows.append(np.tile(np.arange(len(lengths), dtype=np.int32), times))
        generator.shuffle(rows[-1])
    row = np.concatenate(rows)
    places = [(d, o) for d, n in enumerate(lengths[row].tolist()) for o in range(n)]
    count = (len(places) - extra) // seq_length
    cuts = []
    for cut in range(0, count * seq_length + 1, seq_length):
        if extra or not cut:
            cuts.append(places[cut] if cut else (0, 0))
        else:
            cuts.append((places[cut - 1][0], places[cut - 1][1] + 1))
    parts = np.split(np.arange(count), [full]) if separate else [np.arange(count)]
    for part in parts:
        generator.shuffle(part)
    return row, np.array(cuts), np.concatenate(parts)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=14).filter(lambda x: sum(x) > 8),
    seq_length=st.integers(1, 8),
    num_samples=st.none() | st.integers(1, 60),
    seed=st.integers(0, 99),
    extra=st.booleans(),
    part=st.sampled_from([1, 2, 5, 1 << 20]),
)
@settings(max_examples=80, deadline=None)
def test_built_in_parts(
    lengths: list[int],
    seq_length: int,
    num_samples: int | None,
    seed: int,
    extra: bool,
    part: int,
) -> None:
    array = np.array(lengths, np.int32)
    expected = in_one_piece(array, seq_length, num_samples, seed, int(extra))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_PART", part)
        found = pack.build_indices(
            array,
            (0, len(array)),
            seq_length=seq_length,
            num_samples=num_samples,
            seed=seed,
            extra_token=extra,
        )
    for one, other in zip((found.documents, found.samples, found.shuffle), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_indexed(tmp_path / "d", make_documents(4, 60, 40), np.uint16)
    return str(tmp_path / "d")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every dataset as a large one."""
    monkeypatch.setattr(index, "ON_DISK", 0)
    monkeypatch.setattr(indexed, "LARGE", 0)


def folders(prefix: str) -> list[Path]:
    return sorted(path.parent for path in Path(f"{prefix}.cache").glob("*/index.json"))


def same(one: GptDataset, other: GptDataset) -> bool:
    ids = (dataset.windows(np.arange(len(dataset))) for dataset in (one, other))
    return np.array_equal(*ids)


def test_opened_as_built(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = GptDataset(prefix, S, 200)
    assert not Path(f"{prefix}.cache").exists()
    monkeypatch.setattr(index, "ON_DISK", 0)
    said: list[str] = []
    built = GptDataset(prefix, S, 200, progress=lambda what, done, total: said.append(what))
    assert set(said) == {"shuffling documents", "cutting samples", "shuffling samples"}
    monkeypatch.setattr(index, "build_indices", None)  # opened from here on
    opened = GptDataset(prefix, S, 200)
    assert same(plain, built)
    assert same(plain, opened)
    assert opened.fingerprint() == plain.fingerprint()
    assert not opened.indices.shuffle.flags.writeable
    for other in ({"seed": 2}, {"num_samples": 900}, {"documents": (0, 30)}):
        with pytest.raises(TypeError, match="not callable"):
            GptDataset(prefix, **{"seq_length": S, "num_samples": 200, **other})


OPTIONS = SampleOptions(
    eod=0, create_attention_mask=True, reset_attention_mask=True, reset_position_ids=True
)


def test_packed_documents_are_opened_as_built(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of whole documents is kept like the other: built by one process, the same bits, opened by the next."""

    def opened(**changes: Any) -> WholeDataset:
        given = {"seq_length": S, "num_samples": 200, "window": 3, "options": OPTIONS}
        return WholeDataset(prefix, **given | changes)

    said = list[tuple[str, int, int | None]]()
    plain = opened(progress=lambda *what: said.append(what))
    assert said == []  # done at once
    assert not Path(f"{prefix}.cache").exists()
    monkeypatch.setattr(index, "ON_DISK", 0)
    built = opened(progress=lambda *what: said.append(what))
    assert [what for what in said if what[0] == "packing documents"][-1][1:] == (len(plain), 200)
    monkeypatch.setattr(document_packing, "build_packing", None)  # opened from here on
    for one in (built, opened()):
        assert not one._row.flags.writeable
        assert (len(one), one.epochs, one.fingerprint()) == (
            len(plain),
            plain.epochs,
            plain.fingerprint(),
        )
        everything = np.arange(len(plain))
        assert one.index_problems() == []
        for name, column in one.batch(everything).items():
            np.testing.assert_array_equal(column, plain.batch(everything)[name])
    for other in ({"seed": 2}, {"num_samples": 900}, {"window": 4}, {"documents": (0, 30)}):
        with pytest.raises(TypeError, match="not callable"):
            opened(**other)


def test_conversations_that_are_refused_leave_no_index(tmp_path: Path, large: None) -> None:
    write_indexed(tmp_path / "talks", [np.array([1, 2, 3])] * 4 + [np.arange(S + 1)], np.int32)
    for _ in range(2):
        with pytest.raises(BadInputError, match="1 of 5 conversations are longer than seq_length"):
            WholeDataset(tmp_path / "talks", S, options=OPTIONS, conversations=True)
    assert folders(str(tmp_path / "talks")) == []


def test_sources_are_mixed_on_the_disk(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which source a sample is taken from is kept, too, by blends and by mixtures that change."""
    both, given = [prefix, prefix], {"seq_length": S, "size": 90}
    schedule = [(0, [3.0, 1.0]), (20, [0.0, 1.0]), (70, [1.0, 1.0])]

    def opened(progress: Any = None) -> list[Any]:
        return [
            open_blend(["3", prefix, "1", prefix], progress=progress, **given),
            open_mixture(both, schedule, progress=progress, **given),
        ]

    said = list[str]()
    plain = opened(lambda what, done, total: said.append(what))
    assert said == []  # done at once
    monkeypatch.setattr(index, "ON_DISK", 0)
    built = opened(lambda what, done, total: said.append(what))
    assert said.count("mixing sources") == 1 + len(schedule)
    monkeypatch.setattr(blend, "blend_indices", None)  # opened from here on
    for one, other, expected in zip(built, opened(), plain, strict=True):
        for found in (one, other):
            assert not found.chosen.flags.writeable
            np.testing.assert_array_equal(found.chosen, expected.chosen)
            np.testing.assert_array_equal(found.within, expected.within)
            assert found.fingerprint() == expected.fingerprint()
    with pytest.raises(TypeError, match="not callable"):
        open_mixture(both, [(0, [3.0, 1.0]), (21, [0.0, 1.0])], **given)


def test_damage_is_built_again(prefix: str, large: None, caplog) -> None:
    whole = GptDataset(prefix, S, 200)
    (folder,) = folders(prefix)
    for name in ("shuffle.npy", "samples.npy", "index.json"):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content[:-9])
        assert same(GptDataset(prefix, S, 200), whole)
        assert (folder / name).read_bytes() == content
        (folder / name).unlink()
        assert same(GptDataset(prefix, S, 200), whole)
        assert (folder / name).read_bytes() == content
    assert "not whole; building it again" in caplog.text


def test_a_file_that_changes_is_checked_again(prefix: str, large: None, monkeypatch) -> None:
    """A large index is checked and hashed by the first process only, as long as no file changes."""
    first = IndexedDataset(prefix).fingerprint()
    monkeypatch.setattr(IndexedDataset, "_check_index", lambda self: pytest.fail("checked"))
    assert IndexedDataset(prefix).fingerprint() == first
    monkeypatch.undo()
    monkeypatch.setattr(indexed, "LARGE", 0)
    path = Path(f"{prefix}.idx")
    raw = bytearray(path.read_bytes())
    raw[indexed.HEADER.size] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BadInputError, match="points to byte"):
        IndexedDataset(prefix)


def test_no_room(prefix: str, large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index, "sync_file", full)
    with pytest.raises(
        TelechatMoeError, match=r"samples \(0 MiB\) cannot be written: No space left"
    ):
        GptDataset(prefix, S, 200)
    assert [p.name for p in Path(f"{prefix}.cache").iterdir() if p.is_dir()] == []


PROGRAM = """
import os, signal, sys
from telechat_moe.data import GptDataset, index
index.ON_DISK = 0
def say(what, done, total):
    if sys.argv[2] == what:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "cutting samples":
        print("built")
dataset = GptDataset(sys.argv[1], 16, 200, progress=say)
print(len(dataset))
"""


def processes(prefix: str, *kill: str) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, prefix, at], stdout=subprocess.PIPE, text=True
        )
        for at in kill
    ]


def test_processes_that_are_killed_and_that_wait(prefix: str) -> None:
    """One builds, the others wait for it and open what it built; one that is killed leaves nothing that is used."""
    (killed,) = processes(prefix, "shuffling samples")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert folders(prefix) == []
    assert len(list(Path(f"{prefix}.cache").iterdir())) == 2  # the lock, and what is half built
    together = processes(prefix, "", "", "")
    lines = [process.communicate()[0].splitlines() for process in together]
    count = str(len(GptDataset(prefix, S, 200)))
    assert [said[-1] for said in lines] == [count] * 3
    assert sum(said[0] == "built" for said in lines) == 1
    (folder,) = folders(prefix)
    assert sorted(path.name for path in Path(f"{prefix}.cache").iterdir()) == [
        ".building",
        folder.name,
    ]
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.npy")}
    assert json.loads((folder / "index.json").read_text()) == {"bytes": sizes}
