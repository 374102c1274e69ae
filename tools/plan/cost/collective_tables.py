"""Read what hccl_test and nccl-tests print: a table with the time of a collective for each size."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from telechat_moe.errors import BadInputError
from telechat_moe.tools.plan.cost.collectives import all_gather, all_reduce, all_to_all
from telechat_moe.tools.plan.cost.columns import Floats
from telechat_moe.tools.plan.cost.device import Device

TABLE = re.compile(r"alg_?(?:bandwidth|bw)\b")
_TEST = re.compile(
    r"\b(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)_(?:test|perf)\b", re.IGNORECASE
)
_RANKS = re.compile(r"\s-(?:np?|-ntasks)[ =]*(\d+)\s")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\son\s+(\S+)\s+device")
_NODE = re.compile(r"\s-p\s+(\d+)\b")
_COLUMNS = {
    "data_size(Bytes)": "size", "aveg_time(us)": "time", "avg_time(us)": "time", "alg_bandwidth(GB/s)": "algbw",
    "check_result": "check", "size": "size", "time": "time", "algbw": "algbw", "#wrong": "check",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MeasuredCollective:
    """One row of a table."""

    table: str
    line: int
    operation: str
    ranks: int
    ranks_of_node: int
    size: float
    """Bytes of the full buffer, as both programs count."""
    seconds: float

    def predicted(self, device: Device) -> Floats:
        """Return the predicted seconds."""
        stride = np.array([max(device.node_devices / self.ranks_of_node, 1.0)])
        size, ranks = np.array([self.size]), np.array([float(self.ranks)])
        if self.operation == "allreduce":
            return all_reduce(size, ranks, stride, device)
        exchange = all_to_all if self.operation == "alltoall" else all_gather
        return exchange(size, ranks, stride, device)

    def unlike(self, other: "MeasuredCollective") -> float:
        """Return how different two rows are: doublings of size, ranks and nodes, and one for another operation."""
        steps = np.log2(
            [[x.size, x.ranks, x.ranks_of_node] for x in (self, other)], dtype=np.float64
        )
        return float(np.abs(steps[0] - steps[1]).sum()) + (self.operation != other.operation)


def read_collectives(file: Path, text: str) -> list[MeasuredCollective]:
    """Read a table with the command that printed it or, of nccl-tests, with its heading.

    Raises:
        BadInputError: Operation or ranks are not in the file, or a cell cannot be; names line and column.
    """
    joined, hosts = text.replace("\\\n", " ").splitlines(), dict(_RANK.findall(text))
    command = next(filter(_TEST.search, joined), "")
    test = _TEST.search(command)
    launch = command[: test.start()] if test else ""
    ranks = max(map(int, hosts), default=-1) + 1 or int((_RANKS.findall(launch) or ["0"])[0])
    if test is None or ranks < 2:
        lacks = "at least two ranks" if test else "the name of the collective"
        raise BadInputError(
            f"{file}:1: {lacks} not found, expected the command that was run in a line above the table, as in: "
            "mpirun -n 8 ./all_reduce_test -p 8 ..."
        )
    of_node = -(-ranks // len(set(hosts.values()))) if hosts else ranks
    per_node = int((_NODE.findall(command) or [of_node])[0])
    operation = test[1].lower().replace("_", "")
    rows = [
        MeasuredCollective(
            table=str(file),
            line=line,
            operation=operation,
            ranks=ranks,
            ranks_of_node=min(per_node, ranks),
            size=size,
            seconds=us / 1e6,
        )
        for line, size, us in _cells(file, text)
    ]
    if not rows:
        raise BadInputError(f"{file}:1: a heading without rows, expected sizes and times")
    return rows


def _cells(file: Path, text: str) -> Iterator[tuple[int, float, float]]:
    """Yield line, size in bytes and time in us of each row below a heading."""
    columns: list[str] = []
    for number, content in enumerate(text.splitlines(), start=1):
        bare = content.replace("|", " ").split()
        heading = [_COLUMNS.get(word.rstrip(":"), "") for word in bare if word != "#"]
        if "size" in heading and "algbw" in heading:
            columns = heading
        elif columns and bare and bare[0].isdigit():
            if len(bare) < len(columns):
                raise BadInputError(
                    f"{file}:{number}: column {len(bare) + 1}: missing, expected {len(columns)} as in the heading"
                )
            row = dict(zip(reversed(columns), reversed(bare[: len(columns)]), strict=True))
            yield number, *_row(f"{file}:{number}", row)


def _row(where: str, row: dict[str, str]) -> tuple[float, float]:
    """Return size and time of a row; the first of several columns of a name counts."""
    values: dict[str, float] = {}
    for name in ("size", "time", "algbw"):
        try:
            values[name] = float(row[name])
        except (KeyError, ValueError):
            values[name] = -1.0
        if not 0 < values[name] < np.inf and (name != "algbw" or values[name] < 0):
            raise BadInputError(
                f"{where}: column {name}: {row.get(name)!r}, expected a number above 0"
            )
    if row.get("check", "0").lower() not in ("0", "n/a", "success", "null"):
        raise BadInputError(
            f"{where}: column check: {row['check']}, the test found wrong results; expected a right one"
        )
    # GB is 10^9 bytes in nccl-tests and newer versions of hccl_test, 2^30 in older ones
    rates = [values["size"] / values["time"] * 1e6 / unit for unit in (1e9, 2**30)]
    if all(abs(rate - values["algbw"]) > 0.02 * rate + 0.01 for rate in rates):
        raise BadInputError(
            f"{where}: column algbw: {values['algbw']:g} GB/s, expected size / time, {rates[0]:.4g} GB/s"
        )
    return values["size"], values["time"]
