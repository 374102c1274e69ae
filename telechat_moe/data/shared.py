"""One process of a host reads the training data; the others map its batches from shared memory.

The batches are in a ring of places in memory without a name (``memfd_create``), which the system frees with the last process
that holds it, and the processes talk through a socket without a file: however they end, nothing is left behind. A small
``/dev/shm`` does not matter. Linux only.

::

    reader -> follower    the memory; a line about the data; a line for each batch: which it is, and where its arrays are
    follower -> reader    a byte for each batch that it looks at no more

A batch is told by the first samples of its step and of itself, which decide what it holds. A follower leaves out those that it
does not ask for: they were prepared before the position changed, which it does in all processes alike.
"""

import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from telechat_moe.data.dataset import Dataset
from telechat_moe.data.loader import Batches, Loader
from telechat_moe.data.sample import Batch
from telechat_moe.errors import TelechatMoeError
from telechat_moe.processes import RankDiedError
from telechat_moe.units import size_text

PLACES = 3
"""Batches in the ring: as many as a loader prepares ahead."""
PATIENCE_S = 60.0
"""How long the reader waits for followers to connect, which all processes do at the same time."""
_POLL_S = 0.1
_ALIGN = 64
_ORDER = "order"
_CREDENTIALS = struct.Struct("3i")


class Publisher:
    """The reader's end: gives its batches to the followers.

    Args:
        name: Name of the socket, which only the processes of this run on this host use.

    Raises:
        TelechatMoeError: The name is in use.
    """

    def __init__(self, name: str, followers: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(_address(name))
        except OSError as error:
            raise TelechatMoeError(
                f"batches cannot be shared as {name}: {error.strerror}; another run uses this output_dir, or a process of "
                "an earlier one is still there"
            ) from None
        self._listener.listen(followers)
        self._expected = followers
        self._released: dict[socket.socket, int] = {}  # of each follower that lives
        self._descriptor = os.memfd_create("telechat-moe-batches")
        self._memory: mmap.mmap | None = None
        self._place_bytes = self._count = 0
        self.interrupted = threading.Event()

    def begin(self, about: Mapping[str, Any]) -> None:
        """Wait for the followers and tell them about the data, JSON values.

        Raises:
            RankDiedError: One does not come.
        """
        self._listener.settimeout(PATIENCE_S)
        while len(self._released) < self._expected:
            try:
                follower, _ = self._listener.accept()
            except TimeoutError:
                raise RankDiedError(
                    f"{len(self._released)} of the {self._expected} processes that share this one's batches came in "
                    f"{PATIENCE_S:.0f} s; see what the others say",
                    is_echo=True,
                ) from None
            if _user_of(follower) != os.geteuid():
                follower.close()
                continue
            self._released[follower] = 0
            with suppress(OSError):  # it died
                socket.send_fds(follower, [b"."], [self._descriptor])
                follower.sendall(_line(about))
            follower.settimeout(_POLL_S)
        self._listener.close()

    def put(self, which: tuple[int, int], arrays: Mapping[str, np.ndarray]) -> None:
        """Give a batch to the followers, unless ``interrupted`` is set while its place in the ring is in use.

        Raises:
            TelechatMoeError: There is no memory for the ring.
        """
        ends = np.cumsum([-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays.values()])
        memory = self._memory or self._allocate(int(ends[-1]))
        assert ends[-1] <= self._place_bytes, "all batches have the shapes of the first"
        if not self._wait_for_place():
            return
        start, entries = self._count % PLACES * self._place_bytes, list[list[Any]]()
        for (name, array), end in zip(arrays.items(), ends.tolist(), strict=True):
            offset = start + end - -(-array.nbytes // _ALIGN) * _ALIGN
            np.ndarray(array.shape, array.dtype, memory, offset)[...] = array
            entries.append([name, array.dtype.str, array.shape, offset])
        line = _line({"batch": which, "arrays": entries})
        for follower in list(self._released):
            try:
                follower.sendall(line)
            except OSError:
                self._forget(follower)
        self._count += 1

    def _allocate(self, batch_bytes: int) -> mmap.mmap:
        total = PLACES * batch_bytes
        try:
            os.posix_fallocate(self._descriptor, 0, total)
            self._memory = mmap.mmap(self._descriptor, total)
        except OSError as error:
            raise TelechatMoeError(
                f"no memory for {PLACES} batches of {size_text(batch_bytes)} that the processes of a host share: "
                f"{error.strerror}; raise the limit (ulimit -f, memory of the container) or lower runner_config.batch_size"
            ) from None
        self._place_bytes = batch_bytes
        return self._memory

    def _wait_for_place(self) -> bool:
        """Wait until no follower looks at what is in the next place; False: interrupted."""
        for follower in list(self._released):
            while self._released.get(follower, self._count) <= self._count - PLACES:
                if self.interrupted.is_set():
                    return False
                try:
                    released = len(follower.recv(1 << 12))
                except TimeoutError:
                    continue
                except OSError:
                    released = 0
                if not released:
                    self._forget(follower)
                    break
                self._released[follower] += released
        return True

    def _forget(self, follower: socket.socket) -> None:
        """Go on without a follower that ended; whoever started the processes decides what that means."""
        del self._released[follower]
        follower.close()

    def close(self) -> None:
        """End the connections; what was put before can still be read."""
        for connection in (self._listener, *self._released):
            connection.close()
        self._released.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class Subscriber:
    """A follower's end: takes the reader's batches.

    Args:
        name: As the reader's, which is there already.

    Raises:
        RankDiedError: It is not.
    """

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(_address(name))
        except OSError:
            raise self._gone() from None
        if _user_of(self._socket) != os.geteuid():
            raise TelechatMoeError(f"the process that shares batches as {name} is another user's")
        self._lines = self._socket.makefile("rb")
        self._descriptor = -1
        self._memory: mmap.mmap | None = None
        self._holds = False

    def begin(self) -> dict[str, Any]:
        """Return what the reader says about the data, once it has opened them.

        Raises:
            RankDiedError: It ended before.
        """
        with suppress(OSError):
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
            self._descriptor = descriptors[0] if descriptors else -1
        return self._next_line()

    def take(self, which: tuple[int, int]) -> dict[str, np.ndarray]:
        """Return a batch; its arrays are the shared ones, and hold it until the next is asked for.

        Raises:
            RankDiedError: The reader ended.
        """
        while True:
            if self._holds:
                with suppress(OSError):  # what a reader that ended sent can still be read
                    self._socket.sendall(b".")
            message = self._next_line()
            self._holds = True
            if tuple(message["batch"]) == which:
                break
        if self._memory is None:
            self._memory = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        return {
            name: np.ndarray(shape, dtype, self._memory, offset)
            for name, dtype, shape, offset in message["arrays"]
        }

    def _next_line(self) -> dict[str, Any]:
        line = b""
        with suppress(OSError):
            line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise self._gone()
        return json.loads(line)

    def _gone(self) -> RankDiedError:
        return RankDiedError(
            "the process that reads the training data for this one ended; what it says, or who started it, names the cause",
            is_echo=True,
        )

    def close(self) -> None:
        """End the connection; arrays that were taken stay readable."""
        self._lines.close()
        self._socket.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class SharedLoader(Loader):
    """A loader whose batches the other processes of a host take, too; arguments as a :class:`Loader`'s."""

    def __init__(
        self, publisher: Publisher, dataset: Dataset, batch_size: int, **settings: Any
    ) -> None:
        super().__init__(dataset, batch_size, **settings)
        self._publisher = publisher
        about = {"dataset": self.fingerprint(), "past": self.past(len(dataset))}
        publisher.begin({"samples_per_epoch": self._epochs.size, **about})

    def _prepare(self, step: int, start: int) -> tuple[Batch, np.ndarray | None]:
        batch, order = super()._prepare(step, start)
        self._publisher.put((step, start), batch if order is None else {**batch, _ORDER: order})
        return batch, order

    def close(self) -> None:
        """See :meth:`Loader.close`."""
        self._publisher.interrupted.set()
        super().close()
        self._publisher.interrupted.clear()

    def __exit__(self, *_: object) -> None:
        """Close the loader and its connections."""
        self.close()
        self._publisher.close()


class FollowingLoader(Batches):
    """The batches of another process of this host, which uses a :class:`SharedLoader` of the same recipe.

    Args:
        epochs, deal_to, unit: As the reader's.

    Raises:
        RankDiedError: The reader ended.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        batch_size: int,
        *,
        epochs: int | None = 1,
        deal_to: tuple[int, int] | None = None,
        unit: int | None = None,
    ) -> None:
        self._subscriber, self._about = subscriber, subscriber.begin()
        super().__init__(batch_size, self._about["samples_per_epoch"], epochs, deal_to, unit)

    def __next__(self) -> Batch:
        """See :meth:`Batches.__next__`."""
        if (following := self._next(self.next_sample)) is None:
            raise StopIteration
        place, step = following
        batch = self._subscriber.take((step, place))
        order = batch.pop(_ORDER, None)
        self.order = None if order is None else order.copy()
        self.next_sample = place + self.batch_size
        return batch

    def fingerprint(self) -> str:
        """See :meth:`Batches.fingerprint`."""
        return self._about["dataset"]

    def past(self, sample: int) -> list[Any] | None:
        """See :meth:`Batches.past`."""
        past = self._about["past"]
        return None if past is None else [segment for segment in past if segment[0] < sample]

    def __exit__(self, *_: object) -> None:
        """End the connection."""
        self._subscriber.close()


def _address(name: str) -> str:
    return f"\0telechat-moe-{name}"  # the leading zero: no file


def _user_of(other: socket.socket) -> int:
    """Return the user whose process is at the other end."""
    credentials = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1]


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
