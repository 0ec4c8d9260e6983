"""The automaton around the table: events one at a time, causes, the timer of a state, and who waits for a change.

Invariants: events are taken in order (`fire` queues); every change of state goes through the table and leaves a cause;
a timer belongs to the state that armed it and is gone with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tdai_supervisor.decide.model import Action, Event, State
from tdai_supervisor.decide.table import step

TOLD = (Event.TAKEN, Event.HELD, Event.SILENT)  # a new cause of these is news even where the state stays


class Automaton:
    """State, cause and since of one Gateway. `fire` is the only way to change them; a subclass does the actions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state, self.cause, self.since = State.STOPPED, "not started yet", wall()
        self.next_try: float | None = None  # loop time
        self.loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._events: deque[tuple[Event, str]] = deque()
        self._pumping = False
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def act(self, action: Action, event: Event, cause: str) -> None:
        """Do one action of the table."""
        raise NotImplementedError

    def entered(self, state: State) -> None:
        """The state is new now; called before the actions."""

    def publish(self) -> None:
        """Everything that follows from an event has been done: tell the outside."""

    def note(self, entry: dict[str, Any]) -> None:
        """Keep a transition. Must not wait for a disk: a death is answered after it."""

    def fire(self, event: Event, cause: str) -> None:
        """Take an event: next state, then its actions. Events fired by an action wait for their turn."""
        self._events.append((event, cause))
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._events:
                self._step(*self._events.popleft())
        finally:
            self._pumping = False
        self.changed()

    def changed(self) -> None:
        """Publish what is true now and wake who waits for it."""
        self.publish()
        self._changed.set()
        self._changed = asyncio.Event()

    def _step(self, event: Event, cause: str) -> None:
        cell = step(self.state, event)
        before = self.state
        if cell.state is not before:
            self._enter(cell.state)
        if cell.state is not before or (event in TOLD and cause != self.cause):
            self.cause = cause
            entry = {"from": str(before), "to": str(cell.state), "event": str(event), "cause": cause}
            self.note(entry)
        for action in cell.actions:
            self.act(action, event, cause)

    def _enter(self, state: State) -> None:
        self.state, self.since = state, wall()
        self.forget_timer()
        self.entered(state)

    def wait(self, delay: float) -> None:
        """Fire TIMER after delay seconds, unless the state changes before."""
        self.forget_timer()
        self.next_try = self.loop.time() + delay
        self._timer = self.loop.call_later(delay, self._wait_is_over)

    def _wait_is_over(self) -> None:
        self.forget_timer()
        self.fire(Event.TIMER, "the wait is over")

    def forget_timer(self) -> None:
        """No TIMER will come."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.next_try = None, None

    async def settled(self, done: Callable[[], bool], deadline: float) -> bool:
        """Whether done() became true before the loop time deadline; it is asked after every change."""
        while not done():
            changed = self._changed
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return done()
        return True

    def task(self, coroutine: Any) -> asyncio.Task[None]:
        """Run a coroutine of this Gateway; what it raises reaches the loop's exception handler."""
        task: asyncio.Task[None] = self.loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself only holds tasks weakly
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"Gateway {self.name}: a task failed", "exception": error}
            self.loop.call_exception_handler(context)


def wall() -> float:
    """Seconds since the epoch, for display only: nothing may use it to decide."""
    return time.time()
