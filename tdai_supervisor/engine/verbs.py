"""What the daemon does for each verb of the control socket.

Invariants: the want is durable before anything is done about it; a verb waits for an outcome no longer than its own
timeout, and the work goes on whether or not somebody still waits; every verb may be repeated.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from tdai_supervisor import __version__
from tdai_supervisor.decide.attachments import by_profile
from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.decide.model import Event, Origin, State, Want
from tdai_supervisor.engine import metrics, overview, report, spools
from tdai_supervisor.engine.control import refusal, reply
from tdai_supervisor.host import disk

if TYPE_CHECKING:
    from tdai_supervisor.engine.daemon import Daemon
    from tdai_supervisor.engine.gateway import Gateway

STOP_MARGIN = 10.0  # s over kill_delay before `stop` says that it is not done
SETTING = ("start", "restart", "forget")  # verbs that read the settings first: a name may be new, or gone
TAIL_LINES = 10  # of the Gateway's log in a failed start
START_MARGIN = 5.0  # s over startup_timeout


class Verbs:
    """The handler of the control socket."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._handlers = {
            "ping": self._ping,
            "status": self._status,
            "start": self._start,
            "stop": self._stop,
            "restart": self._restart,
            "leave": self._leave,
            "reload": self._reload,
            "subscribe": self._subscribe,
            "metrics": self._metrics,
            "snapshot": self._snapshot,
            "forget": self._forget,
        }

    async def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request; an unknown verb or name is a refusal."""
        handler = self._handlers.get(request["verb"])
        if handler is None:
            return refusal(
                "unknown-verb", f"cannot do {request['verb']!r}: the daemon {__version__} does not know it", None, 2
            )
        name = request.get("name")
        if request["verb"] in SETTING:
            try:
                self._daemon.load()
            except SettingsError as error:
                return refusal("settings", str(error), None, 6)
        if name is not None and name not in self._daemon.gateways and handler != self._forget:
            known = ", ".join(self._daemon.gateways)
            return refusal("unknown-name", f"cannot find a Gateway named {name!r}: configured are {known}", None, 6)
        return await handler(request)

    async def _ping(self, _: dict[str, Any]) -> dict[str, Any]:
        return reply(self._daemon.about_me())

    async def _status(self, _: dict[str, Any]) -> dict[str, Any]:
        return reply(await overview.describe(self._daemon))

    async def _subscribe(self, _: dict[str, Any]) -> dict[str, Any]:
        return reply({"subscribed": "events"})

    async def _snapshot(self, request: dict[str, Any]) -> dict[str, Any]:
        """A snapshot of each READY Gateway now, as the night makes it."""
        snapshots = self._daemon.snapshots
        for gateway in self._chosen(request):
            if gateway.state is State.READY:
                await snapshots.make(gateway)
        return reply({g.name: snapshots.existing(g.name) for g in self._chosen(request)})

    async def _metrics(self, _: dict[str, Any]) -> dict[str, Any]:
        spooled = await self._daemon.worker.run(spools.look, self._daemon.root)
        attached = await self._daemon.worker.run(self._daemon.attachments.look, time.monotonic())
        now = asyncio.get_running_loop().time()
        return reply({"text": metrics.text(self._daemon.gateways.values(), now, spooled, by_profile(attached))})

    def _chosen(self, request: dict[str, Any]) -> list[Gateway]:
        name = request.get("name")
        return [self._daemon.gateways[name]] if name else list(self._daemon.gateways.values())

    async def _want(self, gateways: list[Gateway], want: Want) -> list[dict[str, Any]]:
        """Persist and set the want; a disk that refuses is told, and does not keep the user from his will."""
        troubles = []
        for gateway in gateways:
            if not await self._daemon.worker.run(self._daemon.files.write_want, gateway.name, want):
                message = f"cannot persist the want of {gateway.name}: {self._daemon.files.trouble}"
                troubles.append(
                    {"code": "want-not-saved", "message": message, "hint": "it holds until the daemon ends"}
                )
            gateway.want = want
        return troubles

    async def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        gateways = self._chosen(request)
        warnings = await self._want(gateways, Want.UP)
        for gateway in gateways:
            external = request.get("take_over") and gateway.origin is Origin.EXTERNAL
            gateway.fire(Event.TAKE_OVER if external else Event.UP, "asked to start")
        return await self._started(gateways, request, warnings)

    async def _started(
        self, gateways: list[Gateway], request: dict[str, Any], warnings: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """What became of a start, once that is known or at once where nobody waits."""
        if not request.get("wait", True):
            return reply(await self._data(gateways, warnings))
        outcomes = await asyncio.gather(*(self._wait_ready(g, request) for g in gateways))
        return await self._outcome(gateways, [e for e in outcomes if e], warnings)

    async def _restart(self, request: dict[str, Any]) -> dict[str, Any]:
        chosen = self._chosen(request)
        gateways = chosen if request.get("name") else [g for g in chosen if g.want is Want.UP] or chosen
        warnings = await self._want(gateways, Want.UP)
        for gateway in gateways:
            gateway.fire(Event.RESTART, "asked to restart")
        return await self._started(gateways, request, warnings)

    async def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        gateways = self._chosen(request)
        attached = await self._daemon.worker.run(self._daemon.attachments.look, time.monotonic())
        names = {n for g in gateways if g.state is not State.STOPPED for n in (g.name, report.url(g))}
        cut = by_profile(a for a in attached if a["gateway"] in names)
        if request.get("keep_want"):
            warnings = []
            for gateway in gateways:
                gateway.want = Want.DOWN
        else:
            warnings = await self._want(gateways, Want.DOWN)
        for gateway in gateways:
            gateway.fire(Event.DOWN, "asked to stop")
        if not request.get("name"):
            self._daemon.retired.end()
            gateways = [*gateways, *self._daemon.retired]
        outcomes = await asyncio.gather(*(self._wait_stopped(g) for g in gateways))
        result = await self._outcome(gateways, [e for e in outcomes if e], warnings)
        result["data"]["cut_off"] = {"sessions": sum(cut.values()), "profiles": cut}
        if request.get("leave") and result["ok"]:
            # After the reply has been written: whoever asked waits for it, then for us to go.
            asyncio.get_running_loop().call_later(0.01, lambda: self._daemon.finish(leave=False))
        return result

    async def _forget(self, request: dict[str, Any]) -> dict[str, Any]:
        """A name that is gone from the settings: back when its Gateway is ended."""
        name = request.get("name")
        if name in self._daemon.gateways:
            return refusal("configured", f"cannot forget {name}: supervisor.toml still names it", None, 1)
        gateway = self._daemon.retired.get(str(name))
        error = await self._wait_stopped(gateway) if gateway is not None else None
        return reply({"name": name}, [error] if error else [], 1 if error else 0)

    async def _leave(self, _: dict[str, Any]) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.01, lambda: self._daemon.finish(leave=True))
        return reply({"pid": self._daemon.about["pid"]})

    async def _reload(self, _: dict[str, Any]) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.01, self._daemon.reload)
        return reply({"pid": self._daemon.about["pid"]})

    async def _data(self, gateways: list[Gateway], warnings: list[dict[str, Any]]) -> dict[str, Any]:
        about = await overview.describe(self._daemon)
        names = {g.name for g in gateways}
        about["gateways"] = [g for g in about["gateways"] if g["name"] in names]
        return {**about, "warnings": warnings}

    async def _outcome(
        self, gateways: list[Gateway], errors: list[dict[str, Any]], warnings: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return reply(await self._data(gateways, warnings), errors, 1 if errors else 0)

    async def _wait_ready(self, gateway: Gateway, request: dict[str, Any]) -> dict[str, Any] | None:
        """None when READY, else the error that says why not. A second death is reason enough to stop waiting."""
        loop = asyncio.get_running_loop()
        lives = gateway.spawn_number
        timeout = float(request.get("timeout") or gateway.settings.startup_timeout + START_MARGIN)
        if gateway.state is State.BLOCKED:
            # The answer of the look that this `start` asked for, not the one from before.
            await gateway.settled(lambda: not gateway.claiming, loop.time() + timeout)
        final = (State.READY, State.BACKOFF, State.FATAL, State.BLOCKED, State.UNREADY, State.STOPPED)
        if await gateway.settled(lambda: gateway.state in final and not gateway.claiming, loop.time() + timeout):
            if gateway.state is State.READY:
                return None
            why, hint = gateway.cause, "memory-tencentdb-ctl status"
            if gateway.state is State.UNREADY:
                why = f"it is alive but not ready: {gateway.cause}"
        else:
            why, hint = f"not READY after {timeout:g} s ({gateway.state}: {gateway.cause})", "memory-tencentdb-ctl logs"
        message = f"cannot start {gateway.name}: {why}"
        error: dict[str, Any] = {"code": str(gateway.state).lower(), "message": message, "hint": f"try `{hint}`"}
        if gateway.spawn_number > lives or gateway.life is not None:  # else the log is of an earlier life
            error["log"] = await self._daemon.worker.run(disk.tail, gateway.log_paths[1], TAIL_LINES)
            error["log"] = error["log"] or await self._daemon.worker.run(disk.tail, gateway.log_paths[0], TAIL_LINES)
        return error

    async def _wait_stopped(self, gateway: Gateway) -> dict[str, Any] | None:
        loop = asyncio.get_running_loop()
        limit = gateway.settings.kill_delay + STOP_MARGIN
        if await gateway.settled(
            lambda: gateway.state is State.STOPPED or gateway.want is Want.UP, loop.time() + limit
        ):
            if gateway.state is State.STOPPED:
                return None
            message = f"cannot stop {gateway.name}: it was asked to start meanwhile"
            return {"code": "overtaken", "message": message, "hint": "try again"}
        message = f"cannot stop {gateway.name}: {gateway.state} after {limit:g} s: {gateway.cause}"
        return {"code": "not-stopped", "message": message, "hint": "try `memory-tencentdb-ctl status`"}
