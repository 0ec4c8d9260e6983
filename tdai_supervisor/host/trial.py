"""A trial: whether a package really boots, before anybody relies on it.

Invariants: it runs as the daemon would run it, but on a port and a data directory of its own, on loopback, without an
LLM key; whatever the outcome, its whole tree is ended before the trial is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping

from tdai_supervisor.decide import launch, settings
from tdai_supervisor.decide.model import Cookie
from tdai_supervisor.host import disk, probe, process, tree

BOOT_WITHIN = 120.0  # s; cold, and five at once on two cores, boots took 14 s (measured)
ASK_WITHIN = 5.0  # s for one answer
END_WITHIN = 10.0  # s
SAID = 10  # lines of its log
DIED = "it ended"


class TrialError(Exception):
    """It did not boot; the message says how it ended, `log` what it said last."""

    def __init__(self, message: str, log: list[str]) -> None:
        super().__init__(message)
        self.log = log


def boot(
    node: str, place: str, scratch: str, config: str, env: Mapping[str, str], within: float = BOOT_WITHIN
) -> float:
    """Boot the package in place with a data directory below scratch; seconds until /health answered as a Gateway's.

    config: the text of its config file. Raises TrialError, or OSError where it cannot even be tried.
    """
    gateway = settings.load(scratch, "", {"HOME": scratch}).gateways["default"]
    disk.private_dir(gateway.data_dir)
    disk.write(gateway.config_file, config, durable=False)
    port = _free_port(gateway.host)
    given = {k: v for k, v in env.items() if not k.startswith("TDAI_LLM_")}
    child_env = launch.environment(
        given, gateway, port=port, key=secrets.token_urlsafe(32), cookie=Cookie(scratch, "default", 1), llm={}
    )
    path = os.path.join(scratch, "gateway.log")
    log = disk.append_only(path)
    started = time.monotonic()
    try:
        child = process.spawn(launch.command_line("node", gateway, "", node), child_env, place, (log, log), ())
    finally:
        os.close(log)
    try:
        trouble = asyncio.run(_wait(child, gateway.host, port, within))
    finally:
        tree.end_below(os.path.dirname(scratch), END_WITHIN)
        exit_ = child.reap()
        child.close()
    if trouble == DIED and exit_ is not None:
        trouble = f"it ended with {f'code {exit_.code}' if exit_.signal is None else f'signal {exit_.signal}'}"
    if trouble is not None:
        raise TrialError(trouble, disk.tail(path, SAID))
    return time.monotonic() - started


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


async def _wait(child: process.Process, host: str, port: int, within: float) -> str | None:
    """None once it answers in a Gateway's shape, else what is wrong."""
    clock = asyncio.get_running_loop().time
    until, last = clock() + within, "nothing answers on its port"
    while clock() < until:
        if not child.alive():
            return DIED
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            async with asyncio.timeout(ASK_WITHIN):
                answer = await probe.ask(host, port)
            if answer.status == 200 and answer.generation is not None:
                return None
            last = f"/health answers HTTP {answer.status}, and not in the shape of a Gateway"
        await asyncio.sleep(0.05)
    return f"not ready after {within:g} s: {last}"
