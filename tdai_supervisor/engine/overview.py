"""status data: everything the daemon knows, put together when it is asked.

Invariants: what must be read from a disk is read in the worker; nothing is decided or changed here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from tdai_supervisor import __version__
from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.engine import configured, report, spools
from tdai_supervisor.host import node

if TYPE_CHECKING:
    from tdai_supervisor.engine.daemon import Daemon


class _Seen(NamedTuple):
    """What the worker found."""

    drift: dict[str, list[str]]
    installed: dict[str, str | None]
    spools: list[spools.Spool]
    attachments: list[dict[str, Any]]


async def describe(daemon: Daemon) -> dict[str, Any]:
    """status data, by the frozen contract."""
    seen = await daemon.worker.run(_look, daemon)
    gateways = [
        report.status(g, seen.drift.get(n, []), seen.installed.get(n)) | {"profiles": _profiles(seen, n, report.url(g))}
        for n, g in daemon.gateways.items()
    ]
    return {
        "daemon": daemon.about_me(),
        "root": daemon.root,
        "gateways": gateways,
        "attachments": seen.attachments,
        "spools": [spool.as_json(time.time()) for spool in seen.spools],
    }


def _profiles(seen: _Seen, name: str, url: str) -> list[str]:
    """The profiles whose memory a Gateway is, as far as their sessions told: more than one share it."""
    told = [(s.profile, s.target) for s in seen.spools if not s.gone]
    told += [(a["profile"], a["gateway"]) for a in seen.attachments]
    return sorted({str(profile) for profile, target in told if profile and target in (name, url)})


def _look(daemon: Daemon) -> _Seen:
    now = {"node": node.installed(daemon.settings.install_dir if daemon.settings else ""), "embedded": __version__}
    return _Seen(
        _drift(daemon),
        {name: now.get(g.kind) for name, g in daemon.gateways.items()},
        spools.look(daemon.root),
        daemon.attachments.look(time.monotonic()),
    )


def _drift(daemon: Daemon) -> dict[str, list[str]]:
    """What each running Gateway was launched with and is no longer configured."""
    try:
        fresh = configured.read_settings(daemon.root, daemon.env)
    except SettingsError as error:
        return {name: [str(error)] for name, g in daemon.gateways.items() if g.life is not None}
    found = {}
    for name, gateway in daemon.gateways.items():
        if gateway.life is not None and not gateway.life.external and name in fresh.gateways:
            values: dict[str, Any] | None = {} if gateway.kind == "command" else None
            found[name] = configured.drift(fresh, fresh.gateways[name], gateway.launched, values)
    return found
