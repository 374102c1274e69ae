"""samples.jsonl: which samples each step saw. It is only ever appended to, by resumed runs, too; ``audit`` reads it.

Lines by ``event``:

``start``
    A process begins: ``step`` (last step done), ``next_sample``, ``samples_per_epoch``, ``earlier_samples`` (of other data
    that count as read), ``global_batch``, ``unit`` (samples that are of one epoch), ``dataset`` (fingerprint), ``data_path``, ``layout``, ``rollbacks`` (of the checkpoint that it resumes from); ``sources``: the
    prefixes, where there are several; ``mixture``: their schedule, of each segment the first sample, and number,
    fingerprint and weight of each source that has a weight (``telechat_moe.mixture``); ``new_data``: true,
    the data are others than that checkpoint's and begin anew; ``continues``: that checkpoint, if it is another run's.
``step``
    A step is done: ``step``, ``first`` and ``count`` (samples, counted through all epochs), ``content`` (BLAKE2b of
    their token ids in the order in which they were read, 64 bits), ``applied`` (false: the update was left out),
    ``order`` (where samples were dealt: for each micro-batch and data-parallel rank its samples, counted from ``first``),
    ``sources`` (where there are several: samples of each).
``rollback``
    The run went back: ``to_step``, ``from_step``, ``left_out`` (first sample and the one after the last), and why.

The lines of a run are in order of time: a ``start`` at step 6 after a line of step 9 undoes the steps 7 to 9.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

FILE = "samples.jsonl"


def content(input_ids: Iterable[np.ndarray]) -> str:
    """Return the checksum of token ids, ``[rows, S]`` each; it does not depend on the division into micro-batches."""
    digest = hashlib.blake2b(digest_size=8)
    for rows in input_ids:
        digest.update(np.ascontiguousarray(rows, dtype=np.int32).data)
    return digest.hexdigest()


class SampleLog:
    """Append to a samples.jsonl; every line is in the file when a method returns.

    Args:
        path: The file. A line that a kill truncated is kept, on a line of its own.
        fresh: The file is a new run's: an existing one is kept as ``samples.previous.jsonl``.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh and path.exists():
            path.replace(path.with_name("samples.previous.jsonl"))
        self._file = path.open("ab", buffering=0)
        if self._file.tell():
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    self._file.write(b"\n")

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Append a line of JSON; the module names its keys."""
        self._file.write(json.dumps({"event": event, **values}).encode() + b"\n")

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
