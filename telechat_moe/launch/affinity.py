"""Choose the cores that the processes of a machine run on: near their NPU, and different ones.

``msrun --bind_core`` would do this, too, but it reads the cores from ``/sys/fs/cgroup/cpuset/cpuset.cpus``, which
machines with cgroup 2 do not have; there it binds nothing, with a warning that nobody sees. So each process binds
itself.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ASCEND = ("0x19e5", "0x12")  # vendor Huawei; PCI class 12, processing accelerators


@dataclass(frozen=True)
class Topology:
    """A machine.

    Attributes:
        nodes: Cores of each NUMA node that this process may use; nodes without any are left out.
        npus: NUMA node of each NPU by device number; -1 = not known.
    """

    nodes: dict[int, list[int]]
    npus: list[int]

    @staticmethod
    def read(sys: Path = Path("/sys"), allowed: set[int] | None = None) -> "Topology":
        """Read this machine's topology.

        Args:
            sys: Where the kernel describes it.
            allowed: Cores that may be used; None = those of this process.
        """
        allowed = os.sched_getaffinity(0) if allowed is None else allowed
        nodes: dict[int, list[int]] = {}
        for path in sys.glob("devices/system/node/node[0-9]*/cpulist"):
            cores = sorted(set(parse_cores(path.read_text())) & allowed)
            if cores:
                nodes[int(path.parent.name.removeprefix("node"))] = cores
        if not nodes:  # a kernel without NUMA
            nodes = {0: sorted(allowed)}
        return Topology(dict(sorted(nodes.items())), _npus(sys))

    def cores(self, processes: int) -> list[list[int]]:
        """Return the cores of each process.

        Process i drives NPU i and gets cores of its NUMA node; where that is not known, processes are spread over the
        nodes in order. Those on one node share its cores evenly; with fewer cores than processes, some run on the same.

        Args:
            processes: Processes on this machine.
        """
        known = list(self.nodes)
        wanted = self.npus[:processes]
        if len(wanted) < processes or any(node not in self.nodes for node in wanted):
            wanted = [known[i * len(known) // processes] for i in range(processes)]
        shares: list[list[int]] = []
        for i, node in enumerate(wanted):
            here, index = wanted.count(node), wanted[:i].count(node)
            shares.append(_share(self.nodes[node], here, index))
        return shares


def _share(cores: Sequence[int], shares: int, index: int) -> list[int]:
    """Return one of several shares of the cores, as equal as can be, none empty."""
    if len(cores) < shares:
        return [cores[index % len(cores)]]
    return list(cores[index * len(cores) // shares : (index + 1) * len(cores) // shares])


def _npus(sys: Path) -> list[int]:
    """Return the NUMA node of each Ascend NPU that processes see, by device number."""
    by_address: dict[str, int] = {}
    for device in sys.glob("bus/pci/devices/*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == _ASCEND[0] and kind.startswith(_ASCEND[1]):
                by_address[device.name.lower()] = int((device / "numa_node").read_text())
        except (OSError, ValueError):
            continue
    if not by_address:
        return []
    order = npu_addresses() or sorted(by_address)
    nodes = [by_address.get(address, -1) for address in order]
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    chosen = sorted(int(x) for x in visible.split(",") if x.strip().isdecimal())
    return [nodes[i] if i < len(nodes) else -1 for i in chosen] or nodes


def npu_addresses() -> list[str]:
    """Return the PCI addresses of all NPUs by device number, as ``npu-smi`` says; empty if it is not there.

    Without it the order of PCI addresses is taken for that of device numbers.
    """
    try:
        found: dict[int, str] = {}
        for line in _npu_smi("-m").splitlines()[1:]:
            npu, chip, number, *_ = line.split()
            if not number.isdecimal():  # a chip that only manages
                continue
            board = _npu_smi("-t", "board", "-i", npu, "-c", chip)
            address = re.search(r"PCIe\s*Bus\s*Info\s*:\s*(\S+)", board)
            found[int(number)] = address[1].lower() if address else ""
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return [found.get(i, "") for i in range(max(found) + 1)] if found else []


def _npu_smi(*arguments: str) -> str:
    command = ["npu-smi", "info", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


def parse_cores(text: str) -> list[int]:
    """Return the numbers of the kernel's list format, ``0-3,8,10-11``."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if ends is None:
            raise ValueError(f"`{text.strip()}` is not a list of cores")
        cores += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    return cores


def use_cores(processes: int, index: int, bind: bool) -> None:
    """Bind this process to its cores if asked; set how many threads it may use if that is not set.

    Call it before mindspore is imported, whose threads inherit both.

    Args:
        processes: Processes on this machine.
        index: Which of them this is.
    """
    share = max(1, len(os.sched_getaffinity(0)) // processes)
    if bind:
        mine = Topology.read().cores(processes)[index]
        os.sched_setaffinity(0, mine)
        share = len(mine)
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
