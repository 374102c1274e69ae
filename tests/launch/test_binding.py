"""Binding processes to cores: the plan from a topology, the binding itself, and what has changed it."""

import json
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telechat_moe.errors import UsageError
from telechat_moe.launch import affinity, binding
from telechat_moe.launch.affinity import Core, Npu, Topology, parse_cpus
from telechat_moe.launch.binding import Binding, BindingWatch, conflicts, use_cores
from telechat_moe.processes import Control
from telechat_moe.recipe import load
from telechat_moe.units import ranges_text

MINE = os.sched_getaffinity(0)
several = pytest.mark.skipif(len(MINE) < 2, reason="one CPU cannot be bound in two ways")


def machine(
    root: Path,
    nodes: dict[int, str],
    npus: dict[str, int] | None = None,
    siblings: tuple[str, ...] = (),
) -> Path:
    """Write /sys of a machine: CPUs of NUMA nodes, NUMA node of each NPU by PCI address, hardware threads of a core."""
    for node, cpus in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for core in siblings:
        for cpu in parse_cpus(core):
            folder = root / f"devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(core + "\n")
    npus = npus or {}
    for address, node in {"0000:00:01.0": -1, **npus}.items():
        folder = root / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x19e5\n" if address in npus else "0x8086\n")
        (folder / "class").write_text("0x120000\n")
        (folder / "numa_node").write_text(f"{node}\n")
    return root


def shares(topology: Topology, processes: int) -> list[str]:
    return [ranges_text(share.cpus, ",") for share in topology.shares(processes)]


# ------------------------------------------------------------------------------ the plan

TWO_NODES = {0: "0-7", 1: "8-15"}


def test_processes_get_cores_beside_their_npu(tmp_path: Path) -> None:
    npus = {"0000:c1:00.0": 0, "0000:01:00.0": 1, "0000:02:00.0": 1, "0000:c2:00.0": 0}
    found = Topology.read(machine(tmp_path, TWO_NODES, npus), set(range(16)))
    assert [npu.node for npu in found.npus] == [1, 1, 0, 0]
    assert shares(found, 4) == ["8-11", "12-15", "0-3", "4-7"]


NPU_SMI = """#!/bin/sh
[ "$2" = -m ] && printf 'NPU ID  Chip ID  Chip Logic ID  Chip Name\\n0 0 0 Ascend 910B\\n0 1 - Mcu\\n5 0 1 Ascend 910B\\n' && exit
case $5 in 0) echo '  PCIe Bus Info    : 0000:C1:00.0';; 5) echo '  PCIe Bus Info    : 0000:01:00.0';; esac
"""


def npu_smi(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script in the place of npu-smi."""
    script = folder / "npu-smi"
    script.write_text(text)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return script


def test_device_numbers_are_those_of_npu_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path / "sys", TWO_NODES, {"0000:01:00.0": 0, "0000:c1:00.0": 1})
    assert [npu.node for npu in Topology.read(root, {0, 8}).npus] == [0, 1]  # by address
    script = npu_smi(tmp_path, NPU_SMI, monkeypatch)
    assert affinity.npu_addresses() == ["0000:c1:00.0", "0000:01:00.0"]
    assert [npu.node for npu in Topology.read(root, {0, 8}).npus] == [1, 0]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    assert shares(Topology.read(root, {0, 8}), 1) == ["0"]
    script.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
    assert [npu.node for npu in Topology.read(root, {0, 8}).npus] == [0, 1]


# A server of eight 910B3 with 192 CPUs in eight nodes, as ms-swift's documentation shows it (NPU-support.md).
TOPO = """\
\t   NPU0       NPU1       NPU2       NPU3       NPU4       NPU5       NPU6       NPU7       CPU Affinity
NPU0       X          HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       144-167
NPU1       HCCS       X          HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       144-167
NPU2       HCCS       HCCS       X          HCCS       HCCS       HCCS       HCCS       HCCS       96-119
NPU3       HCCS       HCCS       HCCS       X          HCCS       HCCS       HCCS       HCCS       96-119
NPU4       HCCS       HCCS       HCCS       HCCS       X          HCCS       HCCS       HCCS       0-23
NPU5       HCCS       HCCS       HCCS       HCCS       HCCS       X          HCCS       HCCS       0-23
NPU6       HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       X          HCCS       48-71
NPU7       HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       HCCS       X          48-71

Legend:

  X    = Self
  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.
"""
# One of A5, whose last NPU has no affinity (the test of a scheduler for it).
TOPO_A5 = """\
NPU0       NPU1       NPU2       NPU3       CPU Affinity
NPU0       X          UB         UB         144-191
NPU1       UB         X          UB         144-191
NPU2       UB         UB         X          48-95
NPU3       UB         UB         UB         X
"""


def test_where_the_kernel_does_not_know_the_node_npu_smi_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {i: f"{24 * i}-{24 * i + 23}" for i in range(8)}
    npus = {f"0000:{number:02x}:00.0": -1 for number in range(1, 9)}  # as in a virtual machine
    root = machine(tmp_path / "sys", nodes, npus)
    npu_smi(tmp_path, f'#!/bin/sh\n[ "$3" = topo ] && cat <<END\n{TOPO}END\n', monkeypatch)
    found = Topology.read(root, set(range(192)))
    assert [npu.node for npu in found.npus] == [6, 6, 4, 4, 0, 0, 2, 2]
    assert shares(found, 8)[:3] == ["144-155", "156-167", "96-107"]
    assert all(share.why == f"that of NPU {i}" for i, share in enumerate(found.shares(8)))


def test_an_npu_without_affinity_gets_the_freest_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu_smi(tmp_path, f"#!/bin/sh\ncat <<END\n{TOPO_A5}END\n", monkeypatch)
    assert {i: cpus[0] for i, cpus in affinity.npu_cpus().items()} == {0: 144, 1: 144, 2: 48}
    nodes = {i: [(cpu,) for cpu in range(48 * i, 48 * i + 48)] for i in range(4)}
    found = Topology(nodes, [Npu("", node) for node in (3, 3, 1, -1)])
    assert [(s.node, s.why) for s in found.shares(4)][2:] == [
        (1, "that of NPU 2"),
        (0, "that of NPU 3 is not known"),
    ]


def test_without_npus_processes_spread_over_the_nodes(tmp_path: Path) -> None:
    found = Topology.read(machine(tmp_path, TWO_NODES), set(range(16)))
    assert shares(found, 3) == ["0-3", "4-7", "8-15"]
    assert {share.why for share in found.shares(3)} == {"no NPU"}


def test_cpus_that_are_not_allowed_and_nodes_without_any_are_left_out(tmp_path: Path) -> None:
    nodes = {0: "0-3,16-19", 1: "4-7", 2: ""}
    found = Topology.read(machine(tmp_path, nodes), {2, 3, 16, 17})
    assert found.nodes == {0: [(2,), (3,), (16,), (17,)]}
    assert shares(found, 2) == ["2-3", "16-17"]
    # An NPU on a node whose cores are not ours does not leave its process without any.
    elsewhere = Topology(found.nodes, [Npu("", 1), Npu("", 0)])
    assert [(share.node, share.why) for share in elsewhere.shares(2)] == [
        (0, "that of NPU 0 1 has no core left"),
        (0, "that of NPU 1"),
    ]


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    """A Xeon numbers the second threads after all first ones: 0 and 4 are one core."""
    root = machine(tmp_path, {0: "0-7"}, siblings=("0,4", "1,5", "2,6", "3,7"))
    assert shares(Topology.read(root, set(range(8))), 2) == ["0-1,4-5", "2-3,6-7"]
    assert shares(Topology.read(root, {0, 1, 2, 4}), 2) == ["0,4", "1-2"]


@st.composite
def topologies(draw: st.DrawFn) -> tuple[Topology, int]:
    """Draw nodes of any sizes with 1 to 4 hardware threads a core, NPUs anywhere or nowhere, and a number of processes."""
    threads = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any))
    nodes: dict[int, list[Core]] = {}
    cores = sum(sizes)
    first = 0
    for node, size in enumerate(sizes):
        if size:
            numbers = range(first, first + size)
            nodes[node] = [tuple(c + cores * thread for thread in range(threads)) for c in numbers]
        first += size
    places = st.integers(-1, len(sizes))
    npus = draw(st.lists(places.map(lambda node: Npu("", node)), max_size=8))
    return Topology(nodes, npus), draw(st.integers(1, 2 * cores + 2))


@given(topologies())
def test_every_process_gets_whole_cores_of_one_node_of_its_own(drawn: tuple[Topology, int]) -> None:
    topology, processes = drawn
    found = topology.shares(processes)
    of_core = {cpu: core for cores in topology.nodes.values() for core in cores for cpu in core}
    uses = Counter(cpu for share in found for cpu in share.cpus)
    for share in found:
        assert share.cpus
        assert set(share.cpus) == {cpu for mine in share.cpus for cpu in of_core[mine]}
        assert {of_core[cpu] for cpu in share.cpus} <= set(topology.nodes[share.node])
    if processes <= len(set(of_core.values())):
        assert max(uses.values()) == 1
    else:
        assert set(uses) == set(of_core)
        assert max(uses.values()) - min(uses.values()) <= max(map(len, topology.nodes.values()))


@given(topologies())
def test_processes_are_balanced(drawn: tuple[Topology, int]) -> None:
    """Without NPUs: on no other node would a process of the fullest one get more cores; on a node shares differ by one."""
    topology, processes = Topology(drawn[0].nodes), drawn[1]
    found = topology.shares(processes)
    count = Counter(share.node for share in found)
    each = {node: len(cores) / count[node] for node, cores in topology.nodes.items() if count[node]}
    for node, cores in topology.nodes.items():
        assert len(cores) / (count[node] + 1) <= min(each.values()) + 1e-9
        sizes = {len(share.cpus) // len(cores[0]) for share in found if share.node == node}
        assert not sizes or max(sizes) - min(sizes) <= 1
    assert [share.node for share in found] == sorted(share.node for share in found)


@given(topologies())
def test_a_process_is_beside_its_npu_while_there_is_a_core(drawn: tuple[Topology, int]) -> None:
    topology, processes = drawn
    count = Counter[int]()
    for npu, share in zip(topology.npus, topology.shares(processes), strict=False):
        count[npu.node] += 1
        if count[npu.node] <= len(topology.nodes.get(npu.node, [])):
            assert share.node == npu.node


def test_this_machine_is_read() -> None:
    found = Topology.read()
    cores = [core for cores in found.nodes.values() for core in cores]
    assert sorted(cpu for core in cores for cpu in core) == sorted(MINE)


@pytest.mark.parametrize("text", ["0-", "a", "1 2", "1,,2"])
def test_what_is_no_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of CPUs"):
        parse_cpus(text)


# ------------------------------------------------------------------------------ interrupts

INTERRUPTS = """\
           CPU0       CPU1
   8:          0          1   IO-APIC    8-edge      rtc0
2753:        811          0   ITS-MSI 528384 Edge      sq_send_trigger_irq
2754:          0        904   ITS-MSI 528385 Edge      cq_update_irq
2755:          0          3   ITS-MSI 528386 Edge      devdrv-msg
3009:          1          2   ITS-MSI 530432 Edge      sq_send_trigger_irq
 NMI:          0          0   Non-maskable interrupts
"""


def test_interrupts_of_an_npu_are_those_of_its_device(tmp_path: Path) -> None:
    """The driver's names are the same for all NPUs, the numbers are not."""
    npu = Npu("0000:c1:00.0", 1)
    (tmp_path / "interrupts").write_text(INTERRUPTS)
    for number, cpus in {8: "0-1", 2753: "0", 2754: "1", 2755: "0-1", 3009: "1"}.items():
        (tmp_path / f"irq/{number}").mkdir(parents=True)
        (tmp_path / f"irq/{number}/smp_affinity_list").write_text(f"{cpus}\n")
    for number in (2753, 2754, 2755):
        path = tmp_path / f"bus/pci/devices/{npu.address}/msi_irqs/{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = affinity.npu_interrupts(npu, tmp_path, tmp_path)
    assert found == [(2753, "sq_send_trigger_irq", [0]), (2754, "cq_update_irq", [1])]
    assert len(affinity.interrupts(tmp_path)) == 5
    assert not affinity.npu_interrupts(Npu("", 1), tmp_path, tmp_path)


def test_interrupts_of_this_machine_are_read() -> None:
    for one in affinity.interrupts():
        path = Path(f"/proc/irq/{one.number}/smp_affinity_list")
        assert ranges_text(one.cpus, ",") == path.read_text().strip()
        assert f" {one.name}\n" in Path("/proc/interrupts").read_text()


# ------------------------------------------------------------------------------ the binding

BOUND = """
import json, sys, threading
from dataclasses import asdict
from telechat_moe.launch.binding import use_cores
binding = use_cores(2, int(sys.argv[1]), True)
threading.Thread(target=threading.Event().wait, name="reader", daemon=True).start()
import os
print(os.environ["OMP_NUM_THREADS"])
print(json.dumps(asdict(binding)), flush=True)
sys.stdin.readline()
"""


@contextmanager
def bound(index: int) -> Iterator[tuple[subprocess.Popen[str], Binding]]:
    """Start a process that binds itself as one of two, with another thread, and waits."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    command, pipe = [sys.executable, "-c", BOUND, str(index)], subprocess.PIPE
    with subprocess.Popen(command, text=True, env=environment, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        threads = int(process.stdout.readline())
        report = Binding(**json.loads(process.stdout.readline()))
        assert threads == len(report.cpus)
        try:
            yield process, report
        finally:
            process.kill()


def taskset(cpus: str, pid: int, *flags: str) -> None:
    subprocess.run(["taskset", *flags, "-pc", cpus, str(pid)], check=True, capture_output=True)


@several
def test_what_changes_a_binding_behind_our_back_is_reported(tmp_path: Path) -> None:
    control, said = Control.fresh(tmp_path), list[str]()
    watch = BindingWatch(control, [0, 1], said.append)
    with ExitStack() as stack:
        both = [stack.enter_context(bound(index)) for index in (0, 1)]
        assert [found.cpus for _, found in both] == [s.cpus for s in Topology.read().shares(2)]
        for rank, (process, found) in enumerate(both):
            control.write(f"rank_{rank}.pid", str(process.pid))
            binding.note(control, rank, found)
            control.set_position(rank, "step 1")
        watch.look()
        assert [line.partition(":")[0] for line in said] == ["rank 0", "rank 1"]
        assert all(re.search(r"; verified, \d+ threads$", line) for line in said)
        (first, _), (second, found) = both
        thread = max(int(path.name) for path in Path(f"/proc/{second.pid}/task").iterdir())
        other, mine = (ranges_text(cpus, ",") for cpus in (both[0][1].cpus, found.cpus))
        taskset(other, thread)
        assert not found.changes(first.pid) or found.cpus != both[0][1].cpus
        [change] = found.changes(second.pid)
        assert str(thread) in change
        assert change.startswith("thread ")
        assert change.endswith(f"may run on CPUs {other}, bound to {mine}")
        del said[:]
        watch.look()  # not yet time again
        assert not said
        for _ in range(2):
            watch.looked = 0.0
            watch.look()
        assert said == [f"binding changed: rank 1: {change}"]
        taskset(mine, thread)
        assert not found.changes(second.pid)
        taskset(ranges_text(sorted(MINE), ","), second.pid, "-a")
        assert "threads python" in found.changes(second.pid)[0]
    assert not found.changes(second.pid)  # gone


@several
def test_a_thread_may_have_fewer_cpus_but_not_the_process() -> None:
    here = Binding(sorted(MINE), "", "", "")
    assert not here.changes(os.getpid())
    with bound(0) as (process, found):
        wider = Binding([*found.cpus, max(MINE) + 1], found.mems, "", "")
        [change] = wider.changes(process.pid)
        assert f"({process.pid})" in change
        assert change.startswith("thread ")


def test_memory_of_other_nodes_is_reported() -> None:
    [change] = Binding(sorted(MINE), "7", "", "").changes(os.getpid())
    assert change.startswith("memory may come from NUMA nodes")
    assert change.endswith("before 7")


def test_memory_comes_from_the_node_or_the_reason_is_said() -> None:
    with bound(0) as (process, found):
        policies = Path(f"/proc/{process.pid}/numa_maps")
        if found.memory == "from node 0 first":
            assert "prefer:0" in policies.read_text()
        else:
            assert "writes to it first; set_mempolicy" in found.memory


def test_without_set_mempolicy_the_first_touch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    said = binding._prefer(0)
    assert said.endswith("writes to it first; set_mempolicy is not known for riscv64")


def test_the_end_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control, said = Control.fresh(tmp_path), list[str]()
    watch = BindingWatch(control, [0, 1], said.append)
    watch.end()
    assert not said  # nothing was bound
    binding.note_end(control, 0, Binding(sorted(MINE), "", "", ""))
    watch.end()
    assert said == ["ranks 0: bound at the end as at the start"]
    binding.note_end(control, 1, Binding([max(MINE) + 1], "", "", ""))
    watch.end()
    assert said[1].startswith("binding changed: rank 1: thread")
    assert said[1:] == capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("variable", ["MSRUN_CPU_LIST", "MSRUN_BIND_FILE"])
def test_what_msrun_has_bound_is_not_bound_again(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "[0]")
    with pytest.raises(UsageError, match=f"msrun has bound this process already.*{variable}"):
        use_cores(2, 0, bind=True)


@pytest.mark.parametrize(
    ("sets", "variable", "keys"),
    [
        (["context.affinity_cpu_list=False"], "", []),
        (["context.affinity_cpu_list=False"], "0", []),
        ([], "", ["affinity_cpu_list"]),
        (["context.affinity_cpu_list={device_0: 0-3}"], "", ["affinity_cpu_list"]),
        (["context.affinity_config={device_0: {}}"], "", ["affinity_config"]),
        (["context.affinity_cpu_list=False"], "1", ["context"]),
    ],
)
def test_mindformers_binds_too_unless_it_is_told_not_to(
    sets: list[str], variable: str, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_AFFINITY", variable)
    found = conflicts(load("telechat3_moe/pretrain_tiny.yaml", sets))
    assert [problem.key.removeprefix("context.") for problem in found] == keys
