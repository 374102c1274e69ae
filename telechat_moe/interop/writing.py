"""Write a folder of weights; after a kill at any moment the next run continues where it stopped.

Until it is complete, everything is in a hidden folder beside the destination::

    .DST.partial/lock         held by the process that writes
    .DST.partial/plan.json    what is being written, from which files
    .DST.partial/inputs.jsonl checksums of input files that were read to the end
    .DST.partial/done.jsonl   output files that are complete, with their checksums
    .DST.partial/files/       the output; one that is being written ends in .part

The next run with the same plan verifies the finished files and writes the others. The destination appears under its
own name only when it is complete.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telechat_moe import files, tensor_files
from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError
from telechat_moe.files import FileSums, Progress
from telechat_moe.reading import json_or_none, parse_json
from telechat_moe.tensor_files import TensorFile, TensorOutput


@dataclass
class Destination:
    """A folder or file of weights to be made.

    Args:
        dst: Folder, or a name that ends in ``.safetensors``.
        shards: Tensors of each output file.
        extra: JSON files of a folder besides, by name.
        label: ``format`` in the files' metadata.
    """

    dst: Path
    source: Path
    inputs: Sequence[Path]
    shards: Sequence[list[TensorOutput]]
    extra: Mapping[str, Mapping[str, Any]]
    label: str
    progress: Progress | None = None
    finished: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def write(self) -> tuple[list[str], int]:
        """Write what is not written yet.

        Returns:
            Names of the files of the destination, and how many an earlier, interrupted run had finished.

        Raises:
            BadInputError: An input differs from its checksums or changed, or another process writes here.
            TelechatMoeError: Writing failed; finished files are kept.
        """
        self.work = self.dst.parent / f".{self.dst.name}.partial"
        total = sum(o.nbytes for shard in self.shards for o in shard)
        try:
            self.files = self.work / "files"
            self.files.mkdir(parents=True, exist_ok=True)
            busy = UsageError(f"another process is writing {self.dst}; wait for it")
            with files.locked(self.work / "lock", busy):
                return self._write(total)
        except OSError as error:
            path = error.filename or self.work
            raise TelechatMoeError(
                f"cannot write {self.dst}: {error.strerror or error} ({path}); {total:,} bytes are needed. "
                + self._left()
            ) from error
        except BadInputError:
            if not self.finished:
                shutil.rmtree(self.work, ignore_errors=True)
            raise

    def _left(self) -> str:
        """Remove what is of no use to the next run; say what is left."""
        if not self.finished:
            shutil.rmtree(self.work, ignore_errors=True)
            return "Nothing was left behind."
        return (
            f"{len(self.finished)} of {len(self.shards)} files are finished and kept in {self.work}: the same command "
            "continues there; remove the folder to abandon it"
        )

    def _write(self, total: int) -> tuple[list[str], int]:
        single = [self.dst.name] if self._single() else None
        names = single or tensor_files.shard_names(len(self.shards))
        before = {path: _identity(path) for path in self.inputs}
        self._begin(names)
        sources = self._check_inputs()
        self._verify_finished()
        resumed = sum(name in self.finished for name in names)
        shards = zip(names, self.shards, strict=True)
        todo = [(name, shard) for name, shard in shards if name not in self.finished]
        left = sum(o.nbytes for _, shard in todo for o in shard)
        advance = files.counter("writing", total, self.progress, total - left)
        advance(0)
        for name, shard in todo:
            self._write_shard(name, shard, advance)
        if changed := [path for path in self.inputs if _identity(path) != before[path]]:
            text = f"{changed[0]} changed while it was being read"
            raise BadInputError(f"{text}; {self.dst} was not made")
        return self._finish(names, sources), resumed

    # ------------------------------------------------------------------ what is there already

    def _begin(self, names: list[str]) -> None:
        """Continue with what is there if it was made by the same plan; else start from scratch."""
        plan = {
            "inputs": [[path.name, *_identity(path)] for path in self.inputs],
            "outputs": [
                [name, *([o.name, o.dtype, list(o.shape)] for o in shard)]
                for name, shard in zip(names, self.shards, strict=True)
            ],
            "extra": self.extra,
            "label": self.label,
        }
        key = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        path = self.work / "plan.json"
        if json_or_none(path) == {"key": key}:
            return
        for name in ("plan.json", "inputs.jsonl", "done.jsonl"):
            (self.work / name).unlink(missing_ok=True)
        shutil.rmtree(self.files)
        self.files.mkdir()
        files.write_atomic(path, files.json_bytes({"key": key}))

    def _check_inputs(self) -> FileSums:
        """Return the checksums of the inputs; compare them with the ones beside them."""
        log = self.work / "inputs.jsonl"
        logged = {line["name"]: line for line in _lines(log)}
        total = sum(path.stat().st_size for path in self.inputs)
        advance, sums = files.counter("checking the source", total, self.progress), FileSums()
        for path in self.inputs:
            if path.name in logged:
                sums[path.name] = {k: logged[path.name][k] for k in ("bytes", "sha256")}
                advance(sums[path.name]["bytes"])
                continue
            sums[path.name] = files.checksum(path, advance)
            _append(log, {"name": path.name, **sums[path.name]})
        expected = files.read_checksums(self.source) or {}
        folder = files.checksums_path(self.source).parent
        if problems := files.differences(folder, expected, sums):
            text = f"{self.source}: the weights are not those that were written:"
            raise BadInputError("\n  ".join([text, *problems]))
        return sums

    def _verify_finished(self) -> None:
        """Keep the finished files whose content is still right; remove everything else."""
        for line in _lines(self.work / "done.jsonl"):
            path = self.files / line["name"]
            if path.is_file() and path.stat().st_size == line["bytes"]:
                checksums = files.checksum(path)
                if checksums["sha256"] == line["sha256"]:
                    self.finished[line["name"]] = checksums
        for path in self.files.iterdir():
            if path.name not in self.finished:
                path.unlink()

    # ------------------------------------------------------------------ writing

    def _write_shard(
        self, name: str, shard: list[TensorOutput], advance: Callable[[int], None]
    ) -> None:
        part = self.files / f"{name}.part"
        checksums = TensorFile(name, shard, {"format": self.label}).write(part, advance)
        part.rename(self.files / name)
        files.sync_folder(self.files)
        _append(self.work / "done.jsonl", {"name": name, **checksums})
        self.finished[name] = checksums

    def _finish(self, names: list[str], sources: FileSums) -> list[str]:
        """Put the destination under its own name, complete."""
        extra = {} if self._single() else dict(self.extra)
        for name, content in extra.items():
            files.write_atomic(self.files / name, files.json_bytes(content))
        written = {name: self.finished[name] for name in names}
        written |= {name: files.checksum(self.files / name) for name in extra}
        sums = files.checksums_path(self.files / self.dst.name if self._single() else self.files)
        checksums = files.checksums_content(written, self.source, sources)
        files.write_atomic(sums, files.json_bytes(checksums))
        if self._single():
            sums.rename(self.dst.with_name(sums.name))
            (self.files / self.dst.name).rename(self.dst)
        else:
            self.files.rename(self.dst)
        files.sync_folder(self.dst.parent)
        shutil.rmtree(self.work, ignore_errors=True)
        return sorted([*written, sums.name])

    def _single(self) -> bool:
        return self.dst.suffix == ".safetensors"


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; a torn last one is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [parse_json(line) for line in lines if line.endswith(b"\n")]


def _append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line, after the rest of a line that a kill truncated, and wait until it is on the disk."""
    if path.exists() and not (raw := path.read_bytes()).endswith(b"\n") and raw:
        path.write_bytes(raw[: raw.rfind(b"\n") + 1])
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")
        os.fsync(file.fileno())
