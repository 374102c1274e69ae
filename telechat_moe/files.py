"""Files that survive a kill, say whether they changed, and are not changed by others.

* Durable: :func:`write_new`, :func:`write_atomic`, :func:`new_folder`, :func:`sync_folder`: what has its name is
  complete and on the disk.
* Checked: :func:`read` gives the SHA-256 with the content; a sealed JSON file (:func:`seal`, :func:`unseal`) holds its
  own; ``checksums.json`` beside weights, written by ``convert`` and verified at every reading, has those of files::

    {
     "format":  "telechat-moe weights",
     "version": 1,
     "files":   {"model-00001-of-00002.safetensors": {"bytes": 4096, "sha256": "..."}, ...},
     "source":  {"path": "hf", "files": {"model.safetensors": {"bytes": 8192, "sha256": "..."}}}
    }

  Beside a single file ``x.safetensors`` it is called ``x.safetensors.checksums.json``.
* Private: :func:`keep_others_out`, :func:`check_private`.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telechat_moe.errors import BadInputError
from telechat_moe.interruption import unfinished
from telechat_moe.narrowing import is_object
from telechat_moe.reading import parse_json

CHUNK_BYTES = 1 << 20
"""Hashed, then written or read while it is still in the processor's cache."""

DYING_S = 2.0
"""What a process with much memory may take to go after it was killed."""

CHECKSUMS = "checksums.json"
FORMAT = "telechat-moe weights"
VERSION = 1
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
UNSEALED = "0" * 64
"""Placeholder of a sealed file's own checksum while that is computed."""

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done and how much there is (None: not known)."""
Advance = Callable[[int], None]
"""Called with the number of bytes that were read or written since the last call."""
FileSums = dict[str, dict[str, Any]]
"""Files by name: ``bytes`` and ``sha256``."""


# ---------------------------------------------------------------------------------------- durable


def write_new(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a file that must not exist yet and wait until it is on the disk; return its ``bytes`` and ``sha256``."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
            size += len(chunk)
        sync_file(file)
    return {"bytes": size, "sha256": digest.hexdigest()}


def copy_new(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file that must not exist yet; :func:`settle` waits for the disk."""
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)


def settle(path: Path) -> dict[str, Any]:
    """Wait until a file is on the disk; return its ``bytes`` and ``sha256``."""
    with path.open("r+b") as file:
        sync_file(file)
    return checksum(path)


def sync_file(file: Any) -> None:
    """Wait until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes | str, *, replace: bool = True) -> None:
    """Write a file whole or not at all, replacing one of that name; ``replace`` False: that is a FileExistsError."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.part")
    hidden.unlink(missing_ok=True)
    with unfinished(hidden):
        try:
            write_new(hidden, [data.encode() if isinstance(data, str) else data])
            if replace:
                hidden.replace(path)
            else:
                path.hardlink_to(hidden)
        finally:
            hidden.unlink(missing_ok=True)


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file that people may read."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


@contextmanager
def new_folder(path: Path) -> Generator[Path, None, None]:
    """Yield a hidden folder beside ``path``; it gets that name if all goes well, and is removed if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    with unfinished(hidden):
        hidden.mkdir()
        try:
            yield hidden
            sync_folder(hidden)
            hidden.rename(path)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    sync_folder(path.parent)


def lock(descriptor: int) -> None:
    """Lock an open file for this process.

    Raises:
        BlockingIOError: Another process holds it, and not only until it is gone after it was killed.
        OSError: The file system has no locks.
    """
    deadline = time.monotonic() + DYING_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)


@contextmanager
def locked(path: Path, busy: Exception | None) -> Generator[None, None, None]:
    """Hold the lock of a file, made if it is not there, or of a folder; the system drops it when the process dies.

    ``busy`` is raised if another process holds it; None: wait for it. Where the file system has no locks, nothing is held.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        try:
            if busy:
                lock(descriptor)
            else:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BlockingIOError as error:
            raise (busy or error) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------- checked


@dataclass(frozen=True)
class FileContent:
    """What was found in a file; ``data`` is None if only the checksum was wanted."""

    nbytes: int
    sha256: str
    data: NDArray[np.uint8] | None

    @property
    def sums(self) -> dict[str, Any]:
        """Return size and checksum as ``bytes`` and ``sha256``."""
        return {"bytes": self.nbytes, "sha256": self.sha256}


def read(path: Path, *, keep: bool, advance: Advance = lambda _: None) -> FileContent:
    """Read a file once, for its checksum and, with ``keep``, for its content.

    Raises:
        OSError: If the file is missing or cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = np.empty(size if keep else min(size, CHUNK_BYTES), np.uint8)
        view = data.data
        position = 0
        while position < size:
            start = position if keep else 0
            count = file.readinto(view[start : start + min(CHUNK_BYTES, size - position)])
            if not count:
                break
            digest.update(view[start : start + count])
            position += count
            advance(count)
    return FileContent(position, digest.hexdigest(), data if keep else None)


def checksum(path: Path, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return ``bytes`` and ``sha256`` of a file."""
    return read(path, keep=False, advance=advance).sums


def seal(content: Mapping[str, Any]) -> bytes:
    """Return a JSON file whose key ``sha256`` (now :data:`UNSEALED`) is the checksum of the file itself.

    It is computed over the file with :data:`UNSEALED` in its place.
    """
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text.replace(UNSEALED, digest, 1).encode()


def unseal(raw: bytes) -> tuple[dict[str, Any], str | None]:
    """Return the content of a sealed JSON file, and what is wrong with its checksum (None: nothing).

    Raises:
        ValueError: It is no JSON object; the message says why.
    """
    try:
        content = parse_json(raw.decode())
        if not is_object(content):
            raise ValueError("no object")
    except ValueError as error:
        raise ValueError(f"not valid JSON, truncated or changed ({error})") from error
    claimed = str(content.get("sha256"))
    actual = hashlib.sha256(raw.replace(claimed.encode(), UNSEALED.encode(), 1)).hexdigest()
    wrong = f"checksum differs, the file was changed (sha256 {actual}, not {claimed})"
    return content, wrong if actual != claimed else None


def checksums_path(weights: Path) -> Path:
    """Return the path of the checksums of a folder or of a single file of weights."""
    if weights.suffix == ".safetensors" and not weights.is_dir():
        return weights.with_name(f"{weights.name}.{CHECKSUMS}")
    return weights / CHECKSUMS


def checksums_content(files: FileSums, source: Path, source_files: FileSums) -> dict[str, Any]:
    """Return the content of checksums.json."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "files": files,
        "source": {"path": str(source), "files": source_files},
    }


def read_checksums(weights: Path) -> FileSums | None:
    """Return the files that the checksums beside weights name; None if there are no checksums.

    Raises:
        BadInputError: checksums.json cannot be read.
    """
    path = checksums_path(weights)
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from error
    try:
        content = parse_json(raw)
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"{content['format']} version {content['version']}")
        files = {
            str(n): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])}
            for n, f in content["files"].items()
        }
        if any(Path(name).name != name for name in files):
            raise ValueError("a file outside the folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"{path}: no checksums of {FORMAT} version {VERSION} ({error!r})"
        ) from error
    return files


def difference(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """Return how a file differs from what was written, by ``bytes`` and ``sha256``; None: not at all."""
    if actual["bytes"] != expected["bytes"]:
        how = "truncated" if actual["bytes"] < expected["bytes"] else "too long"
        return f"{how}, {actual['bytes']:,} bytes found, {expected['bytes']:,} expected"
    if actual["sha256"] != expected["sha256"]:
        return (
            "checksum differs, the content was changed "
            f"(sha256 {actual['sha256']}, not {expected['sha256']})"
        )
    return None


def differences(folder: Path, expected: FileSums, actual: FileSums) -> list[str]:
    """Return how files differ from what was written, a line each; files without a checksum count as right."""
    pairs = (
        (name, difference(now, expected[name])) for name, now in actual.items() if name in expected
    )
    return [f"{folder / name}: {problem}" for name, problem in pairs if problem]


def counter(phase: str, total: int, progress: Progress | None, nbytes: int = 0) -> Advance:
    """Return a function that adds to the bytes that are done and tells ``progress``."""

    def advance(count: int) -> None:
        nonlocal nbytes
        nbytes += count
        if progress is not None:
            progress(phase, nbytes, max(nbytes, total))

    return advance


def verify_checksums(weights: Path, progress: Progress | None = None) -> tuple[int, int, list[str]]:
    """Compare all files with their checksums; return their number, their bytes, and the problems, a line each.

    ``progress`` is called with a phase, the bytes read and the bytes in all.

    Raises:
        BadInputError: There are no checksums.
    """
    expected, sums = read_checksums(weights), checksums_path(weights)
    if expected is None:
        problem = f"no {sums.name} there" if weights.exists() else "no such file or folder"
        raise BadInputError(f"{weights}: {problem}; nothing to verify against")
    if not expected:
        raise BadInputError(f"{sums}: names no file; nothing to verify")
    folder = sums.parent
    total = sum(f["bytes"] for f in expected.values())
    advance = counter("verifying", total, progress)
    problems: list[str] = []
    for name in expected:
        try:
            problems += differences(folder, expected, {name: checksum(folder / name, advance)})
        except FileNotFoundError:
            problems.append(f"{folder / name}: missing")
        except OSError as error:
            problems.append(f"{folder / name}: cannot be read ({error.strerror})")
    return len(expected), total, problems


def require_checksums(weights: Path) -> None:
    """Refuse weights that differ from the checksums beside them; weights without checksums are accepted.

    Raises:
        BadInputError: A file differs, is missing or cannot be read; lists all.
    """
    problems = verify_checksums(weights)[2] if read_checksums(weights) is not None else []
    if problems:
        raise BadInputError(
            f"{weights}: the weights are not those that were written:\n  " + "\n  ".join(problems)
        )


# ---------------------------------------------------------------------------------------- private


def keep_others_out() -> None:
    """Keep group and others from writing to whatever this process and its children create."""
    os.umask(os.umask(0o077) | OTHERS_WRITE)


def user_cache() -> Path:
    """Return this user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "telechat-moe"


def check_private(path: Path) -> Path:
    """Return a file or folder that only this user can have written.

    Pickles and control files are trusted; one that somebody else can write would run their code.

    Raises:
        BadInputError: It belongs to somebody else, others can write it or its folder, or it is a symbolic link.
    """
    for checked, subject in ((path.absolute().parent, "its folder"), (path, "it")):
        info = checked.stat() if checked != path else checked.lstat()
        problem = ""
        if checked == path and stat.S_ISLNK(info.st_mode):
            problem = "is a symbolic link"
        elif info.st_uid != os.geteuid():
            problem = f"belongs to user {info.st_uid}, not to {os.geteuid()}"
        elif info.st_mode & OTHERS_WRITE:
            problem = f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
        if problem:
            raise BadInputError(
                f"{path}: {subject} {problem}, and what it says is trusted; remove it, and start again where "
                "only you can write (chmod go-w)"
            )
    return path
