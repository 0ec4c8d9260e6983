"""The processes of one supervisor root, and waiting for things to become true.

Invariants: a process belongs to a root by what it carries (its environment, its working directory, its command line),
never by a recorded pid; ourselves and our ancestors never belong to one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

T = TypeVar("T")


def wait_for(look: Callable[[], T | None], timeout: float = 10.0, what: str = "") -> T:
    """The first true value of look(), which is called again and again; AssertionError after timeout seconds."""
    deadline = time.monotonic() + timeout
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what or look}; last seen: {seen!r}"
        time.sleep(0.005)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Found(NamedTuple):
    """A live process and the command line it shows."""

    pid: int
    command: str


def of_root(root: str | os.PathLike[str]) -> list[Found]:
    """Every live process that carries this root: in its cookie, environment, working directory or command line."""
    own = _ancestors()
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    found = [_look(pid, os.fspath(root)) for pid in pids if pid not in own]
    return [process for process in found if process is not None]


def end_all(root: str | os.PathLike[str], timeout: float = 10.0) -> None:
    """KILL everything of this root until a scan finds nobody: a keeper may bring back what was ended before it."""

    def nobody() -> bool:
        left = of_root(root)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return not left

    wait_for(nobody, timeout, f"nobody of {root}")


def alive(pid: int) -> bool:
    """Whether pid runs; a zombie does not."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in (b"Z", b"X")


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, or None where there is no such process."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _stat(pid: int) -> list[bytes] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _look(pid: int, root: str) -> Found | None:
    if not alive(pid):
        return None
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read()
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read().split(b"\0")
        cwd = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return None
    mark = os.fsencode(root)
    carried = any(
        entry.startswith(b"MEMORY_TENCENTDB_OWNER=" + mark + b":") or entry == b"MEMORY_TENCENTDB_ROOT=" + mark
        for entry in environment
    )
    named = any(word == mark or word.startswith(mark + b"/") for word in words.split(b"\0"))
    inside = cwd == root or cwd.startswith(root + "/")
    if not (carried or named or inside):
        return None
    return Found(pid, words.replace(b"\0", b" ").decode("utf-8", "replace").strip())


def _ancestors() -> set[int]:
    chain, pid = {0, 1}, os.getpid()
    while pid not in chain:
        chain.add(pid)
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    return chain
