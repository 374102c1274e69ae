"""Record the inputs of a graph's ``Tap`` operators, which ``graph/tap.py`` inserts, and read what they wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.ops import native

VALUES, STATISTICS, FINGERPRINT = MODES = ("tensor", "statistics", "fingerprint")
"""What a tap writes, in the order of the library's numbers."""


class TapError(TelechatMoeError):
    """What was to be recorded could not be written."""


@contextmanager
def recording(folder: Path, mode: str = "tensor") -> Iterator[None]:
    """Let all taps of this process write into a folder, which is made; see ``csrc/tap.cc`` for the files.

    ``mode`` is one of :data:`MODES`: values, statistics (max, min, mean, L2 norm), or fingerprints.

    Raises:
        TapError: The files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = native.load()
    if not library.telechat_tap_begin(str(folder).encode(), MODES.index(mode)):
        raise TapError(f"{folder}: values.bin and index.txt cannot be made there")
    try:
        yield
    finally:
        ended = library.telechat_tap_end()
    if ended < 0:
        raise TapError(f"{folder}: values.bin could not be written to its end; is the disk full?")


class TapRecord(NamedTuple):
    """One tensor in ``values.bin``: where it is in the file, its type by MindSpore's name, its shape."""

    file: Path
    begin: int
    size: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> bytes:
        """Return what was written of it.

        Raises:
            BadInputError: The file is too short.
        """
        with self.file.open("rb") as file:
            file.seek(self.begin)
            content = file.read(self.size)
        if len(content) != self.size:
            raise BadInputError(f"{self.file}: it ends before byte {self.begin + self.size}")
        return content


def index(folder: Path) -> dict[int, list[TapRecord]]:
    """Return what each tap has written, in the order of its runs.

    Raises:
        BadInputError: The folder does not have the library's format.
    """
    records: dict[int, list[TapRecord]] = {}
    try:
        with (folder / "index.txt").open(encoding="ascii") as lines:
            for line in lines:
                tap, begin, size, dtype, *shape = line.split()
                location = folder / "values.bin", int(begin), int(size)
                written = TapRecord(*location, dtype, tuple(map(int, shape)))
                records.setdefault(int(tap), []).append(written)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{folder}/index.txt: not what taps write: {error}") from None
    return records
