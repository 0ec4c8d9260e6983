"""The probe loop of one live Gateway: ask, wait, judge.

Invariants: one probe at a time, and it stays open until its answer is complete or a verdict falls; what a silence
means is decided by decide.window alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tdai_supervisor.decide.model import Event
from tdai_supervisor.decide.settings import GatewaySettings
from tdai_supervisor.decide.window import Excuse, Window
from tdai_supervisor.host import probe, process, tree

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Health:
    """What the last complete answer said. latency in seconds; slow: the silence is past probe_deadline."""

    answer: probe.Answer | None = None
    latency: float | None = None
    slow: bool = False
    failure: str | None = None


class Watch:
    """Probes one Gateway until cancelled and reports every verdict through `report(event, cause)`."""

    def __init__(
        self,
        settings: GatewaySettings,
        port: int,
        health: Health,
        *,
        pids: Callable[[], Iterable[int]],
        report: Callable[[Event, str], None],
        hold: Callable[[], str | None],
        is_ours: Callable[[], bool],
    ) -> None:
        self._settings, self._port = settings, port
        self._health = health
        self._pids, self._report, self._hold, self._is_ours = pids, report, hold, is_ours
        self._clock = asyncio.get_running_loop().time
        self._window = Window(settings, self._clock())
        self._cpu_then = 0

    async def run(self) -> None:
        """Ends by cancellation, or after a verdict UNFIT."""
        while True:
            started = self._clock()
            if self._window.probe(started):
                self._cpu_then = cpu_of(self._pids())
            asking = asyncio.ensure_future(probe.ask(self._settings.host, self._port))
            try:
                while not asking.done():
                    await self._wait(self._window.next_look(self._clock()), asking)
                    if not asking.done() and self._judge():
                        return
            finally:
                asking.cancel()
            self._take(asking, started)
            if self._judge():
                return
            await self._wait(self._window.pause())

    async def _wait(self, seconds: float, until: asyncio.Future[probe.Answer] | None = None) -> None:
        due = self._clock() + seconds
        if until is None:
            await asyncio.sleep(seconds)
        else:
            await asyncio.wait([until], timeout=seconds)
        if self._window.woke(self._clock(), due):
            self._cpu_then = cpu_of(self._pids())

    def _judge(self) -> bool:
        """Report what the silence means; whether that ended the watch."""
        now = self._clock()
        self._health.slow = self._health.slow or self._window.is_slow(now)
        verdict = self._window.verdict(now, self._excuse)
        if verdict is None:
            return False
        event, cause = verdict
        self._report(event, cause + (f" ({self._health.failure})" if self._health.failure else ""))
        return event is Event.UNFIT

    def _excuse(self, seconds: float) -> Excuse:
        states = [state for pid in self._pids() for state in tree.thread_states(pid)]
        used = (cpu_of(self._pids()) - self._cpu_then) / TICKS_PER_SECOND
        return Excuse(used / seconds if seconds > 0 else None, "D" in states, "t" in states)

    def _take(self, asking: asyncio.Future[probe.Answer], started: float) -> None:
        """Note the outcome of a finished probe, and report what it changes."""
        health = self._health
        try:
            answer = asking.result()
            if not self._is_ours():
                raise ConnectionError(f"port {self._port} is answered by a process that is not ours")
        except (OSError, ValueError) as error:
            health.failure = str(error) or type(error).__name__
            self._window.failed()
            return
        now = self._clock()
        self._window.answered(now)
        health.answer, health.latency, health.failure = answer, now - started, None
        health.slow = health.latency >= self._settings.probe_deadline
        hold = self._hold()
        event = Event.ANSWERED if hold is None else Event.HELD
        self._report(event, hold or f"answered /health in {health.latency * 1000:.0f} ms")


def cpu_of(pids: Iterable[int]) -> int:
    """Clock ticks used by these processes so far; those that are gone count 0."""
    return sum(stat.cpu_ticks for pid in pids if (stat := process.read_stat(pid)) is not None)
