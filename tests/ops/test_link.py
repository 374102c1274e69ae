"""Messages between processes: by tag in any order, every type, and what a lost connection says."""

import socket

import numpy as np
import pytest

from telechat_moe.graph.links import ways
from telechat_moe.ops import native
from telechat_moe.ops.native import Kernel, NativeError

A, B = 1001, 1002  # what is sent to A arrives from B


@pytest.fixture(scope="module")
def ends():
    first, second = socket.socketpair()
    native.load().telechat_link(A, first.detach())
    native.load().telechat_link(B, second.detach())


def send(x: np.ndarray, tag: int) -> None:
    Kernel("Send", {"peer": A, "tag": tag})([x], [np.zeros(1, np.float32)])


def receive(shape: tuple[int, ...], dtype: type, tag: int) -> np.ndarray:
    out = np.zeros(shape, dtype)
    Kernel("Receive", {"peer": B, "tag": tag, "extents": list(shape)})(
        [np.zeros(1, np.float32)], [out]
    )
    return out


@pytest.mark.usefixtures("ends")
def test_messages_are_taken_by_tag_and_in_order_within_a_tag() -> None:
    sent = [np.full((300, 1000), i, np.float32) for i in range(6)]
    for i, x in enumerate(sent):
        send(x, i % 3)  # nobody receives yet: a sender does not wait
    for tag in (2, 0, 1):
        for i in (tag, tag + 3):
            np.testing.assert_array_equal(receive((300, 1000), np.float32, tag), sent[i])


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.int64, np.bool_])
def test_every_type(dtype: type) -> None:
    x = np.arange(12).reshape(3, 4).astype(dtype)
    send(x, 7)
    np.testing.assert_array_equal(receive((3, 4), dtype, 7), x)


@pytest.mark.usefixtures("ends")
def test_how_long_messages_are_on_their_way_is_told_once() -> None:
    library, x = native.load(), np.zeros(10, np.float32)
    ways([B])
    library.telechat_link_trial(0.05, 0.001, 0)
    try:
        for _ in range(2):
            send(x, 9)
            receive((10,), np.float32, 9)
    finally:
        library.telechat_link_trial(0.0, 0.0, 0)
    send(x, 9)
    ((pipeline, exchange),) = ways([B])  # not of the third, which was not taken yet
    assert pipeline >= 2 * (0.05 + 0.001 * 40)
    assert exchange == 0.0
    receive((10,), np.float32, 9)
    ((later, _),) = ways([B])
    assert 0 <= later < pipeline
    assert ways([B]) == [(0.0, 0.0)]


@pytest.mark.usefixtures("ends")
def test_a_message_of_another_size_is_refused() -> None:
    send(np.zeros(4, np.float32), 8)
    with pytest.raises(NativeError, match=r"rank 1002 sent 16 bytes as message 8, expected 20"):
        receive((5,), np.float32, 8)


def test_without_a_connection() -> None:
    with pytest.raises(NativeError, match="there is no connection to rank 77"):
        Kernel("Receive", {"peer": 77, "tag": 0, "extents": [1]})(
            [np.zeros(1, np.float32)], [np.zeros(1, np.float32)]
        )
