"""What HCCL, the driver and MindSpore's cluster say is turned into one sentence; texts as they were published."""

import pytest

from telechat_moe.launch.faults import KINDS, fault_of, first_fault

# MindSpore's page on error analysis, and a thread of MindYOLO's; shortened.
NOTIFY = """\
RuntimeError: Run task for graph:kernel_graph_1 error! The details refer to 'Ascend Error Message'.

----------------------------------------------------
- Ascend Error Message:
----------------------------------------------------
EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record from remote rank [0].base information: [streamID:[27], taskID[10], taskType[Notify Wait], tag[HcomAllReduce_6629421139219749105_0].] task information: [notify id:[0x0000000100000000], stage:[ffffffff], remote rank:[0].
there are(is) 1 abnormal device(s):
        serverId[10.90.55.95], deviceId[0], Heartbeat Lost Occurred, Possible Reason: 1. Process has exited, 2. Network Disconnected
]
"""
# The format of HCCL's sources in CANN 8.5 for the group.
GROUP = (
    "[PID: 7277] 2025-12-04-21:59:08.232.310 Communication_Error_Timeout(EI0002): The wait execution of the Notify register times "
    "out. Reason: The Notify register has not received the Notify record from remote rank: [5]. base information: "
    "[tag[AllGather_10.0.0.1%eth0]]. group information: [group:[hccl_world_group], rankSize[8], rankId[1]]\n"
)
TABLE = (
    "RuntimeError: EI0004: The ranktable or rank is invalid,Reason:[The ranktable config devId is inconsistent with the local "
    "devId.]. Please check the configured ranktable. [/etc/hccl_8p.json]\n"
)
SOCKET = (
    "EI0006: 2024-08-05-18:15:21.270.506 Getting socket times out. Reason: Remote Rank did not send the data in time. Please "
    "check the reason for the rank being stuck\n"
    "[ERROR] HCCL(2717288,python3):2025-07-23-03:49:57.177.194 [hccl_socket_manager.cc:778] [2734049][Wait][LinkEstablish]wait "
    "socket establish timeout, role[1] rank[12] timeout[120]\n"
)
CQE = (
    "[PID: 3448331] 2025-12-04-21:59:08.232.310 Execution Error ROCE CQE(EI0013): An error CQE occurred during operator "
    "execution. Local information: server 127.0.0.1, device ID 0, device IP 127.10.0.1. Peer information: server 127.0.0.2, "
    "device ID 1, device IP 127.10.0.2.\n"
)
MEMORY = "RuntimeError: Out of Memory!!! Request memory size: 1073741824B, Memory Statistic:\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (NOTIFY, 6, ["time-out", "device 0 of 10.90.55.95", "AllReduce", "(EI0002)", "HCCL_EXEC_TIMEOUT"]),
        (GROUP, 1, ["rank 5 of the group", "AllGather", "group hccl_world_group", "(EI0002)"]),
        (TABLE, 1, ["rank table (EI0004): The ranktable config devId is inconsistent", "RANK_TABLE_FILE"]),
        (SOCKET, 1, ["no link", "rank 12 of the group", "(EI0006)", "HCCL_CONNECT_TIMEOUT", "hccn_tool"]),
        (CQE, 1, ["a link between devices broke, device 1 of 127.0.0.2 (EI0013)"]),
        (MEMORY, 1, ["memory is too small: Out of Memory!!! Request memory size: 1073741824B", "plan memory"]),
        ("RuntimeError: Failed to register the compute graph node: 3\n", 1, ["MindSpore's scheduler"]),
        ("Call aclrtSetDevice failed, ret[107001]. Got device count[0]\n", 1, ["cannot be opened", "npu-smi"]),
    ],
    ids=["notify", "group", "table", "socket", "cqe", "memory", "scheduler", "device"],
)  # fmt: skip
def test_a_published_text_becomes_a_sentence(text: str, line: int, words: list[str]) -> None:
    fault = fault_of("some line of the run\n" + text)
    assert fault is not None
    assert fault.line == line + 1
    assert "\n" not in fault.sentence
    assert [word for word in words if word not in fault.sentence] == []


def test_a_link_that_was_down_names_its_group_from_elsewhere_in_the_log() -> None:
    text = f"{SOCKET}RuntimeError: Failed to create comm group on device side for 8-1544301.\n"
    fault = fault_of(text)
    assert fault is not None
    assert "group 8-1544301 (EI0006)" in fault.sentence


def test_the_cause_comes_before_the_time_outs_of_others() -> None:
    logs = {0: NOTIFY, 1: "all is well\n", 2: f"{SOCKET}{MEMORY}", 3: TABLE}
    first = first_fault(logs)
    assert first is not None
    assert first[0] == 2
    assert "memory is too small" in first[1].sentence
    assert first_fault({1: "step 1 loss 2.3\n", 4: "Traceback\nRuntimeError: other\n"}) is None


def test_no_kind_is_hidden_by_one_before_it() -> None:
    """Each code of the table is recognised by one of its kinds, with a sentence of two parts."""
    codes = ["EI0002", "EI0004", "EI0005", "EI0006", "EI0007", "EI0008", "EI0010", "EI0011", "EI0012", "EI0013", "EI0014",
             "EI0015", "EI0017", "EJ0001", "EJ0002", "EL0004"]  # fmt: skip
    faults = {code: fault_of(f"{code}: something") for code in codes}
    assert [
        code for code, fault in faults.items() if fault is None or code not in fault.sentence
    ] == []
    assert all(kind.advice and "{" not in kind.advice for kind in KINDS)
