"""Hostfiles, as in Open MPI and DeepSpeed: ``host slots=8 [addr=10.0.0.1]``, ``#`` begins a comment."""

import ipaddress
import platform
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from telechat_moe.errors import BadInputError
from telechat_moe.reading import read_text

# user@name, name, address; no leading dash, nothing of a shell
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:-]*")


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        name: What the remote shell is given.
        slots: Processes that it may run: its devices.
        address: Address at which the other machines reach it; empty: its name.
    """

    name: str
    slots: int
    address: str = ""

    @property
    def reached_at(self) -> str:
        """Address or name at which other machines reach this host."""
        return self.address or self.name.rpartition("@")[2]

    def is_here(self) -> bool:
        """Return whether it is this machine."""
        name = self.name.rpartition("@")[2]
        if not self.address and name in ("localhost", platform.node(), socket.getfqdn()):
            return True
        return self.reached_at in local_addresses() or _is_loopback(self.reached_at)


def local_addresses() -> set[str]:
    """Return the addresses of this machine's interfaces."""
    import psutil

    interfaces = psutil.net_if_addrs().values()
    return {a.address.split("%")[0] for addresses in interfaces for a in addresses}


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def read_hosts(path: Path) -> list[Host]:
    """Read a hostfile.

    Raises:
        BadInputError: With every line that is wrong.
    """
    try:
        lines = read_text(path).splitlines()
    except BadInputError as error:
        raise BadInputError(f"{path}: the hostfile cannot be read: {error}") from None
    hosts: list[Host] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            hosts.append(_host(words, hosts))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if not hosts and not problems:
        problems.append(f"{path}: names no host; expected lines `host slots=8 [addr=10.0.0.1]`")
    if problems:
        raise BadInputError("\n".join(problems))
    return hosts


def _host(words: list[str], before: list[Host]) -> Host:
    name, settings = words[0], {}
    if not _HOST.fullmatch(name):
        raise ValueError(f"`{name}` is not a host name")
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key not in ("slots", "addr") or not equals or key in settings:
            expected = "expected `slots=8` or `addr=10.0.0.1`, each once"
            raise ValueError(f"`{word}` is not understood; {expected}")
        settings[key] = value
    slots = settings.get("slots", "")
    if not slots.isdecimal() or not int(slots):
        slots = slots or "(not given)"
        raise ValueError(f"{name} has slots={slots}; expected slots=N, its devices")
    address = settings.get("addr", "")
    if address:
        try:
            address = str(ipaddress.ip_address(address))
        except ValueError:
            raise ValueError(f"addr={address} is not an IP address") from None
    host = Host(name, int(slots), address)
    for other in before:
        if host.name == other.name or host.reached_at == other.reached_at:
            text = f"{name} ({host.reached_at}) is there twice"
            raise ValueError(f"{text}; give all its slots in one line")
    return host


def choose(hosts: Sequence[Host], processes: int, path: Path) -> list[Host]:
    """Return the first hosts that have room for the processes, with the slots that are used.

    ``msrun`` numbers ranks as node times processes of a node, so all nodes run equally many, and starts a scheduler
    wherever the first address is local, so each machine is one node.

    Raises:
        BadInputError: They do not fit.
    """
    room, chosen = 0, []
    for host in hosts:
        if room < processes:
            chosen.append(host)
            room += host.slots
    if room < processes:
        text = f"{room} slots on {len(hosts)} host(s), the recipe needs {processes}"
        raise BadInputError(f"{path}: {text}")
    per_host, remainder = divmod(processes, len(chosen))
    too_small = [h for h in chosen if h.slots < per_host]
    if remainder or too_small:
        slots = ", ".join(f"{h.name} {h.slots}" for h in chosen)
        raise BadInputError(
            f"{path}: {processes} processes do not spread evenly over {len(chosen)} hosts (slots: {slots}); "
            "msrun runs equally many on each: change the slots, or the recipe's devices"
        )
    local_hosts = [h.name for h in chosen if h.is_here()]
    if len(local_hosts) > 1:
        raise BadInputError(
            f"{path}: {' and '.join(local_hosts)} are both this machine; give it one line with all its slots"
        )
    return [Host(h.name, per_host, h.address) for h in chosen]


def resolve(host: Host) -> str:
    """Return the address of a host, for ``msrun``.

    Raises:
        BadInputError: Its name is not known here.
    """
    if host.is_here() and not host.address:
        return "127.0.0.1"
    with suppress(ValueError):
        return str(ipaddress.ip_address(host.reached_at))
    try:
        addresses = socket.getaddrinfo(host.reached_at, None, type=socket.SOCK_STREAM)
    except OSError:
        raise BadInputError(
            f"the address of host {host.name} is not known here; add addr=IP to its line of the hostfile"
        ) from None
    return str(addresses[0][4][0])
