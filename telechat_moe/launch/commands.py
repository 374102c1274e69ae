"""The ``msrun`` command of every node of a run, as a list of arguments and as a line for a shell.

Only lines made by ``shlex.join`` pass through a shell, and msrun itself starts none (:mod:`telechat_moe.launch.msrun`): a
value of a recipe is never run as a command.
"""

import errno
import os
import shlex
import socket
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from telechat_moe.errors import UsageError
from telechat_moe.launch.hosts import Host, resolve

DEFAULT_PORT = 8118
NO_SHELL = ("-m", "telechat_moe.launch.msrun")
"""Arguments of python before those of :meth:`LaunchNode.msrun`."""
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=3"
# What a shell around us may have left over from another run.
STRANGE = (
    *("DEVICE_ID", "MS_DEV_PRECOMPILE_ONLY", "MS_NODE_ID", "MS_ROLE", "MS_SCHED_HOST"),
    *("MS_SCHED_PORT", "MS_TOPO_TIMEOUT", "MS_WORKER_NUM", "RANK_ID", "RANK_SIZE"),
)


@dataclass(frozen=True)
class LaunchNode:
    """One host of a run and its processes.

    Attributes:
        number: Counted from 0; the scheduler runs on node 0.
        local: Processes on it, of ``total`` of the run.
        master: Address of node 0, where the scheduler has ``port``.
    """

    number: int = 0
    host: str = ""
    local: int = 1
    total: int = 1
    master: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    is_here: bool = True

    @property
    def ranks(self) -> range:
        """Global ranks of the processes on this host."""
        return range(self.number * self.local, (self.number + 1) * self.local)

    def msrun(self, logs: Path, program: Sequence[str], watched: bool = False) -> list[str]:
        """Return the command.

        Args:
            watched: We follow it, and show its logs ourselves; msrun leaves its ``tail`` processes behind when killed.
        """
        scripts = Path(sysconfig.get_path("scripts"))
        several = [f"--node_rank={self.number}"] if self.local < self.total else []
        return [
            str(scripts / "msrun"),
            *(f"--worker_num={self.total}", f"--local_worker_num={self.local}", *several),
            *(f"--master_addr={self.master}", f"--master_port={self.port}"),
            *(f"--log_dir={logs}", "--join=True", "--cluster_time_out=300"),
            f"--tail_worker_log={self.total if watched else 0}",
            *program,
        ]

    def shell_line(self, logs: Path, program: Sequence[str]) -> str:
        """Return a line for a POSIX shell on the node that runs the command as we would."""
        return (
            f"cd {shlex.quote(str(Path.cwd()))} && umask g-w,o-w && "
            f'PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH" '
            + shlex.join(["python", *NO_SHELL, *self.msrun(logs, program)])
        )


def make_nodes(hosts: Sequence[Host], port: int | None) -> list[LaunchNode]:
    """Return the nodes of a run.

    Args:
        port: Port of the scheduler; None: a free one on this machine, else 8118.

    Raises:
        BadInputError: An address is not known.
        UsageError: The first host's address cannot be reached by the others.
    """
    master = resolve(hosts[0])
    if len(hosts) > 1 and (master.startswith("127.") or master == "::1"):
        raise UsageError(
            f"the first host, {hosts[0].name}, is this machine at {master}, where other hosts do not reach it; "
            "add addr=IP to its line of the hostfile"
        )
    if port is None:
        port = free_port(master) if hosts[0].is_here() else DEFAULT_PORT
    total = sum(h.slots for h in hosts)
    run = (total, master, port)
    return [LaunchNode(i, h.name, h.slots, *run, h.is_here()) for i, h in enumerate(hosts)]


def remote(shell: str, host: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs another one on a host.

    Args:
        shell: A command that takes a host and one line for a shell there, as ssh does; ``{host}`` is replaced by the
            host; without it the host comes last.
        argv: What to run there, in the folder where we are.
    """
    try:
        words = shlex.split(shell)
    except ValueError as error:
        text = f"--remote-shell {shell}: {error}; write it as a shell would read it"
        raise UsageError(text) from None
    if any("{host}" in word for word in words):
        words = [word.replace("{host}", host) for word in words]
    else:
        words.append(host)
    return [*words, f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(argv)}"]


def environment() -> dict[str, str]:
    """Return the environment of msrun, which starts the first python of PATH: ours, whether it is activated or not."""
    env = {k: v for k, v in os.environ.items() if k not in STRANGE}
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("GLOG_v", "3")
    return env


# ------------------------------------------------------------------------------ ports


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on at an address of this machine."""
    with _socket(address) as s:
        s.bind((address, 0))
        return int(s.getsockname()[1])


def check_port(address: str, port: int) -> None:
    """Refuse a port of this machine that is in use, or an address that this machine does not have.

    Raises:
        UsageError: Says by which process, if that can be seen.
    """
    if not 1024 <= port <= 65535:
        raise UsageError(f"--master-port {port}: msrun takes 1024 to 65535")
    with _socket(address) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just closed is free
        try:
            s.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                text = f"{address} is not an address of this machine, where the scheduler should listen"
            else:
                text = (
                    f"port {port} of {address} cannot be used by the scheduler: {error.strerror}{_user(port)}; "
                    "choose another with --master-port"
                )
            raise UsageError(text) from None


def _socket(address: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)


def _user(port: int) -> str:
    import psutil

    try:
        for c in psutil.net_connections("tcp"):
            if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr[1] == port and c.pid:
                words = " ".join(psutil.Process(c.pid).cmdline())[:120]
                return f" (process {c.pid} listens: {words})"
    except psutil.Error:  # of another user
        pass
    return ""
