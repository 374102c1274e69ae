"""Building datasets: what is in them, determinism, interruption, faults."""

import contextlib
import filecmp
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from telechat_moe.data import IndexedDataset, build, load_tokenizer, scan, verify
from telechat_moe.data import build as build_function
from telechat_moe.data.corpus import open_corpus
from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

DRIVER = Path(__file__).with_name("kill_driver.py")
FILES = [
    "manifest.json",
    "tokenizer.json",
    "train.bin",
    "train.idx",
    "valid.bin",
    "valid.idx",
]


def same_files(first: Path, second: Path) -> bool:
    assert sorted(path.name for path in first.iterdir()) == FILES
    _, differing, missing = filecmp.cmpfiles(first, second, FILES, shallow=False)
    return not differing and not missing


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset that was built without interruption, in many shards."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with small_shards():
        result = build(out, open_corpus([corpus]), vocab_size=400, seed=3)
    assert result.shards > 5
    return out


@contextlib.contextmanager
def small_shards() -> Iterator[None]:
    before = scan.SHARD_BYTES
    scan.SHARD_BYTES = 8000
    try:
        yield
    finally:
        scan.SHARD_BYTES = before


def test_dataset_holds_the_corpus(corpus: Path, whole: Path) -> None:
    """Every document is on one side, whole, in order, exact, and ends with EoD."""
    tokenizer = load_tokenizer(whole)
    expected = [path.read_bytes() for path in sorted(corpus.rglob("*.txt"))]
    manifest = json.loads((whole / "manifest.json").read_text())
    found: dict[str, list[bytes]] = {}
    for side in ("train", "valid"):
        dataset = IndexedDataset(whole / side)
        assert dataset.dtype == np.uint16
        documents = [dataset[index] for index in range(len(dataset))]
        assert all(tokens[-1] == tokenizer.eod for tokens in documents)
        assert not any((tokens[:-1] == tokenizer.eod).any() for tokens in documents)
        found[side] = [tokenizer.decode(tokens[:-1]).encode() for tokens in documents]
        assert manifest[side]["documents"] == len(documents)
        assert manifest[side]["tokens"] == sum(map(len, documents))
        assert manifest[side]["text_bytes"] == sum(map(len, found[side]))
    assert [text for text in expected if text in found["train"]] == found["train"]
    assert [text for text in expected if text in found["valid"]] == found["valid"]
    assert sorted(found["train"] + found["valid"]) == sorted(expected)
    assert len(found["valid"]) == round(0.05 * len(expected))
    assert manifest["corpus"]["text_bytes"] == sum(map(len, expected))
    assert verify(whole) == manifest


def test_two_builds_are_equal(corpus: Path, whole: Path, tmp_path: Path) -> None:
    """Also where the shards are cut elsewhere, and where the corpus lies elsewhere."""
    moved = tmp_path / "moved" / corpus.name
    moved.parent.mkdir()
    moved.symlink_to(corpus)
    build(tmp_path / "out", open_corpus([moved]), vocab_size=400, seed=3)
    assert same_files(tmp_path / "out", whole)


def test_seed_moves_the_split_only(corpus: Path, whole: Path, tmp_path: Path) -> None:
    sides = []
    for seed in (3, 4, 5):
        result = build(tmp_path / str(seed), open_corpus([corpus]), vocab_size=400, seed=seed)
        sides.append(IndexedDataset(result.out / "valid").tokens.tolist())
    assert len({tuple(side) for side in sides}) == 3
    assert (tmp_path / "3" / "valid.bin").read_bytes() == (whole / "valid.bin").read_bytes()


def test_equal_documents_stay_on_one_side(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"text number {number % 8} " * 5)
    result = build(tmp_path / "out", open_corpus([folder]), vocab_size=300, valid_fraction=0.3)
    tokenizer = load_tokenizer(result.out)
    texts = []
    for side in ("train", "valid"):
        dataset = IndexedDataset(result.out / side)
        texts.append({tokenizer.decode(dataset[i]) for i in range(len(dataset))})
    assert len(texts[0]) + len(texts[1]) == 8
    assert not texts[0] & texts[1]


def test_own_validation_files(corpus: Path, tmp_path: Path, caplog) -> None:
    """All documents of --valid are validation data, all others are trained on, and other files are other inputs."""
    (tmp_path / "held").mkdir()
    for number in range(3):
        (tmp_path / "held" / f"{number}.txt").write_text(f"held back {number} " * 20)
    valid = [tmp_path / "held"]
    with small_shards():
        result = build(tmp_path / "out", open_corpus([corpus], valid=valid), vocab_size=400)
    plain = build(tmp_path / "plain", open_corpus([corpus]), vocab_size=400, valid_fraction=0)
    assert (result.out / "train.bin").read_bytes() == (plain.out / "train.bin").read_bytes()
    tokenizer, data = load_tokenizer(result.out), IndexedDataset(result.out / "valid")
    texts = [tokenizer.decode(data[i][:-1]) for i in range(len(data))]
    assert texts == [f"held back {number} " * 20 for number in range(3)]
    assert build(tmp_path / "out", open_corpus([corpus], valid=valid), vocab_size=400).reused
    with pytest.raises(UsageError, match="valid_documents: 3 there, None now"):
        build(tmp_path / "out", open_corpus([corpus]), vocab_size=400)
    some = next(corpus.rglob("*.txt"))
    (tmp_path / "held" / "copy.txt").write_bytes(some.read_bytes())
    with caplog.at_level("WARNING"):
        build(tmp_path / "again", open_corpus([corpus], valid=valid), vocab_size=400)
    assert "1 of 4 validation documents are in the training data, too" in caplog.text
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "x").write_bytes(b"\xff")
    with pytest.raises(BadInputError, match="no document of them is for validation"):
        build(tmp_path / "none", open_corpus([corpus], valid=[tmp_path / "bytes"]), vocab_size=400)


def test_split_of_too_few_documents(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("only one document " * 20)
    with pytest.raises(BadInputError, match=r"1 document, 1 of them .* --valid-fraction 0"):
        build(tmp_path / "out", open_corpus([tmp_path / "one.txt"]), vocab_size=300)
    result = build(
        tmp_path / "out", open_corpus([tmp_path / "one.txt"]), vocab_size=300, valid_fraction=0
    )
    assert "valid" not in result.manifest
    assert not (result.out / "valid.bin").exists()


def test_given_tokenizer(corpus: Path, whole: Path, tmp_path: Path) -> None:
    result = build(tmp_path / "out", open_corpus([corpus]), tokenizer=load_tokenizer(whole), seed=3)
    assert (result.out / "train.bin").read_bytes() == (whole / "train.bin").read_bytes()
    assert result.manifest["inputs"]["vocab_size"] is None


def test_reuse_refuse_replace(corpus: Path, tmp_path: Path, caplog) -> None:
    out = tmp_path / "out"
    first = build(out, open_corpus([corpus]), vocab_size=300)
    assert not first.reused
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert build(out, open_corpus([corpus]), vocab_size=300).reused
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    with pytest.raises(UsageError, match=r"vocab_size: 300 there, 310 now.*--force"):
        build(out, open_corpus([corpus]), vocab_size=310)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    forced = build(out, open_corpus([corpus]), vocab_size=310, valid_fraction=0, force=True)
    assert forced.manifest["tokenizer"]["vocab_size"] == 310
    assert not (out / "valid.bin").exists()
    # A damaged file is noticed, said, and made again.
    raw = bytearray((out / "train.bin").read_bytes())
    raw[100] ^= 1
    (out / "train.bin").write_bytes(raw)
    with pytest.raises(BadInputError, match=r"train\.bin: damaged"):
        verify(out)
    again = build(out, open_corpus([corpus]), vocab_size=310, valid_fraction=0)
    assert not again.reused
    assert "train.bin: damaged" in caplog.text
    assert verify(out) == forced.manifest


def test_foreign_files_are_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"holds train\.bin but no manifest\.json"):
        build(tmp_path, open_corpus([corpus]), vocab_size=300)
    assert (tmp_path / "train.bin").read_bytes() == b"precious"
    with pytest.raises(UsageError, match="is not a folder"):
        build(tmp_path / "train.bin", open_corpus([corpus]), vocab_size=300)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"manifest\.json: not a manifest"):
        build(tmp_path, open_corpus([corpus]), vocab_size=300)


def test_bad_arguments(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"valid_fraction is 1\.0"):
        build(tmp_path, open_corpus([corpus]), valid_fraction=1.0)
    with pytest.raises(UsageError, match="vocab_size is 10"):
        build(tmp_path, open_corpus([corpus]), vocab_size=10)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(BadInputError, match=r"empty\.txt: holds no text"):
        build(tmp_path / "out", open_corpus([tmp_path / "empty.txt"]))
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").rename(tmp_path / "folder" / "empty.txt")
    with pytest.raises(BadInputError, match="the corpus has no text"):
        build(tmp_path / "out", open_corpus([tmp_path / "folder"]))


def test_finished_shards_are_not_done_again(
    corpus: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[build_function.__module__]
    write = module._Job._write_shard
    written: list[int] = []

    def write_four(self, shard, *rest) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(shard)
        write(self, shard, *rest)

    monkeypatch.setattr(module._Job, "_write_shard", write_four)
    out = tmp_path / "out"
    with small_shards():
        with pytest.raises(KeyboardInterrupt):
            build(out, open_corpus([corpus]), vocab_size=400, seed=3)
        assert [path.name for path in out.iterdir()] == [".partial"]
        # One of the four is damaged: it alone is done again.
        victim = out / ".partial" / "shard-000002.train.bin"
        victim.write_bytes(victim.read_bytes()[:-1])
        written.clear()
        monkeypatch.setattr(
            module._Job, "_write_shard", lambda *a: written.append(a[1]) or write(*a)
        )
        result = build(out, open_corpus([corpus]), vocab_size=400, seed=3)
    assert result.resumed_shards == 3
    assert written == [2, *range(4, result.shards)]
    assert same_files(out, whole)


def test_files_appear_by_renaming(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT never holds a file that is being written."""
    out = tmp_path / "out"
    replace = Path.replace
    renamed: set[str] = set()

    def record(self, target):
        assert {path.name for path in out.iterdir()} - {".partial"} == renamed
        if Path(target).parent == out:
            renamed.add(Path(target).name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", record)
    build(out, open_corpus([corpus]), vocab_size=300)
    assert sorted(renamed) == FILES


def test_replacement_that_is_interrupted(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old and new files are never under one manifest."""
    out = tmp_path / "out"
    build(out, open_corpus([corpus]), vocab_size=300)
    replace = Path.replace

    def stop_halfway(self, target):
        if Path(target) == out / "train.idx":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop_halfway)
        with pytest.raises(KeyboardInterrupt):
            build(out, open_corpus([corpus]), vocab_size=310, force=True)
    assert not (out / "manifest.json").exists()
    with pytest.raises(UsageError, match="but no manifest"):
        build(out, open_corpus([corpus]), vocab_size=300)
    assert build(out, open_corpus([corpus]), vocab_size=310).resumed_shards == 1
    verify(out)


def drive(corpus: Path, out: Path, *how: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(corpus), str(out), *how],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else {}


def assert_sound(out: Path, whole: Path) -> None:
    """Whatever is visible in OUT is one of the complete files."""
    for path in out.iterdir() if out.exists() else ():
        if path.name != ".partial":
            assert path.read_bytes() == (whole / path.name).read_bytes()


def test_killed_at_chosen_and_random_moments(corpus: Path, whole: Path, tmp_path: Path) -> None:
    """SIGKILL before file operations spread over the build, one after another, then finish."""
    _, counted = drive(corpus, tmp_path / "count", "count")
    operations = counted["operations"]
    generator = random.Random(1)
    # The last 0.4 of the operations remove the finished work; before them the files are published.
    moments = generator.sample(range(1, operations // 2), 5)
    moments += [int(share * operations) for share in (0.54, 0.57, 0.6)]
    for moment in moments:
        out = tmp_path / f"at{moment}"
        code, _ = drive(corpus, out, "event", str(moment))
        assert code == -signal.SIGKILL
        assert_sound(out, whole)
        code, result = drive(corpus, out, "count")
        assert code == 0
        assert result["reused"] or result["resumed"] > 0 or moment < 20
        assert same_files(out, whole)
    # One build killed again and again, by the clock.
    out = tmp_path / "again"
    for share in (0.3, 0.6, 0.9):
        drive(corpus, out, "time", str(share * counted["seconds"]))
        assert_sound(out, whole)
    drive(corpus, out, "count")
    assert same_files(out, whole)


def test_two_builds_at_once(corpus: Path, tmp_path: Path) -> None:
    import fcntl

    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(TelechatMoeError, match="another build is writing to"):
            build(tmp_path, open_corpus([corpus]), vocab_size=300)
    finally:
        os.close(descriptor)


def test_corpus_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"text number {number} " * 50)
    module = sys.modules[build_function.__module__]
    train = module._Job._train

    def change_then_train(self, vocab_size):
        tokenizer = train(self, vocab_size)
        (folder / "5.txt").write_text("changed")
        return tokenizer

    monkeypatch.setattr(module._Job, "_train", change_then_train)
    with pytest.raises(BadInputError, match=r"5\.txt changed while the dataset was being built"):
        build(tmp_path / "out", open_corpus([folder]), vocab_size=300)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"cannot mount a small tmpfs (needs root): {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk(corpus: Path, whole: Path, small_disk: Path) -> None:
    """The build stops with a clear error, shows nothing half-written, and can go on."""
    out = small_disk / "out"
    with small_shards():
        with pytest.raises(TelechatMoeError, match=r"no space left on .*/out") as caught:
            build(out, open_corpus([corpus]), vocab_size=400, seed=3)
        assert caught.value.exit_code == 1
        assert [path.name for path in out.iterdir()] == [".partial"]
        done = len(list((out / ".partial").glob("shard-*.json")))
        assert done > 0
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        result = build(out, open_corpus([corpus]), vocab_size=400, seed=3)
    assert result.resumed_shards == done
    assert same_files(out, whole)


@pytest.mark.parametrize("text", ["a" * 300_000, "_." * 150_000, " " * 300_000 + "b"])
def test_a_word_without_end_is_learned_from_in_pieces(text: str, tmp_path: Path) -> None:
    """The time that a word takes grows with its square; the pieces are the text."""
    pieces = list(scan.learn_from(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 128
    (tmp_path / "a.txt").write_text(text)
    begin = time.process_time()
    build(tmp_path / "out", open_corpus([tmp_path / "a.txt"]), vocab_size=300, valid_fraction=0)
    assert time.process_time() - begin < 20  # in whole 40 to 60 s


def test_words_of_real_text_are_whole() -> None:
    text = Path(json.__file__).read_text(encoding="utf-8")
    assert list(scan.learn_from(text)) == [text]


def test_the_end_of_documents_is_kept_with_the_dataset(tmp_path: Path) -> None:
    """It is known by tokenizer_config.json or --eod-token only, and whoever reads the dataset has neither."""
    from tokenizers import Tokenizer, models

    folder = tmp_path / "model"
    folder.mkdir()
    names = {"<unk>": 0, "a": 1, "<|im_end|>": 2, "</s>": 3, "<end>": 4}
    for vocabulary, given, expected in (
        ({k: v for k, v in names.items() if k != "</s>"}, None, "<|im_end|>"),
        (names, "<end>", "<end>"),
    ):
        Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(
            str(folder / "tokenizer.json")
        )
        (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
        (tmp_path / "a.txt").write_text("a")
        out = tmp_path / str(given)
        build(
            out,
            open_corpus([tmp_path / "a.txt"]),
            tokenizer=load_tokenizer(folder, given),
            valid_fraction=0,
        )
        assert load_tokenizer(out).eod_token == expected
        assert IndexedDataset(out / "train")[0].tolist() == [1, names[expected]]
