"""The indices of large datasets on the disk: built once, then opened through memory maps in any number of processes.

``PREFIX.cache/KEY/`` holds an index's arrays, ``NAME.npy``, and ``index.json``. KEY is a hash of the
dataset's fingerprint and of all settings that decide the index, so one that is there is the right one. A folder appears by
renaming, complete; what a killed build left is removed by the next.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.pack import Allocate, SampleIndices, build_indices, sizes_of
from telechat_moe.errors import TelechatMoeError
from telechat_moe.files import Progress, json_bytes, locked, new_folder, sync_file, write_atomic
from telechat_moe.reading import parse_json

logger = logging.getLogger(__name__)

ON_DISK = 1 << 26
"""Numbers in an index from which on it is kept on the disk: about 22 million samples."""
_ABOUT = "index.json"
_BUILDING = ".building"

IndexArrays = dict[str, np.ndarray]


def open_indices(
    source: IndexedDataset,
    documents: tuple[int, int],
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> SampleIndices:
    """Return the indices of a dataset; see :func:`open_arrays`.

    Args:
        documents, settings: See :func:`telechat_moe.data.pack.build_indices`.

    Raises:
        ValueError: If the documents hold fewer tokens than one sample needs.
    """
    first, end = documents
    some = {name: value for name, value in settings.items() if name != "seed"}
    sizes = sizes_of(source.tokens_in(first, end), end - first, **some)

    def build(allocate: Allocate | None) -> IndexArrays:
        say = None if allocate is None else progress
        arrays = build_indices(
            source.sequence_lengths, documents, **settings, allocate=allocate, progress=say
        )
        return {name: getattr(arrays, name) for name in ("documents", "samples", "shuffle")}

    key = [list(documents), settings]
    arrays = open_arrays(source, key, sizes.entries, build, f"{sizes.samples:,} samples")
    return SampleIndices(**arrays, epochs=sizes.epochs)


def open_arrays(
    source: IndexedDataset,
    key: list[Any],
    entries: int,
    build: Callable[[Allocate | None], IndexArrays],
    description: str,
) -> IndexArrays:
    """Return an index: a small one is built in memory, others opened, and built where they are missing.

    Args:
        source: The token files that it is kept beside.
        key: All that decides it but the files, JSON values.
        entries: About how many numbers it has.
        build: Makes its arrays. It may let the function that it gets, if any, make some of them on the disk.

    Raises:
        TelechatMoeError: It cannot be written.
    """
    if entries < ON_DISK:
        return build(None)
    text = json.dumps([source.fingerprint(), *key], sort_keys=True)
    folder = Path(f"{source.prefix}.cache") / hashlib.sha256(text.encode()).hexdigest()[:32]
    if (arrays := _read(folder)) is not None:
        return arrays
    try:
        folder.parent.mkdir(exist_ok=True)
        with locked(folder.parent / _BUILDING, None):
            if (arrays := _read(folder)) is not None:
                return arrays  # another process has built it
            for left in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            logger.warning("%s: building the index of %s, once", source.prefix, description)
            with new_folder(folder) as hidden:
                _finish(hidden, build(_allocate_in(hidden)))
    except OSError as error:
        raise TelechatMoeError(
            f"{folder}: the index of {description} ({entries * 6 >> 20:,} MiB) cannot be written: "
            f"{error.strerror or error}; free space there or make it writable"
        ) from None
    arrays = _read(folder)
    assert arrays is not None
    return arrays


def _allocate_in(folder: Path) -> Allocate:
    def allocate(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        array = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)
        return array.view(np.ndarray)

    return allocate


def _finish(folder: Path, arrays: IndexArrays) -> None:
    """Bring the arrays to the disk, then say what they are."""
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        path = folder / f"{name}.npy"
        if isinstance(array.base, np.memmap):
            array.base.flush()
        else:
            np.save(path, array)
        with path.open("rb") as file:
            sync_file(file)
        sizes[path.name] = path.stat().st_size
    write_atomic(folder / _ABOUT, json_bytes({"bytes": sizes}))


def _read(folder: Path) -> IndexArrays | None:
    """Open an index; None: it is not there, or not whole."""
    try:
        sizes = parse_json((folder / _ABOUT).read_bytes())["bytes"]
        if not all((folder / file).stat().st_size == size for file, size in sizes.items()):
            logger.warning("%s: not whole; building it again", folder)
            return None
        opened = {file: np.load(folder / file, mmap_mode="r") for file in sizes}
        return {Path(file).stem: array.view(np.ndarray) for file, array in opened.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
