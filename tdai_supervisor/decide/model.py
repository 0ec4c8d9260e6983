"""The words of the project as types.

Invariants: want and state are different fields; a pid alone never names a process (see Identity); "unknown" is an
answer of its own and never counts as "gone".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Want(StrEnum):
    """What the user asked for; persisted, survives reboots."""

    UP = "up"
    DOWN = "down"


class State(StrEnum):
    """What a Gateway is, as far as its owner can prove."""

    STOPPED = "STOPPED"
    STARTING = "STARTING"
    READY = "READY"
    UNREADY = "UNREADY"
    STOPPING = "STOPPING"
    BACKOFF = "BACKOFF"
    BLOCKED = "BLOCKED"
    FATAL = "FATAL"


class Event(StrEnum):
    """What can happen to a Gateway. Verdicts of policy come in as events, so the table stays total and pure."""

    UP = "up"  # want became up, or `start` was asked again
    DOWN = "down"  # want became down, or `stop` was asked again
    RESTART = "restart"  # end it and start it again, want stays up
    TAKE_OVER = "take over"  # end the external Gateway by proof and run ours
    CLEAR = "clear"  # nobody lives on the data directory or the port
    FOUND = "found"  # a live Gateway was found: ours without an owner, or an external one
    TAKEN = "taken"  # somebody else, or somebody unprovable, holds the data directory or the port
    ANSWERED = "answered"  # a complete healthy answer
    HELD = "held"  # alive, but do not deliver to it
    SILENT = "silent"  # no complete answer for hang_after, with an excuse (busy, traced)
    UNFIT = "unfit"  # must be ended and counted: hung, startup_timeout, memory_limit
    AGAIN = "again"  # it is gone; policy says: start at once
    LATER = "later"  # it is gone; policy says: wait
    GIVE_UP = "give up"  # it is gone; policy says: budget spent, or no retry can help
    GONE = "gone"  # ended as asked: tree, lease and port are free
    TIMER = "timer"  # the wait of BACKOFF, BLOCKED or FATAL is over


class Action(StrEnum):
    """What the engine does after a transition, in the order given by the table."""

    CLAIM = "claim"  # look at lease, cookie, port, processes; answers with CLEAR, FOUND or TAKEN
    SPAWN = "spawn"  # exec the Gateway
    WATCH = "watch"  # wait for its death and probe it
    END = "end"  # rule 10: end the tree; answers with GONE, AGAIN, LATER or GIVE_UP
    WAIT = "wait"  # arm the timer of the new state
    PARDON = "pardon"  # forget counted deaths


class Origin(StrEnum):
    """How a live Gateway came to be known."""

    SPAWNED = "spawned"
    ADOPTED = "adopted"
    EXTERNAL = "external"


class Verdict(StrEnum):
    """The answer to "is this process ours?"; only OURS may be signalled, only GONE may be replaced."""

    OURS = "ours"
    FOREIGN = "foreign"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process beyond doubt: pid and start ticks on one boot in one pid namespace, and its user.

    ticks is field 22 of /proc/PID/stat (clock ticks since boot): unlike create times it does not move with the wall
    clock.
    """

    pid: int
    ticks: int
    boot_id: str
    pid_ns: str
    uid: int


@dataclass(frozen=True, slots=True)
class Cookie:
    """The environment entry MEMORY_TENCENTDB_OWNER=<root>:<name>:<spawn number>: ownership that needs no record."""

    root: str
    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.root}:{self.name}:{self.number}"

    @classmethod
    def parse(cls, text: str) -> Cookie | None:
        """The cookie in text, or None where it is not one. A root may contain colons, a name and a number do not."""
        head, _, number = text.rpartition(":")
        root, _, name = head.rpartition(":")
        if not root or not name or not number.isdecimal():
            return None
        return cls(root, name, int(number))


COOKIE_NAME = "MEMORY_TENCENTDB_OWNER"


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. code and signal are None where the kernel did not tell (never invented)."""

    code: int | None
    signal: int | None

    @property
    def known(self) -> bool:
        """Whether the kernel reported this exit."""
        return self.code is not None or self.signal is not None
