"""Shard a checkpoint for the ranks of a layout, and merge the shards, bit for bit.

``reshard`` writes a folder::

    pieces.json             layout, step, the run's state, size and SHA-256 of each file, shape of each tensor
    rank_0.safetensors      rank 0's shard of each weight, moment and average; its metadata holds their regions

Training resumes from a checkpoint under any layout without this; it is for programs that load one file for each rank.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe import files, tensor_files
from telechat_moe.checkpoint import checkpoint, manifest
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.files import UNSEALED, unseal
from telechat_moe.reading import parse_json
from telechat_moe.recipe import Recipe
from telechat_moe.sharding.shards import EMA, Region, WeightShards, weight_of
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
    flat = {name: (group, x) for group, found in saved.tensors.items() for name, x in found.items()}
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
    whole: dict[str, Array] = {}
    filled: dict[str, dict[Region, str]] = {name: {} for name in content["tensors"]}
    problems: list[str] = []
    for file, wanted in content["files"].items():
        found, problem = _read(source / file, wanted, content["step"])
        problems += [f"{file}: {problem}"] if problem else []
        for name, (region, piece) in found.items():
            problem = _put(whole, filled, content["tensors"].get(name), name, region, piece)
            problems += [f"{file}: {problem}"] if problem else []
    if not problems:
        problems = [
            f"{name}: the shards do not cover it"
            for name, described in content["tensors"].items()
            if sum(map(_size, filled[name])) != math.prod(described["shape"])
        ]
    if problems:
        raise BadInputError(f"broken shards in {source}:\n  " + "\n  ".join(problems))
    groups: dict[str, dict[str, Array]] = {}
    for name, described in content["tensors"].items():
        groups.setdefault(described["group"], {})[name] = whole[name]
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
    content = read_manifest(folder)
    problems = []
    for file, wanted in content["files"].items():
        _, problem = _read(folder / file, wanted, content["step"])
        problems += [f"{file}: {problem}"] if problem else []
    if problems:
        raise BadInputError(f"broken shards in {folder}:\n  " + "\n  ".join(problems))
    return content


def _read(
    path: Path, wanted: Mapping[str, Any], step: int
) -> tuple[dict[str, tuple[Region, Array]], str | None]:
    """Return a rank's shards with their regions, or what is wrong with the file."""
    try:
        found = files.read(path, keep=True)
    except FileNotFoundError:
        return {}, "missing"
    except OSError as error:
        return {}, f"cannot be read ({error.strerror})"
    assert found.data is not None
    if found.nbytes < wanted["bytes"]:
        return {}, f"truncated, {found.nbytes:,} bytes found, {wanted['bytes']:,} expected"
    try:
        metadata, tensors = tensor_files.metadata(found.data), parse(found.data)
        regions = parse_json(metadata.get("regions", "{}"))
        if metadata.get("step") != str(step):
            return {}, f"is of step {metadata.get('step')}, {FILE} of step {step}"
        if found.sha256 != wanted["sha256"]:
            return {}, "checksum differs, the content was changed"
        return {n: (tuple((a, b) for a, b in regions[n]), x) for n, x in tensors.items()}, None
    except (ValueError, KeyError) as error:
        return {}, f"not a file of shards ({error})"


def _put(
    whole: dict[str, Array],
    filled: dict[str, dict[Region, str]],
    described: Mapping[str, Any] | None,
    name: str,
    region: Region,
    piece: Array,
) -> str | None:
    """Copy a shard into its tensor; return what is wrong with it."""
    if described is None:
        return f"{name} is not in {FILE}"
    shape, lengths = described["shape"], [end - begin for begin, end in region]
    inside = len(region) == len(shape) and all(
        0 <= a <= b <= n for (a, b), n in zip(region, shape, strict=True)
    )
    if not inside or list(piece.shape) != lengths:
        return f"{name} is {list(piece.shape)} at {region}, the whole tensor is {shape}"
    digest = hashlib.blake2b(np.ascontiguousarray(piece).tobytes()).hexdigest()
    if region in filled[name]:
        same = filled[name][region] == digest
        return None if same else f"{name}: differs from the copy of another rank"
    if name not in whole:
        whole[name] = np.empty(shape, piece.dtype)
    filled[name][region] = digest
    whole[name][manifest.slices(region)] = piece
    return None


def _size(region: Region) -> int:
    return math.prod(b - a for a, b in region)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{path} exists; name a folder that does not")


def _check_model(saved: checkpoint.Checkpoint, cuts: WeightShards, recipe: Recipe) -> None:
    """Refuse a checkpoint of another model than the recipe's."""
    found = {name: x.shape for group in saved.tensors.values() for name, x in group.items()}
    problems = []
    averages = [f"{EMA}.{name}" for name in cuts.weights] if EMA in saved.tensors else []
    expected = {*cuts.names, *averages}
    for name in sorted(found.keys() | expected):
        wanted = cuts.shapes.get(weight_of(name))
        if name not in found:
            problems.append(f"{name} is missing")
        elif name not in expected or wanted is None:
            problems.append(f"{name} is not in the recipe's model")
        elif found[name] != wanted:
            problems.append(f"{name} is {list(found[name])}, the recipe's model has {list(wanted)}")
    if problems:
        raise BadInputError(
            f"{saved.path} does not fit the model of {recipe.source}:\n  " + "\n  ".join(problems)
        )
