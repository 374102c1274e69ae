"""A conversion that is killed, meets damaged files, or runs in little memory."""

import dataclasses
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from weights import layout, write_hf

from telechat_moe.checkpoint.weights import own_weights
from telechat_moe.cli import main
from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError
from telechat_moe.interop.hf import convert

CHILD = Path(__file__).with_name("convert_child.py")
CONFIG = layout()
SHARD = 2_000_000


def child(src: Path, dst: Path, to: str, shard_bytes: int, config=CONFIG) -> list[str]:
    given = json.dumps({k: v for k, v in dataclasses.asdict(config).items() if v is not None})
    return [sys.executable, str(CHILD), str(src), str(dst), to, str(shard_bytes), given]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "hf"
    write_hf(folder, CONFIG, 3_000_000, sparse=False)
    return folder


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """Ours, from a conversion that nothing interrupted."""
    path = tmp_path_factory.mktemp("whole") / "ours"
    convert(source, path, CONFIG, "telechat", SHARD)
    return path


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def finished(work: Path) -> dict[str, tuple[int, int]]:
    """Return the complete files of an unfinished conversion: inode and time of the last change."""
    log = work / "done.jsonl"
    lines = (
        [json.loads(x) for x in log.read_text().splitlines(True) if x.endswith("\n")]
        if log.exists()
        else []
    )
    stats = {x["name"]: (work / "files" / x["name"]).stat() for x in lines}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def test_killed_at_random_moments(tmp_path, source, whole):
    """Every kill leaves no destination and loses no finished file; the end is what it is without kills."""
    dst, work = tmp_path / "ours", tmp_path / ".ours.partial"
    command = [*child(source, dst, "telechat", SHARD), "paced"]
    pieces: list[str] = []
    convert(source, tmp_path / "alone", CONFIG, "telechat", SHARD, lambda w, *_: pieces.append(w))
    shutil.rmtree(tmp_path / "alone")
    reading, writing = pieces.count("checking the source"), pieces.count("writing")
    dice, seen, counts = random.Random(5), {}, set()
    for _ in range(8):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        # It begins a piece for each line: eight times a ninth of the writing is not the end.
        for _ in range(dice.randrange(reading + writing // 9)):
            assert process.stdout.readline() == b"piece\n"
            process.stdin.write(b"\n")
            process.stdin.flush()
        time.sleep(dice.uniform(0, 0.006))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not dst.exists()
        now = finished(work) if work.exists() else {}
        assert all(now[name] == was for name, was in seen.items()), (
            "a finished file was written again"
        )
        seen = now
        counts.add(len(seen))
    assert len(counts) > 2, "few kills came after a file"
    enough = b"\n" * len(pieces)
    done = subprocess.run(command, input=enough, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["resumed_files"] == len(seen)
    assert contents(dst) == contents(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ours"]


def interrupted(source: Path, dst: Path, files: int) -> Path:
    """Let a conversion fail after some files; return its hidden folder."""
    work = dst.parent / f".{dst.name}.partial"

    def fail(text, done, total):
        if len(finished(work)) == files:
            raise OSError(28, "No space left on device")

    with pytest.raises(TelechatMoeError, match=f"No space left.*{files} of .* files are finished"):
        convert(source, dst, CONFIG, "telechat", SHARD, fail)
    return work


def test_a_finished_file_that_was_damaged_is_made_again(tmp_path, source, whole):
    work = interrupted(source, tmp_path / "ours", 4)
    first, second, third, fourth = sorted((work / "files").glob("model-*.safetensors"))
    raw = bytearray(first.read_bytes())
    raw[-1] ^= 1
    first.write_bytes(raw)
    second.write_bytes(second.read_bytes()[:-1])
    third.unlink()
    result = convert(source, tmp_path / "ours", CONFIG, "telechat", SHARD)
    assert result.resumed_files == 1
    assert contents(tmp_path / "ours") == contents(whole)
    assert fourth.name in contents(whole)


def test_another_plan_begins_anew(tmp_path, source):
    interrupted(source, tmp_path / "ours", 3)
    result = convert(source, tmp_path / "ours", CONFIG, "telechat", SHARD * 2)
    assert result.resumed_files == 0


def test_a_source_that_changed_begins_anew(tmp_path, source):
    copy = tmp_path / "hf"
    shutil.copytree(source, copy)
    interrupted(copy, tmp_path / "ours", 3)
    path = sorted(copy.glob("*.safetensors"))[0]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert convert(copy, tmp_path / "ours", CONFIG, "telechat", SHARD).resumed_files == 0


def test_a_source_that_changes_meanwhile(tmp_path, source):
    copy = tmp_path / "hf"
    shutil.copytree(source, copy)

    def meddle(text, finished, total):
        if text == "writing" and finished == total:
            path = sorted(copy.glob("*.safetensors"))[0]
            path.write_bytes(path.read_bytes())

    with pytest.raises(BadInputError, match="changed while it was being read"):
        convert(copy, tmp_path / "ours", CONFIG, "telechat", SHARD, meddle)
    assert not (tmp_path / "ours").exists()


def test_one_at_a_time(tmp_path, source):
    def again(text, finished, total):
        if text == "writing" and finished == total:
            with pytest.raises(UsageError, match="another process is writing"):
                convert(source, tmp_path / "ours", CONFIG, "telechat", SHARD)

    convert(source, tmp_path / "ours", CONFIG, "telechat", SHARD, again)
    assert (tmp_path / "ours").is_dir()


# ------------------------------------------------------------------------------------- checksums


def test_checksums_name_every_file_written_and_read(source, whole):
    given = json.loads((whole / "checksums.json").read_text())
    for folder, files in ((whole, given["files"]), (source, given["source"]["files"])):
        for name, known in files.items():
            assert known["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
            assert known["bytes"] == (folder / name).stat().st_size
    assert set(given["files"]) == {p.name for p in whole.iterdir()} - {"checksums.json"}
    assert set(given["source"]["files"]) == {p.name for p in source.glob("*.safetensors")}


def damaged(whole: Path, folder: Path) -> tuple[Path, str]:
    shutil.copytree(whole, folder)
    path = sorted(folder.glob("*.safetensors"))[1]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    return folder, path.name


def test_verify(tmp_path, whole, capsys):
    assert main(["convert", "--verify", str(whole)]) == 0
    assert "all as they were written" in capsys.readouterr().out
    folder, name = damaged(whole, tmp_path / "bad")
    sorted(folder.glob("*.safetensors"))[0].unlink()
    assert main(["convert", "--verify", str(folder), "--json", str(tmp_path / "r.json")]) == 1
    problems = json.loads((tmp_path / "r.json").read_text())["problems"]
    assert [p.split(": ", 1)[1].split(",")[0] for p in problems] == ["missing", "checksum differs"]
    assert name in problems[1]
    assert main(["convert", "--verify", str(tmp_path)]) == 3
    assert "no checksums.json" in capsys.readouterr().err
    assert main(["convert", str(whole)]) == 2
    assert "needs DST, --recipe, --to" in capsys.readouterr().err
    assert main(["convert", "--verify", str(whole), "--to", "hf"]) == 2


def test_a_single_file_has_its_checksums_beside_it(tmp_path, source, capsys):
    convert(source, tmp_path / "x.safetensors", CONFIG, "telechat")
    assert main(["convert", "--verify", str(tmp_path / "x.safetensors")]) == 0
    with (tmp_path / "x.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    assert main(["convert", "--verify", str(tmp_path / "x.safetensors")]) == 1
    assert "1,000,000 bytes" in capsys.readouterr().err


def test_damaged_weights_are_not_converted(tmp_path, whole):
    folder, name = damaged(whole, tmp_path / "bad")
    with pytest.raises(BadInputError, match=f"{name}: checksum differs"):
        convert(folder, tmp_path / "hf", CONFIG, "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]


def test_damaged_weights_are_not_loaded(tmp_path, whole):
    folder, name = damaged(whole, tmp_path / "bad")
    with pytest.raises(BadInputError, match=f"{name}: checksum differs"):
        own_weights(folder, CONFIG)
    own_weights(whole, CONFIG)


# ---------------------------------------------------------------------------------------- memory


def measured(
    tmp_path: Path, config, shard_bytes: int, there_sparse: bool
) -> tuple[list[dict], int, int]:
    """Convert a layout to ours and back; return both reports, the bytes, and the largest tensor."""
    size = write_hf(tmp_path / "hf", config, shard_bytes, sparse=there_sparse)
    reports = []
    for src, dst, to in (("hf", "ours", "telechat"), ("ours", "back", "hf")):
        command = child(tmp_path / src, tmp_path / dst, to, shard_bytes, config)
        out = subprocess.run(command, capture_output=True, text=True, check=False)
        assert out.returncode == 0, out.stderr
        reports.append(json.loads(out.stdout))
        if src == "ours":
            shutil.rmtree(tmp_path / "ours")
    largest = max(
        2 * config.n_routed_experts * config.hidden_size * config.moe_intermediate_size,
        2 * config.vocab_size * config.hidden_size,
    )
    return reports, size, largest


def test_memory_of_300_megabytes(tmp_path):
    config = layout(
        vocab_size=16384, hidden_size=512, intermediate_size=2048, num_hidden_layers=5,
        n_routed_experts=64, moe_intermediate_size=320,
    )  # fmt: skip
    reports, size, largest = measured(tmp_path, config, 30_000_000, there_sparse=False)
    assert size > 300e6
    for report in reports:
        grown = report["peak"] - report["start"]
        # The bound for any size is 1.5 times the largest tensor (20 MB) and 1 GB; here the second part is 40 MB.
        assert grown < 1.5 * largest + 40e6, f"{grown / 1e6:.0f} MB more than at the start"
    back = {}
    for file in (tmp_path / "back").glob("*.safetensors"):
        back |= raw_tensors(file)
    paths = sorted((tmp_path / "hf").glob("*.safetensors"))[:2]
    assert paths
    for path in paths:  # every bit came back
        for name, raw in raw_tensors(path).items():
            assert back[name] == raw


def raw_tensors(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: hashlib.sha256(
            raw[8 + length + e["data_offsets"][0] : 8 + length + e["data_offsets"][1]]
        ).hexdigest()
        for name, e in header.items()
    }


@pytest.mark.slow
def test_memory_of_20_gigabytes(tmp_path):
    """A layout of 20 GB: sparse files in, 20 GB on the disk for a while."""
    if shutil.disk_usage(tmp_path).free < 48e9:
        pytest.skip("needs 48 GB of free disk")
    config = layout(
        vocab_size=131072, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24,
        num_attention_heads=32, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=96, moe_intermediate_size=640,
    )  # fmt: skip
    reports, size, largest = measured(tmp_path, config, 4_000_000_000, there_sparse=True)
    assert size > 20e9
    for report in reports:
        line = f"{size / 1e9:.1f} GB, peak {report['peak'] / 1e6:.0f} MB, {report['seconds']:.0f} s"
        sys.stdout.write(f"to {report['to']}: {line}\n")
        assert report["peak"] < 1.5 * largest + 1e9


# -------------------------------------------------------------------------------------- progress


def test_progress_comes_to_the_end(tmp_path, source):
    seen: dict[str, list[tuple[int, int]]] = {}

    def note(text, finished, total):
        seen.setdefault(text, []).append((finished, total))

    convert(source, tmp_path / "ours", CONFIG, "telechat", SHARD, note)
    assert list(seen) == ["checking the source", "writing"]
    for moves in seen.values():
        done = [d for d, _ in moves]
        assert done == sorted(done)
        assert done[-1] == moves[-1][1]
        assert len({total for _, total in moves}) == 1


def test_quiet_where_there_is_no_terminal(tmp_path, whole, capsys):
    assert main(["convert", "--verify", str(whole)]) == 0
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal(tmp_path, whole):
    """In a pseudo-terminal: what is done, bytes and speed."""
    import os
    import pty

    parent, terminal = pty.openpty()
    code = "import sys; from telechat_moe.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "convert", "--verify", str(whole)],
        stderr=terminal,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(terminal)
    text = b""
    while True:
        try:
            chunk = os.read(parent, 4096)
        except OSError:  # the terminal is gone
            break
        if not chunk:
            break
        text += chunk
    assert process.wait() == 0
    assert b"verifying" in text
    assert b"iB" in text
