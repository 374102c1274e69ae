"""Checkpoints: safetensors files and one JSON file with checksums; never pickle, never half written.

``save`` writes ``ROOT/step-00000123/``::

    checkpoint.json                         format, step, size and SHA-256 of each file, dtype, shape
                                            and file of each tensor, and the caller's JSON state
    model-00001-of-00001.safetensors        one file or more for each group of tensors
    optimizer-00001-of-00002.safetensors

How a save survives being killed at any moment: everything is written to a hidden folder of ROOT, each
file and the folder are forced to the disk, and only then is the folder renamed. Older checkpoints are
removed after that, by renaming them to a hidden name first. What a killed save leaves behind has a
hidden name too; the next save removes it. A lock on ``ROOT/.lock``, which the system drops when a
process dies, keeps two live processes from cleaning up after each other.
"""

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.train import manifest, shards
from telechat_moe.train.manifest import STEP_NAME, BrokenCheckpointError
from telechat_moe.train.shards import BFLOAT16, Array

__all__ = [
    "BFLOAT16",
    "BrokenCheckpointError",
    "Checkpoint",
    "CheckpointError",
    "diff_config",
    "latest",
    "list_checkpoints",
    "load",
    "save",
    "verify",
]

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 << 20

_GROUP_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BLOCK_BYTES = 4096
_THREADS = 4
_LOCK_PATIENCE_S = 600.0


class CheckpointError(TelechatMoeError):
    """A checkpoint could not be written; earlier ones are untouched (exit code 1)."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        path: Folder that it was read from.
        step: Number of finished training steps.
        tensors: Arrays by group ("model", "optimizer", ...) and name. Writable; BF16 is `BFLOAT16`.
        state: The JSON state that was given to `save`.
    """

    path: Path
    step: int
    tensors: dict[str, dict[str, Array]]
    state: dict[str, Any]


# ---------------------------------------------------------------------------------------- saving


def save(
    root: str | Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Array]],
    state: Mapping[str, Any],
    *,
    keep_last: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the checkpoint of a step; when this returns, it survives a power cut.

    The same arguments give the same bytes. A checkpoint of the same step is replaced.

    Args:
        root: Folder of all checkpoints of a run; made if it is missing.
        step: Number of finished training steps, >= 0.
        tensors: Arrays by group and name, for example ``{"model": {...}, "optimizer": {...}}``.
        state: Everything else that is needed to go on, as strict JSON (string keys, finite numbers).
        keep_last: How many complete checkpoints up to this step to keep, this one included; >= 1;
            None keeps all. Those of later steps are never removed.
        shard_bytes: A file is closed when the next tensor would make it larger than this.

    Returns:
        The folder of the checkpoint, ``root/step-00000123``.

    Raises:
        BadInputError: If the arguments cannot be stored.
        CheckpointError: If writing failed (disk full, no permission...); nothing was changed.
    """
    root = Path(root)
    if step < 0 or (keep_last is not None and keep_last < 1) or shard_bytes < 1:
        raise BadInputError(
            f"step ({step}) must be >= 0, keep_last ({keep_last}) and shard_bytes "
            f"({shard_bytes}) >= 1"
        )
    planned = _plan(tensors, shard_bytes)
    content = manifest.build(step, planned, state)
    sizes = [len(manifest.seal(content)), *(s.nbytes for _, s in planned)]
    needed = sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root) as locked:
            if locked:
                _sweep(root)
            free = shutil.disk_usage(root).free
            if free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))
            path = _write(root, step, planned, content)
            if keep_last is not None:
                _retire(root, step, keep_last)
    except OSError as error:
        raise CheckpointError(_explain(error, root, step, needed)) from error
    return path


def _plan(
    tensors: Mapping[str, Mapping[str, Array]], shard_bytes: int
) -> list[tuple[str, shards.Shard]]:
    planned: list[tuple[str, shards.Shard]] = []
    for group in sorted(tensors):
        if not _GROUP_NAME.fullmatch(group):
            raise BadInputError(f"group name {group!r} must be lower-case letters, digits and '_'")
        for name in tensors[group]:
            manifest.check_text(name, f"name of a tensor of {group!r}")
        try:
            planned += [(group, s) for s in shards.plan(group, tensors[group], shard_bytes)]
        except BadInputError as error:
            raise BadInputError(f"group {group!r}: {error}") from error
    return planned


def _write(
    root: Path, step: int, planned: list[tuple[str, shards.Shard]], content: dict[str, Any]
) -> Path:
    final = root / f"step-{step:08d}"
    hidden = root / f".saving-step-{step:08d}-{os.getpid()}-{secrets.token_hex(4)}"
    hidden.mkdir()
    try:
        todo = [shard for _, shard in planned]
        for shard, sha256 in zip(
            todo, _parallel(lambda s: shards.write(hidden, s), todo), strict=True
        ):
            content["files"][shard.file]["sha256"] = sha256
        with (hidden / manifest.FILE).open("xb") as file:
            file.write(manifest.seal(content))
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(hidden)
        if final.exists():
            replaced = root / f".replaced-{final.name}"
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
            hidden.rename(final)
            _sync_folder(root)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            hidden.rename(final)
            _sync_folder(root)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return final


def _parallel(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Apply a function to all items in a few threads; a failure stops those not yet begun."""
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Hold the lock of ROOT; yields False where the file system has no locks."""
    with (root / ".lock").open("a+b") as file:
        supported = True
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"another process has been saving into {root} for {_LOCK_PATIENCE_S:.0f} s; "
                        "give each run its own output_dir"
                    ) from None
                if not waiting:
                    logger.warning("waiting for another process that is saving into %s", root)
                waiting = True
                time.sleep(0.05)
            except OSError:
                logger.warning("%s: no file locks; leftovers of killed saves are kept", root)
                supported = False
                break
        try:
            yield supported
        finally:
            if supported:
                fcntl.flock(file, fcntl.LOCK_UN)


def _sweep(root: Path) -> None:
    """Remove what killed saves left behind. Only the holder of the lock may call this."""
    for path in sorted(root.iterdir()):
        if path.name.startswith((".saving-step-", ".removing-step-")):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(".replaced-step-"):
            final = root / path.name.removeprefix(".replaced-")
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:  # killed between the two renames of a replacement
                path.rename(final)
                _sync_folder(root)


def _retire(root: Path, step: int, keep_last: int) -> None:
    """Remove older checkpoints, counting as kept only those whose files are all there."""
    kept = 0
    for path in list_checkpoints(root):
        if _step_of(path) > step:
            continue
        if kept < keep_last:
            kept += _looks_complete(path)
            continue
        hidden = root / f".removing-{path.name}"
        try:
            path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            logger.warning("cannot remove the old checkpoint %s: %s", path, error)


def _looks_complete(path: Path) -> bool:
    try:
        files = manifest.read(path)["files"]
        return all((path / name).stat().st_size == f["bytes"] for name, f in files.items())
    except (OSError, BrokenCheckpointError):
        return False


def _explain(error: OSError, root: Path, step: int, needed: int) -> str:
    where = Path(error.filename) if error.filename else root
    text = f"cannot save the checkpoint of step {step} into {root}: {error.strerror or error}"
    if where != root:
        text += f" ({where})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        folder = next(p for p in (root, *root.absolute().parents) if p.exists())
        free = shutil.disk_usage(folder).free
        text += f"; {_size(needed)} needed, {_size(free)} free"
        if free >= needed:
            text += " (a quota, a limit on files or another process stands in the way)"
    text += ". "
    if not root.is_dir():
        return text + "No checkpoint was written; set output_dir to a folder that can be written."
    with suppress(BadInputError):  # the folder may be unreadable, too
        for path in list_checkpoints(root):
            with suppress(BrokenCheckpointError):
                verify(path)
                return text + f"The last good checkpoint, {path}, is intact (checksums verified)."
    return text + "There is no earlier good checkpoint."


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB ({count:,} bytes)"


# --------------------------------------------------------------------------------------- reading


def _step_of(path: Path) -> int:
    match = STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def list_checkpoints(root: str | Path) -> list[Path]:
    """Return the folders of all checkpoints under ``root``, newest step first, unverified."""
    root = Path(root)
    try:
        found = {p for p in root.iterdir() if STEP_NAME.fullmatch(p.name) and p.is_dir()}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInputError(f"cannot list the checkpoints in {root}: {error.strerror}") from error
    # A replacement that was killed between its two renames left the old one under a hidden name.
    visible = {p for p in found if not p.name.startswith(".")}
    hidden = {p for p in found - visible if root / p.name.removeprefix(".replaced-") not in visible}
    return sorted(visible | hidden, key=_step_of, reverse=True)


def load(path: str | Path) -> Checkpoint:
    """Read one checkpoint, verifying every byte.

    Raises:
        BrokenCheckpointError: If anything differs from what was saved; lists every problem.
    """
    checkpoint = _read(Path(path), keep=True)
    assert checkpoint is not None  # keep=True
    return checkpoint


def verify(path: str | Path) -> None:
    """Check the checksums, sizes and presence of all files of a checkpoint, without keeping them.

    Raises:
        BrokenCheckpointError: If anything differs from what was saved; lists every problem.
    """
    _read(Path(path), keep=False)


def latest(root: str | Path, *, warn: Callable[[str], None] | None = None) -> Checkpoint | None:
    """Load the newest checkpoint that verifies; None if there is none at all.

    Args:
        root: Folder of all checkpoints of a run.
        warn: Called with a message for each broken checkpoint that is passed over (default: logs a
            warning).

    Raises:
        BadInputError: If there are checkpoints and all are broken; lists each.
    """
    warn = warn or logger.warning
    failures: list[BrokenCheckpointError] = []
    for path in list_checkpoints(root):
        try:
            checkpoint = load(path)
        except BrokenCheckpointError as error:
            failures.append(error)
            continue
        for failure in failures:
            warn(f"{failure}\n  going on from {path} instead")
        return checkpoint
    if failures:
        raise BadInputError(
            f"no usable checkpoint in {root}, all {len(failures)} are broken:\n"
            + "\n".join(str(failure) for failure in failures)
        )
    return None


def _read(path: Path, *, keep: bool) -> Checkpoint | None:
    content = manifest.read(path)
    files: dict[str, Any] = content["files"]

    def read_one(name: str) -> shards.FileContent | OSError:
        try:
            return shards.read(path / name, keep=keep)
        except OSError as error:
            return error

    contents = dict(zip(files, _parallel(read_one, list(files)), strict=True))
    problems = [p for name in files if (p := _file_problem(name, files[name], contents[name]))]
    tensors: dict[str, dict[str, Array]] = {}
    if keep and not problems:
        tensors = _tensors(content["tensors"], contents, problems)
    if problems:
        raise BrokenCheckpointError(path, problems)
    return Checkpoint(path, content["step"], tensors, content["state"]) if keep else None


def _file_problem(
    name: str, expected: dict[str, Any], found: shards.FileContent | OSError
) -> str | None:
    if isinstance(found, FileNotFoundError):
        return f"{name}: missing"
    if isinstance(found, OSError):
        return f"{name}: cannot be read ({found.strerror})"
    if found.nbytes != expected["bytes"]:
        how = "truncated" if found.nbytes < expected["bytes"] else "too long"
        return f"{name}: {how}, {found.nbytes:,} bytes found, {expected['bytes']:,} expected"
    if found.sha256 != expected["sha256"]:
        return (
            f"{name}: checksum differs, the content was changed "
            f"(sha256 {found.sha256}, not {expected['sha256']})"
        )
    return None


def _tensors(
    described: dict[str, dict[str, Any]],
    contents: dict[str, shards.FileContent],
    problems: list[str],
) -> dict[str, dict[str, Array]]:
    """Take the tensors out of the files, comparing the files' headers with checkpoint.json."""
    in_file: dict[str, dict[str, Array]] = {}
    for name, content in contents.items():
        assert content.data is not None
        try:
            in_file[name] = shards.parse(content.data)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    tensors: dict[str, dict[str, Array]] = {}
    for group, wanted in described.items():
        tensors[group] = {}
        for name, want in wanted.items():
            array = in_file.get(want["file"], {}).pop(name, None)
            if array is None:
                problems.append(f"{want['file']}: tensor {name!r} is missing")
                continue
            found = {"dtype": shards.dtype_name(array.dtype), "shape": list(array.shape)}
            problems += [
                f"{want['file']}: tensor {name!r} has {key} {value}, {manifest.FILE} says {want[key]}"
                for key, value in found.items()
                if value != want[key]
            ]
            tensors[group][name] = array
    for file, rest in in_file.items():
        problems += [f"{file}: tensor {name!r} is not in {manifest.FILE}" for name in rest]
    return tensors


# ---------------------------------------------------------------------------------------- resume


def diff_config(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Compare two configurations, for refusing to resume under another model.

    Returns:
        One line ``dotted.key: saved -> now`` for each value that differs, sorted; values are
        written as JSON, ``(absent)`` stands for a key that is on one side only. 1 and 1.0 are the
        same setting, 1 and true are not.
    """
    before, now = _flat(saved), _flat(current)
    return [
        f"{key}: {_shown(before, key)} -> {_shown(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if not (key in before and key in now and _same(before[key], now[key]))
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or (prefix and not value):
        return {prefix: json.loads(json.dumps(value))}  # a tuple becomes a list, as in the file
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _shown(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else "(absent)"
