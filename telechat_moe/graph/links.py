"""Connect the processes that exchange messages: MindSpore's CPU backend has neither Send nor Receive.

Each process listens; where, and a secret of the run, all learn through an AllReduce. Of two, the higher rank
connects. From then on the sockets belong to the native library (``ops/csrc/link.cc``).
"""

import os
import secrets
import socket
import struct
from collections.abc import Sequence

import numpy as np

from telechat_moe.errors import TelechatMoeError
from telechat_moe.ops import native

PATIENCE_S = 300.0
_HELLO = struct.Struct("!16si")
_linked: set[int] = set()


def link(rank: int, peers: Sequence[Sequence[int]]) -> None:
    """Connect this process to those that it exchanges messages with; those that are connected stay so.

    MindSpore's communication is initialised. All processes call this together.

    Args:
        peers: For each rank, the ranks that it exchanges messages with.

    Raises:
        TelechatMoeError: One does not connect.
    """
    if not any(peers):
        return
    unlinked = [peer for peer in peers[rank] if peer not in _linked]
    with socket.create_server((_own_address(), 0)) as server:
        server.settimeout(PATIENCE_S)
        addresses, secret = _exchange(rank, len(peers), server)
        hello = _HELLO.pack(secret, rank)
        for peer in (p for p in unlinked if p < rank):
            end = socket.create_connection(addresses[peer], PATIENCE_S)
            end.sendall(hello)
            _keep(peer, end)
        missing = {peer for peer in unlinked if peer > rank}
        while missing:
            try:
                end, _ = server.accept()
            except TimeoutError:
                raise TelechatMoeError(
                    f"rank {rank}: rank {min(missing)} did not connect within {PATIENCE_S:.0f} s"
                ) from None
            token, peer = _HELLO.unpack(_read(end, _HELLO.size))
            if secrets.compare_digest(token, secret) and peer in missing:
                missing.remove(peer)
                _keep(peer, end)
            else:
                end.close()


def ways(peers: Sequence[int]) -> list[tuple[float, float]]:
    """Return for each peer how long its messages were on their way that were taken since the last call: of pipelines, of exchanges.

    Seconds by two clocks, the sender's and this host's: what these differ by cancels in the mean of both directions.
    """
    seconds = np.zeros((len(peers), 2))
    for peer, row in zip(peers, seconds, strict=True):
        native.load().telechat_link_ways(peer, row.ctypes.data)
    return [(float(a), float(b)) for a, b in seconds]


def _own_address() -> str:
    """Return the address of this host that reaches the scheduler."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MS_SCHED_HOST", "127.0.0.1"), 1))  # sends nothing
        return probe.getsockname()[0]


def _exchange(rank: int, ranks: int, server: socket.socket) -> tuple[list[tuple[str, int]], bytes]:
    """Return where each process listens, and 16 bytes that rank 0 chose."""
    from mindspore import Tensor, ops

    host, port = server.getsockname()
    told = np.zeros((ranks, 22), np.float32)  # bytes, because AllReduce adds floats
    secret = secrets.token_bytes(16) if rank == 0 else bytes(16)
    told[rank] = [*socket.inet_aton(host), port >> 8, port & 255, *secret]
    heard = ops.AllReduce()(Tensor(told)).asnumpy().astype(np.uint8)
    addresses = [(socket.inet_ntoa(r[:4].tobytes()), int(r[4]) << 8 | int(r[5])) for r in heard]
    return addresses, heard[0, 6:].tobytes()


def _read(end: socket.socket, count: int) -> bytes:
    end.settimeout(10.0)
    data = b""
    while len(data) < count:
        try:
            chunk = end.recv(count - len(data))
        except OSError:
            chunk = b""
        if not chunk:
            return bytes(count)
        data += chunk
    return data


def _keep(peer: int, end: socket.socket) -> None:
    """Hand a socket to the native library."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    native.load().telechat_link(peer, end.detach())
    _linked.add(peer)
