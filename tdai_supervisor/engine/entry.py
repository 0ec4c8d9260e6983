"""How a process becomes the daemon, and how `stop` does the daemon's work once where there is none.

Invariants: our own log lies over descriptors 1 and 2 before anything can write to them (a keeper's pipe may be gone);
no core files; umask 077.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from tdai_supervisor.decide import paths, settings
from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.decide.model import Want
from tdai_supervisor.engine.configured import kept_environment
from tdai_supervisor.engine.daemon import OWN_LOG_BYTES, Daemon
from tdai_supervisor.engine.runfiles import recorded, recorded_settings
from tdai_supervisor.engine.verbs import Verbs
from tdai_supervisor.host import disk, process


def prepare(root: str, keeper: str) -> None:
    """Make this process fit to be the daemon: private files, no core dumps, a log of its own under a keeper."""
    os.umask(0o077)
    process.stop_core_dumps()
    disk.private_dir(root)
    disk.private_dir(paths.run(root))
    os.chdir(root)
    if os.getpid() == 1:
        # The kernel drops what PID 1 does not handle, and waiting for the lock comes before the loop's own handlers.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if keeper != "none":
        path = paths.daemon_log(root)
        # A daemon that fails at every start must not fill the disk with saying so.
        if os.path.exists(path) and os.path.getsize(path) > OWN_LOG_BYTES:
            os.replace(path, path + ".1")
        fd = disk.append_only(path)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=form, datefmt="%Y-%m-%dT%H:%M:%S%z")


def environment(root: str, keeper: str) -> dict[str, str]:
    """The names the daemon runs by: what `start` kept where a keeper runs us, our own in the foreground."""
    own = {k: v for k, v in os.environ.items() if not settings.ENVIRONMENT_NAMES.fullmatch(k)}
    if keeper == "none":
        return dict(os.environ)
    return own | kept_environment(root)


def main(root: str, keeper: str) -> tuple[int, str | None]:
    """Run the daemon on root; its exit code, and what it could not do. keeper: see the contract's words."""
    prepare(root, keeper)

    async def run() -> tuple[int, str | None]:
        daemon = Daemon(root, environment(root, keeper), keeper)
        code = await daemon.run()
        if daemon.failure is not None and keeper != "none":
            logging.getLogger("tdai_supervisor").error("%s", daemon.failure)
        return code, daemon.failure

    return asyncio.run(run())


def stop_once(
    root: str, name: str | None, env: Mapping[str, str], lock_wait: float, *, keep_want: bool = False
) -> dict[str, Any] | int:
    """End Gateways where no daemon lives: lock, look, end, verify. The reply of `stop`, or a failure's exit code.

    keep_want: the persisted wants stay, so that the next daemon starts them again.
    """

    async def run() -> dict[str, Any] | int:
        daemon = Daemon(root, dict(env), "none")
        disk.private_dir(root)
        disk.private_dir(paths.run(root))
        failed = daemon._acquire(lock_wait)
        if failed is not None:
            return failed
        try:
            try:
                daemon.load()
            except SettingsError:
                # Whoever cannot start with these settings must still be able to end what runs by the ones before.
                left = recorded(root)
                if not left:
                    raise
                daemon.take(settings.load(root, recorded_settings(left), {}))
            for gateway in daemon.gateways.values():
                gateway.want = daemon.files.read_want(gateway.name) or Want.DOWN
            reply = await Verbs(daemon).handle({"verb": "stop", "name": name, "keep_want": keep_want})
        finally:
            await daemon.close()
        return reply

    logging.getLogger("tdai_supervisor").setLevel(logging.ERROR)
    return asyncio.run(run())
