"""What launching is made of: hostfiles, cores, commands, ports, files that others must not write."""

import fcntl
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.files import check_private, keep_others_out
from telechat_moe.launch import commands, hosts
from telechat_moe.launch.commands import LaunchNode, check_port, make_nodes, remote
from telechat_moe.launch.host_processes import HostProcesses, has_ended
from telechat_moe.launch.hosts import Host
from telechat_moe.launch.multi_host import MultiHostProcesses
from telechat_moe.processes import (
    Control,
    RankDiedError,
    RankFailedError,
    exit_code,
    stop_on_signal,
)
from telechat_moe.recipe import load

NASTY = "a b$(touch pwned)`touch pwned`';touch pwned;\"&|\n*"


# ------------------------------------------------------------------------------ hostfiles


def hostfile(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


def test_a_hostfile_of_open_mpi_is_read(tmp_path: Path) -> None:
    text = "\ufeff# two machines\nnode-1 slots=8 addr=10.0.0.1\n\nme@node-2 addr=fe80::2 slots=4 # small\n"
    assert hosts.read_hosts(hostfile(tmp_path, text)) == [
        Host("node-1", 8, "10.0.0.1"),
        Host("me@node-2", 4, "fe80::2"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a", "slots=(not given)"),
        ("a slots=", "slots=(not given)"),
        ("a slots=0", "slots=0"),
        ("a slots=two", "slots=two"),
        ("a slots=2 slots=3", "`slots=3` is not understood"),
        ("a slots=2 port=1", "`port=1` is not understood"),
        ("a slots=2 addr=10.0.0", "addr=10.0.0 is not an IP address"),
        ("-oProxyCommand=touch slots=2", "`-oProxyCommand=touch` is not a host name"),
        ("a;touch slots=2", "`a;touch` is not a host name"),
        ("b slots=2 addr=10.0.0.9", "is there twice"),
        ("first slots=1", "is there twice"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = hostfile(tmp_path, f"first slots=2 addr=10.0.0.9\n{line}\nlast slots=x\n")
    with pytest.raises(BadInputError) as error:
        hosts.read_hosts(path)
    first, second = str(error.value).splitlines()
    assert first.startswith(f"{path}:2: ")
    assert message in first
    assert second.startswith(f"{path}:3: last has slots=x")


def test_a_hostfile_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfworker-1 slots=8\n")
    assert [(host.name, host.slots) for host in hosts.read_hosts(path)] == [("worker-1", 8)]


def test_an_empty_or_missing_hostfile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="names no host"):
        hosts.read_hosts(hostfile(tmp_path, "# nobody\n"))
    with pytest.raises(BadInputError, match="nothing: the hostfile cannot be read"):
        hosts.read_hosts(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("slots", "processes", "used"),
    [([8, 8], 16, [8, 8]), ([8, 8], 8, [8]), ([8, 8], 12, [6, 6]), ([2, 2, 2], 4, [2, 2])],
)
def test_the_first_hosts_with_room_are_used(
    slots: list[int], processes: int, used: list[int]
) -> None:
    given = [Host(f"h{i}", n, f"10.0.0.{i}") for i, n in enumerate(slots)]
    assert [h.slots for h in hosts.choose(given, processes, Path("hosts"))] == used


@pytest.mark.parametrize(
    ("given", "processes", "message"),
    [
        ([Host("a", 2, "10.0.0.1"), Host("b", 1, "10.0.0.2")], 4, "3 slots on 2 host"),
        ([Host("a", 2, "10.0.0.1"), Host("b", 1, "10.0.0.2")], 3, "do not spread evenly"),
        ([Host("a", 3, "10.0.0.1"), Host("b", 1, "10.0.0.2")], 4, "do not spread evenly"),
        ([Host("a", 1, "127.0.0.1"), Host("b", 1, "127.0.0.2")], 2, "both this machine"),
    ],
)
def test_what_msrun_cannot_number_is_refused(
    given: list[Host], processes: int, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        hosts.choose(given, processes, Path("hosts"))


def test_an_address_that_others_cannot_reach_is_refused() -> None:
    with pytest.raises(UsageError, match="add addr=IP"):
        make_nodes([Host("localhost", 1), Host("b", 1, "10.0.0.2")], None)
    with pytest.raises(BadInputError, match="add addr=IP"):
        make_nodes([Host("no.such.host.invalid", 1)], None)


# ------------------------------------------------------------------------------ commands


@pytest.fixture
def fake_msrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in msrun's place that writes what it was given."""
    folder = tmp_path / "bin with blank"
    folder.mkdir()
    script = folder / "msrun"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, shutil, sys\n"
        "print(json.dumps([sys.argv, os.getcwd(), os.umask(0), shutil.which('python')]))\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(folder))
    return script


def test_the_line_for_a_shell_gives_msrun_what_we_would(
    tmp_path: Path, fake_msrun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / NASTY.replace("\n", "")
    place.mkdir()
    monkeypatch.chdir(place)
    node = LaunchNode(1, "b", 2, 4, "10.0.0.1", 8200, is_here=False)
    program = ["python", "-m", "telechat_moe.run", NASTY]
    line = node.shell_line(place / "log", program)
    process = subprocess.run(
        ["sh", "-c", f"umask 0; {line}"], capture_output=True, text=True, check=True, cwd="/"
    )
    argv, folder, umask, python = json.loads(process.stdout)
    assert argv == node.msrun(place / "log", program)
    assert argv[0] == str(fake_msrun)
    assert argv[1:6] == [
        *("--worker_num=4", "--local_worker_num=2", "--node_rank=1"),
        *("--master_addr=10.0.0.1", "--master_port=8200"),
    ]
    assert argv[-4:] == program
    assert folder == str(place)
    assert umask == 0o022
    assert python == str(Path(sys.executable).parent / "python")
    assert not list(tmp_path.rglob("pwned"))


def touches(folder: Path) -> Path:
    """Return a folder of logs whose name, in a command, makes the file ``pwned`` in the folder of the command."""
    logs = folder / "out$(touch${IFS}pwned)`touch${IFS}pwned`;touch${IFS}pwned;" / "log"
    logs.mkdir(parents=True)
    return logs


def test_a_shell_that_msrun_starts_is_not_started(
    tmp_path: Path, fake_msrun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What msrun of 2.9 does after a failure, in a stand-in: the excerpt from its scheduler's log."""
    fake_msrun.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "logs = next(a for a in sys.argv if a.startswith('--log_dir=')).partition('=')[2]\n"
        "os.system(f'cat {logs}/scheduler.log')\nsys.exit(7)\n"
    )
    monkeypatch.chdir(tmp_path)
    line = LaunchNode(local=2, total=2).shell_line(touches(tmp_path), ["python", "job.py"])
    process = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, cwd="/"
    )
    assert process.returncode == 7, process.stderr
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
def test_a_job_that_fails_under_msrun_executes_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real msrun; without our protection it executes the name of the folder."""
    (tmp_path / "fails.py").write_text("raise SystemExit('ERROR: planned')\n")
    monkeypatch.chdir(tmp_path)
    node = LaunchNode(local=2, total=2, port=commands.free_port())
    logs = touches(tmp_path)
    line = node.shell_line(logs, ["python", "fails.py"])
    process = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, cwd="/"
    )
    assert process.returncode != 0
    assert (logs / "scheduler.log").exists()
    assert not (tmp_path / "pwned").exists()
    Control.fresh(tmp_path / "job")
    run = HostProcesses(tmp_path / "job", node, logs, ["python", "fails.py"], out=None)
    with pytest.raises(RankDiedError):
        run.run()
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("shell", ["{ssh} -o Some=Thing", "env TO={{host}} sh -c"])
def test_a_remote_shell_passes_arguments_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    ssh = tmp_path / "ssh"  # like the real one: joins its arguments with blanks for a shell there
    ssh.write_text('#!/bin/sh\n[ "$1" = -o ] && shift 2\nshift\ncd / && exec sh -c "$*"\n')
    ssh.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd()]))"
    argv = [sys.executable, "-c", code, NASTY, "-x"]
    command = remote(shell.format(ssh=ssh), "node-7", argv)
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == [[NASTY, "-x"], str(tmp_path)]
    assert not (tmp_path / "pwned").exists()
    assert any("node-7" in word for word in command)


def test_ssh_is_asked_nothing_and_notices_a_dead_machine() -> None:
    with pytest.raises(UsageError, match=r"--remote-shell ssh \"unb: No closing quotation"):
        remote('ssh "unb', "node-7", ["true"])
    words = remote(commands.SSH, "node-7", ["true"])
    assert words[0] == "ssh"
    assert words[-2] == "node-7"
    assert {"BatchMode=yes", "ServerAliveInterval=10"} <= set(words)
    assert shlex.split(words[-1])[-2:] == ["exec", "true"]


@pytest.mark.parametrize("late_s", [0, 3])
def test_what_an_agent_says_counts_even_if_it_comes_after_its_end(
    tmp_path: Path, late_s: int
) -> None:
    answer = {"answer": {"kind": "failed", "message": "no room", "exit_code": 7}}
    shell = tmp_path / "shell"
    shell.write_text(f"#!/bin/sh\n(sleep {late_s}; echo '{json.dumps(answer)}') &\n")
    shell.chmod(0o755)
    Control.fresh(tmp_path / "job")
    node = LaunchNode(host="a", is_here=False)
    job, metrics = tmp_path / "job", tmp_path / "metrics.jsonl"
    with pytest.raises(RankFailedError, match="no room") as error:
        MultiHostProcesses(job, [node], tmp_path, ["python"], metrics, str(shell)).run()
    assert error.value.exit_code == 7


# ------------------------------------------------------------------------------ ports


def test_a_port_in_use_is_refused_with_who_uses_it() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"port {port} .*process {os.getpid()} listens"
        ) as error:
            check_port("127.0.0.1", port)
        assert "--master-port" in str(error.value)
    check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 is not an address of this machine"):
        check_port("192.0.2.1", 8118)
    with pytest.raises(UsageError, match="1024 to 65535"):
        check_port("127.0.0.1", 80)


# ------------------------------------------------------------------------------ files


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_control_files_are_not_for_others(tmp_path: Path, no_umask: None) -> None:
    (tmp_path / "job").mkdir(mode=0o755)
    control = Control.fresh(tmp_path / "job", task={"a": 1})
    control.write("stop")
    control.set_position(0, "step 1")
    paths = list(control.folder.rglob("*"))
    assert len(paths) >= 3
    for path in paths:
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path
    assert stat.S_IMODE(control.folder.stat().st_mode) == 0o700
    assert control.task() == {"a": 1}


def test_keeping_others_out_takes_nothing_that_the_user_wants_back() -> None:
    before = os.umask(0o077)
    try:
        keep_others_out()
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)


@pytest.mark.parametrize("how", ["mode", "folder", "link", "owner"])
def test_a_task_that_somebody_else_may_have_written_is_not_read(tmp_path: Path, how: str) -> None:
    control = Control.fresh(tmp_path / "job", task={"steps": 1})
    path = control.folder / "task.json"
    if how == "mode":
        path.chmod(0o666)
    elif how == "folder":
        control.folder.chmod(0o777)
    elif how == "link":
        path.rename(control.folder / "other")
        path.symlink_to(control.folder / "other")
    elif os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        pytest.skip("only root can give a file away")
    said = {
        "mode": r"it can be written by others \(mode 0666\)",
        "folder": r"its folder can be written by others \(mode 0777\)",
        "link": "it is a symbolic link",
        "owner": "it belongs to user 65534",
    }
    with pytest.raises(BadInputError, match=rf"task\.json: {said[how]}"):
        control.task()


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    assert check_private(path) == path


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import sys; sys.exit(3)", 3),
    ],
)
def test_how_a_process_ended_is_known_before_its_parent_asks(code: str, expected: int) -> None:
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert exit_code(process.pid) == expected
    assert exit_code(process.pid) == 0  # it was waited for


HOLDER = """
import fcntl, sys, threading, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
memory = bytearray(512 << 20)  # takes a while to free; the first thread has ended before
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_has_ended_when_its_locks_are_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with path.open("a") as file, subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert not has_ended(process.pid)
        process.kill()
        while not has_ended(process.pid):
            pass
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert has_ended(process.pid)


# ------------------------------------------------------------------------------ restarts


@pytest.mark.parametrize(
    ("restarts", "overwrite", "deaths", "started"),
    [
        # What the newest checkpoint is at each death -> the flags of every start.
        (0, False, ["a"], [""]),
        (1, False, [None, None], ["", "--resume"]),
        (1, False, ["a", "a"], ["", "--resume"]),
        (1, False, ["a", "b", "c", "c"], ["", "--resume", "--resume", "--resume"]),
        (2, False, ["a", "a", "b", "b", "b"], ["", "--resume", "--resume", "--resume", "--resume"]),
        # The old checkpoint is still there at the first death, not at the second.
        (2, True, ["old", "a", "a", "a"], ["--overwrite", "--overwrite", "--resume", "--resume"]),
    ],
)
def test_restarts_are_counted_anew_after_a_new_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarts: int,
    overwrite: bool,
    deaths: list[str | None],
    started: list[str],
) -> None:
    launch = pytest.importorskip("telechat_moe.launch.job")
    found: list[str | None] = ["old" if overwrite else None]
    flags: list[str] = []
    left = list(deaths)

    def start(recipe, plan, resolved, logs, resume: bool, overwrite: bool) -> None:
        flags.append("--resume" if resume else "--overwrite" if overwrite else "")
        logs.mkdir(parents=True, exist_ok=True)
        found[0] = left.pop(0)
        raise launch.RankDiedError("rank 1 died")

    monkeypatch.setattr(launch, "_start", start)
    monkeypatch.setattr(launch, "newest", lambda recipe, plan: found[0])
    recipe = load("telechat3_moe/pretrain_tiny.yaml", [f"output_dir={tmp_path}/run"])
    plan = launch.LaunchPlan(nodes=[LaunchNode()], restarts=restarts)
    with pytest.raises(launch.RankDiedError, match="rank 1 died"):
        launch._train_to_the_end(recipe, plan, tmp_path / "recipe.yaml", False, overwrite)
    assert flags == started
    assert not left


def test_a_stop_that_cannot_be_asked_for_ends_at_once(tmp_path: Path) -> None:
    control = Control(tmp_path / "gone")
    with pytest.raises(KeyboardInterrupt), stop_on_signal(control.ask_to_stop):
        signal.raise_signal(signal.SIGTERM)
