"""Graphs that are kept: found by what they were made from only, and no fault of their files changes or ends a run."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="needs mindspore (pip install '.[train]')")

from telechat_moe.graph import cache
from telechat_moe.ops import native

pytestmark = pytest.mark.mindspore

SCRIPT = Path(__file__).with_name("tiny_step.py")
TAKEN = "the graph of a step is kept from an earlier start"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk: needs root")


def begin(home: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a tiny step."""
    env = {**os.environ, "XDG_CACHE_HOME": str(home), **environment}
    command = [sys.executable, str(SCRIPT), *(arguments or ("2", "3"))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def lines(process: subprocess.Popen[str], factor: float = 2, weight: float = 3) -> str:
    """Return what a tiny step said; it must have ended well and computed the right number."""
    *said, result = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert float(result) == 1000 * (factor * (factor * weight + 1) + 1)
    return "\n".join(said)


def graphs(home: Path) -> list[Path]:
    return sorted((home / "telechat-moe" / "graphs").glob("*.graphs"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the first start has kept its graph."""
    home = tmp_path_factory.mktemp("first")
    assert lines(begin(home)) == cache.COMPILING
    assert len(graphs(home)) == 1
    return home


@pytest.fixture
def home(first: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    subprocess.run(["cp", "-a", str(first / "telechat-moe"), str(tmp_path)], check=True)
    return tmp_path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one page."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    subprocess.run(command, check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_kept_graph_has_the_values_of_its_process(home):
    (first,) = graphs(home)
    assert lines(begin(home, "2", "5"), weight=5) == TAKEN
    assert lines(begin(home, "4", "3"), factor=4) == cache.COMPILING
    # It is the kept graph that runs: with the first one's file it multiplies by that one's constant.
    (other,) = {*graphs(home)} - {first}
    other.write_bytes(first.read_bytes())
    assert lines(begin(home, "4", "3"), factor=2) == TAKEN


@pytest.mark.parametrize("damage", ["cut", "bit"])
def test_a_damaged_file_is_compiled_anew(home, damage):
    (file,) = graphs(home)
    raw = bytearray(file.read_bytes())
    if damage == "bit":
        raw[len(raw) // 2] ^= 16
    file.write_bytes(raw if damage == "bit" else raw[:-9])
    assert lines(begin(home)) == f"{file} is damaged\n{cache.COMPILING}"
    assert lines(begin(home)) == TAKEN


def test_every_flipped_bit_and_every_cut_is_found(first, tmp_path):
    (file,) = graphs(first)
    raw, said = file.read_bytes(), list[str]()
    copy = tmp_path / "copy.graphs"
    damaged = [raw[:i] for i in range(len(raw))]
    damaged += [raw[:i] + bytes([raw[i] ^ 1 << i % 8]) + raw[i + 1 :] for i in range(len(raw))]
    for content in damaged:
        copy.write_bytes(content)
        assert cache._take(copy, tmp_path / "out", said.append) == {}
    assert len(said) == len(damaged)
    assert not (tmp_path / "out").exists()
    copy.write_bytes(raw)
    os.utime(copy, (0, 0))
    taken = cache._take(copy, tmp_path / "out", said.append)
    assert len(said) == len(damaged)
    assert copy.stat().st_mtime > 0, "used last"
    # MindSpore's own files, cut by a full disk before they are kept:
    assert sorted(Path(name).suffix for name in taken) == [".hash", ".mindir"]
    for name, data in taken.items():
        assert cache._is_whole(name, data)
        assert not any(cache._is_whole(name, data[:i]) for i in range(len(data)))


@root_only
def test_a_full_disk(tmp_path, disk):
    full = begin(tmp_path, TMPDIR=str(disk))
    assert "not kept for later starts: MindSpore could not write it" in lines(full)
    assert graphs(tmp_path) == []
    (disk / "telechat-moe" / "graphs").mkdir(parents=True)
    (disk / "other").write_bytes(bytes(4096))
    assert "not kept for later starts: [Errno 28]" in lines(begin(disk))
    assert list((disk / "telechat-moe" / "graphs").iterdir()) == []


@root_only
def test_a_disk_too_full_for_the_copy(home, disk):
    assert "is not kept: [Errno 28]" in lines(begin(home, TMPDIR=str(disk)))
    assert list(disk.iterdir()) == []


def test_a_process_killed_while_it_writes(tmp_path):
    killed = begin(tmp_path, "2", "3", "die")
    assert killed.wait() == -9
    assert graphs(tmp_path) == []
    assert lines(begin(tmp_path)) == cache.COMPILING
    assert lines(begin(tmp_path)) == TAKEN


def test_two_processes_at_once(tmp_path):
    both = [begin(tmp_path), begin(tmp_path, "2", "5")]
    assert lines(both[0]) in (cache.COMPILING, TAKEN)
    assert lines(both[1], weight=5) in (cache.COMPILING, TAKEN)
    assert lines(begin(tmp_path)) == TAKEN


def test_what_others_can_write_is_not_used(home):
    folder = home / "telechat-moe" / "graphs"
    folder.chmod(0o777)
    said = lines(begin(home))
    assert f"{cache.COMPILING}; it is not kept: {folder}: it can be written by others" in said
    folder.chmod(0o700)
    (file,) = graphs(home)
    file.chmod(0o620)
    assert f"not kept: {file}: it can be written by others (mode 0620)" in lines(begin(home))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user: needs root")
def test_what_belongs_to_others_is_not_used(home):
    (file,) = graphs(home)
    os.chown(file, 65534, -1)
    assert f"not kept: {file}: it belongs to user 65534" in lines(begin(home))
    os.chown(file, 0, -1)
    os.chown(file.parent, 65534, -1)
    assert f"not kept: {file.parent}: it belongs to user 65534" in lines(begin(home))


def test_no_place_for_it_and_switches_of_mindspore(tmp_path, home):
    (tmp_path / "file").write_text("")
    missing = begin(Path(), XDG_CACHE_HOME="", HOME=str(tmp_path / "file"))
    assert "not kept: [Errno 20] Not a directory" in lines(missing)
    assert "not kept: MS_DEV_FOO is set" in lines(begin(home, MS_DEV_FOO="1"))


@root_only
def test_a_folder_that_can_only_be_read(home, disk):
    subprocess.run(["cp", "-a", str(home / "telechat-moe"), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert lines(begin(disk)) == TAKEN
    assert "not kept for later starts: [Errno 30]" in lines(begin(disk, "4", "3"), factor=4)


def test_only_the_command_keeps_graphs():
    said = list[str]()
    with cache.compile_cache([], 1, said.append):
        pass
    assert "is not the command telechat-moe" in said[0]


def test_keys_tell_apart_what_graphs_are_made_from(tmp_path, monkeypatch):
    sources = tmp_path / "a.py", tmp_path / "b.py"
    for source in sources:
        source.write_text("x = 1\n")
    monkeypatch.setattr(cache, "_own_code", lambda: sources[:1])
    monkeypatch.setattr(cache, "_foreign_code", lambda: sources[1:])
    keys = [cache.key(["recipe"], 1)]
    assert cache.key(["recipe"], 1) == keys[0]
    keys += [cache.key(["another"], 1), cache.key(["recipe"], 2)]
    hashes = [cache.source_hash("settings"), cache.source_hash("others")]
    for source in sources:
        source.write_text("x = 2\n")
        keys.append(cache.key(["recipe"], 1))
    assert cache.source_hash("settings") not in hashes
    assert hashes[0] != hashes[1]
    for name in ("OMP_NUM_THREADS", "MS_ENABLE_NUMA", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.setenv(name, "7")
        keys.append(cache.key(["recipe"], 1))
    monkeypatch.setattr(cache, "installed", lambda package: "0.1")  # of MindSpore
    keys.append(cache.key(["recipe"], 1))
    for place in ("numpy.__version__", "sys.version"):
        monkeypatch.setattr(place, "0.1")
        keys.append(cache.key(["recipe"], 1))
    monkeypatch.setattr(cache, "_processor", lambda: ["avx9"])
    keys.append(cache.key(["recipe"], 1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(77)))
    keys.append(cache.key(["recipe"], 1))
    assert len(set(keys)) == len(keys)


def test_the_code_is_ours_the_library_and_what_is_not_installed(tmp_path, monkeypatch):
    code = set(cache._own_code())
    assert {native.path(), Path(cache.__file__), Path(native.__file__)} <= code
    assert (
        Path(cache.__file__).parents[1] / "recipe" / "experts.py" in code
    )  # of a rank's graph, too
    assert Path(__file__) in set(cache._foreign_code())
    assert Path(str(pytest.__file__)) not in code | set(cache._foreign_code())
    site = Path(sysconfig.get_path("purelib"), "sitecustomize.py")
    monkeypatch.setitem(sys.modules, "sitecustomize", type(sys)("sitecustomize"))
    sys.modules["sitecustomize"].__file__ = str(site)
    assert site in set(cache._foreign_code())


def test_the_last_ones_used_stay(tmp_path):
    for i in range(11):
        file = tmp_path / f"{i}.graphs"
        file.write_bytes(b"")
        os.utime(file, (i, i))
    os.utime(tmp_path / "0.graphs", (99, 99))
    cache._keep(tmp_path / "0.graphs", tmp_path / "nothing", {}, 0)
    left = {int(x.stem) for x in tmp_path.glob("*.graphs")}
    assert left == {0, *range(4, 11)}
