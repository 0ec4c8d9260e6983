"""Nightly snapshots: `backup` of each READY Gateway into snapshots/ of the root, by a child process, three kept.

Invariants: one at a time, nobody waits for it; an old snapshot goes only after a newer one is complete; whether one is
due is decided from the names of those that are there, so a restart of the daemon changes nothing.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from typing import TYPE_CHECKING

from tdai_supervisor.decide.model import State
from tdai_supervisor.decide.policy import snapshot_due
from tdai_supervisor.engine.loop import any_death
from tdai_supervisor.engine.python import PYTHON
from tdai_supervisor.host import disk, process

if TYPE_CHECKING:
    from tdai_supervisor.engine.gateway import Gateway

log = logging.getLogger("tdai_supervisor")
KEPT = 3
LOOK_EVERY = 120  # ticks: ten minutes
PATIENCE = 1800.0  # s one may take
STAMP = "%Y%m%dT%H%M%SZ"


class Snapshots:
    """Makes them for all Gateways of a root."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.folder = os.path.join(root, "snapshots")
        self._ticks = 0
        self._running = False

    def tick(self, gateways: list[Gateway], now: float, hour: int) -> None:
        """Called by the loop every 5 s. now: seconds since the epoch; hour: of the local day."""
        self._ticks += 1
        if self._ticks % LOOK_EVERY or self._running:
            return
        due = [g for g in gateways if g.state is State.READY and snapshot_due(self.newest(g.name), now, hour)]
        if due:
            self._running = True
            due[0].task(self.make(due[0]))

    def existing(self, name: str) -> list[str]:
        """The snapshots of one Gateway, oldest first."""
        try:
            # Whole: the snapshots of "work-2" are not those of "work".
            mine = re.compile(re.escape(name) + r"-\d{8}T\d{6}Z\.tar\.gz")
            found = [n for n in os.listdir(self.folder) if mine.fullmatch(n)]
        except OSError:
            return []
        return sorted(found)

    def newest(self, name: str) -> float | None:
        """When the newest one was begun, in seconds since the epoch, or None."""
        found = self.existing(name)
        if not found:
            return None
        stamp = found[-1][len(name) + 1 : -len(".tar.gz")]
        try:
            return float(time.mktime(time.strptime(stamp, STAMP)) - time.timezone)
        except ValueError:
            return None

    async def make(self, gateway: Gateway) -> None:
        """One snapshot now; then the oldest go."""
        name, worker = gateway.name, gateway.shared.worker
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            await worker.run(disk.private_dir, self.folder)
            path = os.path.join(self.folder, f"{name}-{time.strftime(STAMP, time.gmtime())}.tar.gz")
            argv = [PYTHON, "-I", "-m", "tdai_supervisor", "--root", self._root, "backup", path, "--gateway", name]
            child = process.spawn(argv, gateway.shared.env, "/", (null, null), ())
            await any_death([child], PATIENCE)
            if child.alive():
                child.signal(signal.SIGKILL)
                await any_death([child], PATIENCE)
            exit_ = child.reap()
            child.close()
            if exit_ is None or exit_.code != 0:
                gateway.shared.files.note_failure(self.folder, f"cannot make a snapshot of {name}: {exit_}")
                return
            for old in self.existing(name)[:-KEPT]:
                await worker.run(os.unlink, os.path.join(self.folder, old))
            log.info("Gateway %s: snapshot %s", name, path)
        except OSError as error:
            gateway.shared.files.note_failure(self.folder, f"cannot make a snapshot of {name}: {error.strerror}")
        finally:
            os.close(null)
            self._running = False
