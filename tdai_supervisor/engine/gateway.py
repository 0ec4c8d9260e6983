"""One Gateway under its owner: observe, ask the table, act. The only place that acts.

Invariants: events are taken one at a time, in order (`fire` queues); every change of state goes through the table and
leaves a cause; an answer from an earlier life (a claim, a probe, a timer) is recognised by its token and dropped; between
the report of a death and the spawn nothing waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tdai_supervisor.decide import launch, policy
from tdai_supervisor.decide.model import Action, Cookie, Event, Exit, Identity, Origin, State, Want
from tdai_supervisor.decide.settings import DEFAULT_PORT, GatewaySettings, Settings
from tdai_supervisor.decide.table import step
from tdai_supervisor.engine.claiming import Claiming, Found
from tdai_supervisor.engine.ending import Ending
from tdai_supervisor.engine.loop import Worker, on_death
from tdai_supervisor.engine.runfiles import RunFiles
from tdai_supervisor.engine.watching import Health, Watch
from tdai_supervisor.host import disk, ports, process
from tdai_supervisor.host.locks import Lease
from tdai_supervisor.host.process import Process

log = logging.getLogger("tdai_supervisor")
BLOCKED_RECHECK = 5.0  # s
TAIL_LINES = 20
LIVE = (State.STARTING, State.READY, State.UNREADY, State.STOPPING)


@dataclass(frozen=True)
class Shared:
    """What all Gateways of a daemon use together."""

    settings: Settings
    files: RunFiles
    worker: Worker
    taken_ports: Callable[[str], set[int]]  # by the other Gateways
    publish: Callable[[Gateway], None]  # after each change: record, status line
    journal: Callable[[Gateway, dict[str, Any]], None]


@dataclass
class LastExit:
    """The end of the last life, as status shows it. at: wall clock seconds, for display."""

    exit: Exit
    cause: str
    at: float


class Gateway:
    """State, want and everything known about one Gateway. `fire` is the only way to change it."""

    def __init__(self, shared: Shared, settings: GatewaySettings, record: dict[str, Any] | None) -> None:
        self.shared, self.settings = shared, settings
        self._next: GatewaySettings | None = None  # changed settings, for the next life
        self.name = settings.name
        self.want = Want.DOWN
        self.state, self.cause, self.since = State.STOPPED, "not started yet", _wall()
        self.origin: Origin | None = None
        self.main: Process | None = None
        self.listener: Identity | None = None
        self.health = Health()
        self.hold: str | None = None
        self.last_exit: LastExit | None = None
        self.adoptions = 0
        self.deaths = policy.Deaths()
        self.next_try: float | None = None  # loop time
        self.lease = Lease(settings.data_dir)
        last = record or {}
        self.seq = int(last.get("seq") or 0)
        self.spawn_number = int(last.get("spawn_number") or 0)
        self.restarts = int(last.get("restarts") or 0)
        kept = last.get("port")
        self.port: int = settings.port or (kept if isinstance(kept, int) and 0 < kept < 65536 else DEFAULT_PORT)
        self.kind = "node" if settings.kind == "node" else "command" if settings.kind == "command" else "embedded"
        self.memory: int | None = None
        self.pids: set[int] = set()
        self._claiming = Claiming(self)
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[Event, str]] = deque()
        self._pumping = False
        self._life = 0  # token of everything that belongs to one claim, process or wait
        self._found: Found | None = None
        self._last_spawn: Found | None = None
        self._respawn = False  # our own child just died: the quick claim will do
        self._sweep_later = False
        self._looking = False
        self._logs: list[int] = []
        self._watch: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unwatch: Callable[[], None] | None = None
        self._delay = 0.0
        self._ready_at: float | None = None
        self._asked_to_end: str | None = None  # why we end it ourselves
        self._counted = False  # whether this ending is a death
        self._taking_over = False
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- events ----------------------------------------------------------------------------------------------------

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
        self.shared.publish(self)
        self._changed.set()
        self._changed = asyncio.Event()

    def _step(self, event: Event, cause: str) -> None:
        cell = step(self.state, event)
        before = self.state
        if cell.state is not before:
            self._enter(cell.state)
        if cell.state is not before or (cause != self.cause and event in (Event.TAKEN, Event.HELD, Event.SILENT)):
            self.cause = cause
            entry = {"from": str(before), "to": str(cell.state), "event": str(event), "cause": cause}
            self.shared.journal(self, entry)
            log.info("Gateway %s: %s -> %s: %s", self.name, before, cell.state, cause)
        if event is Event.UNFIT and cell.actions:
            self._asked_to_end, self._counted = cause, True
        elif event in (Event.RESTART, Event.DOWN, Event.TAKE_OVER) and cell.actions:
            self._asked_to_end, self._taking_over = cause, event is Event.TAKE_OVER
        for action in cell.actions:
            self._act(action)

    def _enter(self, state: State) -> None:
        self.state, self.since = state, _wall()
        self._ready_at = self._loop.time() if state is State.READY and self._ready_at is None else self._ready_at
        if state not in (State.UNREADY,):
            self.hold = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.next_try = None, None
        if state not in LIVE:
            self.health = Health()

    def _act(self, action: Action) -> None:
        if action is Action.CLAIM:
            self._claim()
        elif action is Action.SPAWN:
            self._spawn()
        elif action is Action.WATCH:
            self._start_watch()
        elif action is Action.END:
            self._end()
        elif action is Action.WAIT:
            self._wait()
        elif action is Action.PARDON:
            self.deaths = policy.Deaths()

    async def settled(self, done: Callable[[], bool], deadline: float) -> bool:
        """Whether done() became true before the loop time deadline."""
        while not done():
            changed = self._changed
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return done()
        return True

    def _task(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)  # the loop itself only holds tasks weakly
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"Gateway {self.name}: a task failed", "exception": error}
            self._loop.call_exception_handler(context)

    # -- claim, spawn, adopt ---------------------------------------------------------------------------------------

    def reconfigure(self, shared: Shared, settings: GatewaySettings) -> None:
        """Use these settings from the next life on."""
        self.shared = shared
        if settings != self.settings:
            self._next = settings

    @property
    def claiming(self) -> bool:
        """Whether a look is under way whose verdict is still to come."""
        return self._looking

    def _claim(self) -> None:
        self._life += 1
        if self._next is not None:
            self.settings, self._next, self._last_spawn = self._next, None, None
            self.lease = Lease(self.settings.data_dir)
            self.port = self.settings.port or self.port
            for fd in self._logs:
                os.close(fd)
            self._logs = []
        quick = self._claiming.quick(self._last_spawn) if self._respawn and self._last_spawn else None
        self._respawn = False
        if quick is not None:
            self._found = quick
            self._sweep_later = True
            return self.fire(Event.CLEAR, self.cause)
        self._task(self._claim_life(self._life))
        return None

    async def _claim_life(self, life: int) -> None:
        self._looking = True
        try:
            found = await self._claiming.look()
        finally:
            self._looking = False
        if life != self._life or self.state not in (State.STARTING, State.BLOCKED):
            found.close()
            return
        if found.claim.sweep:
            log.info("Gateway %s: sweeping leftovers %s", self.name, found.claim.sweep)
            ending = Ending(self.shared.worker, self.root, self.name, self.lease, self.settings.kill_delay)
            await ending.run(None, lambda: None, set(found.claim.sweep))
            if life != self._life:
                found.close()
                return
        self._found = found
        self.fire(found.claim.event, found.claim.cause)

    @property
    def root(self) -> str:
        """The supervisor root."""
        return self.shared.settings.root

    def _spawn(self) -> None:
        found, self._found = self._found, None
        assert found is not None and found.lease is not None
        self.port = found.port
        self.kind = found.kind
        number = max(self.spawn_number, found.newest_number) + 1
        cookie = Cookie(self.root, self.name, number)
        env = launch.environment(
            os.environ, self.settings, port=self.port, key=found.key, cookie=cookie, llm=self.shared.settings.llm
        )
        try:
            if not self._logs:
                self._logs = [disk.append_only(path) for path in self.log_paths]
            argv = launch.command_line(self.kind, self.settings, sys.executable, found.node)
            out, err = self._logs
            main = process.spawn(argv, env, found.cwd, out, err, inherit=(found.lease,))
        except OSError as error:
            self.last_exit = LastExit(Exit(None, None), f"cannot exec: {error.strerror}: {error.filename}", _wall())
            self._after_death(0.0, f"cannot exec {error.filename}: {error.strerror}", process.is_no_exec(error))
            return
        finally:
            # The child has its copy: the lease must end with the Gateway, not with us.
            found.close()
        self._last_spawn = found
        self.spawn_number = number
        self.origin = Origin.SPAWNED
        self._take(main)
        if self._sweep_later:
            self._sweep_later = False
            self._task(self._sweep_older(number))

    async def _sweep_older(self, number: int) -> None:
        """After a quick respawn: end what earlier lives left behind."""
        seen = await self.shared.worker.run(process.scan)
        mine = [s for s in seen if s.cookie and (s.cookie.root, s.cookie.name) == (self.root, self.name)]
        old = {s.pid for s in mine if s.cookie and s.cookie.number < number}
        if old:
            log.info("Gateway %s: sweeping leftovers %s", self.name, sorted(old))
            ending = Ending(self.shared.worker, self.root, self.name, self.lease, self.settings.kill_delay)
            await ending.run(None, lambda: None, old)

    def _take(self, main: Process) -> None:
        self.main = main
        self.pids = {main.pid}
        self.listener = None
        self.memory = None
        self._asked_to_end, self._counted, self._ready_at = None, False, None

    def _start_watch(self) -> None:
        found, self._found = self._found, None
        if found is not None:
            if found.process is None:
                return self.fire(Event.AGAIN, "it was gone before it could be held")
            self.origin = Origin.EXTERNAL if found.claim.external else Origin.ADOPTED
            self.adoptions += not found.claim.external
            self.port = found.port
            self.spawn_number = max(self.spawn_number, found.newest_number)
            self._take(found.process)
            found.process = None
            found.close()
        if self.main is None:
            return None  # the spawn failed and has said so
        life = self._life
        self._unwatch = on_death(self.main, lambda: self._died(life))
        self.health = Health()
        watch = Watch(
            self.settings,
            self.port,
            self.health,
            lambda: self.pids,
            lambda event, cause: self._verdict(life, event, cause),
            lambda: self.health.answer.hold if self.health.answer else None,
            self._listener_is_ours,
        )
        self._watch = self._task(watch.run())
        return None

    def _verdict(self, life: int, event: Event, cause: str) -> None:
        """A verdict of the watch; an external Gateway is never ended for one."""
        if life != self._life or self.state is State.STOPPING:
            return
        if event is Event.UNFIT and self.origin is Origin.EXTERNAL:
            event = Event.SILENT
        if event is Event.HELD:
            self.hold = cause
        if step(self.state, event).state is not self.state or (event is Event.HELD and cause != self.cause):
            self.fire(event, cause)

    def _listener_is_ours(self) -> bool:
        """Whether the port belongs to our tree; looked up when it is first answered and after a change of listener."""
        if self.main is None:
            return False
        if self.listener is not None and self.state is not State.STARTING:
            return True
        found = ports.on(self.settings.host, self.port)
        pid = ports.owned_by(found, [self.main.pid])
        if pid is None:
            members = process.tree(process.scan(), self.root, self.name, self.main)
            self.pids = {self.main.pid, *(m.pid for m in members)}
            pid = ports.owned_by(found, self.pids)
        if pid is None and found and process.LINUX:
            return False
        self.listener = process.identify(pid or self.main.pid)
        return self.listener is not None

    # -- death, end ------------------------------------------------------------------------------------------------

    def _died(self, life: int) -> None:
        if life != self._life or self.main is None:
            return
        exit_ = self.main.reap()
        if exit_ is None:
            return
        self._stop_watch()
        if self.state is State.STOPPING:
            asked = policy.name_exit(exit_, asked=self._asked_to_end).text
            self.last_exit = LastExit(exit_, asked, _wall())
            return  # the ending goes on until the whole tree is gone
        ready_for = self._loop.time() - self._ready_at if self._ready_at is not None else 0.0
        pid = self.main.pid
        external = self.origin is Origin.EXTERNAL
        self._release()
        cause = policy.name_exit(exit_)
        self.last_exit = LastExit(exit_, cause.text, _wall())
        text = f"pid {pid} {cause.text}"
        if external:
            return self.fire(Event.AGAIN, f"the external Gateway is gone: {text}")
        self._after_death(ready_for, text, cause.hopeless, exit_)
        return None

    def _after_death(self, ready_for: float, text: str, hopeless: bool, exit_: Exit | None = None) -> None:
        """Count a death and do what policy says; at once if it says at once, else after the log has been read."""
        now = self._loop.time()
        self.deaths = policy.count_death(self.deaths, now, ready_for, self.shared.settings.policy)
        what = policy.after_death(self.deaths, now, random.random(), self.shared.settings.policy, hopeless)  # noqa: S311
        if exit_ is not None:
            self._task(self._explain(exit_))
        self.restarts += 1
        if what.event is Event.AGAIN:
            self._respawn = exit_ is not None
            return self.fire(Event.AGAIN, text)
        self._delay = what.delay
        if what.event is Event.GIVE_UP and not hopeless:
            window = self.shared.settings.policy.death_window
            text = f"{text}; {len(self.deaths.times)} deaths within {window:g} s, one trial in {what.delay:g} s"
        else:
            text = f"{text}; next try in {what.delay:.1f} s"
        self.fire(what.event, text)
        return None

    async def _explain(self, exit_: Exit) -> None:
        """Read the end of the log, name the cause better, and give up at once where no retry can help."""
        tail = "\n".join(await self.shared.worker.run(disk.tail, self.log_paths[1], TAIL_LINES))
        named = policy.name_exit(exit_, tail)
        if self.last_exit is None or self.last_exit.exit is not exit_:
            return
        if named.text != self.last_exit.cause:
            self.cause = self.cause.replace(self.last_exit.cause, named.text)
            self.last_exit.cause = named.text
            self.shared.publish(self)
        if named.hopeless and self.state is State.BACKOFF:
            self._delay = self.shared.settings.policy.trial_interval
            self.fire(Event.GIVE_UP, f"{named.text}; one trial in {self._delay:g} s")

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _release(self) -> None:
        if self.main is not None:
            self.main.close()
        self.main, self.listener, self.origin, self.memory = None, None, None, None
        self.pids = set()
        self._life += 1

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._found is not None:
            self._found.close()
            self._found = None
        if self._ending is None:
            self._ending = self._task(self._run_ending())

    async def _run_ending(self) -> None:
        ending = Ending(self.shared.worker, self.root, self.name, self.lease, self.settings.kill_delay)

        def stuck() -> None:
            self.cause = ending.stuck or self.cause
            self.shared.publish(self)

        if self.origin is not Origin.EXTERNAL:
            await ending.run(self.main, stuck)
        elif self._taking_over and self.main is not None:
            await ending.run(None, stuck, {self.main.pid})
        if self.main is not None and self.origin is not Origin.EXTERNAL:
            exit_ = self.main.reap()
            if exit_ is not None and exit_.known:
                asked = policy.name_exit(exit_, asked=self._asked_to_end).text
                self.last_exit = LastExit(exit_, asked, _wall())
        self._ending = None
        ready_for = self._loop.time() - self._ready_at if self._ready_at is not None else 0.0
        counted, why = self._counted, self._asked_to_end or "asked to stop"
        left_alone = self.origin is Origin.EXTERNAL and not self._taking_over
        self._stop_watch()
        self._release()
        self._asked_to_end, self._counted, self._taking_over = None, False, False
        if self.want is Want.DOWN:
            self.fire(Event.GONE, f"{why}; the external Gateway was left alone" if left_alone else why)
        elif counted:
            self._after_death(ready_for, why, hopeless=False)
        else:
            self.restarts += 1
            self.fire(Event.AGAIN, why)

    def _wait(self) -> None:
        self._life += 1
        life = self._life
        delay = BLOCKED_RECHECK if self.state is State.BLOCKED else self._delay
        if self._found is not None:
            self._found.close()
            self._found = None
        self.next_try = self._loop.time() + delay

        def over() -> None:
            self._timer, self.next_try = None, None
            if life == self._life:
                self.fire(Event.TIMER, "the wait is over")

        self._timer = self._loop.call_later(delay, over)

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def log_paths(self) -> tuple[str, str]:
        """Where its stdout and stderr go."""
        directory = self.settings.log_dir
        return os.path.join(directory, "gateway.stdout.log"), os.path.join(directory, "gateway.stderr.log")

    @property
    def shown(self) -> Identity | None:
        """The identity status and record name: the listener once it is known, else the process we hold."""
        return self.listener or (self.main.identity if self.main else None)

    def detach(self) -> None:
        """Let everything go without touching the Gateway: the daemon leaves, the next one adopts."""
        self._stop_watch()
        if self._timer is not None:
            self._timer.cancel()
        self._release()
        for fd in self._logs:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._logs = []


def _wall() -> float:
    """For display only: nothing here may use it to decide."""
    return time.time()
