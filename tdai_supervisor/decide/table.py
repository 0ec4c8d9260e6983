"""The automaton of one Gateway: state x event -> next state and actions.

Invariants: the table is total (a test walks every cell); a cell that stays and does nothing is an event that means
nothing in that state, such as a timer that fires late; END is the only action that may signal a process, and every path
that leaves a live process behind goes through it.
"""

from __future__ import annotations

from typing import NamedTuple

from tdai_supervisor.decide.model import Action, Event, State


class Cell(NamedTuple):
    """Where an event leads and what is done then."""

    state: State
    actions: tuple[Action, ...] = ()


_CLAIM = (Action.CLAIM,)
_SPAWN = (Action.SPAWN, Action.WATCH)
_WATCH = (Action.WATCH,)
_END = (Action.END,)
_WAIT = (Action.WAIT,)
_FRESH = (Action.PARDON, Action.CLAIM)

S, E = State, Event

# Only cells that do something are written; `_total` fills the others with "stay". A row is one state.
_ROWS: dict[State, dict[Event, Cell]] = {
    S.STOPPED: {
        E.UP: Cell(S.STARTING, _FRESH),
        E.RESTART: Cell(S.STARTING, _FRESH),
        E.TAKE_OVER: Cell(S.STARTING, _FRESH),
        # A crash may have left a process behind that no record names: `stop` looks again even here.
        E.DOWN: Cell(S.STOPPING, _END),
    },
    S.STARTING: {
        E.DOWN: Cell(S.STOPPING, _END),
        E.RESTART: Cell(S.STOPPING, _END),
        E.TAKE_OVER: Cell(S.STOPPING, _END),
        E.CLEAR: Cell(S.STARTING, _SPAWN),
        E.FOUND: Cell(S.STARTING, _WATCH),
        E.TAKEN: Cell(S.BLOCKED, _WAIT),
        E.ANSWERED: Cell(S.READY),
        E.HELD: Cell(S.UNREADY),
        E.UNFIT: Cell(S.STOPPING, _END),
        E.AGAIN: Cell(S.STARTING, _CLAIM),
        E.LATER: Cell(S.BACKOFF, _WAIT),
        E.GIVE_UP: Cell(S.FATAL, _WAIT),
    },
    S.READY: {
        E.DOWN: Cell(S.STOPPING, _END),
        E.RESTART: Cell(S.STOPPING, _END),
        E.TAKE_OVER: Cell(S.STOPPING, _END),
        E.HELD: Cell(S.UNREADY),
        E.SILENT: Cell(S.UNREADY),
        E.UNFIT: Cell(S.STOPPING, _END),
        E.AGAIN: Cell(S.STARTING, _CLAIM),
        E.LATER: Cell(S.BACKOFF, _WAIT),
        E.GIVE_UP: Cell(S.FATAL, _WAIT),
    },
    S.UNREADY: {
        E.DOWN: Cell(S.STOPPING, _END),
        E.RESTART: Cell(S.STOPPING, _END),
        E.TAKE_OVER: Cell(S.STOPPING, _END),
        E.ANSWERED: Cell(S.READY),
        E.UNFIT: Cell(S.STOPPING, _END),
        E.AGAIN: Cell(S.STARTING, _CLAIM),
        E.LATER: Cell(S.BACKOFF, _WAIT),
        E.GIVE_UP: Cell(S.FATAL, _WAIT),
    },
    S.STOPPING: {
        E.GONE: Cell(S.STOPPED),
        E.AGAIN: Cell(S.STARTING, _CLAIM),
        E.LATER: Cell(S.BACKOFF, _WAIT),
        E.GIVE_UP: Cell(S.FATAL, _WAIT),
    },
    S.BACKOFF: {
        E.UP: Cell(S.STARTING, _FRESH),
        E.RESTART: Cell(S.STARTING, _FRESH),
        E.TAKE_OVER: Cell(S.STARTING, _FRESH),
        E.DOWN: Cell(S.STOPPING, _END),
        E.TIMER: Cell(S.STARTING, _CLAIM),
    },
    S.BLOCKED: {
        # Looking again does not leave the state: a holder that stays is one journal line, not one every recheck.
        E.UP: Cell(S.BLOCKED, _FRESH),
        E.RESTART: Cell(S.BLOCKED, _FRESH),
        E.TAKE_OVER: Cell(S.BLOCKED, _FRESH),
        E.DOWN: Cell(S.STOPPING, _END),
        E.TIMER: Cell(S.BLOCKED, _CLAIM),
        E.TAKEN: Cell(S.BLOCKED, _WAIT),
        E.CLEAR: Cell(S.STARTING, _SPAWN),
        E.FOUND: Cell(S.STARTING, _WATCH),
        E.GIVE_UP: Cell(S.FATAL, _WAIT),
    },
    S.FATAL: {
        E.UP: Cell(S.STARTING, _FRESH),
        E.RESTART: Cell(S.STARTING, _FRESH),
        E.TAKE_OVER: Cell(S.STARTING, _FRESH),
        E.DOWN: Cell(S.STOPPING, _END),
        E.TIMER: Cell(S.STARTING, _CLAIM),
    },
}


def _total() -> dict[tuple[State, Event], Cell]:
    return {(state, event): _ROWS[state].get(event, Cell(state)) for state in State for event in Event}


TABLE = _total()


def step(state: State, event: Event) -> Cell:
    """The next state and its actions. Total: never raises for a State and an Event."""
    return TABLE[state, event]


def diagram() -> str:
    """The table as a Mermaid state diagram; docs/architecture.md holds exactly this text (a test compares)."""
    arrows: dict[tuple[State, State], list[Event]] = {}
    for (state, event), cell in TABLE.items():
        if cell.state is not state:
            arrows.setdefault((state, cell.state), []).append(event)
    lines = ["stateDiagram-v2", "    [*] --> STOPPED"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(diagram(), end="")
