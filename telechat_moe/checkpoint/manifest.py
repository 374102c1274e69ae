"""checkpoint.json: what a checkpoint consists of, and the checksums of all of it.

::

    {
     "sha256":  "<of this file, with these 64 digits replaced by zeros>",
     "format":  "telechat-moe checkpoint",
     "version": 1,
     "step":    123,
     "state":   {whatever the trainer needs to resume},
     "files":   {"model-00001-of-00001.safetensors": {"bytes": 4096, "sha256": "..."}},
     "tensors": {"model": {"norm.weight": {"dtype": "F32", "shape": [256], "file": "model-..."}}}
    }

Version 2 was written by several ranks together: ``ranks`` and ``layout`` say by which, and instead of ``file`` a tensor
has ``"pieces": [{"file": "model_rank00000-...", "region": [[0, 128]]}]``: its shards, each with its file and its
(begin, end) in every dimension of the tensor. The shards of a tensor have one shape and tile it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from telechat_moe.errors import BadInputError
from telechat_moe.files import UNSEALED, unseal
from telechat_moe.narrowing import is_object
from telechat_moe.sharding.shards import Region
from telechat_moe.tensor_files import TensorFile

FILE = "checkpoint.json"
FORMAT = "telechat-moe checkpoint"
VERSION, VERSION_SHARDED = 1, 2


STEP_NAME = re.compile(r"(?:\.replaced-)?step-(\d{8,})")
"""Name of a checkpoint's folder; the prefix marks one whose replacement was interrupted."""

_FILE_NAME = re.compile(r"[a-z][a-z0-9_]*-\d{5,}-of-\d{5,}\.safetensors")


class BrokenCheckpointError(BadInputError):
    """A checkpoint is not what was saved (exit code 3).

    Attributes:
        path: Folder of the checkpoint.
        problems: One line for each file or tensor that differs, and how.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        super().__init__(f"broken checkpoint {path}:\n  " + "\n  ".join(problems))


def build(
    step: int, planned: list[tuple[str, TensorFile]], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of checkpoint.json, with zeros in place of the checksums.

    Raises:
        BadInputError: If JSON would change or lose a part of ``state``; names the part.
    """
    described: dict[str, dict[str, Any]] = {group: {} for group, _ in planned}
    for group, file in planned:
        for output in file.outputs:
            about = {"dtype": output.dtype, "shape": list(output.shape), "file": file.name}
            described[group][output.name] = about
    files = {file.name: {"bytes": file.nbytes, "sha256": UNSEALED} for _, file in planned}
    return describe(step, state, files, described, {"version": VERSION})


def describe(
    step: int,
    state: Mapping[str, Any],
    files: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of checkpoint.json; ``about``: its version and what else belongs to it.

    Raises:
        BadInputError: If JSON would change or lose a part of ``state``; names the part.
    """
    return {
        "sha256": UNSEALED,
        "format": FORMAT,
        **about,
        "step": step,
        "state": _plain(state, "state"),
        "files": dict(files),
        "tensors": {group: dict(sorted(names.items())) for group, names in tensors.items()},
    }


def slices(region: Region) -> tuple[slice, ...]:
    """Return the indices of a region in its tensor."""
    return tuple(slice(begin, end) for begin, end in region)


def pieces(described: Mapping[str, Any]) -> list[tuple[str, Region]]:
    """Return the shards of a tensor: the file of each, and its region in the tensor."""
    if "pieces" not in described:
        return [(described["file"], tuple((0, n) for n in described["shape"]))]
    return [(p["file"], tuple((a, b) for a, b in p["region"])) for p in described["pieces"]]


def tiles(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Return whether regions of one shape cover a whole tensor, each element once."""
    if not regions or any(len(region) != len(shape) for region in regions):
        return False
    lengths = [end - begin for begin, end in regions[0]]
    for region in regions:
        for (begin, end), length, size in zip(region, lengths, shape, strict=True):
            aligned = begin % length == 0 if length else begin == 0
            if end - begin != length or not aligned or not 0 <= begin <= end <= size:
                return False
    return (
        len(set(regions)) == len(regions)
        and math.prod(lengths) * len(regions) == math.prod(shape)
        and all(length or not size for length, size in zip(lengths, shape, strict=True))
    )


def _plain(value: Any, location: str) -> Any:
    """Return a copy made of plain JSON types; refuse what JSON would change or lose."""
    if isinstance(value, Mapping):
        plain: dict[str, Any] = {}
        for key in value:
            if not isinstance(key, str):
                raise BadInputError(f"{location}: key {key!r} must be a string")
            plain[check_text(key, f"key of {location}")] = _plain(value[key], f"{location}.{key}")
        return plain
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{location}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str):
        return check_text(value, location)
    if type(value) is float and not math.isfinite(value):
        raise BadInputError(f"{location}: {value} is not a JSON number")
    if value is None or type(value) in (bool, int, float):
        return value
    raise BadInputError(f"{location}: {type(value).__name__} {value!r} cannot be stored as JSON")


def check_text(text: str, location: str) -> str:
    """Return ``text``; refuse what cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(f"{location}: {text!r} is not valid Unicode") from error
    return text


def refuse_folder_of_steps(path: Path) -> None:
    """Refuse the folder of a run's checkpoints where one of them is expected.

    Raises:
        BadInputError: It is one; names the newest.
    """
    if steps := sorted(p.name for p in path.glob("step-*") if STEP_NAME.fullmatch(p.name)):
        raise BadInputError(
            f"{path} is a folder of {len(steps)} checkpoint(s); name one, such as {path / steps[-1]}"
        )


def read(path: Path) -> dict[str, Any]:
    """Read checkpoint.json in a checkpoint's folder and check it against its own checksum.

    Raises:
        BrokenCheckpointError: If it is missing, unreadable, changed or of another format.
        BadInputError: If the folder holds checkpoints.
    """

    def broken(problem: str) -> BrokenCheckpointError:
        return BrokenCheckpointError(path, [f"{FILE}: {problem}"])

    try:
        raw = (path / FILE).read_bytes()
    except FileNotFoundError:
        refuse_folder_of_steps(path)
        raise broken("missing" if path.is_dir() else f"there is no folder {path}") from None
    except OSError as error:
        raise broken(f"cannot be read ({error.strerror})") from error
    try:
        content, problem = unseal(raw)
    except ValueError as error:
        raise broken(str(error)) from error
    if content.get("format") != FORMAT:
        raise broken(f"not the description of a checkpoint (no format {FORMAT!r})")
    if content.get("version") not in (VERSION, VERSION_SHARDED):
        raise broken(
            f"version {content.get('version')!r}; this program reads versions {VERSION} and {VERSION_SHARDED}"
        )
    if problem:
        raise broken(problem)
    if lost := [k for k in ("step", "state", "files", "tensors") if k not in content]:
        raise broken(f"key {lost[0]!r} is missing")
    match = STEP_NAME.fullmatch(path.name)
    if match and content["step"] != int(match[1]):
        raise broken(f"is of step {content['step']}; the folder was renamed")
    if wrong := _wrong_files(content["files"]):
        raise broken(wrong)
    return content


def _wrong_files(files: Any) -> str:
    """Return what is wrong with how files are described; empty: nothing."""
    for name, described in files.items() if is_object(files) else [("", files)]:
        if not _FILE_NAME.fullmatch(name):
            return f"bad file name {name!r}"
        match described:
            case {"bytes": int(), "sha256": str()}:
                pass
            case _:
                return f"{name}: no bytes and sha256"
    return ""


def incomplete(path: Path) -> BrokenCheckpointError | None:
    """Return what is wrong with a checkpoint as far as names and sizes of files show; None: nothing."""
    try:
        files = read(path)["files"]
    except BrokenCheckpointError as error:
        return error
    problems: list[str] = []
    for name, described in files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            problems.append(f"{name}: missing")
        elif size != described["bytes"]:
            problems.append(f"{name}: {size:,} bytes, {FILE} says {described['bytes']:,}")
    return BrokenCheckpointError(path, problems) if problems else None
