"""One life of a Gateway: a process from spawn or adoption to its end, and all that is known of it.

Invariants: a life is its own token (what comes from another life is dropped by comparing the object); it never acts on
the process; its death is reported once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass

from tdai_supervisor.decide.model import Event, Exit, Identity, Origin
from tdai_supervisor.decide.settings import GatewaySettings
from tdai_supervisor.engine.loop import on_death
from tdai_supervisor.engine.watching import Health, Watch
from tdai_supervisor.host import ports, process, tree
from tdai_supervisor.host.process import Process


@dataclass
class LastExit:
    """The end of the last life, as status shows it. at: wall clock seconds, for display."""

    exit: Exit
    cause: str
    at: float


@dataclass
class Ordered:
    """Why we end a life ourselves: the reason, whether it counts as a death, whether an external one is taken over."""

    why: str
    counted: bool = False
    take_over: bool = False


REAPED_WITHIN = 5.0  # s in which init is expected to reap an orphan (some take 2)


async def late_exit(remains: int) -> Exit:
    """The exit of a dead process that was not our child, asked for until it is known or REAPED_WITHIN has passed."""
    clock = asyncio.get_running_loop().time
    until = clock() + REAPED_WITHIN
    try:
        while not (found := process.ask_kernel(remains)).known and clock() < until:  # noqa: ASYNC110  (no event for this)
            await asyncio.sleep(0.05)
        return found
    finally:
        os.close(remains)


class Life:
    """A live process that answers, or will answer, on port. listener: who answers, once that is known."""

    def __init__(self, main: Process, origin: Origin, port: int, root: str, settings: GatewaySettings) -> None:
        self.main, self.origin, self.port = main, origin, port
        self.listener: Identity | None = None
        self.pids = {main.pid}
        self.memory: int | None = None
        self.health = Health()
        self.ready_at: float | None = None  # loop time
        self._root, self._settings = root, settings
        self._watching: asyncio.Task[None] | None = None
        self._cancel: Callable[[], None] | None = None

    @property
    def external(self) -> bool:
        """Whether somebody else started it: watched, never signalled."""
        return self.origin is Origin.EXTERNAL

    @property
    def shown(self) -> Identity:
        """Who status and record name: the listener once it is known, else the process itself."""
        return self.listener or self.main.identity

    def ready_for(self, now: float) -> float:
        """Seconds since it first was READY; 0 where it never was."""
        return now - self.ready_at if self.ready_at is not None else 0.0

    def watch(
        self,
        task: Callable[..., asyncio.Task[None]],
        verdict: Callable[[Life, Event, str], None],
        died: Callable[[Life], None],
        hold: Callable[[], str | None],
    ) -> None:
        """Wait for its death and probe it; reports go to verdict(self, …) and died(self)."""
        self._cancel = on_death(self.main, lambda: died(self))
        watch = Watch(
            self._settings,
            self.port,
            self.health,
            pids=lambda: self.pids,
            report=lambda event, cause: verdict(self, event, cause),
            hold=hold,
            is_ours=self._listener_is_ours,
        )
        self._watching = task(watch.run())

    def stop_probing(self) -> None:
        """No more verdicts; its death is still reported."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def close(self) -> None:
        """Let it go: no more verdicts, no report, no descriptor. The process stays what it is."""
        self.stop_probing()
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
        self.main.close()

    def _listener_is_ours(self) -> bool:
        """Whether the port belongs to our tree; once the listener is known, asked again only if it died."""
        if self.listener is not None and process.identify(self.listener.pid) == self.listener:
            return True
        found = ports.on(self._settings.host, self.port)
        pid = ports.owned_by(found, [self.main.pid])
        if pid is None:
            members = tree.members(tree.scan(), self._root, self._settings.name, self.main)
            self.pids = {self.main.pid, *(m.pid for m in members)}
            pid = ports.owned_by(found, self.pids)
        if pid is None and found and process.LINUX:
            return False
        self.listener = process.identify(pid or self.main.pid)
        return self.listener is not None
