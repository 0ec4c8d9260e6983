"""Trees: who belongs to a Gateway, and what other processes show of themselves.

Invariants: a scan is of one moment; ourselves, our ancestors and zombies are never in it; membership needs the cookie,
a session whose number cannot have been reused, or descent from one of these.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tdai_supervisor.decide.model import COOKIE_NAME, Cookie
from tdai_supervisor.host.process import LINUX, Process, Stat, pids, read_stat, uid_of

_KTHREADD = 2 if LINUX and read_stat(2) is not None and not os.path.exists("/proc/2/exe") else 0  # parent of its kind


@dataclass(frozen=True, slots=True)
class Seen:
    """A live process in a scan; cookie is set only for processes whose environment we may read."""

    stat: Stat
    uid: int
    cookie: Cookie | None
    environ: bytes = b""

    @property
    def pid(self) -> int:
        return self.stat.pid


def scan(*, cookies: bool = True) -> list[Seen]:
    """Every live process but ourselves, our ancestors and kernel threads (about 1 ms per 76). Zombies are left out.

    cookies=False reads no environments: enough where the session of a held process tells who belongs to it.
    """
    own = _ancestors()
    seen = []
    for pid in pids():
        stat = read_stat(pid) if pid not in own else None
        if stat is None or stat.dead or _KTHREADD in (stat.pid, stat.ppid):
            continue
        uid = uid_of(pid)
        if uid is None:
            continue
        environ = _environ(pid) if cookies and uid == os.geteuid() else b""
        seen.append(Seen(stat, uid, _cookie_in(environ), environ))
    return seen


def _ancestors() -> set[int]:
    """Ourselves and everybody above us: nothing of ours, whatever their environment says."""
    chain, pid = {0, 1}, os.getpid()
    while pid not in chain:
        chain.add(pid)
        stat = read_stat(pid)
        pid = stat.ppid if stat else 0
    return chain


def _environ(pid: int) -> bytes:
    try:
        if not LINUX:
            import psutil  # noqa: PLC0415

            return b"\0".join(f"{k}={v}".encode() for k, v in psutil.Process(pid).environ().items())
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith("psutil"):
            return b""
        raise


def variable(environ: bytes, name: str) -> str | None:
    """The value of name in the text of an environment, or None."""
    key = name.encode() + b"="
    for entry in environ.split(b"\0"):
        if entry.startswith(key):
            return entry[len(key) :].decode("utf-8", "surrogateescape")
    return None


def _cookie_in(environ: bytes) -> Cookie | None:
    if COOKIE_NAME.encode() not in environ:
        return None
    return Cookie.parse(variable(environ, COOKIE_NAME) or "")


def members(seen: Sequence[Seen], root: str, name: str, main: Process | None) -> list[Seen]:
    """The processes of one Gateway: by cookie (of our uid), by the session of `main`, and by descent from either.

    A session counts only while its number cannot have been reused: `main` is held, or its leader is a member by cookie.
    """
    found = {s.pid: s for s in seen if s.cookie and (s.cookie.root, s.cookie.name) == (root, name)}
    sessions = {s.stat.session for s in found.values() if s.stat.session in found}
    if main is not None and main.session == main.pid:
        leader = next((s for s in seen if s.pid == main.pid), None)
        if leader is None or leader.stat.ticks == main.identity.ticks:
            sessions.add(main.pid)
    if main is not None:
        found |= {s.pid: s for s in seen if s.pid == main.pid and s.stat.ticks == main.identity.ticks}
    found |= {s.pid: s for s in seen if s.stat.session in sessions}
    grown = True
    while grown:
        more = {s.pid: s for s in seen if s.pid not in found and s.stat.ppid in found}
        found |= more
        grown = bool(more)
    return list(found.values())


def end_below(folder: str, within: float) -> None:
    """KILL every process of ours whose cookie names a root below folder, until a scan finds none.

    For what needs no grace: trials and downloads. Raises TimeoutError naming a pid after `within` seconds.
    """
    until = time.monotonic() + within
    while True:
        left = [s for s in scan() if s.cookie is not None and s.cookie.root.startswith(folder + os.sep)]
        if not left:
            return
        for seen in left:
            held = Process.open(seen.pid)
            if held is not None:
                if held.identity.ticks == seen.stat.ticks:
                    held.signal(signal.SIGKILL)
                held.close()
        if time.monotonic() > until:
            raise TimeoutError(f"pid {left[0].pid} does not end after {within:g} s")
        time.sleep(0.02)


def works_below(folder: str) -> bool:
    """Whether a process of our uid has its working directory in folder; a Gateway has, in its package."""
    top = os.path.realpath(folder)
    return any(where == top or where.startswith(top + os.sep) for where in _working_directories())


def _working_directories() -> Iterable[str]:
    for pid in pids():
        try:
            if LINUX:
                yield os.readlink(f"/proc/{pid}/cwd")
            else:
                import psutil  # noqa: PLC0415

                yield psutil.Process(pid).cwd()
        except Exception as error:
            if not isinstance(error, OSError) and not type(error).__module__.startswith("psutil"):
                raise


def holds_open(pid: int, path: str) -> bool:
    """Whether pid has path itself (same inode) open; False where it cannot be seen."""
    try:
        wanted = os.stat(path)
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), wanted):
                    return True
    except OSError:
        return False
    return False


def open_below(pid: int, directory: str, but: str | None = None) -> bool:
    """Whether pid has a file below directory open that is not below `but`; False where it cannot be seen."""
    prefix = os.path.realpath(directory).rstrip("/") + "/"
    other = "\0" if but is None else os.path.realpath(but).rstrip("/") + "/"
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for fd in names:
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{fd}")
            if path.startswith(prefix) and not path.startswith(other):
                return True
    return False


def command_line(pid: int) -> str | None:
    """The command of pid as one line, or None where it cannot be seen."""
    try:
        if not LINUX:
            import psutil  # noqa: PLC0415

            return " ".join(psutil.Process(pid).cmdline()) or None
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace") or None
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith("psutil"):
            return None
        raise


def memory_of(pids: Iterable[int]) -> int:
    """The resident bytes of these processes together; those that are gone count 0."""
    import psutil  # noqa: PLC0415  (6-8 ms of memory sweeps need it, a death does not)

    total = 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total


def thread_states(pid: int) -> list[str]:
    """The state letter of each thread of pid; empty where they cannot be seen."""
    states = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
                states.append(file.read().rpartition(b")")[2].split()[0].decode("ascii"))
    return states
