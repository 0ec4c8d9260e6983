"""The probe window of one life: when it was asked, when it answered, what the silence means.

Invariants: pure, a fold over times that are passed in (monotonic seconds); one probe at a time; only a complete answer
ends a silence; when we ourselves were late by more than a second the silence starts again, because it may have been
ours; while starting only startup_timeout counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tdai_supervisor.decide.model import Event
from tdai_supervisor.decide.policy import LATE_LOOP, PROBE_SHARE, Silence, is_busy, judge_silence, next_probe_in
from tdai_supervisor.decide.settings import GatewaySettings

FIRST_WAIT, WAIT_GROWTH, STARTING_WAIT = 0.001, 1.5, 0.1  # s: pauses between probes of a starting Gateway
FAILED_WAIT = 1.0  # s at most after a refused or broken probe
LOOK_AGAIN = 1.0  # s between verdicts while one is due


@dataclass(frozen=True, slots=True)
class Excuse:
    """What the tree did since the silence began: see policy.Silence."""

    cpu_share: float | None = None
    blocked: bool = False
    traced: bool = False


class Window:
    """Feed it times, ask it for verdicts. `starting` until the first complete answer."""

    def __init__(self, settings: GatewaySettings, now: float) -> None:
        self._settings = settings
        self._begun = self._answered_at = now
        self._probe_at: float | None = None
        self._pause = FIRST_WAIT
        self.silent_since: float | None = None
        self.starting = True

    def probe(self, now: float) -> bool:
        """A probe starts; whether a silence begins with it (then CPU is to be noted)."""
        self._probe_at = now
        if self.silent_since is None:
            self.silent_since = now
            return True
        return False

    def answered(self, now: float) -> None:
        """A complete answer has come."""
        self._answered_at, self._probe_at, self.silent_since, self.starting = now, None, None, False

    def failed(self) -> None:
        """The probe was refused or broken: the silence goes on without it."""
        self._probe_at = None

    def woke(self, now: float, due: float) -> bool:
        """We woke at now and wanted to at due; whether that was so late that the silence starts again."""
        if now - due <= LATE_LOOP:
            return False
        self._answered_at = now
        if self.silent_since is not None:
            self.silent_since = now
        return True

    def pause(self) -> float:
        """Seconds until the next probe, once one has ended."""
        if self.starting:
            pause, self._pause = self._pause, min(self._pause * WAIT_GROWTH, STARTING_WAIT)
            return pause
        pause = next_probe_in(self._settings)
        return pause if self.silent_since is None else min(pause, FAILED_WAIT)

    def next_look(self, now: float) -> float:
        """Seconds until an open probe could lead to something new: slow, hung, or too late to start."""
        s = self._settings
        silent = self.silent_since if self.silent_since is not None else now
        if self.starting:
            due = self._begun + s.startup_timeout
        else:
            due = max(self._answered_at + s.hang_after, silent + s.hang_after * PROBE_SHARE)
        slow = (self._probe_at if self._probe_at is not None else now) + s.probe_deadline
        ahead = [moment - now for moment in (due, slow) if moment > now]
        return min(ahead) + 0.001 if ahead else LOOK_AGAIN

    def is_slow(self, now: float) -> bool:
        """Whether the silence is longer than probe_deadline: shown, and nothing more."""
        return self.silent_since is not None and now - self.silent_since >= self._settings.probe_deadline

    def verdict(self, now: float, excuse: Callable[[float], Excuse]) -> tuple[Event, str] | None:
        """(SILENT or UNFIT, the cause in words), or None. excuse(seconds) is asked only when it matters."""
        s = self._settings
        if self.starting:
            if now - self._begun < s.startup_timeout:
                return None
            return Event.UNFIT, f"no healthy answer within startup_timeout ({s.startup_timeout:g} s)"
        if self.silent_since is None or now - self._answered_at < s.hang_after:
            return None
        age, since = now - self._answered_at, now - self.silent_since
        what = excuse(since)
        silence = Silence(age, since, what.cpu_share, what.blocked, what.traced)
        event = judge_silence(silence, s)
        if event is None:
            return None
        text = f"no complete answer for {age:.0f} s"
        if event is Event.UNFIT:
            return event, f"hung: {text}"
        if what.traced:
            return event, f"{text}, traced by a debugger"
        assert is_busy(silence)
        return event, f"{text}, busy ({(what.cpu_share or 0) * 100:.0f} % of a core)"
