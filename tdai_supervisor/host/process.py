"""Processes: identity, pidfds, spawn, trees, and the one place that reaps.

Invariants: no signal without a proven identity (pidfd first, identity looked up after it, so the pid cannot be reused
in between); a zombie is gone; a missing /proc entry is gone only where kill(0) says ESRCH; exit statuses are read here
alone, once, and never invented.
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
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tdai_supervisor.decide.model import Exit, Identity, Verdict

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


def pids() -> Iterable[int]:
    """Every pid of this namespace."""
    if not LINUX:
        import psutil  # noqa: PLC0415

        return psutil.pids()
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def exists(pid: int) -> bool:
    """Whether the kernel knows this pid; only ESRCH says no (hidepid hides, EPERM is somebody else's)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


# Everything held by pidfd now: the children among it are reaped by whoever holds them.
_held: weakref.WeakSet[Process] = weakref.WeakSet()


class Process:
    """A live process held by pidfd: its signals cannot reach a recycled pid, its death is an event on fileno().

    Where the system has no pidfd, signals go by pid after an identity check and fileno() is -1.
    """

    def __init__(self, identity: Identity, pidfd: int, *, session: int) -> None:
        self.identity = identity
        self.session = session
        self._pidfd = pidfd
        self._popen: subprocess.Popen[bytes] | None = None
        _held.add(self)

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
            exit_ = ask_kernel(self._pidfd)
        return exit_

    def remains(self) -> int:
        """A descriptor of what is left of a dead process, for `ask_kernel`; the caller closes it. -1 without pidfds."""
        return os.dup(self._pidfd) if self._pidfd >= 0 else -1

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


def ask_kernel(pidfd: int) -> Exit:
    """The exit status of a process that is not our child, where the kernel keeps it (Linux 6.15+), else unknown.

    It is there once the parent of the dead process has reaped it, which for an orphan is a moment after its death.
    """
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
    argv: Sequence[str], env: Mapping[str, str], cwd: str, output: tuple[int, int], inherit: Sequence[int]
) -> Process:
    """Exec argv in a session of its own with umask 077 and only the given descriptors.

    output: its stdout and stderr; inherit: further descriptors it keeps. Raises OSError where exec fails.

    Must be called from the main thread: a parent-death signal or a lease must not hang on a passing thread.
    """
    popen = subprocess.Popen(
        list(argv),
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output[0],
        stderr=output[1],
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


def reap_orphans(seen: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """As PID 1: take away dead orphans that were there at the last call; those left for the next, as (pid, ticks).

    Whose parent died became a child of PID 1. One call's grace, because what we hold, and what a library runs for a
    moment, are our children too, and their exit status belongs to whoever waits for them.
    """
    held, left = {process.pid for process in _held}, set()
    for pid in pids():
        stat = read_stat(pid)
        if stat is None or stat.state != "Z" or stat.ppid != os.getpid() or pid in held:
            continue
        if (pid, stat.ticks) in seen:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        else:
            left.add((pid, stat.ticks))
    return left


def stop_core_dumps() -> None:
    """No core files: they would hold the memory of conversations and keys."""
    import resource  # noqa: PLC0415

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def is_no_exec(error: OSError) -> bool:
    """Whether a spawn failed for a reason no retry can help."""
    return error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
