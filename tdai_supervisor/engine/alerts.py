"""The `notify` command: run when somebody should know, told everything through its environment.

Invariants: it can delay nothing (nobody waits for it) and pile up nothing (one at a time, ended after 30 s).
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence

from tdai_supervisor.decide.model import COOKIE_NAME, State
from tdai_supervisor.engine.loop import any_death
from tdai_supervisor.host import process

log = logging.getLogger("tdai_supervisor")
PATIENCE = 30.0  # s
WORTH_TELLING = (State.FATAL, State.BLOCKED)
KEPT = 100  # alerts waiting for the command at most; the oldest go first, counted in the log


class Alerts:
    """Tells FATAL, BLOCKED, a hold, and the recovery from one of these."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = command
        self._told: dict[str, str] = {}  # by Gateway: the trouble that was told
        self._waiting: list[dict[str, str]] = []
        self._running = False
        self.dropped = 0

    def notice(self, name: str, state: State, hold: str | None, cause: str) -> bool:
        """Note a transition; whether `run` is to be started for it."""
        trouble = str(state) if state in WORTH_TELLING else "hold" if hold else None
        if trouble is None and state is State.READY and name in self._told:
            what = "recovery"
            del self._told[name]
        elif trouble is not None and self._told.get(name) != trouble:
            what = self._told[name] = trouble
        else:
            return False
        if not self.command:
            return False
        self._waiting.append(
            {"MEMORY_TENCENTDB_EVENT": what, "MEMORY_TENCENTDB_GATEWAY": name, "MEMORY_TENCENTDB_CAUSE": cause}
        )
        if len(self._waiting) > KEPT:
            self._waiting.pop(0)
            self.dropped += 1
        return not self._running

    async def run(self) -> None:
        """Run the command for each waiting alert, one after the other."""
        self._running = True
        try:
            while self._waiting:
                await self._run_one(self._waiting.pop(0))
        finally:
            self._running = False

    async def _run_one(self, told: dict[str, str]) -> None:
        env = {k: v for k, v in os.environ.items() if k != COOKIE_NAME} | told
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            child = process.spawn(self.command, env, "/", (null, null), ())
        except OSError as error:
            log.error("cannot run notify %s: %s", self.command[0], error.strerror)
            return
        finally:
            os.close(null)
        await any_death([child], PATIENCE)
        if child.alive():
            log.error("notify %s did not end within %g s", self.command[0], PATIENCE)
            child.signal(signal.SIGKILL)
            await any_death([child], PATIENCE)
        exit_ = child.reap()
        child.close()
        if exit_ is not None and exit_.code != 0:
            log.error("notify %s failed: %s", self.command[0], exit_)
