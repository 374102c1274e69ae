"""Shard a checkpoint for the ranks of a layout, and merge the shards, bit for bit.

``reshard`` writes a folder::

    pieces.json             layout, step, the run's state, size and SHA-256 of each file, shape of each tensor
    rank_0.safetensors      rank 0's shard of each weight, moment and average; its metadata holds their regions

Training resumes from a checkpoint under any layout without this; it is for programs that load one file for each rank.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe import files, tensor_files
from telechat_moe.checkpoint import checkpoint, manifest
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.files import UNSEALED, unseal
from telechat_moe.reading import parse_json
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.shards import EMA, Region, WeightShards, elements, weight_of
from telechat_moe.tensor_files import Array, dtype_name, file_of, parse

FILE = "pieces.json"
FORMAT = "telechat-moe pieces"
VERSION = 1


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank}.safetensors"


def reshard(source: Path, out: Path, recipe: Recipe) -> dict[str, Any]:
    """Write a checkpoint into a new folder as the shards of a recipe's ranks; return the content of ``pieces.json``.

    Raises:
        BadInputError: The checkpoint is broken or not of this model, or the layout does not fit.
        UsageError: ``out`` exists.
    """
    _refuse_existing(out)
    cuts = WeightShards.of(recipe)
    saved = checkpoint.load(source)
    _check_model(saved, cuts, recipe)
    flat = {name: (group, x) for group, xs in saved.tensors.items() for name, x in xs.items()}
    content: dict[str, Any] = {
        "sha256": UNSEALED,
        "format": FORMAT,
        "version": VERSION,
        "step": saved.step,
        "layout": cuts.mesh.describe(),
        "devices": cuts.mesh.devices,
        "state": saved.state,
        "files": {},
        "tensors": {
            name: {"group": group, "dtype": dtype_name(x.dtype), "shape": list(x.shape)}
            for name, (group, x) in flat.items()
        },
    }
    with files.new_folder(out) as hidden:
        for rank in range(cuts.mesh.devices):
            regions: dict[str, Region] = {}
            for name, (_, x) in flat.items():
                if (region := cuts.shard(rank, name, x.dtype.itemsize)) is not None:
                    regions[name] = region
            pieces = {name: flat[name][1][manifest.slices(r)] for name, r in regions.items()}
            metadata = {"step": str(saved.step), "rank": str(rank), "regions": json.dumps(regions)}
            file = file_of(rank_file(rank), pieces, metadata)
            content["files"][file.name] = file.write(hidden / file.name)
        files.write_new(hidden / FILE, [files.seal(content)])
    return content


def merge(source: Path, root: Path) -> Path:
    """Merge shards into a checkpoint below ``root`` with whole tensors: the inverse of :func:`reshard`, byte for byte.

    ``source`` is what :func:`reshard` wrote, or a checkpoint that several ranks wrote.

    Raises:
        BadInputError: Shards are missing, truncated, changed, of another step or shape, or disagree.
    """
    if (source / manifest.FILE).exists():
        saved = checkpoint.load(source)
        _refuse_existing(root / f"step-{saved.step:08d}")
        return checkpoint.save(root, saved.step, saved.tensors, saved.state)
    content = read_manifest(source)
    final = root / f"step-{content['step']:08d}"
    _refuse_existing(final)
    tensors: dict[str, Array] = {}
    digests: dict[str, dict[Region, str]] = {name: {} for name in content["tensors"]}
    problems: list[str] = []
    for file, name, region, shard in _shards(source, content, problems):
        if problem := _put(tensors, digests, content["tensors"].get(name), name, region, shard):
            problems.append(f"{file}: {problem}")
    if not problems:
        problems = [
            f"{name}: the shards do not cover it"
            for name, entry in content["tensors"].items()
            if sum(map(elements, digests[name])) != math.prod(entry["shape"])
        ]
    _refuse(source, problems)
    groups: dict[str, dict[str, Array]] = {}
    for name, entry in content["tensors"].items():
        groups.setdefault(entry["group"], {})[name] = tensors[name]
    return checkpoint.save(root, content["step"], groups, content["state"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``pieces.json`` and check it against its own checksum.

    Raises:
        BadInputError: It is missing, changed, or of another format.
    """
    path = folder / FILE
    try:
        content, problem = unseal(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        manifest.refuse_folder_of_steps(folder)
        raise BadInputError(
            f"{folder} holds no {FILE}: it was not written by `ckpt reshard`"
        ) from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: {error}") from None
    if problem:
        raise BadInputError(f"{path}: {problem}")
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise BadInputError(
            f"{path}: format {content.get('format')!r} version {content.get('version')!r}; this program reads "
            f"{FORMAT!r} version {VERSION}"
        )
    return content


def verify(folder: Path) -> dict[str, Any]:
    """Return ``pieces.json`` after every file was compared with it.

    Raises:
        BadInputError: Files are missing, truncated, changed or of another step; lists all.
    """
    content, problems = read_manifest(folder), list[str]()
    for _ in _shards(folder, content, problems):
        pass
    _refuse(folder, problems)
    return content


def _refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        raise BadInputError(f"broken shards in {folder}:\n  " + "\n  ".join(problems))


def _shards(
    folder: Path, content: Mapping[str, Any], problems: list[str]
) -> Iterator[tuple[str, str, Region, Array]]:
    """Yield file, tensor, region and values of every shard; append what is wrong with a file to ``problems``."""
    for file, entry in content["files"].items():
        try:
            regions, tensors = _read(folder / file, entry, content["step"])
        except _FileError as error:
            problems.append(f"{file}: {error}")
            continue
        for name, shard in tensors.items():
            yield file, name, regions[name], shard


class _FileError(Exception):
    """What is wrong with the file of a rank."""


def _read(
    path: Path, entry: Mapping[str, Any], step: int
) -> tuple[dict[str, Region], dict[str, Array]]:
    """Return the regions and values of a rank's shards by the names of their tensors."""
    try:
        content = files.read(path, keep=True)
    except FileNotFoundError:
        raise _FileError("missing") from None
    except OSError as error:
        raise _FileError(f"cannot be read ({error.strerror})") from None
    assert content.data is not None
    if content.nbytes < entry["bytes"]:
        raise _FileError(f"truncated, {content.nbytes:,} bytes found, {entry['bytes']:,} expected")
    try:
        metadata, tensors = tensor_files.metadata(content.data), parse(content.data)
        regions = parse_json(metadata.get("regions", "{}"))
        bounds = {name: tuple((a, b) for a, b in regions[name]) for name in tensors}
    except (ValueError, KeyError) as error:
        raise _FileError(f"not a file of shards ({error})") from None
    if metadata.get("step") != str(step):
        raise _FileError(f"is of step {metadata.get('step')}, {FILE} of step {step}")
    if content.sha256 != entry["sha256"]:
        raise _FileError("checksum differs, the content was changed")
    return bounds, tensors


def _put(
    tensors: dict[str, Array],
    digests: dict[str, dict[Region, str]],
    entry: Mapping[str, Any] | None,
    name: str,
    region: Region,
    shard: Array,
) -> str | None:
    """Copy a shard into its tensor; return what is wrong with it."""
    if entry is None:
        return f"{name} is not in {FILE}"
    shape, lengths = entry["shape"], [end - begin for begin, end in region]
    ends = zip(region, shape, strict=False)
    inside = len(region) == len(shape) and all(0 <= a <= b <= n for (a, b), n in ends)
    if not inside or list(shard.shape) != lengths:
        return f"{name} is {list(shard.shape)} at {region}, the whole tensor is {shape}"
    digest = hashlib.blake2b(np.ascontiguousarray(shard).tobytes()).hexdigest()
    if region in digests[name]:
        is_copy = digests[name][region] == digest
        return None if is_copy else f"{name}: differs from the copy of another rank"
    if name not in tensors:
        tensors[name] = np.empty(shape, shard.dtype)
    digests[name][region] = digest
    tensors[name][manifest.slices(region)] = shard
    return None


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{path} exists; name a folder that does not")


def _check_model(saved: checkpoint.Checkpoint, cuts: WeightShards, recipe: Recipe) -> None:
    """Refuse a checkpoint of another model than the recipe's."""
    shapes = {name: x.shape for group in saved.tensors.values() for name, x in group.items()}
    problems = []
    averages = [f"{EMA}.{name}" for name in cuts.weights] if EMA in saved.tensors else []
    expected = {*cuts.names, *averages}
    for name in sorted(shapes.keys() | expected):
        expected_shape = cuts.shapes.get(weight_of(name))
        if name not in shapes:
            problems.append(f"{name} is missing")
        elif name not in expected or expected_shape is None:
            problems.append(f"{name} is not in the recipe's model")
        elif shapes[name] != expected_shape:
            problems.append(
                f"{name} is {list(shapes[name])}, the recipe's model has {list(expected_shape)}"
            )
    if problems:
        raise BadInputError(
            f"{saved.path} does not fit the model of {recipe.source}:\n  " + "\n  ".join(problems)
        )
