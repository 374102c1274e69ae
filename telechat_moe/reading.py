"""Read what others wrote: a regular file of bounded size, and JSON of bounded depth and bounded numbers.

What is wrong is said in one line with the place; nothing that a file says decides how much memory or time it takes.
"""

import json
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from telechat_moe.errors import BadInputError
from telechat_moe.narrowing import is_object, short

MAX_BYTES = 1 << 30
"""Of a file that is read as a whole."""
MAX_DEPTH = 127
"""Levels of JSON, as the safetensors library has it."""
MAX_DIGITS = 300
"""Of an integer: as many as a float can have."""
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What is raised where a value that was read has another form than expected."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def real_path(path: str | Path) -> Path:
    """Return where a path leads, absolute; what leads in a circle stays as it is, for whoever opens it to refuse."""
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a circle


class JsonError(ValueError):
    """A text is not JSON as this package reads it.

    Attributes:
        line: Where; 0: not known.
    """

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


def parse_json(text: bytes | str, *, finite: bool = True, unique: bool = True) -> Any:
    """Return what a JSON text says.

    Args:
        text: Bytes in UTF-8, with or without a byte order mark.
        finite: Refuse numbers that are not finite, and integers of more than :data:`MAX_DIGITS`.
        unique: Refuse a key that is there twice.

    Raises:
        JsonError: It is no JSON, is nested deeper than :data:`MAX_DEPTH`, or is refused.
    """
    hooks: dict[str, Any] = {}
    if finite:
        hooks = {"parse_constant": _refuse, "parse_float": _finite, "parse_int": _integer}
    if unique:
        hooks["object_pairs_hook"] = unique_keys
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text, **hooks)
        _check_depth(value)
        if _SURROGATE.search(text):  # half a character can neither be printed nor written
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise JsonError(str(error), error.lineno) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise JsonError(f"no UTF-8 in line {line}", line) from None
    except RecursionError:
        raise JsonError(f"nested too deeply, more than {MAX_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise JsonError("half a character (a lone surrogate)") from None
    except ValueError as error:  # a hook's, or an integer of thousands of digits
        raise JsonError(short(error).partition(";")[0]) from None
    return value


def _check_depth(value: Any) -> None:
    containers: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        containers = [
            below
            for above in containers
            for below in (above.values() if is_object(above) else above)
            if isinstance(below, dict | list)
        ]
    if containers:
        raise RecursionError


class DuplicateKeyError(ValueError):
    """An object of JSON has a key twice."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON.

    Raises:
        DuplicateKeyError: A key is there twice.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise DuplicateKeyError(f"the key {short(name)!r} appears twice")
    return content


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        _refuse(text)
    return number


def _integer(text: str) -> int:
    if text == "-0" or len(text) > MAX_DIGITS:
        _refuse(text)
    return int(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"the number {short(text)}, which is no finite number")


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        BadInputError: It is missing, no regular file, cannot be read, or has more than ``limit`` bytes.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise BadInputError(f"{path}: no regular file")
        with path.open("rb") as file:
            fits = os.fstat(file.fileno()).st_size <= limit
            data = file.read() if fits else b""
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadInputError(
            f"{path}: cannot be read: {getattr(error, 'strerror', error)}"
        ) from None
    if not fits:
        raise BadInputError(f"{path}: more than {limit:,} bytes; expected a smaller file")
    return data


def most_inflated(compressed: int) -> int:
    """Return how many bytes compressed text may have; it shrinks to a tenth, a bomb to a thousandth."""
    return max(1 << 26, 200 * compressed)


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Raises:
        BadInputError: See :func:`read_bytes`; or a byte is not UTF-8.
    """
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise BadInputError(f"{path}:{line}: a byte that is not UTF-8; save it as UTF-8") from None


def json_or_none(path: Path) -> Any:
    """Return what a JSON file of ours says; None: there is none, or a kill has torn it."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        BadInputError: It cannot be read, or is no such JSON; names file and line.
    """
    try:
        content = parse_json(read_bytes(path))
    except JsonError as error:
        place = f"{path}:{error.line}" if error.line else f"{path}"
        raise BadInputError(f"{place}: not valid JSON: {error}") from None
    if not is_object(content):
        raise BadInputError(f"{path}: {type(content).__name__} found, expected an object")
    return content
