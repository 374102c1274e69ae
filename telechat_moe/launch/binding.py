"""Bind a process to its CPUs and memory, and find out later whether something has changed that.

The kernel does not say who changed an affinity; it says which threads have another one.
"""

import ctypes
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from telechat_moe.errors import UsageError
from telechat_moe.launch.affinity import Topology, npu_interrupts, parse_cpus
from telechat_moe.processes import Control
from telechat_moe.recipe import Recipe
from telechat_moe.recipe.problems import Problem
from telechat_moe.units import ranges_text

LOOK_S = 5.0  # between two looks at the threads of a process
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
_PREFERRED = 1  # MPOL_PREFERRED: other nodes where this one is full
_LIBC = ctypes.CDLL(None, use_errno=True)
_OF_MSRUN = ("MSRUN_CPU_LIST", "MSRUN_BIND_FILE")


@dataclass(frozen=True)
class Binding:
    """What a process is bound to.

    Attributes:
        mems: NUMA nodes that its memory may come from, in the kernel's list format; empty if not known.
        share: Where and why, in words.
        memory: Which of these nodes it takes memory from, in words.
    """

    cpus: list[int]
    mems: str
    share: str
    memory: str

    def changes(self, pid: int) -> list[str]:
        """Return what is different now, in words.

        The first thread must have exactly these CPUs; the others may be bound to some of them. A process that is gone has
        no changes.
        """
        texts: list[str] = []
        others: dict[str, list[str]] = {}
        for thread, status in _threads(pid):
            cpus = status["Cpus_allowed_list"]
            now, bound_cpus = set(parse_cpus(cpus)), set(self.cpus)
            if now - bound_cpus or (thread == pid and now != bound_cpus):
                others.setdefault(cpus, []).append(f"{status['Name']} ({thread})")
            if thread == pid and self.mems and status.get("Mems_allowed_list") != self.mems:
                mems = status.get("Mems_allowed_list", "unknown")
                texts.append(f"memory may come from NUMA nodes {mems}, before {self.mems}")
        for cpus, names in others.items():
            suffix = f" and {len(names) - 3} more" if len(names) > 3 else ""
            which = "thread" if len(names) == 1 else "threads"
            which = f"{which} {', '.join(names[:3])}{suffix}"
            bound = ranges_text(self.cpus, ",")
            texts.append(f"{which} may run on CPUs {cpus}, bound to {bound}")
        return texts


def _threads(pid: int) -> Iterable[tuple[int, dict[str, str]]]:
    """Yield the threads of a process with the fields of their status."""
    for folder in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:  # it ended
            continue
        fields = (line.partition(":") for line in lines)
        yield int(folder.name), {name: value.strip() for name, _, value in fields}


def count_threads(pid: int) -> int:
    """Return how many threads a process has; 0 if it is gone."""
    return len(list(Path(f"/proc/{pid}/task").glob("*")))


def use_cores(processes: int, index: int, bind: bool) -> Binding | None:
    """Bind this process to its cores if asked; set how many threads it may use if that is not set.

    Call it before mindspore is imported, whose threads inherit both.

    Raises:
        UsageError: ``msrun`` has bound it already.
    """
    threads, binding = max(1, len(os.sched_getaffinity(0)) // processes), None
    if bind:
        if variable := next((name for name in _OF_MSRUN if os.environ.get(name)), None):
            raise UsageError(
                f"msrun has bound this process already (--bind_core or --bind_numa; {variable} is set), and --bind-cores "
                "would bind it again; expected one of them"
            )
        share = Topology.read().shares(processes)[index]
        for thread, _ in _threads(os.getpid()):  # NumPy has started some of OpenBLAS's
            os.sched_setaffinity(thread, share.cpus)
        memory, threads = _prefer(share.node), len(share.cpus)
        mems = dict(_threads(os.getpid()))[os.getpid()].get("Mems_allowed_list", "")
        binding = Binding(share.cpus, mems, share.describe(), memory)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    return binding


def _prefer(node: int) -> str:
    """Let this thread and those that it starts take memory from a NUMA node while it has some; say whether that worked.

    Without it the kernel takes memory from the node of the thread that first writes to it, which is the same node as long
    as the thread is bound there.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    otherwise = "from the node of the thread that writes to it first"
    if number is None:
        return f"{otherwise}; set_mempolicy is not known for {platform.machine()}"
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    if _LIBC.syscall(number, _PREFERRED, mask, bits * len(mask) + 1):
        return f"{otherwise}; set_mempolicy: {os.strerror(ctypes.get_errno())}"
    return f"from node {node} first"


def plan(processes: int, first_rank: int) -> list[str]:
    """Return what each process on this machine will be bound to, a line each; the interrupts of its NPU, if there are any."""
    lines: list[str] = []
    for i, share in enumerate(Topology.read().shares(processes)):
        lines.append(f"rank {first_rank + i}: {share.describe()}")
        if share.npu is not None:
            by_cpus = Counter((i.name, ranges_text(i.cpus, ",")) for i in npu_interrupts(share.npu))
            lines += [f"  {n} x {name} on CPUs {cpus}" for (name, cpus), n in by_cpus.items()]
    return lines


def conflicts(recipe: Recipe) -> list[Problem]:
    """Return the settings with which MindFormers binds threads, too, each with what to do.

    It calls ``mindspore.runtime.set_cpu_affinity`` unless ``context.affinity_cpu_list`` is False, and binds processes with
    psutil where the environment sets ``CPU_AFFINITY`` (``mindformers/core/context/build_context.py``).
    """
    context, problems = recipe.given.get("context") or {}, list[Problem]()
    if "affinity_config" in context:
        binds = "MindFormers binds threads with it, and --bind processes"
        problems.append(recipe.problem("context.affinity_config", binds, "one of them"))
    elif context.get("affinity_cpu_list") is not False:
        binds = f"{context.get('affinity_cpu_list')}, so MindFormers binds threads, too"
        problems.append(recipe.problem("context.affinity_cpu_list", binds, "False with --bind"))
    if os.environ.get("CPU_AFFINITY", "").lower() in ("1", "true"):
        binds = "CPU_AFFINITY is set in the environment, so MindFormers binds processes, too"
        problems.append(recipe.problem("context", binds, "unset CPU_AFFINITY, or no --bind"))
    return problems


# ------------------------------------------------------------------------------ reports


def note(control: Control, rank: int, binding: Binding) -> None:
    """Tell the launcher what this rank is bound to."""
    control.write(f"rank_{rank}.bound", json.dumps(asdict(binding)))


def note_end(control: Control, rank: int, binding: Binding) -> None:
    """Tell the launcher, and standard error, what has changed until now, as the work is done."""
    changed = binding.changes(os.getpid())
    control.write(f"rank_{rank}.bound_at_end", json.dumps(changed))
    for change in changed:
        sys.stderr.write(f"binding changed: rank {rank}: {change}\n")


@dataclass
class BindingWatch:
    """Looks from time to time whether the ranks of a host still run where they were bound, and says it once if not."""

    control: Control
    ranks: Iterable[int]
    say: Callable[[str], object]
    bound: dict[int, Binding] = field(default_factory=dict[int, Binding])
    reported: set[str] = field(default_factory=set[str])
    looked: float = 0.0

    def look(self) -> None:
        """Look at ranks that have just begun, and at all if it is time again."""
        is_due = time.monotonic() - self.looked >= LOOK_S
        if is_due:
            self.looked = time.monotonic()
        for rank in self.ranks:
            if rank in self.bound and not is_due:
                continue
            noted = self.control.read(f"rank_{rank}.bound")
            begun = self.control.read(f"rank_{rank}.at")
            if noted is None or begun is None:
                continue
            pid = int(self.control.read(f"rank_{rank}.pid") or 0)
            is_new = rank not in self.bound
            self.bound[rank] = binding = Binding(**json.loads(noted))
            changes = binding.changes(pid)
            self._say(rank, changes)
            if is_new and not changes:
                text = f"bound to {binding.share}, memory {binding.memory}"
                self.say(f"rank {rank}: {text}; verified, {count_threads(pid)} threads")

    def end(self) -> None:
        """Say what the ranks found as they ended."""
        ends = {rank: self.control.read(f"rank_{rank}.bound_at_end") for rank in self.ranks}
        noted = {rank: json.loads(text) for rank, text in ends.items() if text is not None}
        for rank, changes in noted.items():
            self._say(rank, changes)
        if noted and not self.reported:
            self.say(f"ranks {ranges_text(sorted(noted))}: bound at the end as at the start")

    def _say(self, rank: int, changes: Iterable[str]) -> None:
        for change in changes:
            kind = f"{rank} {change.rpartition(' may ')[2]}"  # which threads there are changes
            if kind not in self.reported:
                self.reported.add(kind)
                self.say(f"binding changed: rank {rank}: {change}")
