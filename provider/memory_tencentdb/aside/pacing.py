"""When to send again: waiting after trouble, backing off from a record, sparing an extraction. Pure functions only.

Numbers without a source here are those of design.md and of the measured facts named beside them.
"""

from __future__ import annotations

from collections import deque

from ..endpoint import Away
from ..gateway import CAPTURE_DEADLINE, HEALTH_DEADLINE

DROPPED_TRIES = 12
"""Sends of a turn that a Gateway silently drops: all of 100 such turns were recorded within 8 (facts: Gateway, 4.2)."""
FAILURES = 12
"""Failures after which a record is given up, if other records were accepted meanwhile."""
BACKOFF_FIRST, BACKOFF_LAST = 1.0, 60.0
BURST, BURST_PAUSE = 5, 10.0
"""Turns of one session at once, and seconds until more: a pass of extraction takes the last 10 messages and passes over
the rest (facts: Gateway, 4.6). The embedded Gateway has no such pass."""
HEALTH_AGE = 5.0
"""Seconds for which one look at /health is believed while delivering."""
AUTH_PAUSE = 10.0


class Pause:
    """Nothing is sent until ``until`` (monotonic), unless the endpoint record or key ``changes`` before."""

    __slots__ = ("changes", "since", "trouble", "until")

    def __init__(self, trouble: Away, since: float, until: float, changes: object) -> None:
        self.trouble, self.since, self.until, self.changes = trouble, since, until, changes


def pause_length(kind: str, age: float, wait: float | None) -> float:
    """Seconds until the next look at a Gateway that has been in trouble for ``age`` seconds.

    A look that costs nothing is taken every second, later every five; one that may take its whole deadline (silence)
    after a tenth of the age, so that a Gateway that comes back is used soon and a dead one is left in peace.
    """
    if kind == "auth":
        return AUTH_PAUSE
    if kind == "busy":
        return wait if wait is not None else min(max(age, BACKOFF_FIRST), BACKOFF_LAST)
    if kind in ("silent", "cut"):
        return min(max(age / 10, 0.5), 30.0)
    return 1.0 if age < 60 else 5.0


def probe_deadline(kind: str, age: float) -> float:
    """Seconds that a look at /health may take.

    After silence short at first, so that with the pause between two looks a Gateway that comes back is seen within a
    second; then longer, so that one that is only slow is seen too.
    """
    if kind not in ("silent", "cut"):
        return HEALTH_DEADLINE
    return min(max(age / 3, 0.5), CAPTURE_DEADLINE)


def backoff(attempts: int) -> float:
    """Seconds before a record is sent again after so many failures: 1, 2, 4 … 60."""
    return float(min(BACKOFF_LAST, BACKOFF_FIRST * 2 ** min(max(attempts - 1, 0), 10)))


def drop_delay(attempt: int, chance: float) -> float:
    """Seconds before a silently dropped turn is sent again; ``chance`` (0..1) keeps it off the clock tick."""
    return 0.002 + 0.01 * attempt * chance


def burst_over(sent: deque[float] | None, generation: str) -> float:
    """The moment from which a session may be sent to, given the moments of its last captures (BURST at most)."""
    if generation == "embedded" or sent is None or len(sent) < BURST:
        return 0.0
    return sent[0] + BURST_PAUSE
