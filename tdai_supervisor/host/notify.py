"""sd_notify: tell systemd, where it listens."""

from __future__ import annotations

import contextlib
import os
import socket


def send(state: str) -> None:
    """Send lines such as READY=1 to $NOTIFY_SOCKET; nothing happens without one or when nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.setblocking(False)
        out.connect("\0" + address[1:] if address.startswith("@") else address)
        out.send(state.encode())


def watchdog_interval() -> float | None:
    """Seconds within which systemd wants a WATCHDOG=1, or None where it watches somebody else or nobody."""
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1e6
