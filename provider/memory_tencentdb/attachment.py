"""The file by which a session shows that it is attached: sessions/PID-TICKS-N.json in the supervisor root.

Invariants:
* One small file, no thread, no sync, no lock: far below a millisecond. What cannot be written is counted by the caller
  and costs nothing else.
* It goes with shutdown(), with the provider object, and with the process where that ends by itself; what a killed
  process leaves is judged by the pid and ticks in its name, and removed by the daemon.
* A forked child never removes the file of its parent.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
import weakref
from typing import Any

from . import proof
from .settings import Settings

logger = logging.getLogger(__name__)


class Attachment:
    """The file of one provider object; ``owner`` is that object."""

    def __init__(self, owner: object, settings: Settings, profile: str) -> None:
        pid = os.getpid()
        ticks = proof.start_ticks(pid) or 0
        folder = os.path.join(settings.root, "sessions")
        # The number is that of the object: no two that live have the same, and no counter has to be shared.
        self.path = os.path.join(folder, f"{pid}-{ticks}-{id(owner)}.json")
        self._about: dict[str, Any] = {
            "schema": 1,
            "pid": pid,
            "start_ticks": ticks,
            "boot_id": proof.boot_id(),
            "pid_ns": proof.pid_namespace(),
            "profile": profile,
            "session": None,
            "gateway": settings.gateway if settings.address is None else str(settings.address),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "spool": settings.spool,
            "open": [],
        }
        self._folder, self._size = folder, 0
        self._removal = weakref.finalize(owner, _remove, self.path, pid)

    def show(self, session: str, open_: list[str]) -> bool:
        """Say which session it is, and which have turns and no end yet. False: it could not be written.

        Writes only what is new. Where there is no root nobody looks: then nothing is made.
        """
        if not self._removal.alive or (session, open_) == (self._about["session"], self._about["open"]):
            return True
        about = {**self._about, "session": session, "open": open_}
        try:
            if not os.path.isdir(self._folder):
                if not os.path.isdir(os.path.dirname(self._folder)):
                    return True
                os.makedirs(self._folder, mode=0o700, exist_ok=True)
            self._write(about)
        except OSError as error:
            logger.info("memory_tencentdb: the daemon does not know of this session: %s", error)
            return False
        self._about = about
        return True

    def _write(self, about: dict[str, Any]) -> None:
        """In place by one write, padded so that nothing old is left: a rename over it may wait for the disk (ext4)."""
        data = (json.dumps(about) + "\n").encode().ljust(self._size)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.path)
        finally:
            os.close(fd)
        self._size = len(data)

    def end(self) -> None:
        """Remove it; again does nothing."""
        self._removal()


def _remove(path: str, pid: int) -> None:
    if os.getpid() != pid:
        return
    try:
        os.unlink(path)
    except OSError:
        return  # never written, or the daemon was told that we died
