"""Send messages between the processes of a pipeline: frames on a socket, with checksums.

A frame is ``TCPL``, length of the header, length of the payload, CRC-32 of both; the header, JSON; the payload, arrays
one after the other. A reader thread takes frames as they come, so a sender waits for no receiver's order.
"""

import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from telechat_moe.errors import TelechatMoeError

MAGIC = b"TCPL"
HEAD = struct.Struct("!4sIQI")
MAX_HEADER_BYTES = 1 << 26
MAX_PAYLOAD_BYTES = 1 << 36


class LinkError(TelechatMoeError):
    """A connection is closed, or what came through it is no frame."""


class Link:
    """One end of a connection; ``peer`` says who is at the other, for messages."""

    def __init__(self, end: socket.socket, peer: str) -> None:
        self.socket, self.peer = end, peer
        self.lock = threading.Lock()
        self.sent = self.taken = 0

    def send(self, header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> int:
        """Send a frame; return its length in bytes.

        Raises:
            LinkError: The other end is closed.
        """
        shapes = [[a.dtype.str, list(a.shape)] for a in arrays]
        payload = b"".join(a.tobytes() for a in arrays)
        with self.lock:
            text = json.dumps({**header, "arrays": shapes, "number": self.sent}).encode()
            head = HEAD.pack(MAGIC, len(text), len(payload), zlib.crc32(payload, zlib.crc32(text)))
            try:
                self.socket.sendall(head + text + payload)
            except OSError as error:
                raise LinkError(f"{self.peer} closed its connection ({error.strerror})") from None
            self.sent += 1
        return len(head) + len(text) + len(payload)

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return the next frame.

        Raises:
            LinkError: The other end is closed, or sent something that is no frame.
        """
        magic, header_bytes, payload_bytes, expected = HEAD.unpack(self._take(HEAD.size))
        if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise LinkError(f"{self.peer} sent no frame: it begins with {magic!r}")
        text, payload = self._take(header_bytes), self._take(payload_bytes)
        found = zlib.crc32(payload, zlib.crc32(text))
        if found != expected:
            raise LinkError(
                f"{self.peer} sent a broken frame: CRC-32 {found:08x}, expected {expected:08x}"
            )
        header = json.loads(text)
        if header["number"] != self.taken:
            raise LinkError(
                f"{self.peer} sent frame {header['number']}, expected frame {self.taken}"
            )
        self.taken += 1
        arrays: list[np.ndarray] = []
        at = 0
        for dtype, shape in header["arrays"]:
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(payload, dtype, count, at).reshape(shape))
            at += arrays[-1].nbytes
        if at != len(payload):
            raise LinkError(f"{self.peer} sent {len(payload)} bytes of arrays and announced {at}")
        return header, arrays

    def _take(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            try:
                got = self.socket.recv_into(view[at:])
            except OSError as error:
                raise LinkError(f"{self.peer} closed its connection ({error.strerror})") from None
            if not got:
                raise LinkError(f"{self.peer} closed its connection")
            at += got
        return data

    def close(self) -> None:
        """Close it."""
        self.socket.close()


class Inbox:
    """What has arrived, by key, from any number of links."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self.messages: dict[Any, tuple[dict[str, Any], list[np.ndarray]]] = {}
        self.received: dict[int, int] = {}
        self.broken: dict[int, str] = {}

    def listen(self, number: int, link: Link) -> None:
        """Take the frames of a peer, in a thread, until its connection ends."""
        self.received[number] = 0

        def read() -> None:
            try:
                while True:
                    header, arrays = link.receive()
                    with self.change:
                        self.messages[tuple(header["key"])] = (header, arrays)
                        self.received[number] += 1
                        self.change.notify_all()
            except LinkError as error:
                with self.change:
                    self.broken[number] = str(error)
                    self.change.notify_all()

        threading.Thread(target=read, daemon=True, name=f"from {link.peer}").start()

    def put(self, key: tuple[Any, ...], arrays: list[np.ndarray]) -> None:
        """Leave a message to oneself."""
        with self.change:
            self.messages[key] = ({}, arrays)

    def take(
        self, key: tuple[Any, ...], sender: int, waiting: Callable[[], None]
    ) -> list[np.ndarray]:
        """Return the arrays with a key, and forget them; call ``waiting`` whenever they are not there yet.

        Raises:
            LinkError: It never comes: the sender's connection ended.
        """
        with self.change:
            while key not in self.messages:
                if sender in self.broken:
                    raise LinkError(self.broken[sender])
                waiting()
                self.change.wait()
            return self.messages.pop(key)[1]
