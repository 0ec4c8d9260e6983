"""Logs of a Gateway: files it appends to itself, cut by us from the front.

Invariants: a cut never loses a line where the file system can collapse a range (ext4, xfs); where it cannot, what was
written between copy and truncate may be lost; what is dropped on purpose is counted; a log is sized through our own
descriptor, so one that was renamed or deleted is noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from dataclasses import dataclass

from tdai_supervisor.host import disk

_COLLAPSE_RANGE = 0x08
_CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut: bytes left in the live file, and bytes that no backup holds."""

    left: int
    lost: int


def plan(size: int, cap: int, block: int) -> tuple[int, int]:
    """(bytes to take from the front, a multiple of block; how many of them to drop: a backup holds cap)."""
    take = max(0, (size - 1) // block * block)
    return take, max(0, take - cap)


def live_path(pid: int, fd: int, path: str) -> str | None:
    """The name under which the log that pid writes through fd can be opened, or None where it is not a log of ours.

    Ours is what lies at path, what was renamed within its folder, and what was deleted (nobody else can reach that).
    """
    through = f"/proc/{pid}/fd/{fd}"
    try:
        about, target = os.stat(through), os.readlink(through)
    except OSError:
        return path if not os.path.isdir("/proc/self") and os.path.isfile(path) else None
    if not stat.S_ISREG(about.st_mode):
        return None
    if target == path or about.st_nlink == 0:
        return through
    folder = os.path.realpath(os.path.dirname(path)) + "/"
    return through if target.startswith(folder) else None


def cut(live: str, path: str, cap: int, backups: int) -> Cut:
    """Move the content of the log `live` to path.1 (and .1 to .2 …, the last is dropped).

    Blocks for the copy: not in the loop. Raises OSError; the live log is then as it was.
    """
    fd = os.open(live, os.O_RDWR | os.O_CLOEXEC)
    try:
        size, block = os.fstat(fd).st_size, max(4096, os.fstatvfs(fd).f_frsize)
        take, drop = plan(size, cap, block)
        if backups:
            _shift(path, backups)
            _copy(fd, path + ".1", drop, take)
        else:
            drop = take
        if take and _collapse(fd, take):
            return Cut(os.fstat(fd).st_size, drop)
        # Without collapse the rest is copied as late as possible: only what comes in between is gone.
        end = take
        if backups:
            end = _copy(fd, path + ".1", take, None)
        size = os.fstat(fd).st_size
        os.ftruncate(fd, 0)
        return Cut(0, drop + max(0, size - end))
    finally:
        os.close(fd)


def _shift(path: str, backups: int) -> None:
    for n in range(backups, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}.{n - 1}", f"{path}.{n}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path + ".1")


def _copy(fd: int, target: str, start: int, end: int | None) -> int:
    """Append bytes start..end (None: to the end of file) of fd to target; the offset reached."""
    out = disk.append_only(target)
    try:
        while end is None or start < end:
            data = os.pread(fd, _CHUNK if end is None else min(_CHUNK, end - start), start)
            if not data:
                break
            os.write(out, data)
            start += len(data)
    finally:
        os.close(out)
    return start


def _collapse(fd: int, length: int) -> bool:
    """Remove length bytes from the front of the file; whether the file system can."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        call = libc.fallocate64 if hasattr(libc, "fallocate64") else libc.fallocate
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        return bool(call(fd, _COLLAPSE_RANGE, 0, length) == 0)
    except (OSError, AttributeError):
        return False


def oom_kills() -> int:
    """How often the kernel killed for lack of memory in our cgroup (cgroup 2) so far; 0 where that cannot be seen."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            group = file.read().strip().rpartition("::")[2]
        with open(f"/sys/fs/cgroup{group}/memory.events", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    except (OSError, StopIteration, ValueError, IndexError):
        return 0
