"""Record the inputs of a graph's ``Tap`` operators, which ``graph/tap.py`` inserts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from telechat_moe.errors import TelechatMoeError
from telechat_moe.ops import native

MODES = ("tensor", "statistics", "fingerprint")


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
