"""SHA-256 of weight files: ``checksums.json`` beside them, written by ``convert``, verified whenever they are read.

::

    {
     "format":  "telechat-moe weights",
     "version": 1,
     "files":   {"model-00001-of-00002.safetensors": {"bytes": 4096, "sha256": "..."}, ...},
     "source":  {"path": "hf", "files": {"model.safetensors": {"bytes": 8192, "sha256": "..."}}}
    }

Beside a single file ``x.safetensors`` it is called ``x.safetensors.checksums.json``.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from telechat_moe.errors import BadInputError

FILE = "checksums.json"
FORMAT = "telechat-moe weights"
VERSION = 1
_CHUNK_BYTES = 1 << 20

Known = dict[str, dict[str, Any]]
"""Files by name: ``bytes`` and ``sha256``."""


def place(weights: Path) -> Path:
    """Return where the checksums of a folder or of a single file stand."""
    if weights.suffix == ".safetensors" and not weights.is_dir():
        return weights.with_name(f"{weights.name}.{FILE}")
    return weights / FILE


def content(files: Known, source: Path, source_files: Known) -> dict[str, Any]:
    """Return the content of checksums.json."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "files": files,
        "source": {"path": str(source), "files": source_files},
    }


def read(weights: Path) -> Known | None:
    """Return the files that the checksums beside weights name; None if there are no checksums.

    Raises:
        BadInputError: checksums.json cannot be read.
    """
    path = place(weights)
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror}") from error
    try:
        found = json.loads(raw)
        if (found["format"], found["version"]) != (FORMAT, VERSION):
            raise ValueError(f"{found['format']} version {found['version']}")
        files = {
            str(n): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])}
            for n, f in found["files"].items()
        }
        if any(Path(name).name != name for name in files):
            raise ValueError("a file outside the folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"{path}: no checksums of {FORMAT} version {VERSION} ({error!r})"
        ) from error
    return files


def of_file(path: Path, advance: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Return size and SHA-256 of a file.

    Args:
        path: The file.
        advance: Called with the number of bytes read, again and again.
    """
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            if advance is not None:
                advance(count)
    return {"bytes": size, "sha256": digest.hexdigest()}


def differences(folder: Path, expected: Known, found: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return how files differ from what was written, a line each; files that were not looked at count as right."""
    problems: list[str] = []
    for name, now in found.items():
        was = expected.get(name)
        if was is None:
            continue
        if now["bytes"] != was["bytes"]:
            problems.append(
                f"{folder / name}: {now['bytes']:,} bytes, {was['bytes']:,} were written"
            )
        elif now["sha256"] != was["sha256"]:
            problems.append(
                f"{folder / name}: checksum differs, the content was changed "
                f"(sha256 {now['sha256']}, not {was['sha256']})"
            )
    return problems


def verify(
    weights: Path, progress: Callable[[str, int, int], None] | None = None
) -> tuple[int, int, list[str]]:
    """Compare all files with their checksums.

    Args:
        weights: Folder or single file with checksums beside it.
        progress: Called with a phase, the bytes read and the bytes in all.

    Returns:
        Number of files, their bytes, and the problems, a line each.

    Raises:
        BadInputError: There are no checksums.
    """
    expected = read(weights)
    if expected is None:
        what = (
            "no such file or folder" if not weights.exists() else f"no {place(weights).name} there"
        )
        raise BadInputError(f"{weights}: {what}; nothing to verify against")
    folder = place(weights).parent
    total, done = sum(f["bytes"] for f in expected.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("verifying", done, max(done, total))

    problems: list[str] = []
    for name in expected:
        try:
            problems += differences(folder, expected, {name: of_file(folder / name, advance)})
        except FileNotFoundError:
            problems.append(f"{folder / name}: missing")
        except OSError as error:
            problems.append(f"{folder / name}: cannot be read ({error.strerror})")
    return len(expected), total, problems


def require(weights: Path) -> None:
    """Refuse weights that differ from the checksums beside them; without checksums anything goes.

    Raises:
        BadInputError: A file differs, is missing or cannot be read; lists all.
    """
    if read(weights) is None:
        return
    _, _, problems = verify(weights)
    if problems:
        raise BadInputError(
            f"{weights}: the weights are not those that were written:\n  " + "\n  ".join(problems)
        )
