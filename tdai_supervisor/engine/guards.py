"""The guards of one Gateway: memory, logs, disk, LLM. What they find becomes an event or a hold.

Invariants: the loop only does fstat; everything that may wait runs in the worker; each guard is visible in status; a
full or read-only disk is a hold, never a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.decide.model import Exit, State
from tdai_supervisor.decide.policy import judge_log, low_space
from tdai_supervisor.engine import configured
from tdai_supervisor.engine.loop import Worker
from tdai_supervisor.host import disk, logs, outside, tree

if TYPE_CHECKING:
    from tdai_supervisor.engine.gateway import Gateway

TICK = 5.0  # s
SWEEP_EVERY, SWEEP_LIMITED = 6, 3  # ticks: memory and disk are swept every 30 s, 15 with a limit, every tick on hold
LLM_EVERY = 6  # ticks


@dataclass
class LogState:
    """One log: size at the last look and when, bytes lost by cuts, whether it grows like a storm."""

    size: int = 0
    at: float = 0.0
    lost: int = 0
    storm: bool = False
    cutting: bool = False


@dataclass
class Seen:
    """What the last sweep in the worker found."""

    pids: set[int] = field(default_factory=set)
    memory: int = 0
    free: int | None = None
    trouble: str | None = None
    missing: list[str] = field(default_factory=list)


class Guards:
    """Looks after one Gateway's surroundings while it lives."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._ticks = 0
        self._sweeping = False
        self._outside: Worker | None = None
        self._again: asyncio.TimerHandle | None = None
        self._oom_kills = logs.oom_kills()
        self.logs = {"stdout": LogState(), "stderr": LogState()}
        self.seen = Seen()
        self.llm_trouble: str | None = None

    @property
    def hold(self) -> str | None:
        """Why nothing should be delivered, as far as the guards know."""
        return self.seen.trouble or self.llm_trouble

    def describe(self) -> dict[str, Any]:
        """The guards as status shows them."""
        settings = self._gateway.settings
        return {
            "memory_limit": settings.memory_limit,
            "disk": {"free_bytes": self.seen.free, "trouble": self.seen.trouble},
            "logs": {
                "bytes": {name: log.size for name, log in self.logs.items()},
                "lost_bytes": sum(log.lost for log in self.logs.values()),
                "storm": any(log.storm for log in self.logs.values()),
            },
            "llm": {"held_while_down": settings.hold_while_llm_down, "trouble": self.llm_trouble},
            "restart_storm": self._gateway.restart_storm,
        }

    def tick(self) -> None:
        """Called by the loop every 5 s."""
        gateway = self._gateway
        self._look_at_logs()
        if gateway.state not in (State.READY, State.UNREADY):
            return
        self._ticks += 1
        every = SWEEP_EVERY if gateway.settings.memory_limit is None else SWEEP_LIMITED
        if not self._sweeping and (self._ticks % every == 0 or gateway.hold or self._ticks == 1):
            gateway.task(self._sweep())
        if gateway.settings.hold_while_llm_down and (self._ticks % LLM_EVERY == 1 or self.llm_trouble):
            gateway.task(self._ask_llm())

    # -- logs ------------------------------------------------------------------------------------------------------

    def _look_at_logs(self) -> None:
        """Size both logs; cut one over its cap, and come back sooner the faster it grows."""
        gateway = self._gateway
        if self._again is not None:
            self._again.cancel()
            self._again = None
        soonest = TICK
        for name, path in self._live_logs().items():
            log, now = self.logs[name], gateway.loop.time()
            size = os.stat(path).st_size
            look = judge_log(size, log.size, now - log.at if log.at else None, gateway.settings.log_max_bytes)
            log.size, log.at, log.storm = size, now, look.storm
            if look.cut and not log.cutting:
                log.cutting = True
                gateway.task(self._cut(name, path))
            soonest = min(soonest, look.again)
        if soonest < TICK:
            self._again = gateway.loop.call_later(soonest, self._look_at_logs)

    def _live_logs(self) -> dict[str, str]:
        """Where the logs of the present life can be reached: what it writes to, even if that was deleted or renamed."""
        gateway = self._gateway
        found: dict[str, str] = {}
        if gateway.life is None or gateway.life.external:
            return found
        for fd, (name, path) in enumerate(zip(self.logs, gateway.log_paths, strict=True), 1):
            live = logs.live_path(gateway.life.main.pid, fd, path)
            if live is not None:
                found[name] = live
        return found

    async def _cut(self, name: str, live: str) -> None:
        gateway, log, settings = self._gateway, self.logs[name], self._gateway.settings
        path = gateway.log_paths[name == "stderr"]
        try:
            done = await gateway.shared.worker.run(logs.cut, live, path, settings.log_max_bytes, settings.log_backups)
            log.size, log.lost, log.at = done.left, log.lost + done.lost, gateway.loop.time()
        except OSError as error:
            gateway.shared.files.note_failure(path, f"cannot cut {path}: {error.strerror or error}")
        finally:
            log.cutting = False

    # -- memory and disk -------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        gateway = self._gateway
        self._sweeping = True
        try:
            seen = await gateway.shared.worker.run(self._look_around)
        finally:
            self._sweeping = False
        life = gateway.life
        if life is None:
            return
        life.pids = seen.pids | {life.main.pid}
        life.memory = seen.memory
        self.seen = seen
        if seen.missing:
            gateway.close_logs()
        gateway.review()

    @property
    def heavy(self) -> str | None:
        """That it uses more memory than it may, in words, or None."""
        limit, used, mib = self._gateway.settings.memory_limit, self.seen.memory, 1024 * 1024
        if limit is None or used <= limit:
            return None
        return f"memory limit: {used / mib:.0f} MiB used, {limit / mib:g} MiB allowed"

    def oom_killed(self, exit_: Exit) -> bool:
        """Whether the kernel's out-of-memory counter of our cgroup rose since it was last looked at."""
        before, self._oom_kills = self._oom_kills, logs.oom_kills()
        return exit_.signal == signal.SIGKILL and self._oom_kills > before

    def _look_around(self) -> Seen:
        """In the worker: the tree, its memory, the disk below it, and whether the logs are still where they were."""
        gateway = self._gateway
        main = gateway.life.main if gateway.life else None
        members = tree.members(tree.scan(cookies=main is None), gateway.root, gateway.name, main)
        pids = {m.pid for m in members}
        free, trouble = check_disk(gateway.settings.data_dir)
        gone = [p for p, fd in zip(gateway.log_paths, gateway.log_fds, strict=False) if not _same(p, fd)]
        return Seen(pids, tree.memory_of(pids), free, trouble, gone)

    # -- LLM -------------------------------------------------------------------------------------------------------

    async def _ask_llm(self) -> None:
        gateway = self._gateway
        # A thread of its own: a slow answer from outside must not delay a sweep or a claim.
        self._outside = self._outside or Worker()
        self.llm_trouble = await self._outside.run(self._llm_trouble)
        gateway.review()

    def _llm_trouble(self) -> str | None:
        gateway = self._gateway
        values: Mapping[str, Any] = {}
        with contextlib.suppress(SettingsError):  # drift says so
            values = configured.read(gateway.settings).values
        return outside.llm_trouble(configured.llm(gateway.shared.settings, values, with_file=True))

    def close(self) -> None:
        """End the timer, and the thread for calls that leave the machine, if there is one."""
        if self._again is not None:
            self._again.cancel()
        if self._outside is not None:
            self._outside.close()
            self._outside = None


def _same(path: str, fd: int) -> bool:
    """Whether path still names the open log."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def check_disk(directory: str) -> tuple[int | None, str | None]:
    """(free bytes, what is wrong) of a data directory, by a look and a 4 KiB trial write."""
    try:
        about = os.statvfs(directory)
    except OSError as error:
        return None, f"the data directory cannot be seen: {error.strerror}"
    free, total = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    if low_space(free, total):
        return free, f"the disk is nearly full: {free // 1024} KiB left in {directory}"
    trial = os.path.join(directory, f".write-check-{os.getpid()}")
    try:
        disk.write(trial, "x" * 4096, durable=False)
        os.unlink(trial)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(trial)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else f"the data directory cannot be written: {error.strerror}"
        return free, f"{what} ({directory})"
    return free, None
