"""The drain lock: at most one drainer per spool over all processes.

Invariants:
* Only a kernel lock counts (flock on drain.lock); it is free the moment its holder is dead. There is no soft fallback.
* The pid written into the file is for people and for threads of the same process; it decides nothing else.
"""

from __future__ import annotations

import fcntl
import os

from ..spool import private_directory


class Lock:
    """The lock of the spool at ``path``. Not for several threads at once, but for ``held`` and ``holder()``."""

    def __init__(self, path: str) -> None:
        self._path = os.path.join(path, "drain.lock")
        self._fd = -1

    @property
    def held(self) -> bool:
        """Whether it is held through this object."""
        return self._fd >= 0

    def acquire(self) -> bool:
        """Take it without waiting. False: somebody else has it. Raises OSError where there can be no lock at all."""
        private_directory(os.path.dirname(self._path))
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        try:
            os.pwrite(fd, f"{os.getpid():<10}\n".encode(), 0)
        except OSError:
            return True  # a full disk keeps the name out of the file, not the lock from us
        return True

    def removed(self) -> bool:
        """Whether the file was removed while held: then somebody else may hold a new one of that name."""
        return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def holder(self) -> int:
        """The pid that the file names; 0 where it names none."""
        try:
            with open(self._path, encoding="ascii") as file:
                return int(file.read(16).strip() or 0)
        except (OSError, ValueError):
            return 0

    def release(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
