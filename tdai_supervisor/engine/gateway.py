"""One Gateway under its owner: observe, ask the table, act. The only place that acts.

Invariants: what comes from an earlier life or claim is recognised and dropped; a child is spawned only with the lease
in hand; between the report of a death and the spawn nothing waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tdai_supervisor.decide import launch, policy
from tdai_supervisor.decide.model import Action, Cookie, Event, Exit, Identity, Origin, State, Want
from tdai_supervisor.decide.settings import DEFAULT_PORT, GatewaySettings, Settings
from tdai_supervisor.decide.table import step
from tdai_supervisor.engine.automaton import TOLD, Automaton, wall
from tdai_supervisor.engine.claiming import Claiming, Found
from tdai_supervisor.engine.ending import Ending
from tdai_supervisor.engine.guards import Guards
from tdai_supervisor.engine.life import LastExit, Life, Ordered, late_exit
from tdai_supervisor.engine.loop import Worker
from tdai_supervisor.engine.python import PYTHON
from tdai_supervisor.engine.runfiles import RunFiles
from tdai_supervisor.engine.watching import Health
from tdai_supervisor.host import disk, process, tree
from tdai_supervisor.host.locks import Lease

log = logging.getLogger("tdai_supervisor")
BLOCKED_RECHECK = 5.0  # s
TAIL_LINES = 20  # of the log, to name a cause


@dataclass(frozen=True)
class Shared:
    """What all Gateways of a daemon use together."""

    settings: Settings
    files: RunFiles
    worker: Worker
    taken_ports: Callable[[str], set[int]]  # by the other Gateways
    env: Mapping[str, str]  # the daemon's
    publish: Callable[[Gateway], None]  # after each change: record, status line
    journal: Callable[[Gateway, dict[str, Any]], None]  # each transition


class Gateway(Automaton):
    """State, want and everything known about one Gateway. `fire` is the only way to change it."""

    def __init__(self, shared: Shared, settings: GatewaySettings, record: dict[str, Any] | None) -> None:
        self.shared, self.settings = shared, settings
        super().__init__(settings.name)
        self.root = shared.settings.root
        self.want = Want.DOWN
        self.life: Life | None = None
        self.hold: str | None = None
        self.last_exit: LastExit | None = None
        self.deaths = policy.Deaths()
        self.adoptions = 0
        self.starts: dict[str, int] = {}  # by cause, for metrics
        last = record or {}
        self.seq, self.restarts = int(last.get("seq") or 0), int(last.get("restarts") or 0)
        self.spawn_number = int(last.get("spawn_number") or 0)
        kept = last.get("port")
        first = next(p for p in range(DEFAULT_PORT, 65536) if p not in shared.taken_ports(settings.name))
        self.port: int = settings.port or (kept if isinstance(kept, int) and 0 < kept < 65536 else first)
        self.kind = str(last.get("kind") or ("embedded" if settings.kind == "auto" else settings.kind))
        self.kind_cause = str(last.get("kind_cause") or "")
        launched = last.get("launched")
        self.launched: dict[str, str] = launched if isinstance(launched, dict) else {}
        self.version: str | None = last.get("version")  # of the present life; kept across adoption like launched
        self.lease = Lease(settings.data_dir)
        self.log_fds: list[int] = []
        self.guards = Guards(self)
        self._next: GatewaySettings | None = None  # changed settings, for the next life
        self._claiming = Claiming(self)
        self._look: asyncio.Task[None] | None = None
        self._found: Found | None = None
        self._last_spawn: Found | None = None
        self._quick = False  # our own child has just died: the quick claim will do
        self._ordered: Ordered | None = None
        self._ending: asyncio.Task[None] | None = None
        self._delay = 0.0  # of the next WAIT

    def act(self, action: Action, event: Event, cause: str) -> None:
        """Do one action of the table."""
        if action is Action.CLAIM:
            self._claim()
        elif action is Action.SPAWN:
            self._spawn()
        elif action is Action.WATCH:
            self._watch()
        elif action is Action.WAIT:
            self.wait(BLOCKED_RECHECK if self.state is State.BLOCKED else self._delay)
        elif action is Action.PARDON:
            self.deaths = policy.Deaths()
        elif action is Action.END:
            self._end(Ordered(cause, counted=event is Event.UNFIT, take_over=event is Event.TAKE_OVER))

    def entered(self, state: State) -> None:
        """A hold belongs to UNREADY; how long it was READY begins with the first READY of a life."""
        if state is State.READY and self.life is not None and self.life.ready_at is None:
            self.life.ready_at = self.loop.time()
        if state is not State.UNREADY:
            self.hold = None

    def publish(self) -> None:
        """Record and status line."""
        self.shared.publish(self)

    def note(self, entry: dict[str, Any]) -> None:
        """Journal, subscribers, notify."""
        self.shared.journal(self, entry)

    # -- claim, spawn, watch ---------------------------------------------------------------------------------------

    def reconfigure(self, shared: Shared, settings: GatewaySettings) -> None:
        """Use these settings from the next life on."""
        self.shared = shared
        self._next = settings if settings != self.settings else None

    @property
    def claiming(self) -> bool:
        """Whether a look is under way whose verdict is still to come."""
        return self._look is not None

    def _claim(self) -> None:
        self._drop_found()
        if self._next is not None:
            self.settings, self._next, self._last_spawn = self._next, None, None
            self.lease = Lease(self.settings.data_dir)
            self.port = self.settings.port or self.port
            self.close_logs()
        quick = self._claiming.quick(self._last_spawn) if self._quick and self._last_spawn else None
        self._quick = False
        if quick is not None:
            self._found = quick
            self.fire(Event.CLEAR, self.cause)
        else:
            self._look = self.task(self._claim_slowly())

    async def _claim_slowly(self) -> None:
        me = asyncio.current_task()
        found = await self._claiming.look()
        if found.claim.sweep and self._look is me:
            await self._sweep(set(found.claim.sweep))
        if self._look is not me or self.state not in (State.STARTING, State.BLOCKED):
            found.close()  # a later event has overtaken this look
            return
        self._look, self._found = None, found
        self._delay = self.shared.settings.policy.trial_interval  # for GIVE_UP
        self.fire(found.claim.event, found.claim.cause)

    async def _sweep(self, pids: set[int]) -> None:
        log.info("Gateway %s: sweeping leftovers %s", self.name, sorted(pids))
        ending = Ending(self.shared.worker, self.root, self.name, self.lease, self.settings.kill_delay)
        await ending.run(None, lambda: None, pids)

    async def _sweep_older(self, number: int) -> None:
        """After a quick respawn: end what earlier lives left behind."""
        seen = await self.shared.worker.run(tree.scan)
        mine = [s for s in seen if s.cookie and (s.cookie.root, s.cookie.name) == (self.root, self.name)]
        if old := {s.pid for s in mine if s.cookie and s.cookie.number < number}:
            await self._sweep(old)

    def _drop_found(self) -> None:
        self._look = None
        if self._found is not None:
            self._found.close()
            self._found = None

    def _spawn(self) -> None:
        found, self._found = self._found, None
        assert found is not None and found.lease is not None
        number = max(self.spawn_number, found.newest_number) + 1
        cookie = Cookie(self.root, self.name, number)
        env = launch.environment(
            os.environ, self.settings, port=found.port, key=found.key, cookie=cookie, llm=found.llm
        )
        argv = launch.command_line(found.kind, self.settings, PYTHON, found.node)
        try:
            out, err = self.log_fds
            main = process.spawn(argv, env, found.cwd, (out, err), (found.lease,))
        except OSError as error:
            what = error.filename or argv[0]
            self.last_exit = LastExit(Exit(None, None), f"cannot exec {what}: {error.strerror}", wall())
            self._count_death(0.0, self.last_exit.cause, hopeless=process.is_no_exec(error))
            return
        finally:
            # The child has its copy: the lease must end with the Gateway, not with us.
            found.close()
        if found is self._last_spawn or found.quick:
            self.task(self._sweep_older(number))
        self._last_spawn, self.spawn_number = found, number
        self._begin(Life(main, Origin.SPAWNED, found.port, self.root, self.settings), found)

    def _begin(self, life: Life, found: Found) -> None:
        self.life, self.port = life, found.port
        self.kind, self.kind_cause = found.kind, found.kind_cause or self.kind_cause
        if life.origin is not Origin.ADOPTED:  # an adopted one was launched with what its record says
            self.launched, self.version = dict(found.launched), found.version
        cause = "first" if not self.deaths.times else "death"
        self.starts[cause] = self.starts.get(cause, 0) + (life.origin is Origin.SPAWNED)
        self.adoptions += life.origin is Origin.ADOPTED

    def _watch(self) -> None:
        """Watch what was just spawned, or take what a claim found and watch that."""
        found, self._found = self._found, None
        if found is not None:
            self.spawn_number = max(self.spawn_number, found.newest_number)
            main, found.process = found.process, None
            found.close()
            if main is None:
                self.fire(Event.AGAIN, "it was gone before it could be held")
                return
            origin = Origin.EXTERNAL if found.claim.external else Origin.ADOPTED
            self._begin(Life(main, origin, found.port, self.root, self.settings), found)
        if self.life is not None:  # else the spawn failed, and has said so
            self.life.watch(self.task, self._verdict, self._died, self._present_hold)

    # -- verdicts --------------------------------------------------------------------------------------------------

    def _verdict(self, life: Life, event: Event, cause: str) -> None:
        """A verdict on the present life; an external Gateway is never ended for one."""
        if life is not self.life or self.state is State.STOPPING:
            return
        if event is Event.UNFIT and life.external:
            event = Event.SILENT
        if event is Event.HELD:
            self.hold = cause
        if step(self.state, event).state is not self.state or (event in TOLD and cause != self.cause):
            self.fire(event, cause)

    def _present_hold(self) -> str | None:
        """Why nothing should be delivered to it now: what it says itself, or what the guards found."""
        answer = self.health.answer
        return (answer.hold if answer else None) or self.guards.hold

    def review(self) -> None:
        """Take up what the guards found between two probes: a hold that came or went, a limit passed."""
        life = self.life
        if life is None or self.state not in (State.READY, State.UNREADY) or self.health.answer is None:
            return
        hold, heavy = self._present_hold(), self.guards.heavy
        if heavy is not None and not life.external:
            self._verdict(life, Event.UNFIT, heavy)
        elif hold is not None:
            self._verdict(life, Event.HELD, hold)
        elif self.hold is not None:
            self._verdict(life, Event.ANSWERED, f"no longer on hold: {self.hold}")

    # -- death -----------------------------------------------------------------------------------------------------

    def _died(self, life: Life) -> None:
        exit_ = life.main.reap()
        if life is not self.life or exit_ is None:
            return
        if self.state is State.STOPPING:
            life.stop_probing()
            self._note_exit(exit_, policy.name_exit(exit_, asked=self._ordered.why if self._ordered else None).text)
            return  # the ending goes on until the whole tree is gone
        ready_for = life.ready_for(self.loop.time())
        cause = policy.name_exit(exit_)
        remains = -1 if exit_.known else life.main.remains()
        self._release()
        self._note_exit(exit_, cause.text)
        text = f"pid {life.main.pid} {cause.text}"
        self.task(self._explain(exit_, remains))
        if life.external:
            self.fire(Event.AGAIN, f"the external Gateway is gone: {text}")
        else:
            self._quick = life.origin is Origin.SPAWNED
            self._count_death(ready_for, text, cause.hopeless)

    def _note_exit(self, exit_: Exit, cause: str) -> None:
        self.last_exit = LastExit(exit_, cause, wall())

    def _count_death(self, ready_for: float, text: str, hopeless: bool = False) -> None:
        """Count a death and do what policy says."""
        now, rules = self.loop.time(), self.shared.settings.policy
        self.deaths = policy.count_death(self.deaths, now, ready_for, rules)
        after = policy.after_death(self.deaths, now, random.random(), rules, hopeless)  # noqa: S311
        self.restarts += 1
        self._delay = after.delay
        if after.event is not Event.AGAIN:
            self._quick = False
            text += f"; next try in {after.delay:.1f} s"
            if after.event is Event.GIVE_UP and not hopeless:
                text += f" ({rules.death_budget} deaths within {rules.death_window:g} s)"
        self.fire(after.event, text)

    async def _explain(self, exit_: Exit, remains: int) -> None:
        """Read the end of the log, name the cause better, and give up at once where no retry can help."""
        known = exit_ if remains < 0 else await late_exit(remains)
        texts = [await self.shared.worker.run(disk.tail, path, TAIL_LINES) for path in self.log_paths]
        named = policy.name_exit(known, "\n".join(texts[0] + texts[1]), oom_killed=self.guards.oom_killed(known))
        if self.last_exit is None or self.last_exit.exit is not exit_:
            return
        self.last_exit.exit = known
        if named.text != self.last_exit.cause:
            self.cause = self.cause.replace(self.last_exit.cause, named.text)
            self.last_exit.cause = named.text
            self.changed()
        if named.hopeless and self.state is State.BACKOFF:
            self._delay = self.shared.settings.policy.trial_interval
            self.fire(Event.GIVE_UP, f"{named.text}; next try in {self._delay:g} s")

    def _release(self) -> None:
        if self.life is not None:
            self.life.close()
        self.life = None

    # -- end -------------------------------------------------------------------------------------------------------

    def _end(self, ordered: Ordered) -> None:
        self._ordered = ordered
        self._drop_found()
        if self.life is not None:
            self.life.stop_probing()
        if self._ending is None:
            self._ending = self.task(self._run_ending())

    async def _run_ending(self) -> None:
        life, ordered = self.life, self._ordered
        assert ordered is not None
        ending = Ending(self.shared.worker, self.root, self.name, self.lease, self.settings.kill_delay)

        def stuck() -> None:
            self.cause = ending.stuck or self.cause
            self.changed()

        if life is None or not life.external:
            await ending.run(life.main if life else None, stuck)
        elif ordered.take_over:
            await ending.run(None, stuck, {life.main.pid})
        if life is not None and not life.external:
            exit_ = life.main.reap()  # where its death has not been reported yet
            if exit_ is not None and exit_.known:
                self._note_exit(exit_, policy.name_exit(exit_, asked=ordered.why).text)
        # What was ordered meanwhile (a `stop` after a hang) may be newer than what began this.
        ordered, self._ordered, self._ending = self._ordered or ordered, None, None
        ready_for = life.ready_for(self.loop.time()) if life else 0.0
        left_alone = life is not None and life.external and not ordered.take_over
        self._release()
        if self.want is Want.DOWN:
            self.fire(Event.GONE, ordered.why + ("; the external Gateway was left alone" if left_alone else ""))
        elif ordered.counted:
            self._count_death(ready_for, ordered.why)
        else:
            self.restarts += 1
            self.fire(Event.AGAIN, ordered.why)

    # -- facts -----------------------------------------------------------------------------------------------------

    @property
    def health(self) -> Health:
        """What the last answer of the present life said."""
        return self.life.health if self.life else Health()

    @property
    def shown(self) -> Identity | None:
        """The identity status and record name."""
        return self.life.shown if self.life else None

    @property
    def origin(self) -> Origin | None:
        """How the present life came to be known."""
        return self.life.origin if self.life else None

    @property
    def restart_storm(self) -> bool:
        """Whether it dies often, though slowly enough that the budget never fills."""
        return policy.is_storm(self.deaths, self.loop.time())

    @property
    def log_paths(self) -> tuple[str, str]:
        """Where its stdout and stderr go."""
        directory = self.settings.log_dir
        return os.path.join(directory, "gateway.stdout.log"), os.path.join(directory, "gateway.stderr.log")

    def close_logs(self) -> None:
        """Let our own descriptors of its logs go; the next claim opens them anew."""
        for fd in self.log_fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.log_fds = []

    def detach(self) -> None:
        """Let everything go without touching the Gateway: the daemon leaves, the next one adopts."""
        self._drop_found()
        self.forget_timer()
        self.guards.close()
        self._release()
        self.close_logs()
