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
_TEST = re.compile(r"\b(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)_(?:test|perf)\b")
_RANKS = re.compile(r"\s-(?:np?|-ntasks)[ =]*(\d+)\s")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\son\s+(\S+)\s+device")
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
        stride = max(device.node_devices / self.ranks_of_node, 1.0)
        sizes = [np.array([float(x)]) for x in (self.size, self.ranks, stride)]
        if self.operation == "alltoall":
            return all_to_all(sizes[0], sizes[1], sizes[2], device)
        collective = all_reduce if self.operation == "allreduce" else all_gather
        return collective(sizes[0], sizes[1], sizes[2], device)

    def unlike(self, other: "MeasuredCollective") -> float:
        """Return how different two rows are: doublings of size, ranks and nodes, and one for another operation."""
        steps = np.log2([[x.size, x.ranks, x.ranks_of_node] for x in (self, other)])
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
    rows = list(_cells(file, text))
    if test is None or ranks < 2 or not rows:
        lacks = "a row" if test and ranks > 1 else "at least two ranks" if test else "the name of the collective"  # fmt: skip
        text = "expected the command in a line above the table, as in: mpirun -n 8 ./all_reduce_test -p 8 ..."
        raise BadInputError(f"{file}:1: {lacks} not found, {text}")
    of_node = -(-ranks // len(set(hosts.values()))) if hosts else ranks
    of_node = min(ranks, int((re.findall(r"\s-p\s+(\d+)\b", command) or [of_node])[0]))
    operation = test[1].replace("_", "")
    return [
        MeasuredCollective(
            table=str(file), line=line, operation=operation, ranks=ranks, ranks_of_node=of_node, size=size, seconds=us / 1e6
        )
        for line, size, us in rows
    ]  # fmt: skip


def _cells(file: Path, text: str) -> Iterator[tuple[int, float, float]]:
    """Yield line, size in bytes and time in us of each row below a heading."""
    columns: list[str] = []
    for number, content in enumerate(text.splitlines(), start=1):
        bare = content.replace("|", " ").split()
        heading = [_COLUMNS.get(word.rstrip(":"), "") for word in bare if word != "#"]
        if "size" in heading and "algbw" in heading:
            columns = heading
        elif columns and bare and bare[0].isdigit():
            # the first of two columns of a name counts: out of place
            row = dict(reversed(list(zip(columns, bare, strict=False))))
            yield number, *_row(f"{file}:{number}: column", row)


def _row(cell: str, row: dict[str, str]) -> tuple[float, float]:
    """Return size and time of a row."""
    values: list[float] = []
    for name in ("size", "time", "algbw"):
        try:
            values.append(float(row.get(name, "nan")))
        except ValueError:
            values.append(np.nan)
        if not (0 if name == "algbw" else 1e-9) <= values[-1] < np.inf:
            raise BadInputError(f"{cell} {name}: {row.get(name)}, expected a number above 0")
    if row.get("check", "0").lower() not in ("0", "n/a", "success", "null"):
        raise BadInputError(f"{cell} check: {row.get('check')}, expected success, or 0 wrong")
    # GB is 10^9 bytes in nccl-tests and newer versions of hccl_test, 2^30 in older ones
    rates = [values[0] / values[1] * 1e6 / unit for unit in (1e9, 2**30)]
    if all(abs(rate - values[2]) > 0.02 * rate + 0.01 for rate in rates):
        raise BadInputError(
            f"{cell} algbw: {values[2]:g} GB/s, expected size / time, {rates[0]:.4g} GB/s"
        )
    return values[0], values[1]
