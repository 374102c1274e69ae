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
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe import files
from telechat_moe.checkpoint import folder, manifest
from telechat_moe.checkpoint.folder import CheckpointError, list_checkpoints
from telechat_moe.checkpoint.manifest import BrokenCheckpointError
from telechat_moe.errors import BadInputError
from telechat_moe.files import FileContent
from telechat_moe.interruption import unfinished
from telechat_moe.narrowing import equal_values
from telechat_moe.tensor_files import Array, TensorFile, dtype_name, output_of, parse, split
from telechat_moe.units import size_text

logger = logging.getLogger(__name__)

SHARD_BYTES = 256 << 20

_GROUP_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BLOCK_BYTES = 4096
_THREADS = 4


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        step: Number of finished training steps.
        tensors: Arrays by group ("model", "optimizer", ...) and name, writable, BF16 as `BFLOAT16`; of
            :func:`telechat_moe.checkpoint.stored.open_shards` what reads them.
        state: The JSON state that was given to `save`.
    """

    path: Path
    step: int
    tensors: dict[str, dict[str, Any]]
    state: dict[str, Any]


Copied = Callable[[], object] | None
"""Called by a save once all tensors are in files, not yet on the disk, and may change; None: they do not change meanwhile."""

OpenCheckpoint = Callable[[Path], Checkpoint]
"""Return a checkpoint that verifies, or raise BrokenCheckpointError."""


def save(
    root: str | Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Array]],
    state: Mapping[str, Any],
    *,
    keep_last: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    copied: Copied = None,
) -> Path:
    """Write the checkpoint of a step and return its folder; when this returns, it survives a power cut.

    The same arguments give the same bytes. A checkpoint of the same step is replaced.

    Args:
        root: Folder of all checkpoints of a run; made if it is missing.
        step: Number of finished training steps, >= 0.
        tensors: Arrays by group and name, for example ``{"model": {...}, "optimizer": {...}}``.
        state: Everything else that is needed to resume, as strict JSON (string keys, finite numbers).
        keep_last: How many complete checkpoints up to this step to keep, this one included; >= 1;
            None keeps all. Those of later steps are never removed.
        shard_bytes: A file is closed when the next tensor would make it larger than this.
        copied: See :data:`Copied`.

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
    planned = plan(tensors, shard_bytes)
    content = manifest.build(step, planned, state)
    needed = space([len(files.seal(content)), *(s.nbytes for _, s in planned)])
    try:
        root.mkdir(parents=True, exist_ok=True)
        with folder.locked(root) as locked:
            if locked:
                folder.remove_leftovers(root)
            refuse_full(root, needed)
            path = _write(root, step, planned, content, copied)
            if keep_last is not None:
                folder.remove_old(root, step, keep_last)
    except OSError as error:
        raise CheckpointError(explain(error, root, step, needed)) from error
    return path


def plan(
    tensors: Mapping[str, Mapping[str, Array]], shard_bytes: int = SHARD_BYTES, suffix: str = ""
) -> list[tuple[str, TensorFile]]:
    """Return the files of each group, of about ``shard_bytes`` each; their names begin with the group's and the suffix.

    Raises:
        BadInputError: A group or tensor cannot be stored.
    """
    planned: list[tuple[str, TensorFile]] = []
    for group in sorted(tensors):
        if not _GROUP_NAME.fullmatch(group):
            raise BadInputError(f"group name {group!r} must be lower-case letters, digits and '_'")
        for name in tensors[group]:
            manifest.check_text(name, f"name of a tensor of {group!r}")
        # Names, dtypes and shapes decide, not the order of ``tensors``; a tensor is never split.
        outputs = (output_of(name, array) for name, array in sorted(tensors[group].items()))
        try:
            parts = split(outputs, shard_bytes)
        except BadInputError as error:
            raise BadInputError(f"group {group!r}: {error}") from error
        for number, part in enumerate(parts, start=1):
            name = f"{group}{suffix}-{number:05d}-of-{len(parts):05d}.safetensors"
            planned.append((group, TensorFile(name, part)))
    return planned


def _write(
    root: Path,
    step: int,
    planned: list[tuple[str, TensorFile]],
    content: dict[str, Any],
    copied: Copied,
) -> Path:
    path = folder.checkpoint_path(root, step)
    hidden = root / f".saving-{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    with unfinished(hidden):
        hidden.mkdir()
        try:
            content["files"] = write_files(hidden, [file for _, file in planned], copied)
            files.write_new(hidden / manifest.FILE, [files.seal(content)])
            folder.publish(hidden, path)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    return path


def write_files(hidden: Path, planned: list[TensorFile], copied: Copied = None) -> files.FileSums:
    """Write tensor files in a few threads; return ``bytes`` and ``sha256`` of each by name."""
    if copied is None:
        sums = parallel(lambda file: file.write(hidden / file.name), planned)
    else:
        parallel(lambda file: file.copy(hidden / file.name), planned)
        copied()
        sums = parallel(lambda file: files.settle(hidden / file.name), planned)
    return dict(zip((file.name for file in planned), sums, strict=True))


def parallel(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Apply a function to all items in a few threads; a failure stops those not yet begun."""
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def space(sizes: list[int]) -> int:
    """Return the bytes that files of these sizes take on a disk."""
    return sum(-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes)


def refuse_full(root: Path, needed: int) -> None:
    """Raise the OSError of a full disk before anything is written, if fewer bytes than needed are free."""
    if shutil.disk_usage(root).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))


def explain(error: OSError, root: Path, step: int, needed: int) -> str:
    """Say why a save failed, and which checkpoint is still good."""
    file = Path(error.filename) if error.filename else root
    text = f"cannot save the checkpoint of step {step} into {root}: {error.strerror or error}"
    if file != root:
        text += f" ({file})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        existing = next(p for p in (root, *root.absolute().parents) if p.exists())
        free = shutil.disk_usage(existing).free
        text += f"; {_size(needed)} needed, {_size(free)} free"
        if free >= needed:
            text += " (a quota, a limit on files or another process may prevent it)"
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
    return f"{size_text(count)} ({count:,} bytes)"


def load(path: str | Path) -> Checkpoint:
    """Read one checkpoint, verifying every byte.

    Raises:
        BrokenCheckpointError: If anything differs from what was saved; lists every problem.
    """
    checkpoint = _read(Path(path), keep=True)
    assert checkpoint is not None  # keep=True
    return checkpoint


def verify(path: str | Path, share: tuple[int, int] = (0, 1)) -> None:
    """Check the checksums, sizes and presence of the files of a checkpoint, without keeping them.

    Args:
        share: (i, n): of the files, the i-th and every n-th after it. So n processes share the work.

    Raises:
        BrokenCheckpointError: If anything differs from what was saved; lists every problem.
    """
    _read(Path(path), keep=False, share=share)


def latest(
    root: str | Path,
    *,
    warn: Callable[[str], None] | None = None,
    open_checkpoint: OpenCheckpoint = load,
) -> Checkpoint | None:
    """Load the newest checkpoint that verifies; None if there is none at all.

    Args:
        warn: Called with a message for each broken checkpoint that is skipped (default: logs a
            warning).
        open_checkpoint: How it is loaded.

    Raises:
        BadInputError: If there are checkpoints and all are broken; lists each.
    """
    warn = warn or logger.warning
    failures: list[BrokenCheckpointError] = []
    for path in list_checkpoints(root):
        try:
            checkpoint = open_checkpoint(path)
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


def _read(path: Path, *, keep: bool, share: tuple[int, int] = (0, 1)) -> Checkpoint | None:
    content = manifest.read(path)
    first, every = share
    described: files.FileSums = dict(sorted(content["files"].items())[first::every])

    def read_one(name: str) -> FileContent | str:
        try:
            file_content = files.read(path / name, keep=keep)
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return files.difference(file_content.sums, described[name]) or file_content

    contents = dict(zip(described, parallel(read_one, list(described)), strict=True))
    problems = [f"{name}: {text}" for name, text in contents.items() if isinstance(text, str)]
    tensors: dict[str, dict[str, Array]] = {}
    if keep and not problems:
        tensors = _tensors(content["tensors"], contents, problems)
    if problems:
        raise BrokenCheckpointError(path, problems)
    return Checkpoint(path, content["step"], tensors, content["state"]) if keep else None


def _tensors(
    described: dict[str, dict[str, Any]], contents: dict[str, FileContent], problems: list[str]
) -> dict[str, dict[str, Array]]:
    """Take the tensors out of the files, comparing the files' headers with checkpoint.json."""
    in_file: dict[str, dict[str, Array]] = {}
    for name, content in contents.items():
        assert content.data is not None
        try:
            in_file[name] = parse(content.data)
        except ValueError as error:
            problems.append(f"{name}: {error}")
    tensors: dict[str, dict[str, Array]] = {}
    for group, entries in described.items():
        tensors[group] = {}
        for name, entry in entries.items():
            array = _tensor(name, entry, in_file, problems)
            if array is not None:
                tensors[group][name] = array
    for file, unlisted in in_file.items():
        problems += [f"{file}: tensor {name!r} is not in {manifest.FILE}" for name in unlisted]
    return tensors


def _tensor(
    name: str, entry: dict[str, Any], in_file: dict[str, dict[str, Array]], problems: list[str]
) -> Array | None:
    """Return a tensor, merged from its shards; None if something is wrong."""
    pieces = manifest.pieces(entry)
    before = len(problems)
    if not manifest.tiles(entry["shape"], [region for _, region in pieces]):
        problems.append(f"{manifest.FILE}: the shards of {name!r} do not cover {entry['shape']}")
    tensor: Array | None = None
    for file, region in pieces:
        array = in_file.get(file, {}).pop(name, None)
        if array is None:
            problems.append(f"{file}: tensor {name!r} is missing")
            continue
        actual = {"dtype": dtype_name(array.dtype), "shape": list(array.shape)}
        expected = {"dtype": entry["dtype"], "shape": [end - begin for begin, end in region]}
        problems += [
            f"{file}: tensor {name!r} has {key} {value}, {manifest.FILE} says {expected[key]}"
            for key, value in actual.items()
            if value != expected[key]
        ]
        if len(problems) > before:
            continue
        if len(pieces) == 1:
            return array
        tensor = np.empty(entry["shape"], array.dtype) if tensor is None else tensor
        tensor[manifest.slices(region)] = array
    return tensor if len(problems) == before else None


def diff_config(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return ``dotted.key: saved -> now`` for each value that differs between two configurations, sorted.

    Values are written as JSON, ``(absent)`` marks a key that only one side has. 1 and 1.0 are the same setting, 1 and
    true are not.
    """
    before, now = _flat(saved), _flat(current)
    return [
        f"{key}: {_shown(before, key)} -> {_shown(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if not (key in before and key in now and equal_values(before[key], now[key]))
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or (prefix and not value):
        return {prefix: json.loads(json.dumps(value))}  # a tuple becomes a list, as in the file
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _shown(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False) if key in flat else "(absent)"
