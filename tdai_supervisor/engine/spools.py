"""The spools that providers registered (`spools/<hash>.json` in the root: schema, path, profile), and their delivery.

Invariants: the daemon never reads a record; what a dead session left behind is delivered by the provider's own drain
code in a child process, one at a time, while a Gateway is READY; each goes to the Gateway of its profile; a spool that
cannot be delivered is tried less often; a session that died is ended after its turns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tdai_supervisor.decide.model import COOKIE_NAME
from tdai_supervisor.engine.attachments import Attachments
from tdai_supervisor.engine.loop import Worker, any_death
from tdai_supervisor.engine.python import PYTHON
from tdai_supervisor.host import disk, process

log = logging.getLogger("tdai_supervisor")
LOOK_EVERY = 6  # ticks: 30 s
DEADLINE = 60.0  # s one delivery may take; what is left then goes on at the next look
FIRST_WAIT, LAST_WAIT = 60.0, 900.0  # s before a spool that could not be delivered is tried again
HELD = 75

PATIENCE = 5.0  # s a delivery waits for a Gateway that is away: other spools have Gateways of their own

# Of the provider's stats.json.
COUNTED = ("delivered", "dead", "dropped", "possible_duplicates", "torn", "removed", "unmarked")


def registered(root: str) -> Iterator[tuple[str, str]]:
    """(path, profile) of each registered spool; an entry that cannot be read is left out (its writer renews it)."""
    folder = os.path.join(root, "spools")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.endswith(".json"):
            try:
                entry = disk.read_object(os.path.join(folder, name)) or {}
            except (OSError, ValueError):
                continue
            if isinstance(entry.get("path"), str):
                yield entry["path"], str(entry.get("profile") or "")


@dataclass(frozen=True)
class Spool:
    """One registered spool: bytes of its pending segments, and what its drainers counted, by state.

    stats: all that the last drainer kept; fresh: whether nothing was appended since. target: the Gateway that its
    sessions noted, by name or address; None where they did not.
    """

    path: str
    profile: str
    pending_bytes: int
    counts: dict[str, int]
    stats: Mapping[str, Any]
    fresh: bool
    gone: bool
    target: str | None

    @property
    def letters(self) -> int:
        """Dead letters that are kept now; an older drainer counted only those it made."""
        kept = self.stats.get("letters", self.counts.get("dead", 0))
        return kept if isinstance(kept, int) else 0

    def as_json(self, now: float) -> dict[str, Any]:
        """The spool as status shows it; now: seconds since the epoch. Null is what only a drainer would know."""
        oldest, last = self.stats.get("oldest"), self.stats.get("last_success")
        waiting = 0 if self.pending_bytes == 0 else self.stats.get("waiting") if self.fresh else None
        return {
            "profile": self.profile,
            "path": self.path,
            "gone": self.gone,
            "waiting": waiting,
            "waiting_bytes": self.pending_bytes,
            "oldest_s": round(max(0.0, now - oldest), 1)
            if self.pending_bytes and isinstance(oldest, int | float) and oldest > 0
            else None,
            **{key: self.counts.get(key, 0) for key in COUNTED if key != "dead"},
            "dead_letters": self.letters,
            "last_delivered": _rfc3339(last) if isinstance(last, int | float) and last > 0 else None,
            "holding": self.stats.get("holding") or None if self.pending_bytes else None,
        }


def look(root: str) -> list[Spool]:
    """Every registered spool as it is now. Reads directories: not in the loop."""
    found = []
    for path, profile in registered(root):
        segments = os.path.join(path, "spool")
        try:
            names = [n for n in os.listdir(segments) if n.endswith(".seg")]
        except OSError:
            names = []
        about = {n: _stat(os.path.join(segments, n)) for n in names}
        sizes = {n: seen.st_size if seen else 0 for n, seen in about.items()}
        pending = sum(sizes.values()) - _delivered(path, sizes)
        try:
            stats = disk.read_object(os.path.join(path, "stats.json")) or {}
        except (OSError, ValueError):
            stats = {}
        counts = {state: int(stats[state]) for state in COUNTED if isinstance(stats.get(state), int)}
        noted, newest = (
            _stat(os.path.join(path, "stats.json")),
            max((a.st_mtime_ns for a in about.values() if a), default=0),
        )
        fresh = noted is not None and noted.st_mtime_ns >= newest
        gone = not os.path.isdir(path)
        found.append(Spool(path, profile, pending, counts, stats, fresh, gone, _target(path)))
    return found


def _target(path: str) -> str | None:
    try:
        noted = disk.read_object(os.path.join(path, "endpoint.json")) or {}
    except (OSError, ValueError):
        return None
    target = noted.get("address") or noted.get("gateway")
    return target if isinstance(target, str) else None


def _delivered(path: str, sizes: dict[str, int]) -> int:
    """Bytes of the only segment that its drainer noted as delivered although it is not put away yet."""
    try:
        until = (disk.read_object(os.path.join(path, "drained.json")) or {}).get("until")
    except (OSError, ValueError):
        return 0
    if not isinstance(until, list) or len(until) != 2 or len(sizes) != 1 or not isinstance(until[1], int):
        return 0
    (name, size), *_ = sizes.items()
    return min(size, until[1]) if name == f"{until[0]:08d}.seg" else 0


class Deliveries:
    """Delivers what is pending in registered spools, for as long as the daemon lives, and ends sessions that died."""

    def __init__(self, root: str, worker: Worker, env: Mapping[str, str], attachments: Attachments) -> None:
        self._root, self._worker, self._attachments = root, worker, attachments
        self._env = {k: v for k, v in env.items() if k != COOKIE_NAME}
        self._ticks = 0
        self._running = False
        self._not_before: dict[str, float] = {}  # loop time
        self._waits: dict[str, float] = {}
        self._gone: set[str] = set()

    def tick(self, task: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Called by the loop every 5 s while a Gateway is READY. task: how to run a coroutine."""
        self._ticks += 1
        if not self._running and self._ticks % LOOK_EVERY == 1:
            self._running = True
            task(self._deliver())

    async def _deliver(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            spools = await self._worker.run(look, self._root)
            self._tell_gone(spools)
            ends = await self._worker.run(self._attachments.due, time.monotonic())
            for spool in spools:
                sessions = ends.pop(spool.path, []) if not spool.gone else []
                if (spool.pending_bytes == 0 and not sessions) or clock() < self._not_before.get(spool.path, 0.0):
                    continue
                code = await self._drain(spool.path, sessions)
                if sessions and code in (0, 1, HELD):  # their ends are in the spool, whoever delivers them
                    await self._worker.run(self._attachments.ended, spool.path, sessions)
                wait = 0.0 if code in (0, HELD) else min(self._waits.get(spool.path, FIRST_WAIT / 2) * 2, LAST_WAIT)
                self._waits[spool.path] = wait or FIRST_WAIT / 2
                self._not_before[spool.path] = clock() + wait
            for path, sessions in ends.items():  # of a spool that is gone, or that nobody registered
                if path not in {spool.path for spool in spools if not spool.gone}:
                    await self._worker.run(self._attachments.ended, path, sessions)
        finally:
            self._running = False

    def _tell_gone(self, spools: list[Spool]) -> None:
        """Say once of each spool that it is gone, with what the last drainer left in it."""
        for spool in spools:
            if spool.gone and spool.path not in self._gone:
                log.error("the spool %s of profile %s is gone", spool.path, spool.profile or "(no name)")
        self._gone = {spool.path for spool in spools if spool.gone}

    async def _drain(self, path: str, sessions: list[str]) -> int | None:
        """One run of the provider's drain; its exit code: 0 nothing left, 1 something left, 75 a session does it."""
        argv = [PYTHON, "-I", "-m", "memory_tencentdb.drain", "--spool", path, "--root", self._root]
        argv += ["--patience", f"{PATIENCE:g}", *(f"--ended={session}" for session in sessions)]
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            child = process.spawn([*argv, "--deadline", f"{DEADLINE:g}"], self._env, "/", (null, null), ())
        except OSError as error:
            log.error("cannot deliver %s: %s", path, error.strerror)
            return None
        finally:
            os.close(null)
        await any_death([child], DEADLINE + 10)
        if child.alive():
            child.signal(signal.SIGKILL)
            await any_death([child], DEADLINE)
        exit_ = child.reap()
        child.close()
        return exit_.code if exit_ else None


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _rfc3339(wall: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wall))
