"""The automaton, walked cell by cell against a second writing of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdai_supervisor.decide.model import Action, Event, State, Want
from tdai_supervisor.decide.table import TABLE, diagram, step

# One row a state, one column an event; "." stays. Written by hand from the design, not from the table.
COLUMNS = [
    "up",
    "down",
    "restart",
    "take_over",
    "clear",
    "found",
    "taken",
    "answered",
    "held",
    "silent",
    "unfit",
    "again",
    "later",
    "give_up",
    "gone",
    "timer",
]
GRID = """
STOPPED   STARTING STOPPING STARTING STARTING . . . . . . . . . . . .
STARTING  . STOPPING STOPPING STOPPING . . BLOCKED READY UNREADY . STOPPING . BACKOFF FATAL . .
READY     . STOPPING STOPPING STOPPING . . . . UNREADY UNREADY STOPPING STARTING BACKOFF FATAL . .
UNREADY   . STOPPING STOPPING STOPPING . . . READY . . STOPPING STARTING BACKOFF FATAL . .
STOPPING  . . . . . . . . . . . STARTING BACKOFF FATAL STOPPED .
BACKOFF   STARTING STOPPING STARTING STARTING . . . . . . . . . . . STARTING
BLOCKED   . STOPPING . . STARTING STARTING . . . . . . . FATAL . .
FATAL     STARTING STOPPING STARTING STARTING . . . . . . . . . . . STARTING
"""
CELLS = [
    (State(words[0]), Event(column.replace("_", " ")), State(words[0]) if target == "." else State(target))
    for words in (line.split() for line in GRID.strip().splitlines())
    for column, target in zip(COLUMNS, words[1:], strict=True)
]


def test_the_grid_has_every_cell() -> None:
    """No state and no event is left out of the second writing."""
    assert {(s, e) for s, e, _ in CELLS} == {(s, e) for s in State for e in Event} == set(TABLE)


@pytest.mark.parametrize(("state", "event", "target"), CELLS, ids=lambda v: str(v).replace(" ", "-"))
def test_cell(state: State, event: Event, target: State) -> None:
    """Each event leads where the design says."""
    assert step(state, event).state is target


@pytest.mark.parametrize("state", [s for s in State if s is not State.STOPPING])
def test_stop_always_ends_the_tree(state: State) -> None:
    """`stop` looks for processes in every state, also where none should be."""
    assert step(state, Event.DOWN).actions == (Action.END,)


def test_only_a_look_leads_to_a_spawn() -> None:
    """SPAWN happens on CLEAR alone: never without the lease in hand."""
    assert {e for (_, e), c in TABLE.items() if Action.SPAWN in c.actions} == {Event.CLEAR}


def test_every_waiting_state_has_a_way_out() -> None:
    """A state that waits arms its timer on the way in, and the timer leads on."""
    for (state, _), cell in TABLE.items():
        if cell.state in (State.BACKOFF, State.BLOCKED, State.FATAL) and cell.state is not state:
            assert cell.actions == (Action.WAIT,)
    for state in (State.BACKOFF, State.BLOCKED, State.FATAL):
        assert step(state, Event.TIMER).actions


def test_diagram_names_every_state() -> None:
    """The generated diagram shows the whole automaton."""
    assert all(str(s) in diagram() for s in State)


class World:
    """A pure engine around the table: what the actions lead to, one pending outcome at a time."""

    def __init__(self) -> None:
        self.state, self.want = State.STOPPED, Want.DOWN
        self.live = self.counted = self.blocked = self.armed = False
        self.pending: str | None = None
        self.life = 0

    def fire(self, event: Event) -> None:
        cell = step(self.state, event)
        if cell.state is not self.state:
            self.armed = False
        self.state = cell.state
        for action in cell.actions:
            if action is Action.CLAIM:
                self.pending = "claim"
            elif action is Action.SPAWN:
                assert not self.live, "two Gateways at once"
                self.live = True
            elif action is Action.WATCH:
                self.live = True
            elif action is Action.END:
                self.pending, self.counted = "end", event is Event.UNFIT
            elif action is Action.WAIT:
                self.armed = True

    def settle(self) -> None:
        """The outcome of what is under way."""
        what, self.pending = self.pending, None
        if what == "claim" and self.state in (State.STARTING, State.BLOCKED):
            self.fire(Event.TAKEN if self.blocked else Event.CLEAR)
        elif what == "end":
            self.live = False
            down = self.want is Want.DOWN
            self.fire(Event.GONE if down else Event.LATER if self.counted else Event.AGAIN)

    def do(self, name: str) -> None:
        if name in ("up", "restart"):
            self.want = Want.UP
            self.fire(Event.UP if name == "up" else Event.RESTART)
        elif name == "down":
            self.want = Want.DOWN
            self.fire(Event.DOWN)
        elif name == "settle":
            self.settle()
        elif name == "timer" and self.armed:
            self.armed = False
            self.fire(Event.TIMER)
        elif name in ("block", "unblock"):
            self.blocked = name == "block"
        elif name in ("answered", "held", "silent", "unfit") and self.live and self.state is not State.STOPPING:
            self.fire(Event(name))
        elif name in ("again", "later", "give up") and self.live and self.state is not State.STOPPING:
            self.live = False
            self.fire(Event(name))


COMMANDS = ("up", "down", "restart", "settle", "timer", "block", "unblock")
REPORTS = ("answered", "held", "silent", "unfit", "again", "later", "give up")


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(COMMANDS + REPORTS), max_size=60), st.sampled_from(["up", "down"]))
def test_every_interleaving_ends_in_the_last_want(history: list[str], last: str) -> None:
    """Whatever commands, deaths and probes came in whatever order, the last want is what becomes true."""
    world = World()
    for name in history:
        world.do(name)
    world.do("unblock")
    world.do(last)
    for _ in range(10):
        for name in ("settle", "timer", "answered"):
            world.do(name)
    wanted: Any = (State.READY, True) if last == "up" else (State.STOPPED, False)
    assert (world.state, world.live) == wanted
