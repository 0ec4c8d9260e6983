"""Who listens on a TCP port, by the kernel's socket table.

Invariants: asking costs no connection; a listener's uid needs no /proc/PID, so a hidden process is still somebody's;
a listener on a wildcard address holds the port for every host, IPv6 wildcards included.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from tdai_supervisor.decide.policy import Holder
from tdai_supervisor.host import process, tree

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP = 4, 20, 0x301
_NLMSG_ERROR, _NLMSG_DONE, _TCP_LISTEN = 2, 3, 10
OVERFLOW_UID = 65534  # how another user namespace's uid reads: nobody we know


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket. uid is None where it belongs to another user namespace."""

    host: str
    port: int
    uid: int | None
    inode: int


def listeners(port: int | None = None) -> list[Listener]:
    """Every TCP socket that listens, IPv4 and IPv6; only those on port where one is given."""
    found: list[Listener] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            found += _sock_diag(family, port)
        except OSError:
            found += _proc_net(family, port)
    return found


def _sock_diag(family: int, port: int | None) -> list[Listener]:
    """One dump of listening sockets of a family (0.3 ms); raises OSError where the kernel has no sock_diag."""
    if not hasattr(socket, "AF_NETLINK"):
        raise OSError("no netlink")
    # struct inet_diag_req_v2: family, protocol, ext, pad, states, then inet_diag_sockid (48 bytes).
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, 1 << _TCP_LISTEN)
    request += bytes(48)
    header = struct.pack("=IHHII", 16 + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
    found: list[Listener] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as link:
        link.settimeout(1.0)
        link.send(header + request)
        while True:
            data = link.recv(65536)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind == _NLMSG_DONE:
                    return found
                if kind == _NLMSG_ERROR:
                    raise OSError("the kernel refused a socket dump")
                listener = _diag_message(family, data[16:length])
                if port in (None, listener.port):
                    found.append(listener)
                data = data[(length + 3) & ~3 :]


def _diag_message(family: int, body: bytes) -> Listener:
    """struct inet_diag_msg: 4 bytes, sockid (ports, addresses, interface, cookie), expires, queues, uid, inode."""
    port = struct.unpack_from("!H", body, 4)[0]
    size = 4 if family == socket.AF_INET else 16
    host = socket.inet_ntop(family, body[8 : 8 + size])
    uid, inode = struct.unpack_from("=II", body, 64)
    return Listener(host, port, None if uid == OVERFLOW_UID else uid, inode)


def _proc_net(family: int, port: int | None) -> list[Listener]:
    """The same from /proc/net/tcp or tcp6; empty where there is no /proc."""
    name = "tcp" if family == socket.AF_INET else "tcp6"
    found = []
    try:
        with open(f"/proc/net/{name}", encoding="ascii") as file:
            lines = file.readlines()[1:]
    except OSError:
        return []
    for line in lines:
        fields = line.split()
        address, _, hex_port = fields[1].rpartition(":")
        if fields[3] == "0A" and port in (None, int(hex_port, 16)):
            words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
            uid = int(fields[7])
            host = socket.inet_ntop(family, b"".join(words))
            found.append(Listener(host, int(hex_port, 16), None if uid == OVERFLOW_UID else uid, int(fields[9])))
    return found


def conflicts(listener: Listener, host: str) -> bool:
    """Whether listener keeps another process from binding host on its port."""
    wildcards = ("0.0.0.0", "::")  # noqa: S104  (compared, not bound)
    return listener.host in wildcards or host in wildcards or listener.host == _numeric(host)


def _numeric(host: str) -> str:
    return {"localhost": "127.0.0.1", "::ffff:127.0.0.1": "127.0.0.1"}.get(host, host)


def on(host: str, port: int) -> list[Listener]:
    """The listeners that hold host:port."""
    return [x for x in listeners(port) if conflicts(x, host)]


def owned_by(found: Iterable[Listener], pids: Iterable[int]) -> int | None:
    """The first of these pids that has one of these sockets open, or None."""
    sockets = list(found)
    return next((pid for pid in pids if listened_by(pid, sockets)), None) if sockets else None


def listened_by(pid: int, found: Iterable[Listener]) -> list[Listener]:
    """Those of these sockets that pid has open; empty where it cannot be seen."""
    names = {f"socket:[{x.inode}]": x for x in found}
    own = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if (listener := names.get(os.readlink(f"/proc/{pid}/fd/{fd}"))) is not None:
                    own.append(listener)
    return own


def holder(found: list[Listener]) -> Holder | None:
    """Who holds a port, named as far as /proc shows. Walks all processes: not for the loop."""
    if not found:
        return None
    pid = owned_by(found, (s for s in process.pids() if s != os.getpid()))
    if pid is None and owned_by(found, [os.getpid()]):
        pid = os.getpid()
    return Holder(pid, tree.command_line(pid) if pid else None, found[0].uid)


def is_free(host: str, port: int) -> bool:
    """Whether host:port can be bound now, as a server with SO_REUSEADDR would."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError:
            return False
    return not on(host, port)


def next_free(host: str, first: int, taken: Iterable[int] = (), tries: int = 1000) -> int | None:
    """The first free port from `first` upwards that is not in taken, or None after `tries`."""
    avoid = set(taken)
    for port in range(first, min(first + tries, 65536)):
        if port not in avoid and is_free(host, port):
            return port
    return None
