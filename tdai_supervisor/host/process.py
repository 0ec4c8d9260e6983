"""Processes: identity, pidfds, spawn, trees, and the one place that reaps.

Invariants: no signal without a proven identity (pidfd first, identity looked up after it, so the pid cannot be reused in
between); a zombie is gone; a missing /proc entry is gone only where kill(0) says ESRCH; exit statuses are read here alone,
once, and never invented.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tdai_supervisor.decide.model import COOKIE_NAME, Cookie, Exit, Identity, Verdict

LINUX = sys.platform.startswith("linux")
HAS_PIDFD = hasattr(os, "pidfd_open")
_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes), linux/pidfd.h
_PIDFD_INFO_EXIT = 1 << 3


@functools.cache
def boot_id() -> str:
    """This boot's id; equal in all pid namespaces of one boot."""
    if not LINUX:
        import psutil  # noqa: PLC0415  (only where there is no /proc)

        return f"boot-{int(psutil.boot_time())}"
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


@functools.cache
def pid_namespace() -> str:
    """The pid namespace pids of ours belong to."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Stat:
    """One line of /proc/PID/stat. cpu_ticks: user + system; state: one letter."""

    pid: int
    ppid: int
    session: int
    state: str
    ticks: int
    cpu_ticks: int

    @property
    def dead(self) -> bool:
        """A zombie answers kill(0) but is gone."""
        return self.state in "ZXx"


def read_stat(pid: int) -> Stat | None:
    """What /proc says of pid, or None where it says nothing (which alone proves nothing)."""
    if not LINUX:
        return _psutil_stat(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return None
    # The command may hold spaces and parentheses: fields are counted from the last one.
    fields = line[line.rindex(b")") + 2 :].split()
    return Stat(
        pid,
        int(fields[1]),
        int(fields[3]),
        fields[0].decode("ascii"),
        int(fields[19]),
        int(fields[11]) + int(fields[12]),
    )


def _psutil_stat(pid: int) -> Stat | None:
    import psutil  # noqa: PLC0415

    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        letter = {psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_STOPPED: "T"}.get(process.status(), "S")
        return Stat(
            pid,
            process.ppid(),
            os.getsid(pid),
            letter,
            int(process.create_time() * 100),
            int((times.user + times.system) * 100),
        )
    except (psutil.Error, OSError):
        return None


def identify(pid: int) -> Identity | None:
    """The identity of a live process, or None where it is gone, a zombie, or cannot be seen."""
    stat = read_stat(pid)
    if stat is None or stat.dead:
        return None
    uid = uid_of(pid)
    return None if uid is None else Identity(pid, stat.ticks, boot_id(), pid_namespace(), uid)


def uid_of(pid: int) -> int | None:
    """The effective uid of pid, or None where it cannot be seen."""
    try:
        return os.stat(f"/proc/{pid}").st_uid if LINUX else _psutil_uid(pid)
    except OSError:
        return None


def _psutil_uid(pid: int) -> int | None:
    import psutil  # noqa: PLC0415

    try:
        return int(psutil.Process(pid).uids().effective)
    except psutil.Error:
        return None


def verdict(recorded: Identity) -> Verdict:
    """What became of a recorded process. Another boot: gone. Another pid namespace: unknown. Never harms by itself."""
    if recorded.boot_id != boot_id():
        return Verdict.GONE
    if recorded.pid_ns != pid_namespace():
        return Verdict.UNKNOWN
    stat = read_stat(recorded.pid)
    if stat is None:
        return Verdict.GONE if not exists(recorded.pid) else Verdict.UNKNOWN
    if stat.ticks != recorded.ticks:
        return Verdict.FOREIGN
    if stat.dead:
        return Verdict.GONE
    return Verdict.OURS if uid_of(recorded.pid) == recorded.uid else Verdict.FOREIGN


def exists(pid: int) -> bool:
    """Whether the kernel knows this pid; only ESRCH says no (hidepid hides, EPERM is somebody else's)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


class Process:
    """A live process held by pidfd: its signals cannot reach a recycled pid, its death is an event on fileno().

    Where the system has no pidfd, signals go by pid after an identity check and fileno() is -1.
    """

    def __init__(self, identity: Identity, pidfd: int, *, session: int) -> None:
        self.identity = identity
        self.session = session
        self._pidfd = pidfd
        self._popen: subprocess.Popen[bytes] | None = None

    @classmethod
    def open(cls, pid: int) -> Process | None:
        """Hold a live process, or None where it is gone."""
        try:
            pidfd = os.pidfd_open(pid) if HAS_PIDFD else -1
        except OSError:
            return None
        # After the pidfd: whatever this identity is, it is the process the pidfd names.
        identity, stat = identify(pid), read_stat(pid)
        if identity is None or stat is None:
            if pidfd >= 0:
                os.close(pidfd)
            return None
        return cls(identity, pidfd, session=stat.session)

    @property
    def pid(self) -> int:
        return self.identity.pid

    def fileno(self) -> int:
        """Readable when the process has died; -1 without pidfds."""
        return self._pidfd

    def alive(self) -> bool:
        """Whether it still lives; a zombie does not."""
        if self._pidfd >= 0:
            return not select.select([self._pidfd], [], [], 0)[0]
        return verdict(self.identity) in (Verdict.OURS, Verdict.UNKNOWN)

    def signal(self, number: int) -> bool:
        """Send a signal; whether it still reached a process. Raises PermissionError where the kernel refuses."""
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
            elif verdict(self.identity) is Verdict.OURS:
                os.kill(self.pid, number)
            else:
                return False
        except ProcessLookupError:
            return False
        return True

    def reap(self) -> Exit | None:
        """How it ended, or None while it lives. A child is reaped; of an adopted process the kernel is asked.

        Call once per death: this is the only place in the project that waits for a process.
        """
        exit_ = _wait_child(self._pidfd, self.pid)
        if exit_ is None:
            return None
        if self._popen is not None:
            # subprocess must never wait for this pid itself: after us it would invent a 0.
            self._popen.returncode = exit_.code if exit_.code is not None else -(exit_.signal or 0)
        if not exit_.known and self._pidfd >= 0:
            exit_ = _ask_kernel(self._pidfd)
        return exit_

    def close(self) -> None:
        """Let the pidfd go."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _wait_child(pidfd: int, pid: int) -> Exit | None:
    """The status of our child, an unknown Exit for a dead process that is not our child, None while it lives."""
    try:
        if pidfd >= 0 and hasattr(os, "P_PIDFD"):
            result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        else:
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        if pidfd >= 0:
            return Exit(None, None) if select.select([pidfd], [], [], 0)[0] else None
        return None if identify(pid) else Exit(None, None)
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return Exit(result.si_status, None)
    return Exit(None, result.si_status)


def _ask_kernel(pidfd: int) -> Exit:
    """The exit status of a process that is not our child, where the kernel keeps it (Linux 6.15+), else unknown."""
    info = bytearray(struct.pack("=QQ12I", _PIDFD_INFO_EXIT, 0, *[0] * 12))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return Exit(None, None)
    mask, *fields = struct.unpack("=QQ11Ii", info)
    if not mask & _PIDFD_INFO_EXIT:
        return Exit(None, None)
    status = fields[-1]
    if os.WIFSIGNALED(status):
        return Exit(None, os.WTERMSIG(status))
    return Exit(os.WEXITSTATUS(status), None)


def spawn(
    argv: Sequence[str], env: Mapping[str, str], cwd: str, stdout: int, stderr: int, inherit: Sequence[int]
) -> Process:
    """Exec argv in a session of its own with umask 077 and only the given descriptors. Raises OSError where exec fails.

    Must be called from the main thread: a parent-death signal or a lease must not hang on a passing thread.
    """
    popen = subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        umask=0o077,
        pass_fds=tuple(inherit),
    )
    pidfd = os.pidfd_open(popen.pid) if HAS_PIDFD else -1
    # Our own child stays a zombie until we reap it, so its stat is there even if it has already died.
    stat = read_stat(popen.pid)
    ticks = stat.ticks if stat else 0
    identity = Identity(popen.pid, ticks, boot_id(), pid_namespace(), os.geteuid())
    process = Process(identity, pidfd, session=popen.pid)
    process._popen = popen
    return process


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


def scan() -> list[Seen]:
    """Every live process but ourselves and our ancestors (about 1 ms per 76). Zombies are left out."""
    own = _ancestors()
    seen = []
    for pid in pids():
        stat = read_stat(pid) if pid not in own else None
        if stat is None or stat.dead:
            continue
        uid = uid_of(pid)
        if uid is None:
            continue
        environ = _environ(pid) if uid == os.geteuid() else b""
        seen.append(Seen(stat, uid, _cookie_in(environ), environ))
    return seen


def pids() -> Iterable[int]:
    """Every pid of this namespace."""
    if not LINUX:
        import psutil  # noqa: PLC0415

        return psutil.pids()
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


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


def tree(seen: Sequence[Seen], root: str, name: str, main: Process | None) -> list[Seen]:
    """The processes of one Gateway: by cookie (of our uid), by the session of `main`, and by descent from either.

    A session counts only while its number cannot have been reused: `main` is held, or its leader is a member by cookie.
    """
    members = {s.pid: s for s in seen if s.cookie and (s.cookie.root, s.cookie.name) == (root, name)}
    sessions = {s.stat.session for s in members.values() if s.stat.session in members}
    if main is not None and main.session == main.pid:
        leader = next((s for s in seen if s.pid == main.pid), None)
        if leader is None or leader.stat.ticks == main.identity.ticks:
            sessions.add(main.pid)
    if main is not None:
        members |= {s.pid: s for s in seen if s.pid == main.pid and s.stat.ticks == main.identity.ticks}
    members |= {s.pid: s for s in seen if s.stat.session in sessions}
    grown = True
    while grown:
        more = {s.pid: s for s in seen if s.pid not in members and s.stat.ppid in members}
        members |= more
        grown = bool(more)
    return list(members.values())


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


def open_below(pid: int, directory: str, but: str) -> bool:
    """Whether pid has a file below directory open that is not below `but`; False where it cannot be seen."""
    prefix, other = (os.path.realpath(d).rstrip("/") + "/" for d in (directory, but))
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


def stop_core_dumps() -> None:
    """No core files: they would hold the memory of conversations and keys."""
    import resource  # noqa: PLC0415

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def is_no_exec(error: OSError) -> bool:
    """Whether a spawn failed for a reason no retry can help."""
    return error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def thread_states(pid: int) -> list[str]:
    """The state letter of each thread of pid; empty where they cannot be seen."""
    states = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/stat", "rb") as file:
                states.append(file.read().rpartition(b")")[2].split()[0].decode("ascii"))
    return states
