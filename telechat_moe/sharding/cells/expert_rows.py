"""Exchange rows of a tensor among the devices of a group, between two steps: how experts move.

Legend: e rows of this device, N elements of a row, R devices of the group.
"""

import zlib
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from telechat_moe.ops.custom import custom_op
from telechat_moe.sharding.cells.collective import Group


class ExchangeRows(nn.Cell):
    """Send each row of a tensor to a device of a group, and receive as many from them.

    The rows go out in the order ``order_e``, those for one device next to each other; they come by sender, and
    ``arrival_e`` says which of them each row of the result is. Subclasses are the collective.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.take, self.reshape = ops.Gather(), ops.Reshape()

    def exchange(self, x_eN: Tensor, sent_R: Tensor, received_R: Tensor) -> Tensor:
        """Return the rows that came, by sender, ``[e, N]``."""
        raise NotImplementedError

    def construct(
        self, x: Tensor, order_e: Tensor, sent_R: Tensor, received_R: Tensor, arrival_e: Tensor
    ) -> Tensor:
        """Return a tensor of the shape of ``x``.

        Args:
            order_e: int32.
            sent_R: int32, how many rows each device gets; ``received_R``, how many each sends.
            arrival_e: int32.
        """
        x_eN = self.reshape(self.take(x, order_e, 0), (x.shape[0], -1))
        y_eN = self.exchange(x_eN, sent_R, received_R)
        return self.reshape(self.take(y_eN, arrival_e, 0), x.shape)


class AscendExchangeRows(ExchangeRows):
    """By AlltoAllV (Ascend)."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.all_to_all = ops.AlltoAllV(group.name, 1)
        self.scale, self.to_int64, self.to_host = ops.Mul(), ops.Cast(), ops.MoveTo()

    def exchange(self, x_eN: Tensor, sent_R: Tensor, received_R: Tensor) -> Tensor:
        """See :meth:`ExchangeRows.exchange`."""
        rows, width = x_eN.shape
        sent, received = self.elements(sent_R, width), self.elements(received_R, width)
        return self.reshape(
            self.all_to_all(self.reshape(x_eN, (-1,)), sent, received), (rows, width)
        )

    def elements(self, rows_R: Tensor, width: int) -> Tensor:
        """Return the elements of rows in the memory of the host, ``[R]`` int64."""
        count_R = self.scale(self.to_int64(rows_R, ms.int64), Tensor(width, ms.int64))
        return self.to_host(count_R, "CPU", True)


class CpuExchangeRows(ExchangeRows):
    """By messages of the native library, ``MoeDispatch`` with the devices as experts (CPU processes)."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        attributes: dict[str, Any] = {"ranks": group.ranks, "member": group.member, "times": 1}
        tag = -1 - zlib.crc32(group.name.encode())
        self.dispatch = custom_op("MoeDispatch", _rows_and_sizes, 3, **attributes, tag=tag)

    def exchange(self, x_eN: Tensor, sent_R: Tensor, received_R: Tensor) -> Tensor:
        """See :meth:`ExchangeRows.exchange`."""
        return self.dispatch(x_eN, sent_R)[0]


def group_of(ranks: tuple[int, ...], rank: int) -> Group:
    """Return the group of ranks among which experts move, as one of them sees it."""
    name = "experts_" + "_".join(map(str, ranks))
    return Group(name, len(ranks), ranks.index(rank), ranks)


def _rows_and_sizes(x: Any, sizes: Any) -> Any:
    return x, sizes, sizes
