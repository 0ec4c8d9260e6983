"""The probe loop of one live Gateway: ask, wait, judge.

Invariants: one probe at a time, and it stays open until an answer is complete or a verdict falls; a slow answer is shown
and nothing more; our own lateness restarts the window; while STARTING only startup_timeout counts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tdai_supervisor.decide.model import Event
from tdai_supervisor.decide.policy import LATE_LOOP, Silence, judge_silence, next_probe_in
from tdai_supervisor.decide.settings import GatewaySettings
from tdai_supervisor.host import probe, process

FIRST_WAIT, WAIT_GROWTH, STARTING_WAIT = 0.001, 1.5, 0.1  # s: probes of a starting Gateway, growing to ten a second
FAILED_WAIT = 1.0  # s at most after a refused or broken probe
LOOK_AGAIN = 1.0  # s between verdicts while one is due


@dataclass
class Health:
    """What the last complete answer said. latency in seconds; slow: an open or failed probe is past probe_deadline."""

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
        pids: Callable[[], Iterable[int]],
        report: Callable[[Event, str], None],
        hold: Callable[[], str | None],
        is_ours: Callable[[], bool],
    ) -> None:
        self._settings, self._port = settings, port
        self._health = health
        self._pids = pids
        self._report = report
        self._hold = hold
        self._is_ours = is_ours
        self._clock = asyncio.get_running_loop().time
        self._answered_at = self._clock()
        self._silent_since: float | None = None
        self._cpu_then = 0
        self._late = 0.0
        self.starting = True

    async def run(self) -> None:
        """Ends only by cancellation, or after a verdict UNFIT."""
        begun, wait = self._clock(), FIRST_WAIT
        while True:
            started = self._clock()
            if self._silent_since is None:
                self._silent_since, self._cpu_then = started, cpu_of(self._pids())
            asking = asyncio.ensure_future(probe.ask(self._settings.host, self._port))
            try:
                while not asking.done():
                    await self._sleep(self._next_look(started, begun), asking)
                    if not asking.done() and self._judge(begun):
                        return
            finally:
                if not asking.done():
                    asking.cancel()
            self._take(asking, started)
            if self.starting:
                if self._judge(begun):
                    return
                pause, wait = wait, min(wait * WAIT_GROWTH, STARTING_WAIT)
            else:
                if self._silent_since is not None and self._judge(begun):
                    return
                pause = next_probe_in(self._settings)
                if self._silent_since is not None:
                    pause = min(pause, FAILED_WAIT)
            await self._sleep(pause)

    async def _sleep(self, seconds: float, until: asyncio.Future[probe.Answer] | None = None) -> None:
        """Wait, and notice if it was us who slept: then the silence was ours."""
        due = self._clock() + seconds
        if until is None:
            await asyncio.sleep(seconds)
        else:
            await asyncio.wait([until], timeout=seconds)
        self._late = max(0.0, self._clock() - due)
        if self._late > LATE_LOOP:
            self._answered_at = self._clock()
            if self._silent_since is not None:
                self._silent_since, self._cpu_then = self._clock(), cpu_of(self._pids())

    def _next_look(self, started: float, begun: float) -> float:
        """Seconds until the open probe could lead to something new: slow, hung, or too late to start."""
        now, s = self._clock(), self._settings
        if self.starting:
            moments = [begun + s.startup_timeout]
        else:
            silent = self._silent_since if self._silent_since is not None else started
            moments = [max(self._answered_at + s.hang_after, silent + s.hang_after * 2 / 3)]
        moments.append(started + s.probe_deadline)
        ahead = [m - now for m in moments if m > now]
        return min(ahead) + 0.001 if ahead else LOOK_AGAIN

    def _judge(self, begun: float) -> bool:
        """Report what the silence means; whether that ended the watch."""
        now = self._clock()
        if self._silent_since is not None and now - self._silent_since >= self._settings.probe_deadline:
            self._health.slow = True
        if self.starting:
            if now - begun < self._settings.startup_timeout:
                return False
            why = f"no healthy answer within startup_timeout ({self._settings.startup_timeout:g} s)"
            self._report(Event.UNFIT, why + (f": {self._health.failure}" if self._health.failure else ""))
            return True
        if self._silent_since is None:
            return False
        since = now - self._silent_since
        blocked, traced = thread_states(self._pids())
        share = (cpu_of(self._pids()) - self._cpu_then) / TICKS_PER_SECOND / since if since > 0 else None
        silence = Silence(now - self._answered_at, since, share, blocked, traced, self._late)
        event = judge_silence(silence, self._settings)
        if event is None:
            return False
        age = f"no complete answer for {silence.answer_age:.0f} s"
        if event is Event.SILENT:
            excuse = "traced by a debugger" if traced else f"busy ({(share or 0) * 100:.0f} % of a core)"
            self._report(event, f"{age}, {excuse}")
            return False
        self._report(event, f"hung: {age}" + (f" ({self._health.failure})" if self._health.failure else ""))
        return True

    def _take(self, asking: asyncio.Future[probe.Answer], started: float) -> None:
        """Note the outcome of a finished probe, and report what it changes."""
        try:
            answer = asking.result()
        except (OSError, ValueError) as error:
            self._health.failure = str(error) or type(error).__name__
            return
        if not self._is_ours():
            self._health.failure = f"port {self._port} is answered by a process that is not ours"
            return
        self._answered_at, self._silent_since = self._clock(), None
        self._health.answer, self._health.latency = answer, self._answered_at - started
        self._health.slow = self._health.latency >= self._settings.probe_deadline
        self._health.failure = None
        self.starting = False
        hold = self._hold()
        if hold is not None:
            self._report(Event.HELD, hold)
        else:
            self._report(Event.ANSWERED, f"answered /health in {self._health.latency * 1000:.0f} ms")


TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_of(pids: Iterable[int]) -> int:
    """Clock ticks used by these processes so far; those that are gone count 0."""
    return sum(stat.cpu_ticks for pid in pids if (stat := process.read_stat(pid)) is not None)


def thread_states(pids: Iterable[int]) -> tuple[bool, bool]:
    """(a thread is in D, a process is traced) among these processes."""
    blocked = traced = False
    for pid in pids:
        for state in process.thread_states(pid):
            blocked |= state == "D"
            traced |= state == "t"
    return blocked, traced
