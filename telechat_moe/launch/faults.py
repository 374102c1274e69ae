"""Recognise in the log of a rank what HCCL, the driver and MindSpore's cluster say as they give up, in one sentence.

The texts are those of CANN 8.0 to 8.5 (``EI0002`` and others, in the tables of its sources and its troubleshooting pages)
and of the libraries of MindSpore 2.9; none was seen here, where there is no NPU.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

FIRST = 40
"""Lines after the first one of a fault that may name its rank, group or device."""


class FaultKind(NamedTuple):
    """A way in which devices or their links fail.

    Attributes:
        pattern: Of the line that reports it; its group ``detail``, if there is one, is quoted.
        meaning: What happened; ``{peer}`` and ``{group}`` are replaced by what the lines name.
        advice: What to do.
        is_echo: It often only follows the fault of another rank.
    """

    pattern: str
    meaning: str
    advice: str
    is_echo: bool = False


class Fault(NamedTuple):
    """A fault that a log reports: the number of its line, from 1, and what it means and asks for."""

    line: int
    sentence: str
    is_echo: bool


_MEMORY = (
    "take what `telechat-moe plan memory RECIPE` proposes (a smaller micro-batch, recomputation, a sharded optimizer), or raise "
    "context.max_device_memory if the device has more; end other processes on it (`npu-smi info`)"
)
_TABLE = "correct it to the devices of the hosts, or unset RANK_TABLE_FILE, since msrun needs none"
_LINK = (
    "look at the logs of the ranks that did not report it, then at the link (`hccn_tool -i DEVICE -link -g`, `-tls -g`); where ranks "
    "only begin late, set HCCL_CONNECT_TIMEOUT (seconds, 120 by default) on all hosts"
)
KINDS = (
    FaultKind(r"EI0004\b.*?Reason:\s*\[(?P<detail>[^\]]*)", "HCCL refuses the rank table", _TABLE),
    FaultKind(r"EI0014\b.*?Reason:\s*\[(?P<detail>[^\]]*)", "the rank table does not fit the devices", _TABLE),
    FaultKind(r"EI0017\b.*?(?P<detail>Config \S+ is missing)", "HCCL refuses the rank table", _TABLE),
    FaultKind(r"EI00(?:04|14|17)\b", "HCCL refuses the rank table", _TABLE),
    FaultKind("does not support ranktable startup", "a rank table is set, which MindSpore no longer starts from", _TABLE),
    FaultKind(r"EJ0002\b", "a network port of a device is down", "`hccn_tool -i DEVICE -link -g` says which; bring it up, or leave its host out"),
    FaultKind(r"EJ0001\b", "the device is still used by an earlier process", "end it (`npu-smi info`), wait ten seconds, and start again"),
    FaultKind(r"EI0008\b", "ranks have different versions of HCCL{group}", "install one version of CANN on all hosts"),
    FaultKind(r"EI0005\b(?:.*?(?P<detail>tag ?\[[^\]]*\]))?", "ranks of a group do not run the same collective{group}", "start all ranks from one recipe and one version of the package; `telechat-moe dryrun RECIPE --check-rank R` compares their graphs"),
    FaultKind(r"(?P<detail>Out of Memory!!! Request memory size:? *[\d.]*\S*)|EI0011\b|EI0007\b|EL0004\b|[Mm]emory isn't enough and alloc failed|The device memory is not enough", "the device's memory is too small", _MEMORY),
    FaultKind(r"[Cc]all (?:aclrtSetDevice|aclInit) failed", "the device cannot be opened", "`npu-smi info` must show it as healthy; driver and CANN must fit (`telechat-moe report`)"),
    FaultKind("ts lost heartbeat|507010", "the device was lost: its task scheduler no longer answers", "`npu-smi info` and the host's kernel log show its state; leave the host out, or go on with --restart N"),
    FaultKind(r"EI0013\b", "a link between devices broke{peer}", "check the network between them, and whether the peer's process ended first; --restart N goes on from the last checkpoint", is_echo=True),
    FaultKind(r"EI0012\b|EI0010\b", "a copy between devices failed{peer}{group}", "check the link between them, and whether the peer's process ended first", is_echo=True),
    FaultKind(r"EI0015\b", "HCCL did not hear from all ranks{group}", "check that all of them started, that hosts reach the first one, and HCCL_SOCKET_IFNAME", is_echo=True),
    FaultKind(r"EI0006\b|wait socket establish timeout", "no link to another device within the time-out{peer}{group}", _LINK, is_echo=True),
    FaultKind(r"EI0002\b", "a collective was not finished within the time-out{peer}{group}", "the logs of the ranks that did not report it say why; where a rank is only slow (saving, compiling), raise HCCL_EXEC_TIMEOUT (seconds)", is_echo=True),
    FaultKind("Topology build timed out|Failed to register the compute graph node", "not all processes reached MindSpore's scheduler in time", "look for a host whose processes did not start; the scheduler's address and port must be reachable from all hosts", is_echo=True),
)  # fmt: skip
"""Those of which one may be the cause of another come first."""

_PEER = (
    r"serverId\[([^\]]+)\], deviceId\[(\d+)\], Heartbeat Lost",
    r"Exception Location\[IP/ID\]:\[([^\]/]+)/(\d+)\]",
    r"Peer information: server ([^,\s]+), device ID (\d+)",
)
_PEER_RANK = re.compile(r"[Rr]emote rank:?\s*\[(\d+)\]|role\[\d+\] rank\[(\d+)\]")
_GROUPS = (
    r"group:\s*\[([^\]]+)\]",
    r"comm group on device side for (\S+)",
    r"[Ii]nit communicator asynchronizely for group (\S+)",
)
_OPERATOR = re.compile(r"tag ?\[(?:Hcom)?([A-Z][A-Za-z]+?)_")
_CODE = re.compile(r"\bE[A-Z]\d{4}\b")


def fault_of(text: str) -> Fault | None:
    """Return the fault that a log reports, of several the one that may be the others' cause; None: no known one."""
    lines = text.splitlines()
    for kind in KINDS:
        pattern = re.compile(kind.pattern)
        for index, line in enumerate(lines):
            if match := pattern.search(line):
                after = lines[index : index + FIRST]
                return Fault(index + 1, _sentence(kind, match, after, lines), kind.is_echo)
    return None


def _sentence(
    kind: FaultKind, match: re.Match[str], after: Iterable[str], lines: Iterable[str]
) -> str:
    block = "\n".join(after)
    meaning = kind.meaning.format(peer=_peer(block), group=_group(block, "\n".join(lines)))
    detail = match.groupdict().get("detail")
    code = _CODE.search(match.group())
    reason = f": {detail.strip()[:200]}" if detail else ""
    return f"{meaning}{f' ({code[0]})' if code else ''}{reason}; {kind.advice}"


def _peer(block: str) -> str:
    """Name the device or rank that is to blame."""
    for pattern in _PEER:
        if match := re.search(pattern, block):
            return f", device {match[2]} of {match[1]}"
    match = _PEER_RANK.search(block)
    return f", rank {match[1] or match[2]} of the group" if match else ""


def _group(block: str, text: str) -> str:
    """Name operator and group; the group may be named elsewhere in the log."""
    operator = _OPERATOR.search(block)
    matches = (re.search(pattern, part) for part in (block, text) for pattern in _GROUPS)
    group = next((match[1].rstrip(".,") for match in matches if match), "")
    parts = [operator[1] if operator else "", f"group {group}" if group else ""]
    return "".join(f", {part}" for part in parts if part)


def first_fault(logs: Mapping[int, str]) -> tuple[int, Fault] | None:
    """Return the fault of several ranks' logs that is most likely the cause, and its rank; None: no known one."""
    faults = {rank: fault for rank, text in logs.items() if (fault := fault_of(text)) is not None}
    return min(faults.items(), key=lambda item: (item[1].is_echo, item[0]), default=None)
