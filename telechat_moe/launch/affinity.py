"""Choose the cores that the processes of a machine run on: whole ones, near their NPU, and different ones.

``msrun --bind_core`` would do this, too, but it reads the cores from ``/sys/fs/cgroup/cpuset/cpuset.cpus``, which
machines with cgroup 2 do not have; there it binds nothing, with a warning that nobody sees. So each process binds
itself (:mod:`telechat_moe.launch.binding`).
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from telechat_moe.units import ranges_text

Core = tuple[int, ...]
"""A core: the CPUs (hardware threads, SMT siblings) of it that may be used."""

_ASCEND = ("0x19e5", "0x12")  # vendor Huawei; PCI class 12, processing accelerators
_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


class Npu(NamedTuple):
    """An NPU: its PCI address, empty if not known, and its NUMA node, -1 if not known."""

    address: str
    node: int


class CoreShare(NamedTuple):
    """What one process gets: CPUs of whole cores, their NUMA node, and its NPU if it has one; ``why`` this node."""

    cpus: list[int]
    node: int
    npu: Npu | None
    why: str

    def describe(self) -> str:
        """Return CPUs, NUMA node and the reason as a text."""
        return f"CPUs {ranges_text(self.cpus, ',')}, NUMA node {self.node} ({self.why})"


class Interrupt(NamedTuple):
    """An interrupt: number, name in ``/proc/interrupts``, and the CPUs that may handle it."""

    number: int
    name: str
    cpus: list[int]


@dataclass(frozen=True)
class Topology:
    """A machine.

    Attributes:
        nodes: Cores of each NUMA node that this process may use; nodes without any are left out.
        npus: NPUs that processes see, by device number.
    """

    nodes: dict[int, list[Core]]
    npus: list[Npu] = field(default_factory=list[Npu])

    @staticmethod
    def read(sys: Path = Path("/sys"), allowed: set[int] | None = None) -> "Topology":
        """Read this machine's topology.

        Args:
            allowed: CPUs that may be used; None = those of this process (control group and affinity).
        """
        allowed = os.sched_getaffinity(0) if allowed is None else allowed
        cpus: dict[int, set[int]] = {}
        for path in sys.glob("devices/system/node/node[0-9]*/cpulist"):
            node = int(path.parent.name.removeprefix("node"))
            cpus[node] = set(parse_cpus(path.read_text())) & allowed
        if not any(cpus.values()):  # a kernel without NUMA
            cpus = {0: allowed}
        nodes = {node: _cores(sys, usable) for node, usable in sorted(cpus.items()) if usable}
        return Topology(nodes, _npus(sys, cpus))

    def shares(self, processes: int) -> list[CoreShare]:
        """Return what each process gets.

        Process i drives NPU i and gets cores of its NUMA node while there is one for it. The others are put where a
        process gets the most cores (the highest average), neighbours on the same node. Those on one node share its
        cores evenly; only with fewer cores than processes some run on the same.
        """
        count = dict.fromkeys(self.nodes, 0)
        places: list[tuple[int | None, str]] = []
        for i in range(processes):
            node = self.npus[i].node if i < len(self.npus) else None
            if node in count and count[node] < len(self.nodes[node]):
                count[node] += 1
                places.append((node, f"that of NPU {i}"))
            elif node is None:
                places.append((None, "no NPU" if not self.npus else f"there is no NPU {i}"))
            else:
                reason = "is not known" if node < 0 else f"{node} has no core left"
                places.append((None, f"that of NPU {i} {reason}"))
        free: list[int] = []
        for _ in range(sum(node is None for node, _ in places)):
            free.append(max(count, key=lambda n: (len(self.nodes[n]) / (count[n] + 1), -n)))
            count[free[-1]] += 1
        others = iter(sorted(free))
        chosen = [(next(others) if node is None else node, reason) for node, reason in places]
        order = [node for node, _ in chosen]
        shares: list[CoreShare] = []
        for i, (node, reason) in enumerate(chosen):
            cores = _part(self.nodes[node], count[node], order[:i].count(node))
            npu = self.npus[i] if i < len(self.npus) else None
            shares.append(CoreShare(sorted(chain(*cores)), node, npu, reason))
        return shares


def _part(cores: Sequence[Core], parts: int, index: int) -> Sequence[Core]:
    """Return one of several parts of the cores, as equal as can be, none empty."""
    if len(cores) < parts:
        return [cores[index % len(cores)]]
    return cores[index * len(cores) // parts : (index + 1) * len(cores) // parts]


def _cores(sys: Path, usable: set[int]) -> list[Core]:
    """Group CPUs by the core that they are hardware threads of, in the order of their first ones."""
    cores: dict[Core, None] = {}
    for cpu in sorted(usable):
        path = sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        siblings = parse_cpus(path.read_text()) if path.exists() else [cpu]
        cores[tuple(sorted({cpu, *(usable & set(siblings))}))] = None
    return list(cores)


# ------------------------------------------------------------------------------ NPUs


def _npus(sys: Path, cpus: dict[int, set[int]]) -> list[Npu]:
    """Return the Ascend NPUs that processes see, by device number.

    Their nodes are what the kernel says of the PCI device, or where it does not know (-1, as in virtual machines), that
    of the CPUs that ``npu-smi info -t topo`` calls near.
    """
    by_address: dict[str, int] = {}
    for device in sys.glob("bus/pci/devices/*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == _ASCEND[0] and kind.startswith(_ASCEND[1]):
                by_address[device.name.lower()] = int((device / "numa_node").read_text())
        except (OSError, ValueError):
            continue
    if not by_address and shutil.which("npu-smi") is None:
        return []
    order = npu_addresses() or sorted(by_address)
    npus = [Npu(address, by_address.get(address, -1)) for address in order]
    if any(npu.node < 0 for npu in npus):
        near_cpus = npu_cpus()
        for i, npu in enumerate(npus):
            usable = set(near_cpus.get(i, []))
            shared = {node: len(node_cpus & usable) for node, node_cpus in cpus.items()}
            node = max(shared, key=lambda node: (shared[node], -node))
            if npu.node < 0 and shared[node]:
                npus[i] = npu._replace(node=node)
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    chosen = sorted(int(x) for x in visible.split(",") if x.strip().isdecimal())
    return [npus[i] if i < len(npus) else Npu("", -1) for i in chosen] or npus


def npu_addresses() -> list[str]:
    """Return the PCI addresses of all NPUs by device number, as ``npu-smi`` says; empty if it is not there.

    Without it the order of PCI addresses is taken for that of device numbers.
    """
    try:
        addresses: dict[int, str] = {}
        for line in npu_smi("-m").splitlines()[1:]:
            npu, chip, number, *_ = line.split()
            if not number.isdecimal():  # a chip that only manages
                continue
            board = npu_smi("-t", "board", "-i", npu, "-c", chip)
            address = re.search(r"PCIe\s*Bus\s*Info\s*:\s*(\S+)", board)
            addresses[int(number)] = address[1].lower() if address else ""
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return [addresses.get(i, "") for i in range(max(addresses) + 1)] if addresses else []


def npu_cpus() -> dict[int, list[int]]:
    """Return the CPUs near each NPU by device number, as ``npu-smi info -t topo`` says; those that it does not name are left out.

    Its table has a row for each NPU whose last column, ``CPU Affinity``, is a list of CPUs.
    """
    try:
        rows = [line.split() for line in npu_smi("-t", "topo").splitlines()]
    except (OSError, subprocess.SubprocessError):
        return {}
    by_npu: dict[int, list[int]] = {}
    for first, *columns in filter(None, rows):
        number = re.fullmatch(r"NPU(\d+)", first)
        if number is not None and columns and _LIST.fullmatch(columns[-1]):
            by_npu[int(number[1])] = parse_cpus(columns[-1])
    return by_npu


def npu_smi(*arguments: str) -> str:
    """Return what ``npu-smi info`` prints.

    Raises:
        OSError, subprocess.SubprocessError: It is not there, fails, or takes longer than ten seconds.
    """
    command = ["npu-smi", "info", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


def parse_cpus(text: str) -> list[int]:
    """Return the numbers of the kernel's list format, ``0-3,8,10-11``."""
    text = text.strip()
    if text and not _LIST.fullmatch(text):
        raise ValueError(f"`{text}` is not a list of CPUs")
    ends = (part.split("-") for part in text.split(",") if part)
    return [cpu for part in ends for cpu in range(int(part[0]), int(part[-1]) + 1)]


# ------------------------------------------------------------------------------ interrupts


def interrupts(proc: Path = Path("/proc")) -> list[Interrupt]:
    """Return the interrupts of this machine's devices, with the CPUs that may handle each; none where that cannot be read."""
    try:
        header, *lines = (proc / "interrupts").read_text().splitlines()
    except (OSError, ValueError):
        return []
    listed: list[Interrupt] = []
    for line in lines:
        number, _, text = line.partition(":")
        if not number.strip().isdecimal():  # those of the processor itself
            continue
        words = text.split()[len(header.split()) :]
        try:
            path = proc / "irq" / number.strip() / "smp_affinity_list"
            cpus = parse_cpus(path.read_text())
        except (OSError, ValueError):
            continue
        listed.append(Interrupt(int(number), words[-1] if words else "", cpus))
    return listed


def npu_interrupts(
    npu: Npu, sys: Path = Path("/sys"), proc: Path = Path("/proc")
) -> list[Interrupt]:
    """Return the interrupts with which a process waits for its NPU: tasks are sent, and queues of done ones updated.

    The driver names them ``sq_send_trigger_irq`` and ``cq_update_irq``.
    """
    numbers = {path.name for path in sys.glob(f"bus/pci/devices/{npu.address or '-'}/msi_irqs/*")}
    named = ("sq_send_trigger_irq", "cq_update_irq")
    return [i for i in interrupts(proc) if str(i.number) in numbers and i.name in named]
