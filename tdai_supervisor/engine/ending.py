"""Rule 10: end a tree, and say so only when nobody is left.

Invariants: the members are found again before every round, by cookie, session and descent; one TERM per process ever,
followed by CONT so that a stopped one can act on it; KILL only after kill_delay; it is over when a scan finds nobody
and the lease is free (the port of a dead process is free by then; a stranger who takes it is not waited for).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from tdai_supervisor.engine.loop import Worker, any_death
from tdai_supervisor.host import tree
from tdai_supervisor.host.locks import Lease
from tdai_supervisor.host.process import Process
from tdai_supervisor.host.tree import Seen

ROUND = 0.25  # s between scans while nothing dies
UNKILLABLE = 1.0  # s after KILL, then it is said which process does not die


class Ending:
    """One ending of one Gateway's tree. `stuck` names what does not die, in words, while that is so."""

    def __init__(self, worker: Worker, root: str, name: str, lease: Lease, kill_delay: float) -> None:
        self._worker = worker
        self._root, self._name = root, name
        self._lease = lease
        self._kill_delay = kill_delay
        self._held: dict[tuple[int, int], Process] = {}
        self._termed: set[tuple[int, int]] = set()
        self.stuck: str | None = None

    async def run(self, main: Process | None, on_stuck: Callable[[], None], only: set[int] | None = None) -> None:
        """End the tree of main (or what a cookie names), or only these pids; return when nobody is left."""
        clock = asyncio.get_running_loop().time
        kill_at = clock() + self._kill_delay
        try:
            while True:
                members = await self._worker.run(self._members, main, only)
                if not members:
                    self.stuck = None
                    return
                killing = clock() >= kill_at
                self._signal(members, killing)
                if clock() >= kill_at + UNKILLABLE and self.stuck is None:
                    self.stuck = ", ".join(f"pid {s.pid} (state {s.stat.state})" for s in members)
                    self.stuck = f"{self.stuck} does not die"
                    on_stuck()
                left = ROUND if killing else min(ROUND, max(0.001, kill_at - clock()))
                await any_death(self._held.values(), left)
                self._forget_dead()
        finally:
            for held in self._held.values():
                held.close()

    def _members(self, main: Process | None, only: set[int] | None) -> list[Seen]:
        """In the worker: who is left. A child of ours that is dead is left to the engine's reaper."""
        seen = tree.scan()
        if only is not None:
            return [s for s in seen if s.pid in only]
        members = tree.members(seen, self._root, self._name, main)
        if not members and main is not None and not self._lease.is_free():
            # It inherited our lease and scrubbed its environment: no cookie of anybody's, but the descriptor tells.
            # The scans are of one moment each: a Gateway that just died may have let go in between.
            mine = [s for s in seen if s.cookie is None and s.uid == os.geteuid()]
            members = [s for s in mine if tree.holds_open(s.pid, self._lease.directory)]
        return members

    def _signal(self, members: list[Seen], killing: bool) -> None:
        for seen in members:
            key = (seen.pid, seen.stat.ticks)
            held = self._held.get(key) or Process.open(seen.pid)
            if held is None:
                continue
            if held.identity.ticks != seen.stat.ticks:
                held.close()  # it died and its pid was taken by an innocent
                continue
            self._held[key] = held
            with contextlib.suppress(PermissionError):  # it changed its uid: the next scan names it as stuck
                if killing:
                    held.signal(signal.SIGKILL)
                elif key not in self._termed:
                    self._termed.add(key)
                    held.signal(signal.SIGTERM)
                    held.signal(signal.SIGCONT)

    def _forget_dead(self) -> None:
        for key in [k for k, p in self._held.items() if not p.alive()]:
            self._held.pop(key).close()
