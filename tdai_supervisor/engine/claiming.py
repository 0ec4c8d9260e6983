"""What is true before a Gateway is spawned, adopted or refused.

Invariants: the lease is taken before anything else is looked at, and kept from then to the spawn, so that what was seen
stays true; a process is a resident only while alive; everything that walks runs in the worker, not in the
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tdai_supervisor import __version__
from tdai_supervisor.decide import launch, paths
from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.decide.model import Event
from tdai_supervisor.decide.policy import Claim, Resident, Scene, judge_claim
from tdai_supervisor.engine import configured
from tdai_supervisor.host import disk, node, ports, probe, tree
from tdai_supervisor.host.locks import LockUnsupportedError
from tdai_supervisor.host.process import Process
from tdai_supervisor.host.tree import Seen

if TYPE_CHECKING:
    from tdai_supervisor.engine.gateway import Gateway


@dataclass
class Found:
    """A verdict and what is needed to act on it. lease: our descriptor of it, held until close()."""

    claim: Claim
    port: int
    kind: str = "embedded"
    lease: int | None = None
    key: str | None = dataclasses.field(default=None, repr=False)
    cwd: str = "/"
    node: str | None = None  # absolute path
    process: Process | None = None
    newest_number: int = 0
    quick: bool = False
    llm: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    launched: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    kind_cause: str = ""
    version: str | None = None

    def close(self) -> None:
        """Let go what was not used."""
        if self.lease is not None:
            os.close(self.lease)
            self.lease = None
        if self.process is not None:
            self.process.close()
            self.process = None


class Claiming:
    """Looks at the scene of one Gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def look(self) -> Found:
        """The verdict on the present scene; a directory that cannot be used is TAKEN with its cause, never an error."""
        gateway = self._gateway
        others = gateway.shared.taken_ports(gateway.name)
        found = await gateway.shared.worker.run(self._look, others)
        if found.claim.external and not await self._is_gateway(found.port):
            found.close()
            found.claim = Claim(Event.TAKEN, f"{found.claim.cause} and which does not answer like a Gateway")
        return found

    async def _is_gateway(self, port: int) -> bool:
        """Whether what listens there answers /health in a Gateway's shape within probe_deadline."""
        settings = self._gateway.settings
        try:
            async with asyncio.timeout(settings.probe_deadline):
                return (await probe.ask(settings.host, port)).generation is not None
        except (OSError, ValueError):
            return False

    def quick(self, last: Found) -> Found | None:
        """Right after the death of our own child: the same spawn again, if lease and port are free now.

        In the loop: a flock and one socket dump, no disk, no walk of /proc. Leftovers are swept after the spawn.
        """
        gateway = self._gateway
        try:
            lease = gateway.lease.take()
        except OSError:
            return None
        if lease is None:
            return None
        if ports.on(gateway.settings.host, gateway.port):
            os.close(lease)
            return None
        return dataclasses.replace(last, claim=Claim(Event.CLEAR), lease=lease, process=None, quick=True)

    def _look(self, others: set[int]) -> Found:
        gateway = self._gateway
        settings = gateway.settings
        try:
            disk.private_dir(settings.data_dir)
            os.makedirs(settings.log_dir, mode=0o700, exist_ok=True)
            lease = gateway.lease.take()
        except LockUnsupportedError as error:
            return Found(Claim(Event.TAKEN, f"cannot lease the data directory: {error.strerror}"), gateway.port)
        except OSError as error:
            why = f"cannot use {error.filename or settings.data_dir}: {error.strerror or error}"
            return Found(Claim(Event.TAKEN, why), gateway.port)
        try:
            return self._judge(lease, others)
        except BaseException:
            if lease is not None:
                os.close(lease)
            raise

    def _judge(self, lease: int | None, others: set[int]) -> Found:
        gateway = self._gateway
        settings = gateway.settings
        asked = self._asked_port()
        gateway.port = asked or gateway.port
        seen = tree.scan()
        listening = ports.listeners()
        residents = [self._resident(s, listening, lease is None) for s in seen if s.uid == os.geteuid()]
        near = [r for r in residents if r.number is not None or r.on_data or r.holds_lease]
        holder = ports.holder([x for x in listening if x.port == gateway.port and ports.conflicts(x, settings.host)])
        scene = Scene(lease is not None, near, holder, asked is not None)
        claim = judge_claim(scene, settings.data_dir, gateway.port)
        found = Found(claim, claim.port or gateway.port, lease=lease)
        found.newest_number = max([0, *(r.number for r in near if r.number is not None)])
        if claim.move:
            free = ports.next_free(settings.host, gateway.port + 1, others)
            if free is None:
                found.claim = Claim(Event.TAKEN, f"no free port from {gateway.port} upwards")
            else:
                found.port = free
        if found.claim.event is Event.CLEAR:
            self._prepare(found)
        elif found.claim.event is Event.FOUND and claim.pid is not None:
            self._hold(found, claim.pid, seen)
        return found

    def _resident(self, seen: Seen, listening: list[ports.Listener], lease_held: bool) -> Resident:
        gateway = self._gateway
        data_dir = gateway.settings.data_dir
        cookie = seen.cookie
        ours = cookie is not None and (cookie.root, cookie.name) == (gateway.root, gateway.name)
        near = tree.variable(seen.environ, "TDAI_DATA_DIR") == data_dir
        near = near or tree.open_below(seen.pid, data_dir, gateway.settings.log_dir)
        holds = lease_held and tree.holds_open(seen.pid, data_dir)
        sockets = ports.listened_by(seen.pid, listening) if near or holds else []
        # A shell may carry the variable and a reader may open a file: only a server is a second writer.
        server = bool(sockets) or (near and _looks_like_gateway(tree.command_line(seen.pid)))
        first = next((x.port for x in sorted(sockets, key=lambda x: x.port != gateway.port)), None)
        return Resident(
            pid=seen.pid,
            number=cookie.number if ours and cookie else None,
            cookie=str(cookie) if cookie else None,
            holds_lease=holds,
            listens_on=first,
            on_data=near and server,
            leader=seen.stat.session == seen.pid,
        )

    def _prepare(self, found: Found) -> None:
        """Everything a spawn needs that may wait for a disk."""
        gateway = self._gateway
        settings = gateway.settings
        found.cwd = settings.data_dir
        try:
            self._choose_kind(found)
            key = self._configure(found)
        except (node.NodeError, SettingsError) as error:
            # No retry helps until somebody installs or mends something.
            found.claim = Claim(Event.GIVE_UP, str(error))
            return
        try:
            gateway.log_fds = gateway.log_fds or [disk.append_only(path) for path in gateway.log_paths]
        except OSError as error:
            found.claim = Claim(Event.TAKEN, f"cannot write {error.filename or error}: {error.strerror or error}")
            return
        if settings.auth == "auto":
            found.key = gateway.shared.files.key(gateway.name, key)
            if found.key is None:
                trouble = gateway.shared.files.trouble or "cannot keep an API key"
                found.claim = Claim(Event.TAKEN, f'{trouble}; free the disk, or set auth = "off"')

    def _choose_kind(self, found: Found) -> None:
        """Kind auto is node where Node and package are complete, else embedded; which and why is kept for status."""
        settings, install = self._gateway.settings, self._gateway.shared.settings.install_dir
        if settings.kind == "command":
            found.kind, found.kind_cause = "command", "configured"
            return
        if settings.kind == "embedded":
            found.kind, found.kind_cause, found.version = "embedded", "configured", __version__
            return
        try:
            # The version, not the link to it: a switch must not change the files under a Gateway that runs or respawns.
            found.cwd = os.path.realpath(node.package(install))
            binary = node.find(settings.node, os.environ)
        except node.NodeError as error:
            if settings.kind == "node":
                raise
            found.kind, found.cwd, found.version = "embedded", settings.data_dir, __version__
            found.kind_cause = f"auto: {error}".replace("cannot run kind node: ", "")
            return
        found.kind, found.node, found.version = "node", binary.path, node.version_of(found.cwd)
        found.kind_cause = f"{'auto' if settings.kind == 'auto' else 'configured'}: {binary} in {found.cwd}"

    def _configure(self, found: Found) -> str | None:
        """Read the Gateway's own file for what it decides: the configured API key, and what was launched with it."""
        gateway, key = self._gateway, self._gateway.settings.api_key
        values: Mapping[str, Any] = {}
        if found.kind != "command":
            file = configured.read(gateway.settings)
            if found.kind == "node":
                try:
                    file = configured.make_it_pay(file, paths.paying(gateway.root, gateway.name))
                except OSError as error:
                    gateway.shared.files.note_failure(file.path, f"cannot write {file.path}: {error.strerror}")
            values, key = file.values, key or file.api_key
        found.llm = configured.llm(gateway.shared.settings, values)
        found.launched = configured.fingerprint(gateway.settings, values, found.llm)
        return key

    def _asked_port(self) -> int | None:
        """The port somebody asked for, in supervisor.toml, the environment or the Gateway's own file."""
        settings = self._gateway.settings
        if settings.port is not None or settings.kind == "command":
            return settings.port
        with contextlib.suppress(SettingsError):  # said when it is read for the spawn
            return configured.read(settings).port
        return None

    def _hold(self, found: Found, pid: int, seen: list[Seen]) -> None:
        """Hold the process to adopt, and learn from its environment what it was started with."""
        about = next(s for s in seen if s.pid == pid)
        held = Process.open(pid)
        if held is None or held.identity.ticks != about.stat.ticks:
            if held is not None:
                held.close()
            return
        found.process = held
        found.kind = self._gateway.kind
        with contextlib.suppress(TypeError, ValueError):
            found.port = int(tree.variable(about.environ, "TDAI_GATEWAY_PORT") or "")
        key = tree.variable(about.environ, "TDAI_GATEWAY_API_KEY")
        if key and not found.claim.external and self._gateway.settings.auth == "auto":
            self._gateway.shared.files.key(self._gateway.name, key)


def _looks_like_gateway(command: str | None) -> bool:
    """Whether a command line is a Gateway's although it does not listen yet."""
    return command is not None and (launch.SERVER in command or launch.EMBEDDED in command)
