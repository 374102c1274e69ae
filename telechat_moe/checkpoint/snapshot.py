"""What a save reads: the parameters in their own memory, or copies of them.

On CPU MindSpore gives access to a parameter's own memory: the view is kept from save to save and replaced when the
parameter has other memory. Copies go into memory that is kept, too, because fresh pages would cost more than the copy.
"""

from collections.abc import Iterable, Mapping
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


class Views:
    """Parameters in their own memory, by group and name; their shapes and data types do not change.

    Attributes:
        nbytes: Bytes of the parameters.
        are_here: All of them are in the memory of this process, none on a device.
    """

    def __init__(self, sources: Mapping[str, Mapping[str, Source]]) -> None:
        self.names = [(group, name) for group, parameters in sources.items() for name in parameters]
        self.follow(sources)
        self.arrays = [source.asnumpy() for source in self.sources]
        self.addresses = np.array([array.ctypes.data for array in self.arrays], np.uint64)
        self.nbytes = sum(array.nbytes for array in self.arrays)
        # Where a device has its own memory, the two addresses never agree.
        pairs = zip(self.sources, self.addresses, strict=True)
        self.are_here = all(source.data_ptr() == address for source, address in pairs)

    def follow(self, sources: Mapping[str, Mapping[str, Source]]) -> None:
        """Read other parameters from now on, of the same names, shapes and data types."""
        self.sources = [sources[group][name] for group, name in self.names]

    def take(self) -> ArrayGroups:
        """Return all parameters as they are; training changes these arrays."""
        for i, source in enumerate(self.sources):
            if source.data_ptr() != self.addresses[i]:
                self.arrays[i] = source.asnumpy()
                self.addresses[i] = self.arrays[i].ctypes.data
        return self.grouped(self.arrays)

    def grouped(self, arrays: Iterable[np.ndarray]) -> ArrayGroups:
        """Return an array for each parameter by group and name."""
        groups: ArrayGroups = {group: {} for group, _ in self.names}
        for (group, name), array in zip(self.names, arrays, strict=True):
            groups[group][name] = array
        return groups


class Snapshot:
    """Copies of parameters."""

    def __init__(self, views: Views) -> None:
        self.views = views
        offsets, end = [], 0
        for array in views.arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = np.zeros(end, np.uint8)
        memory.fill(0)  # touches every page, so that the first save does not
        self.copies = [
            memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for start, array in zip(offsets, views.arrays, strict=True)
        ]
        self._to = np.array([copy.ctypes.data for copy in self.copies], np.uint64)
        self._nbytes = np.array([copy.nbytes for copy in self.copies], np.int64)
        self._all_threads = end >= _SEVERAL_THREADS
        self._native = views.are_here and _is_built()
        self.groups = views.grouped(self.copies)
        if not views.are_here:
            views.arrays.clear()  # what came from the device is a copy already

    def take(self) -> ArrayGroups:
        """Copy all parameters; the arrays are overwritten by the next call."""
        if self._native:
            self.views.take()
            threads = self._all_threads
            native.copy_memory(self._to, self.views.addresses, self._nbytes, all_threads=threads)
        else:
            for copy, source in zip(self.copies, self.views.sources, strict=True):
                np.copyto(copy, source.asnumpy())
        return self.groups


def _is_built() -> bool:
    try:
        native.load()
    except native.NativeError:
        return False
    return True
