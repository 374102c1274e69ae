"""Average the weights of several checkpoints, or take the moving average that one holds."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe import tensor_files
from telechat_moe.checkpoint import manifest
from telechat_moe.checkpoint.weights import differing_shapes, is_transient, read_weights
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.files import Progress
from telechat_moe.interop.writing import Destination
from telechat_moe.numerics import widen
from telechat_moe.sharding.shards import EMA
from telechat_moe.tensor_files import BYTES_OF_DTYPE, Bytes, TensorEntry, TensorOutput

SHARD_BYTES = 5_000_000_000
_SHOWN = 4


@dataclass(frozen=True)
class Average:
    """What was written.

    Attributes:
        sources: Where each term comes from: path, share, and of a checkpoint the SHA-256 of its ``checkpoint.json``.
    """

    path: str
    sources: list[dict[str, Any]]
    files: list[str]
    tensors: int
    total_bytes: int


def average(
    sources: Sequence[Path],
    out: Path,
    weights: Sequence[float] | None = None,
    *,
    ema: bool = False,
    progress: Progress | None = None,
) -> Average:
    """Write ``sum(w_i x_i) / sum(w_i)`` of every weight, added in float64, as float32 weights that `load_checkpoint` reads.

    Args:
        sources: Checkpoints of any layout, or folders and files of weights with our names.
        out: Folder, or a name that ends in ``.safetensors``; must not exist, appears when it is complete.
        weights: ``w_i`` > 0; None: all equal.
        ema: Take the group ``ema`` of the checkpoints instead of their weights.

    Raises:
        UsageError: The weights are not one positive number for each source, or ``out`` exists.
        BadInputError: A source is broken or has other tensors than the first.
        TelechatMoeError: Writing failed; ``out`` was not made.
    """
    factors = list(weights) if weights is not None else [1.0] * len(sources)
    if len(factors) != len(sources) or not all(np.isfinite(w) and w > 0 for w in factors):
        raise UsageError(
            f"--weights {' '.join(f'{w:g}' for w in factors)}: expected {len(sources)} positive numbers, one for each checkpoint"
        )
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists; remove it or name another --out")
    sources_entries = [_open(source, ema) for source in sources]
    for source, entries in zip(sources[1:], sources_entries[1:], strict=True):
        _compare(sources[0], sources_entries[0], source, entries)
    shares = [w / sum(factors) for w in factors]
    outputs = [
        TensorOutput(
            name, "F32", entry.shape, lambda n=name: _mean([e[n] for e in sources_entries], shares)
        )
        for name, entry in sources_entries[0].items()
    ]
    about = [_about(*x, ema) for x in zip(sources, shares, strict=True)]
    single = out.suffix == ".safetensors"
    shards = tensor_files.split(outputs, 1 << 62 if single else SHARD_BYTES)
    extra: dict[str, Mapping[str, Any]] = {"average.json": {"sources": about}}
    if len(shards) > 1:
        extra[tensor_files.INDEX] = tensor_files.index_of(shards)
    files, _ = Destination(out, sources[0], [], shards, extra, "pt", progress).write()
    return Average(str(out), about, files, len(outputs), sum(o.nbytes for o in outputs))


def _open(source: Path, ema: bool) -> dict[str, TensorEntry]:
    """Return the weights of a source by name; of a checkpoint every checksum is compared."""
    if ema and not (source / manifest.FILE).is_file():
        text = "is no checkpoint, so it holds no moving average; leave --ema out"
        raise BadInputError(f"{source} {text}")
    entries = read_weights(source, group=EMA if ema else "model")
    if ema and not entries:
        text = "holds no moving average; set telechat_moe.ema in the recipe of the run"
        raise BadInputError(f"{source} {text}")
    prefix = f"{EMA}." if ema else ""
    entries = {n.removeprefix(prefix): e for n, e in entries.items() if not is_transient(n)}
    for name, entry in entries.items():
        if entry.dtype not in BYTES_OF_DTYPE:
            text = f"{name} is {entry.dtype}; an average takes {', '.join(BYTES_OF_DTYPE)}"
            raise BadInputError(f"{source}: {text}")
    return entries


def _compare(
    first: Path, expected: dict[str, TensorEntry], source: Path, entries: dict[str, TensorEntry]
) -> None:
    problems = differing_shapes(entries, {name: entry.shape for name, entry in expected.items()})
    if problems:
        suffix = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise BadInputError(
            f"{source} is of another model than {first}: {', '.join(problems[:_SHOWN])}{suffix}; "
            "average checkpoints of one model"
        )


def _about(source: Path, share: float, ema: bool) -> dict[str, Any]:
    origin: dict[str, Any] = {"path": str(source), "share": share, "group": EMA if ema else "model"}
    file = source / manifest.FILE
    if file.is_file():
        return {**origin, "checkpoint.json": hashlib.sha256(file.read_bytes()).hexdigest()}
    return {**origin, "written": source.stat().st_mtime_ns}


def _mean(entries: Sequence[TensorEntry], shares: Sequence[float]) -> Iterator[Bytes]:
    """Yield the bytes of a weighted mean, one tensor in memory at a time."""
    total = np.zeros(entries[0].shape, np.float64)
    for entry, share in zip(entries, shares, strict=True):
        total += share * _values(entry)
    yield total.astype("<f4").reshape(-1).view(np.uint8)


def _values(entry: TensorEntry) -> np.ndarray:
    data = entry.read()
    if entry.dtype == "BF16":
        array = widen(data.view(np.uint16), "bfloat16")
    else:
        array = data.view(tensor_files.DTYPES[entry.dtype])
    return array.reshape(entry.shape).astype(np.float64)
