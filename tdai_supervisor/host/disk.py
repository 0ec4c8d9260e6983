"""Files of the root: private, replaced whole, never followed through a link.

Invariants: files are created 0600 and directories 0700 whatever the umask; a reader sees an old or a new file, never
half of one; what cannot be read is moved aside under a name, never overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from typing import Any

MAX_STATE_BYTES = 1024 * 1024  # no file of ours that is read whole comes near this


def private_dir(path: str) -> str:
    """path, made a directory of ours with mode 0700, its parents included. Raises OSError naming the path."""
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    # Opened without following a link first: a planted link must not make us change somebody else's directory.
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        if about.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to uid {about.st_uid}, not to uid {os.geteuid()}")
        if stat.S_IMODE(about.st_mode) & 0o077:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return path


def write(path: str, data: str, *, durable: bool) -> None:
    """Replace path by data, atomically, 0600. durable: on the disk, with its name, when this returns.

    Raises OSError; the old file is then untouched.
    """
    temporary = f"{path}.{os.getpid()}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data.encode("utf-8", "surrogateescape"))
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read(path: str) -> str | None:
    """The text of a regular file of ours, or None where there is none.

    Raises OSError for what is not a regular file, is larger than 1 MiB, or cannot be read; never blocks on a FIFO.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{path} is not a regular file")
        if about.st_size > MAX_STATE_BYTES:
            raise OSError(f"{path} is {about.st_size} bytes, more than any state file of ours")
        return file.read(MAX_STATE_BYTES).decode("utf-8", "surrogateescape")


def read_object(path: str) -> dict[str, Any] | None:
    """The JSON object in path; None where there is no file. Raises ValueError or OSError for anything else."""
    text = read(path)
    if text is None:
        return None
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def quarantine(path: str) -> str:
    """Move an unreadable file aside and return its new name: PATH.quarantine-<UTC time>[-n]."""
    base = f"{path}.quarantine-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    name, n = base, 0
    while os.path.lexists(name):
        n += 1
        name = f"{base}-{n}"
    os.rename(path, name)
    return name


def append_only(path: str) -> int:
    """A descriptor that appends to path, created 0600. Raises OSError for a link, or what is not a regular file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    if about.st_uid == os.geteuid() and stat.S_IMODE(about.st_mode) & 0o077:
        os.fchmod(fd, 0o600)
    os.set_blocking(fd, True)
    return fd


def tail(path: str, lines: int, most: int = 64 * 1024) -> list[str]:
    """The last lines of a log (at most `most` bytes are read); empty where it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most))
        text = file.read(most).decode("utf-8", "replace")
    return text.splitlines()[-lines:] if lines > 0 else []
