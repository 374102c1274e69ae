"""The indices of large datasets on the disk: built once, then opened through memory maps in any number of processes.

``PREFIX.cache/KEY/`` holds ``documents.npy``, ``samples.npy``, ``shuffle.npy`` and ``index.json``. KEY is a hash of the
dataset's fingerprint and of all settings that decide the indices, so one that is there is the right one. A folder appears by
renaming, complete; what a killed build left is removed by the next.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.data.indexed import IndexedDataset
from telechat_moe.data.pack import Allocate, Indices, Progress, build_indices, sizes_of
from telechat_moe.errors import TelechatMoeError
from telechat_moe.files import json_bytes, locked, new_folder, sync_file, write_atomic

logger = logging.getLogger(__name__)

ON_DISK = 1 << 26
"""Numbers in the indices from which on they are kept on the disk: about 22 million samples."""
_NAMES = ("documents", "samples", "shuffle")
_ABOUT = "index.json"
_BUILDING = ".building"


def open_indices(
    source: IndexedDataset,
    documents: tuple[int, int],
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> Indices:
    """Return the indices of a dataset: small ones are built in memory, others opened, and built where they are missing.

    Args:
        source: The token files.
        documents, settings: See :func:`telechat_moe.data.pack.build_indices`.

    Raises:
        ValueError: If the documents hold fewer tokens than one sample needs.
    """
    lengths, (first, end) = source.sequence_lengths, documents
    some = {name: value for name, value in settings.items() if name != "seed"}
    sizes = sizes_of(source.tokens_in(first, end), end - first, **some)
    if sizes.entries < ON_DISK:
        return build_indices(lengths, documents, **settings)
    key = json.dumps([source.fingerprint(), list(documents), settings], sort_keys=True)
    folder = Path(f"{source.prefix}.cache") / hashlib.sha256(key.encode()).hexdigest()[:32]
    if (found := _read(folder)) is not None:
        return found
    try:
        folder.parent.mkdir(exist_ok=True)
        with locked(folder.parent / _BUILDING, None):
            if (found := _read(folder)) is not None:
                return found  # another process has built it
            for left in folder.parent.glob(f".{folder.name}-*"):
                shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            logger.warning(
                "%s: building the index of %s samples, once", source.prefix, f"{sizes.samples:,}"
            )
            with new_folder(folder) as hidden:
                indices = build_indices(
                    lengths, documents, **settings, allocate=_allocate_in(hidden), progress=progress
                )
                _finish(hidden, indices)
    except OSError as error:
        raise TelechatMoeError(
            f"{folder}: the index of {sizes.samples:,} samples ({sizes.entries * 6 >> 20:,} MiB) cannot be written: "
            f"{error.strerror or error}; free space there or make it writable"
        ) from None
    found = _read(folder)
    assert found is not None
    return found


def _allocate_in(folder: Path) -> Allocate:
    def allocate(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        path = folder / f"{name}.npy"
        array = np.lib.format.open_memmap(path, "w+", dtype, shape)
        return array.view(np.ndarray)

    return allocate


def _finish(folder: Path, indices: Indices) -> None:
    """Bring the arrays to the disk, then say what they are."""
    sizes: dict[str, int] = {}
    for name in _NAMES:
        path = folder / f"{name}.npy"
        getattr(indices, name).base.flush()
        with path.open("rb") as file:
            sync_file(file)
        sizes[path.name] = path.stat().st_size
    write_atomic(folder / _ABOUT, json_bytes({"epochs": indices.epochs, "bytes": sizes}))


def _read(folder: Path) -> Indices | None:
    """Open indices; None: they are not there, or not whole."""
    try:
        about = json.loads((folder / _ABOUT).read_bytes())
        whole = all((folder / f).stat().st_size == size for f, size in about["bytes"].items())
        if not whole:
            logger.warning("%s: not whole; building it again", folder)
            return None
        arrays = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r").view(np.ndarray) for name in _NAMES
        }
        return Indices(**arrays, epochs=int(about["epochs"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
