"""The daemon: the only owner of every Gateway of one root.

Invariants: nothing is touched before the supervisor lock is held; it never daemonises itself; TERM and INT end the
Gateways and leave the want alone; HUP keeps pid, children and lock; dying in any other way leaves every Gateway running
for the next daemon to adopt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from typing import Any

from tdai_supervisor import __version__
from tdai_supervisor.decide import paths
from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.decide.model import Event, State, Want
from tdai_supervisor.decide.settings import Settings
from tdai_supervisor.engine import configured, report
from tdai_supervisor.engine.alerts import Alerts
from tdai_supervisor.engine.attachments import Attachments
from tdai_supervisor.engine.control import Control, listen
from tdai_supervisor.engine.gateway import Gateway, Shared
from tdai_supervisor.engine.loop import Worker
from tdai_supervisor.engine.retired import Retired
from tdai_supervisor.engine.runfiles import RunFiles
from tdai_supervisor.engine.snapshots import Snapshots
from tdai_supervisor.engine.spools import Deliveries
from tdai_supervisor.engine.verbs import Verbs
from tdai_supervisor.host import disk, logs, notify, process
from tdai_supervisor.host.locks import LockUnsupportedError, SupervisorLock

log = logging.getLogger("tdai_supervisor")
LOCK_WAIT = 10.0  # s; a keeper's copy waits this long while the owner leaves
EXIT_HELD, EXIT_FAILED, EXIT_NOT_CONFIGURED = 75, 1, 6
OWN_LOG_BYTES = 1024 * 1024  # of run/daemon.log, which has one backup
LOCK_FD = "MEMORY_TENCENTDB_LOCK_FD"  # of the held lock, across the exec of HUP
STOP_MARGIN = 20.0  # s over the longest kill_delay within which all Gateways have ended
TICK = 5.0  # s between looks at our own lock, socket and pidfile, and the guards' ticks


class Daemon:
    """One daemon on one root. keeper: who keeps it ("none" in the foreground)."""

    def __init__(self, root: str, env: dict[str, str], keeper: str) -> None:
        self.root, self.env, self.keeper = root, env, keeper
        self.settings: Settings | None = None
        self.gateways: dict[str, Gateway] = {}
        self.retired = Retired()
        self.files = RunFiles(root)
        self.worker = Worker()
        self.started_at = time.time()
        self.lock = SupervisorLock(paths.lock(root))
        self.alerts = Alerts(())
        self.snapshots = Snapshots(root)
        self.attachments = Attachments(root)
        self.deliveries = Deliveries(root, self.worker, env, self.attachments)
        self.failure: str | None = None  # why run() could not own the root
        self.leaving = False
        self.reloading = False
        self._finish = asyncio.Event()
        self._parent = os.getppid()
        self._control: Control | None = None
        self._socket_id: tuple[int, int] | None = None
        identity = process.identify(os.getpid())
        self.about = {
            "pid": os.getpid(),
            "start_ticks": identity.ticks if identity else None,
            "boot_id": process.boot_id(),
            "pid_ns": process.pid_namespace(),
            "version": __version__,
            "keeper": keeper,
            "keeper_pid": self._parent if keeper == "supervisord" else None,
            "started_at": report.rfc3339(self.started_at),
        }

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self, lock_wait: float = LOCK_WAIT) -> int:
        """Own the root until told to go; the exit code of the process."""
        disk.private_dir(self.root)
        disk.private_dir(paths.run(self.root))
        failed = self._acquire(lock_wait)
        if failed is not None:
            return failed
        try:
            self.load()
        except SettingsError as error:
            self.failure = str(error)
            self.lock.release()
            return EXIT_NOT_CONFIGURED
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._loop_failed)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._finish.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        await self.open_door()
        self.begin()
        notify.send("READY=1\nSTATUS=owns its root")
        checker = loop.create_task(self._tick())
        await self._finish.wait()
        checker.cancel()
        if not self.leaving:
            # In the message that begins systemd's patience: Gateways end side by side, each in its own time.
            patience = max((g.kill_delay for g in self.settings.gateways.values()), default=0) if self.settings else 0
            notify.send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int((patience + STOP_MARGIN) * 1e6)}")
            await self.end_all()
        await self.close()
        return 0

    def _acquire(self, wait: float) -> int | None:
        inherited = os.environ.pop(LOCK_FD, None)
        try:
            if inherited is not None and self.lock.inherit(int(inherited)):
                return None
            if not self.lock.acquire(wait):
                self.failure = f"cannot own {self.root}: {self._holder()} holds it"
                return EXIT_HELD
        except LockUnsupportedError as error:
            self.failure = f"cannot lock {self.root}: {error.strerror}; put the root on a local file system"
            return EXIT_FAILED
        return None

    def _holder(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            about = disk.read_object(paths.pidfile(self.root)) or {}
            there = "" if about.get("pid_ns") == process.pid_namespace() else " of another pid namespace or machine"
            return f"the daemon pid {about['pid']}{there} (keeper {about.get('keeper')})"
        return "another process"

    def load(self) -> None:
        """Read the settings and make a Gateway of each name that is new; raises SettingsError."""
        self.take(configured.read_settings(self.root, self.env))

    def take(self, fresh: Settings) -> None:
        """Use these settings: make a Gateway of each name that is new, end and forget those whose name is gone."""
        for warning in fresh.warnings:
            log.warning("%s", warning)
        first, self.settings, self.alerts.command = self.settings is None, fresh, fresh.notify
        shared = Shared(fresh, self.files, self.worker, self._taken_ports, self.env, self.publish, self._journal)
        for name in [n for n in self.gateways if n not in fresh.gateways]:
            self.retired.add(self.gateways.pop(name))
        if first:
            for left in self.files.left_behind(fresh.gateways):
                self.retired.add(Gateway(shared, left, self.files.read_record(left.name)))
        records = {n: self.files.read_record(n) for n in fresh.gateways if n not in self.gateways}
        # Who has had a port keeps it: a name that is new chooses its own after all of them.
        for name in sorted(fresh.gateways, key=lambda n: n in records and not (records[n] or {}).get("port")):
            known = self.gateways.get(name) or self.retired.back(name)
            if known is not None:
                known.reconfigure(shared, fresh.gateways[name])
            self.gateways[name] = known or Gateway(shared, fresh.gateways[name], records[name])
        self.gateways = {name: self.gateways[name] for name in fresh.gateways}
        if not first:
            self.retired.end()

    async def open_door(self) -> None:
        """Write the pidfile and listen on the control socket."""
        self._write_pidfile()
        listener = listen(self.root)
        about = os.stat(paths.socket(self.root))
        self._socket_id = (about.st_dev, about.st_ino)
        self._control = Control(listener, Verbs(self).handle)
        await self._control.start()

    def _write_pidfile(self) -> None:
        try:
            disk.write(paths.pidfile(self.root), json.dumps(self.about) + "\n", durable=False)
        except OSError as error:
            self.files.note_failure(
                paths.pidfile(self.root), f"cannot write {paths.pidfile(self.root)}: {error.strerror}"
            )

    def begin(self) -> None:
        """Bring every Gateway to its want; one that nobody ever asked about is wanted up."""
        for name, gateway in self.gateways.items():
            kept = self.files.read_want(name)
            if kept is None:
                kept = Want.UP
                self.files.write_want(name, kept)
            gateway.want = kept
            gateway.fire(Event.UP if kept is Want.UP else Event.DOWN, "the daemon started")
        self.retired.end()

    async def end_all(self) -> None:
        """End every Gateway; the persisted wants stay what they are."""
        for gateway in self.gateways.values():
            gateway.want = Want.DOWN
            if gateway.state is State.STOPPED:
                continue
            gateway.fire(Event.DOWN, "the daemon was asked to end")
        forever = float("inf")
        for gateway in [*self.gateways.values(), *self.retired]:
            await gateway.settled(lambda g=gateway: g.state is State.STOPPED, forever)

    async def close(self) -> None:
        """Let everything go: Gateways stay as they are, files are written, the lock is free."""
        if self._control is not None:
            self._control.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(paths.socket(self.root))
        for gateway in [*self.gateways.values(), *self.retired]:
            gateway.detach()
        if not self.leaving and self._control is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(paths.pidfile(self.root))
        self.worker.close()
        if self.lock.held:
            self.lock.release()

    def finish(self, *, leave: bool) -> None:
        """Go: leave=True touches no Gateway, else they are ended first."""
        self.leaving = leave
        self._finish.set()

    def reload(self) -> None:
        """Re-exec in place: same pid, same children, same lock."""
        if self.reloading:
            return
        self.reloading = True
        notify.send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        asyncio.get_running_loop().create_task(self._reexec())

    async def _reexec(self) -> None:
        if self._control is not None:
            self._control.close()
        for gateway in [*self.gateways.values(), *self.retired]:
            gateway.detach()
        self.worker.close()
        os.environ[LOCK_FD] = str(self.lock.hand_on())
        log.info("Re-executing")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  (same program, same pid)

    # -- upkeep ----------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """The beat of the loop that does the work: watchdog, guards, and our own files."""
        beat = notify.watchdog_interval()
        pause = min(TICK, beat / 2) if beat else TICK
        due = 0.0
        orphans: set[tuple[int, int]] = set()
        while True:
            await asyncio.sleep(pause)
            if beat:
                notify.send("WATCHDOG=1")
            due += pause
            if due >= TICK:
                due = 0.0
                for gateway in self.gateways.values():
                    gateway.guards.tick()
                self.attachments.tick(self.worker)
                ready = [g for g in self.gateways.values() if g.state is State.READY]
                if ready:
                    self.deliveries.tick(ready[0].task)
                if os.getpid() == 1:
                    orphans = process.reap_orphans(orphans)
                self.snapshots.tick(list(self.gateways.values()), time.time(), time.localtime().tm_hour)
                await self._check_intact()

    async def _check_intact(self) -> None:
        """Put back what was removed: a lost lock file lets a second daemon in, a lost socket locks users out."""
        if not self.lock.intact():
            log.warning("%s was removed or replaced: locking it again", paths.lock(self.root))
            again = SupervisorLock(paths.lock(self.root))
            if not again.acquire(0):
                log.error("another daemon owns %s now: leaving every Gateway to it", self.root)
                return self.finish(leave=True)
            self.lock.release()
            self.lock = again
        if not os.path.lexists(paths.pidfile(self.root)):  # noqa: ASYNC240  (a stat on a local file)
            self._write_pidfile()
        await self._check_socket()
        if self.keeper != "none" and os.fstat(2).st_size > OWN_LOG_BYTES:
            path = paths.daemon_log(self.root)
            await self.worker.run(logs.cut, path, path, OWN_LOG_BYTES, 1)
        return None

    async def _check_socket(self) -> None:
        try:
            about = os.stat(paths.socket(self.root))
            lost = (about.st_dev, about.st_ino) != self._socket_id
        except FileNotFoundError:
            lost = True
        if lost and self._control is not None:
            log.warning("%s was removed: listening again", paths.socket(self.root))
            old = self._control
            await self.open_door()
            old.close()

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        log.error("%s", context.get("message"), exc_info=error)
        self.files.note_failure("internal", f"internal error: {context.get('message')}: {error!r}")

    # -- what Gateways need ----------------------------------------------------------------------------------------

    def _taken_ports(self, but: str) -> set[int]:
        return {g.port for g in [*self.gateways.values(), *self.retired] if g.name != but}

    def publish(self, gateway: Gateway) -> None:
        """Write the record of a changed Gateway, some time soon and in order."""
        gateway.seq += 1
        self.worker.post(self.files.write_record, gateway.name, report.record(gateway, self.about))
        states = ", ".join(f"{g.name} {g.state}" for g in self.gateways.values())
        notify.send(f"STATUS={states}")

    def _journal(self, gateway: Gateway, entry: dict[str, Any]) -> None:
        pid = gateway.shown.pid if gateway.shown else None
        line = {"at": report.rfc3339(time.time()), "gateway": gateway.name, "pid": pid, **entry}
        self.worker.post(self._keep, line)
        if self._control is not None:
            self._control.tell(line)
        if self.alerts.notice(gateway.name, gateway.state, gateway.hold, entry["cause"]):
            gateway.task(self.alerts.run())

    def _keep(self, line: dict[str, Any]) -> None:
        """In the worker: even our own log lies on a disk."""
        log.info("Gateway %s: %s -> %s: %s", line["gateway"], line["from"], line["to"], line["cause"])
        self.files.journal(line)

    @property
    def keeper_gone(self) -> bool:
        """Whether the process that started us as a keeper is no longer there."""
        return self.keeper == "supervisord" and os.getppid() != self._parent

    def about_me(self) -> dict[str, Any]:
        """The daemon itself, as status shows it."""
        return {
            "running": True,
            "pid": os.getpid(),
            "version": __version__,
            "keeper": "none" if self.keeper_gone else self.keeper,
            "keeper_gone": self.keeper_gone,
            "started_at": self.about["started_at"],
            "trouble": self.files.trouble,
            "failed_writes": self.files.failures,
        }
