"""What the user and the model are told of memory that comes and goes.

Invariants:
* A change is told to the user once, through the host's callbacks and one log line; back is told once.
* While memory is away each recalled text says so, with the number of turns that wait: the model must not take silence
  for "nothing is known". The text of the turn in which it is back says so, once.
"""

from __future__ import annotations

from .endpoint import Away
from .text import clock


class Told:
    """Words for the recalled text of this turn, and for the user if something has changed ("" otherwise)."""

    __slots__ = ("bad", "model", "user")

    def __init__(self, model: str = "", user: str = "", bad: bool = False) -> None:
        self.model, self.user, self.bad = model, user, bad


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"


class Watch:
    """Remembers what was told last. Time is passed in, as wall seconds."""

    def __init__(self) -> None:
        self._kind = ""
        self._since = 0.0
        self._most = 0

    def look(self, trouble: Away | None, waiting: int, wall: float, unsafe: int = 0) -> Told:
        """What to say now, given what stands in the way (None: nothing) and how many turns wait, ``unsafe`` of them
        only in memory because the disk refuses them."""
        if trouble is None:
            return self._back(waiting, wall)
        kind = "hold" if trouble.kind == "hold" else "away"
        changed = kind != self._kind
        if changed:
            self._kind, self._since = kind, wall if not self._kind else self._since
        self._most = max(self._most, waiting)
        state = "away" if kind == "away" else "not taking anything in"
        said = (
            f"memory is {state} since {clock(self._since)} ({trouble.reason}). {_turns(waiting)} "
            f"{'is' if waiting == 1 else 'are'} kept on disk and will be saved when it is back"
            + (f"; {unsafe} of them only in memory, because the disk refuses them" if unsafe else "")
        )
        advice = "" if kind == "hold" else " Answer without it; its tools do not work until then."
        return Told(f"[Long-term {said}.{advice}]", f"memory_tencentdb: {said}" if changed else "", bad=True)

    def _back(self, waiting: int, wall: float) -> Told:
        if not self._kind:
            return Told()
        saved = max(0, self._most - waiting)
        said = (
            f"memory is back since {clock(wall)}, it was away since {clock(self._since)}. "
            f"Of {_turns(self._most)} kept meanwhile {saved} {'is' if saved == 1 else 'are'} saved"
            + (f", {waiting} being saved" if waiting else "")
        )
        self._kind, self._since, self._most = "", 0.0, 0
        return Told(f"[Long-term {said}.]", f"memory_tencentdb: {said}")
