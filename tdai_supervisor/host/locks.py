"""Kernel locks: the supervisor lock (one daemon per root) and the lease (one Gateway per data directory).

Invariants: only flock, never a lock that is a file's existence; a lease is never unlocked, only closed, because
LOCK_UN on any copy frees it for all; a file system without flock is a named error; the lock file is never unlinked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tdai_supervisor.host import disk

if TYPE_CHECKING:
    import filelock


KEEPER_WAIT = 60.0  # s


class LockUnsupportedError(OSError):
    """The file system has no flock."""


class SupervisorLock:
    """`run/supervisor.lock`, held by the daemon alone for as long as it lives."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock: filelock.BaseFileLock | None = None
        self._inherited: int | None = None
        self._fd: int | None = None

    def acquire(self, timeout: float) -> bool:
        """Whether the lock was got within timeout seconds. Raises LockUnsupportedError, or OSError naming the path."""
        import warnings  # noqa: PLC0415

        import filelock  # noqa: PLC0415  (45 ms that only the daemon needs)

        fds: list[int] = []
        lock = filelock.FileLock(
            self.path,
            mode=0o600,
            fallback_to_soft=False,
            preserve_lock_file=True,
            poll_interval=0.02,
            thread_local=False,
            on_acquired=fds.append,
        )
        try:
            # A library that only warns about a weaker lock would be a second owner: a warning is an error here.
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                lock.acquire(timeout=timeout)
        except filelock.Timeout:
            return False
        except (NotImplementedError, UserWarning) as error:
            raise LockUnsupportedError(errno.ENOLCK, f"no file locks at {self.path}: {error}") from None
        self._lock, self._fd = lock, fds[0]
        os.fchmod(self._fd, 0o600)
        return True

    def inherit(self, fd: int) -> bool:
        """Whether the lock is held through a descriptor that survived exec; a lock whose file is gone is let go."""
        try:
            same = os.path.samestat(os.fstat(fd), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            same = False
        if not same:
            os.close(fd)
            return False
        os.set_inheritable(fd, False)
        self._inherited = self._fd = fd
        return True

    def hand_on(self) -> int:
        """The descriptor of the held lock, made to survive the next exec."""
        assert self._fd is not None
        os.set_inheritable(self._fd, True)
        return self._fd

    @property
    def held(self) -> bool:
        """Whether we hold it."""
        return self._fd is not None

    def intact(self) -> bool:
        """Whether the path still names the file we hold; if somebody removed it, a second daemon could lock anew."""
        assert self._fd is not None
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let the lock go (by closing)."""
        if self._inherited is not None:
            os.close(self._inherited)
        elif self._lock is not None:
            self._lock.release(force=True)
        self._lock, self._inherited, self._fd = None, None, None


class Lease:
    """flock on the open data directory, taken before spawn and inherited by the Gateway."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def take(self) -> int | None:
        """A descriptor that holds the lease, or None where another process holds it.

        Raises LockUnsupportedError, or OSError where the directory cannot be opened.
        """
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise LockUnsupportedError(error.errno, f"the file system of {self.directory} has no flock") from None
            raise
        return fd

    def is_free(self) -> bool:
        """Whether nobody holds it now. A directory that is gone has no holder to fear."""
        try:
            fd = self.take()
        except FileNotFoundError:
            return True
        if fd is None:
            return False
        os.close(fd)
        return True


class BusyError(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """The lock of a file, for work that two must not do at once. Raises BusyError at once, OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(path) from None
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def keeper_lock(root: str) -> Iterator[None]:
    """The lock under which a keeper is brought up or ended, so that many `start` at once bring up one.

    Raises TimeoutError after KEEPER_WAIT: a command that was stopped by a signal must not stop all others for ever.
    """
    path = os.path.join(disk.private_dir(os.path.join(root, "run")), "keeper.lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    until, pause = time.monotonic() + KEEPER_WAIT, 0.005
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    raise LockUnsupportedError(error.errno, f"no file locks at {path}: {error.strerror}") from None
                if time.monotonic() > until:
                    raise TimeoutError(f"another start or stop has held {path} for {KEEPER_WAIT:g} s") from None
            # Ever slower: fifty that wait must not take the machine from the one that works.
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        yield
    finally:
        os.close(fd)
