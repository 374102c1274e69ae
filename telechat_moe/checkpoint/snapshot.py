"""Copy all parameters between two steps: the only time that a save stops training.

On CPU MindSpore gives access to a parameter's own memory, so that a copy needs no call into MindSpore: the view is kept
from save to save and replaced when the parameter has other memory. The copies go into memory that is kept, too, because
fresh pages would cost more than the copy.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from telechat_moe.ops import native

ArrayGroups = dict[str, dict[str, np.ndarray]]

_ALIGNMENT = 64
# From here on several threads copy faster. MindSpore's threads spin for a while after a step,
# and a small copy would wait for them.
_SEVERAL_THREADS = 64 << 20


class Source(Protocol):
    """What is copied: a ``mindspore.Parameter``."""

    def asnumpy(self) -> np.ndarray: ...  # noqa: D102
    def data_ptr(self) -> int: ...  # noqa: D102


class Snapshot:
    """Copies of parameters, by group and name, whose shapes and data types do not change."""

    def __init__(self, sources: Mapping[str, Mapping[str, Source]]) -> None:
        self.names = [(group, name) for group, parameters in sources.items() for name in parameters]
        self.follow(sources)
        self.views = [source.asnumpy() for source in self.sources]
        self.addresses = np.array([view.ctypes.data for view in self.views], np.uint64)
        offsets, end = [], 0
        for view in self.views:
            offsets.append(end)
            end += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = np.zeros(end, np.uint8)
        memory.fill(0)  # touches every page, so that the first save does not
        self.copies = [
            memory[start : start + view.nbytes].view(view.dtype).reshape(view.shape)
            for start, view in zip(offsets, self.views, strict=True)
        ]
        self._to = np.array([copy.ctypes.data for copy in self.copies], np.uint64)
        self._nbytes = np.array([view.nbytes for view in self.views], np.int64)
        self._all_threads = end >= _SEVERAL_THREADS
        self._native = _is_built()
        self.groups: ArrayGroups = {group: {} for group in sources}
        for (group, name), copy in zip(self.names, self.copies, strict=True):
            self.groups[group][name] = copy

    def follow(self, sources: Mapping[str, Mapping[str, Source]]) -> None:
        """Copy other parameters from now on, of the same names, shapes and data types."""
        self.sources = [sources[group][name] for group, name in self.names]

    @property
    def nbytes(self) -> int:
        """Bytes that a snapshot holds."""
        return sum(copy.nbytes for copy in self.copies)

    def take(self) -> ArrayGroups:
        """Copy all parameters; the arrays are overwritten by the next call."""
        for i, source in enumerate(self.sources):
            # Where a device has its own memory, the two addresses never agree.
            if source.data_ptr() != self.addresses[i]:
                self.views[i] = source.asnumpy()
                self.addresses[i] = self.views[i].ctypes.data
        if self._native:
            native.copy_memory(
                self._to, self.addresses, self._nbytes, all_threads=self._all_threads
            )
        else:
            for copy, view in zip(self.copies, self.views, strict=True):
                np.copyto(copy, view)
        return self.groups


def _is_built() -> bool:
    try:
        native.load()
    except native.NativeError:
        return False
    return True
