"""Write one checkpoint from several ranks, atomically: it exists complete or not at all.

Every rank writes its own files and then their description into one hidden folder; rank 0, which made the folder and
holds the lock of the folder of checkpoints meanwhile, compares the descriptions and gives the folder its name::

    .saving-step-00000123-SAVE/
        model_rank00002-00001-of-00001.safetensors    the shards that rank 2 writes, and no other rank does
        model_rank00002_row00001-...                  of shards whose rows are apart, the row after the first; and so on
        part-00002.json                               their regions; checksums of files and of replicated shards

Ranks wait for each other only in the thread that saves. A rank that dies leaves nothing visible; the next save removes
its files. A description counts only if it is of the same save (``SAVE``: the run's nonce and the number of its saves).
"""

import errno
import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telechat_moe.checkpoint import checkpoint, folder, manifest
from telechat_moe.checkpoint.checkpoint import Copied
from telechat_moe.checkpoint.folder import CheckpointError
from telechat_moe.checkpoint.manifest import Region
from telechat_moe.errors import CheckFailedError
from telechat_moe.files import UNSEALED, seal, unseal, write_new
from telechat_moe.interruption import unfinished
from telechat_moe.processes import Control
from telechat_moe.tensor_files import Array, TensorFile, dtype_name

FORMAT = "telechat-moe part of a checkpoint"
VERSION = 1
PATIENCE_S = 3600.0
POLL_S = 0.01


@dataclass(frozen=True)
class TensorShard:
    """A shard of a tensor.

    Attributes:
        region: Its (begin, end) in every dimension of the tensor.
        writes: This rank writes it; False: another holder of it does.
        shared: Other ranks hold the same shard.
        rows: Where its rows are in the tensor, if not next to each other, as `region` then says; empty: as it says.
    """

    data: Array
    shape: tuple[int, ...]
    region: Region
    writes: bool = True
    shared: bool = False
    rows: tuple[int, ...] = ()

    def pieces(self) -> list[tuple[Array, Region]]:
        """Return the arrays to write with their regions: the whole shard, or each of its rows."""
        if not self.rows:
            return [(self.data, self.region)]
        columns = self.region[1:]
        return [(self.data[i : i + 1], ((r, r + 1), *columns)) for i, r in enumerate(self.rows)]


TensorShards = Mapping[str, Mapping[str, TensorShard]]


@dataclass(frozen=True)
class JointSave:
    """One save of several ranks; every rank makes one with the same values but ``rank``.

    Attributes:
        root: Folder of all checkpoints of the run.
        save: Name that no other save has.
        control: Tells rank 0 that a rank could not write.
        about: What ``checkpoint.json`` says of the layout.
        keep_last: See :func:`checkpoint.save`.
    """

    root: Path
    step: int
    save: str
    rank: int
    ranks: int
    control: Control
    about: Mapping[str, Any] = field(default_factory=dict)
    keep_last: int | None = None

    def write(
        self, pieces: TensorShards, state: Mapping[str, Any], copied: Copied = None
    ) -> Path | None:
        """Write this rank's shards; on rank 0 wait for the others, complete the checkpoint and return its folder.

        Args:
            pieces: The shards that this rank holds, by group and name.
            state: See :func:`checkpoint.save`; of rank 0.
            copied: See :data:`checkpoint.Copied`.

        Raises:
            CheckpointError: On rank 0, if any rank could not write: no checkpoint is made, earlier ones are untouched.
            CheckFailedError: On rank 0, if ranks hold different values of one shard.
        """
        return self._lead(pieces, state, copied) if self.rank == 0 else self._follow(pieces, copied)

    @property
    def hidden(self) -> Path:
        """The hidden folder that all ranks write into."""
        path = folder.checkpoint_path(self.root, self.step)
        return path.with_name(f".saving-{path.name}-{self.save}")

    def _follow(self, pieces: TensorShards, copied: Copied = None) -> None:
        if not self._folder_is_there():
            return
        try:
            self._write_part(pieces, copied)
        except OSError as error:  # rank 0 tells the user
            name = f"{self.save}-failed-{self.rank}"
            try:
                self.control.write(name, error.strerror or str(error))
            except OSError:
                with suppress(OSError):  # a full disk still takes an empty file
                    self.control.write(name)

    def _folder_is_there(self) -> bool:
        """Wait for rank 0 to make the folder; return False if it gave up."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.hidden.is_dir():
            if self.control.read(f"{self.save}-over") is not None or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def _write_part(self, pieces: TensorShards, copied: Copied = None) -> None:
        planned, tensors = self._plan_part(pieces)
        checkpoint.refuse_full(self.root, checkpoint.space([s.nbytes for _, s in planned]))
        copies = _copies(pieces)
        files = checkpoint.write_files(self.hidden, [file for _, file in planned], copied)
        content = {
            "sha256": UNSEALED,
            "format": FORMAT,
            "version": VERSION,
            **self._identity(self.rank),
            "files": files,
            "tensors": tensors,
            "copies": copies,
        }
        unseen = f".{_part(self.rank)}"
        write_new(self.hidden / unseen, [seal(content)])
        (self.hidden / unseen).rename(self.hidden / _part(self.rank))

    def _plan_part(
        self, pieces: TensorShards
    ) -> tuple[list[tuple[str, TensorFile]], dict[str, dict[str, Any]]]:
        """Return this rank's files by group, and what they hold of each tensor: rows that are apart in a file each."""
        parts = {
            group: {name: shard.pieces() for name, shard in shards.items() if shard.writes}
            for group, shards in pieces.items()
        }
        planned: list[tuple[str, TensorFile]] = []
        tensors: dict[str, dict[str, Any]] = {group: {} for group in parts}
        counts = [len(p) for by_name in parts.values() for p in by_name.values()]
        for number in range(max(counts, default=1)):
            numbered = {
                group: {name: p[number] for name, p in by_name.items() if number < len(p)}
                for group, by_name in parts.items()
            }
            arrays = {
                group: {name: data for name, (data, _) in by_name.items()}
                for group, by_name in numbered.items()
                if by_name or not number
            }
            suffix = f"_rank{self.rank:05d}" + (f"_row{number:05d}" if number else "")
            for group, file in checkpoint.plan(arrays, suffix=suffix):
                planned.append((group, file))
                for name in (output.name for output in file.outputs):
                    described = tensors[group].setdefault(name, _described(pieces[group][name]))
                    region = [list(ends) for ends in numbered[group][name][1]]
                    described["pieces"].append({"file": file.name, "region": region})
        return planned, tensors

    def _identity(self, rank: int) -> dict[str, Any]:
        return {"step": self.step, "save": self.save, "rank": rank, "ranks": self.ranks}

    def _lead(self, pieces: TensorShards, state: Mapping[str, Any], copied: Copied = None) -> Path:
        needed = checkpoint.space([p.data.nbytes for g in pieces.values() for p in g.values()])
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with folder.locked(self.root) as locked:
                if locked:
                    folder.remove_leftovers(self.root)
                with unfinished(self.hidden):
                    self.hidden.mkdir()
                    try:
                        path = self._complete(pieces, state, copied)
                    except BaseException:
                        folder.discard(self.hidden)
                        raise
                if self.keep_last is not None:
                    folder.remove_old(self.root, self.step, self.keep_last)
        except OSError as error:
            raise CheckpointError(
                checkpoint.explain(error, self.root, self.step, needed)
            ) from error
        finally:
            self.control.write(f"{self.save}-over")
        return path

    def _complete(
        self, pieces: TensorShards, state: Mapping[str, Any], copied: Copied = None
    ) -> Path:
        self._write_part(pieces, copied)
        parts = [self._wait_for(rank) for rank in range(self.ranks)]
        _compare_copies(parts)
        about = {"version": manifest.VERSION_SHARDED, "ranks": self.ranks, **self.about}
        files = {name: entry for part in parts for name, entry in part["files"].items()}
        content = manifest.describe(self.step, state, files, _tensors(parts, self.root), about)
        for rank in range(self.ranks):
            (self.hidden / _part(rank)).unlink()
        write_new(self.hidden / manifest.FILE, [seal(content)])
        path = folder.checkpoint_path(self.root, self.step)
        folder.publish(self.hidden, path)
        return path

    def _wait_for(self, rank: int) -> dict[str, Any]:
        """Return a rank's description, once it and the files that it names are there."""
        path = self.hidden / _part(rank)
        deadline = time.monotonic() + PATIENCE_S
        while not path.exists():
            reason = self.control.read(f"{self.save}-failed-{rank}")
            if reason is not None:
                reason = reason or os.strerror(errno.ENOSPC)
                raise OSError(None, f"rank {rank} could not write: {reason}", str(self.hidden))
            if time.monotonic() > deadline:
                raise self._refused(rank, f"has not come for {PATIENCE_S:.0f} s")
            time.sleep(POLL_S)
        try:
            content, problem = unseal(path.read_bytes())
        except ValueError as error:
            raise self._refused(rank, f"is {error}") from error
        if problem:
            raise self._refused(rank, problem)
        expected = {"format": FORMAT, "version": VERSION, **self._identity(rank)}
        for key, value in expected.items():
            if content.get(key) != value:
                raise self._refused(rank, f"is of {key} {content.get(key)!r}, not {value!r}")
        for name, entry in content["files"].items():
            size = (self.hidden / name).stat().st_size if (self.hidden / name).exists() else 0
            if size != entry["bytes"]:
                raise self._refused(
                    rank, f"names {name} with {entry['bytes']:,} bytes, found are {size:,}"
                )
        return content

    def _refused(self, rank: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"cannot save the checkpoint of step {self.step} into {self.root}: the part of rank {rank} {reason}; "
            "no checkpoint was made, earlier ones are untouched"
        )


def _part(rank: int) -> str:
    return f"part-{rank:05d}.json"


def _described(piece: TensorShard) -> dict[str, Any]:
    return {"dtype": dtype_name(piece.data.dtype), "shape": list(piece.shape), "pieces": []}


def _copies(pieces: TensorShards) -> dict[str, dict[str, list[Any]]]:
    """Return where the shards that other ranks hold, too, are in their tensors, and their checksums, by group and name."""
    shared = [
        (group, name, p) for group, ps in pieces.items() for name, p in ps.items() if p.shared
    ]
    digests = checkpoint.parallel(lambda item: _digest(item[2].data), shared)
    copies: dict[str, dict[str, list[Any]]] = {group: {} for group in pieces}
    for (group, name, p), digest in zip(shared, digests, strict=True):
        copies[group][name] = [p.rows or p.region, digest]
    return copies


def _digest(data: Array) -> str:
    return hashlib.sha256(data.reshape(-1).view("u1").data).hexdigest()


def replicas_differ(rank: int, other_rank: int, name: str) -> CheckFailedError:
    """Return the error for two ranks whose copies of a shard differ."""
    return CheckFailedError(
        f"ranks {rank} and {other_rank} hold the same shard of {name}, and their values differ: "
        "the layout is wrong, or a process computed something else"
    )


def _compare_copies(parts: list[dict[str, Any]]) -> None:
    """Refuse shards that several ranks hold with different values: the layout is wrong."""
    first: dict[tuple[str, str, str], tuple[int, str]] = {}
    for rank, part in enumerate(parts):
        for group, copies in part["copies"].items():
            for name, (region, digest) in copies.items():
                owner, expected = first.setdefault((group, name, str(region)), (rank, digest))
                if digest != expected:
                    raise replicas_differ(owner, rank, name)


def _tensors(parts: list[dict[str, Any]], root: Path) -> dict[str, dict[str, Any]]:
    """Return what checkpoint.json says of the tensors; refuse shards that do not cover them."""
    tensors: dict[str, dict[str, Any]] = {group: {} for part in parts for group in part["tensors"]}
    problems = []
    for rank, part in enumerate(parts):
        for group, entries in part["tensors"].items():
            for name, entry in entries.items():
                about = {"dtype": entry["dtype"], "shape": entry["shape"]}
                tensor = tensors[group].setdefault(name, {**about, "pieces": []})
                if {key: tensor[key] for key in about} != about:
                    problems.append(f"{name}: rank {rank} says {about}, not as the ranks before")
                tensor["pieces"] += entry["pieces"]
    for name, tensor in ((n, t) for entries in tensors.values() for n, t in entries.items()):
        if not manifest.tiles(tensor["shape"], [region for _, region in manifest.pieces(tensor)]):
            problems.append(f"{name}: the parts do not cover {tensor['shape']}")
    if problems:
        raise CheckpointError(
            f"cannot save into {root}: the parts of the ranks do not fit together:\n  "
            + "\n  ".join(problems)
        )
    return tensors
