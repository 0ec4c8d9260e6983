"""The sessions that are attached, as their files under sessions/ say, and what becomes of those of dead ones.

Invariants: everything here runs in the worker; a file is removed only when its process is proven dead (ESRCH, other
start ticks, another boot) and nothing is left to be done for it; what lies in another pid namespace is left alone; a
look opens no file of a session that it knows to be dead, and judges most of them by their names alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from tdai_supervisor.decide.attachments import identity, shown
from tdai_supervisor.engine.loop import Worker
from tdai_supervisor.host import disk, process

log = logging.getLogger("tdai_supervisor")
IDLE = 60.0  # s after its death was seen before a session that nobody resumed counts as ended
AT_ONCE = 1000  # files of dead sessions that one look removes: about 0.1 s
ENDS_AT_ONCE = 100  # sessions that one delivery ends: their names go into a command line


@dataclass
class Left:
    """A dead session process that had turns and told no end. since: when its death was seen, monotonic seconds."""

    spool: str
    sessions: list[str]
    since: float


class Attachments:
    """What is known of sessions/, for as long as the daemon lives."""

    def __init__(self, root: str) -> None:
        self._folder = os.path.join(root, "sessions")
        self._read: dict[str, tuple[int, dict[str, Any]]] = {}  # of living ones: (change time, content)
        self._dead: set[str] = set()  # names whose death is proven
        self._elsewhere: set[str] = set()
        self._left: dict[str, Left] = {}
        self._ticks = 0
        self._any = True  # whether the last look found any file of a session

    def tick(self, worker: Worker) -> None:
        """Called by the loop every 5 s; where there are no sessions it wakes the worker every 30 s only."""
        self._ticks += 1
        if self._any or self._ticks % 6 == 0:
            worker.post(self.look, time.monotonic(), AT_ONCE)

    def living(self) -> list[dict[str, Any]]:
        """The living attachments of the last look, as status shows them."""
        return [shown(entry) for _, entry in self._read.values()]

    def look(self, now: float, most: int = 0) -> list[dict[str, Any]]:
        """See what is there now, and remove at most `most` files of dead sessions; the living ones.

        now: monotonic seconds.
        """
        judged: dict[tuple[int, int], bool] = {}
        found: dict[str, tuple[int, dict[str, Any]]] = {}
        try:
            names = set(os.listdir(self._folder))
        except OSError:
            names = set()
        # What was judged once is not looked at again: ten thousand dead ones cost no more than a list of names.
        for name in sorted(names - self._dead - self._elsewhere):
            who = identity(name)
            if who is None:
                continue
            if who not in judged:
                judged[who] = proven_dead(*who)
            if judged[who]:
                self._dead.add(name)
            elif (read := self._take(name)) is not None:
                found[name] = read
        self._read, self._any = found, bool(names)
        self._dead &= names
        self._elsewhere &= names
        for name in list(self._dead - self._left.keys())[:most]:
            self._bury(name, now)
        return self.living()

    def _take(self, name: str) -> tuple[int, dict[str, Any]] | None:
        """The content of a file whose process may live; None where it is of another boot or namespace."""
        path, known = os.path.join(self._folder, name), self._read.get(name)
        try:
            changed = os.lstat(path).st_mtime_ns
            content = known[1] if known is not None and known[0] == changed else disk.read_object(path) or {}
        except (OSError, ValueError):
            return 0, {}  # its process lives: counted, though nothing more is known
        if content.get("boot_id") not in (None, process.boot_id()):
            self._dead.add(name)
            return None
        if content.get("pid_ns") not in (None, process.pid_namespace()):
            self._elsewhere.add(name)
            return None
        return changed, content

    def _bury(self, name: str, now: float) -> None:
        """Remove the file of a dead session, unless it is of another namespace or its sessions are to be ended."""
        path = os.path.join(self._folder, name)
        try:
            content = disk.read_object(path) or {}
        except (OSError, ValueError):
            content = {}
        here = content.get("boot_id") in (None, process.boot_id())
        if here and content.get("pid_ns") not in (None, process.pid_namespace()):
            self._dead.discard(name)
            self._elsewhere.add(name)
            return
        # What a command line cannot carry is not ended: an end is a courtesy.
        sessions = [s for s in content.get("open") or [] if isinstance(s, str) and s.isprintable() and 0 < len(s) < 500]
        if sessions and isinstance(content.get("spool"), str):
            self._left[name] = Left(content["spool"], sessions[:ENDS_AT_ONCE], now)
            return
        self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, name))
        except OSError as error:
            log.warning("cannot remove the attachment %s of a dead session: %s", name, error.strerror)
            self._elsewhere.add(name)
        self._dead.discard(name)
        self._left.pop(name, None)

    def due(self, now: float) -> dict[str, list[str]]:
        """Sessions to be ended now, by spool: dead for IDLE seconds, and resumed by nobody."""
        alive = {
            (str(entry.get("spool")), str(session))
            for _, entry in self._read.values()
            for session in [entry.get("session"), *(entry.get("open") or [])]
        }
        found: dict[str, list[str]] = {}
        for name, left in list(self._left.items()):
            # Who resumed it will end it.
            left.sessions = [s for s in left.sessions if (left.spool, s) not in alive]
            if not left.sessions:
                self._remove(name)
            elif now - left.since >= IDLE:
                known = found.setdefault(left.spool, [])
                known += [s for s in left.sessions if s not in known][: ENDS_AT_ONCE - len(known)]
        return found

    def ended(self, spool: str, sessions: list[str]) -> None:
        """These sessions have their end in that spool now, or need none."""
        for name, left in list(self._left.items()):
            if left.spool == spool:
                left.sessions = [s for s in left.sessions if s not in sessions]
                if not left.sessions:
                    self._remove(name)


def proven_dead(pid: int, ticks: int) -> bool:
    """Whether the process of a name is gone for certain; ticks 0 are those of a system that does not tell them."""
    if not process.exists(pid):
        return True
    stat = process.read_stat(pid)
    return stat is not None and (stat.dead or ticks not in (0, stat.ticks))
