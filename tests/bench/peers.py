"""The supervisors that are measured, behind one set of words.

Invariants: each runs in a folder of its own with its stock settings, but for the delay between TERM and KILL where one
can be set; each keeps one C child on one port, without a shell in between; nothing is ever installed or enabled.
"""

from __future__ import annotations

import abc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.bench.lab import Lab, MissingError, gone, wait_end
from tests.support.processes import free_port

PATIENCE = 20.0  # s for a command or a state of any peer


@dataclass(frozen=True)
class Order:
    """What a peer is asked to keep. env: for the child; kill_delay in seconds, None for the peer's own default."""

    env: tuple[tuple[str, str], ...] = ()
    kill_delay: int | None = None
    settings: str = ""  # of ours only: more lines for [gateway.default] and, after it, [policy]


class Peer(abc.ABC):
    """One supervisor with one child. The words it is called by in tables are its `name`."""

    name = ""
    status: list[str]
    stop_one: list[str]
    start_one: list[str]

    def __init__(self, lab: Lab, order: Order | None = None) -> None:
        self.lab, self.order = lab, order or Order()
        self.folder = lab.folder()
        self.who = self.folder.name
        self.port = free_port()
        self.env = lab.environment(self.who, PORT=str(self.port)) | dict(self.order.env)
        self.foreground: list[subprocess.Popen[bytes]] = []
        self.prepare()

    @abc.abstractmethod
    def prepare(self) -> None:
        """Write what it needs, and set the commands."""

    @abc.abstractmethod
    def bring_up(self) -> list[str]:
        """The command that starts owner and child from nothing."""

    @abc.abstractmethod
    def bring_down(self) -> None:
        """Ask owner and child to end; returns when the command has."""

    in_foreground = False  # whether the command of bring_up() is the owner itself

    def launch(self) -> subprocess.Popen[bytes]:
        """Start owner and child from nothing; returns at once."""
        process = self.popen(self.bring_up())
        if self.in_foreground:
            self.foreground.append(process)
        return process

    def popen(self, argv: list[str]) -> subprocess.Popen[bytes]:
        """Start argv in the folder of this peer, as somebody of this peer."""
        with open(self.folder / "out", "ab") as out:
            return subprocess.Popen(
                argv, env=self.env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def up(self) -> None:
        """Start owner and child, and return when the child listens. Raises RuntimeError."""
        begun = time.monotonic()
        process = self.launch()
        if self.lab.board.wait(self.who, "listen", begun, PATIENCE) is None:
            raise RuntimeError(f"cannot start {self.name}: {(self.folder / 'out').read_text()[-2000:]}")
        if not self.in_foreground:
            wait_end(process, PATIENCE)

    def run(self, argv: list[str]) -> int:
        """Run one of its commands to its end; the exit code."""
        return wait_end(self.popen(argv), 60)

    def down(self) -> None:
        """End owner and child, and return when both are gone. Raises RuntimeError."""
        everything = self.lab.processes(self.who)
        self.bring_down()
        self.wait_gone(everything)

    def kill_owner(self) -> None:
        """kill -9 everything of it but the child."""
        owners = self.lab.owners(self.who)
        for pid in owners:
            os.kill(pid, signal.SIGKILL)
        self.wait_gone(owners)

    def wait_gone(self, pids: list[int]) -> None:
        """Return when none of these lives. Raises RuntimeError."""
        if not gone(pids, PATIENCE):
            raise RuntimeError(f"{self.name} does not end")
        self.foreground = [p for p in self.foreground if p.poll() is None]

    def child_pid(self) -> int:
        """The pid of the newest child."""
        return self.lab.board.all(self.who, "main")[-1].pid


def tool(name: str) -> str:
    """The absolute path of a program: beside this Python, else on PATH. Raises MissingError."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise MissingError(name)
    return found


class Ours(Peer):
    """The daemon alone, in the foreground."""

    name = "ours"
    in_foreground = True
    kind = "command"

    def prepare(self) -> None:
        self.lab.ours.add(self.who)
        self.root = self.folder / "root"
        self.root.mkdir(mode=0o700)
        self.ctl = [tool("memory-tencentdb-ctl"), "--root", str(self.root)]
        self.status = [*self.ctl, "status"]
        self.start_one, self.stop_one = [*self.ctl, "start", "default"], [*self.ctl, "stop", "default"]
        self.write()

    def write(self) -> None:
        """supervisor.toml."""
        lines = ["[gateway.default]", f"port = {self.port}", f'kind = "{self.kind}"']
        if self.kind == "command":
            env = ", ".join(f"{k} = {json.dumps(v)}" for k, v in (("BENCH_WHO", self.who), *self.order.env))
            lines += [f"command = [{json.dumps(self.lab.child)}]", f"env = {{ {env} }}"]
        if self.order.kill_delay is not None:
            lines.append(f"kill_delay = {self.order.kill_delay}")
        (self.root / "supervisor.toml").write_text("\n".join([*lines, self.order.settings, ""]))

    def bring_up(self) -> list[str]:
        return [*self.ctl, "daemon"]

    def bring_down(self) -> None:
        self.run([*self.ctl, "stop"])

    def record(self, name: str = "default") -> dict[str, object]:
        """The endpoint record; empty where there is none yet."""
        try:
            found = json.loads((self.root / "run" / f"{name}.json").read_text())
        except (OSError, ValueError):
            return {}
        return dict(found)

    def daemon_pid(self) -> int | None:
        """The pid in the daemon's pidfile."""
        try:
            return int(json.loads((self.root / "run" / "supervisor.pid").read_text())["pid"])
        except (OSError, ValueError):
            return None


class OursKept(Ours):
    """The same daemon, kept by supervisord and brought up by `start`, which returns when READY."""

    name = "ours, kept"
    in_foreground = False

    def bring_up(self) -> list[str]:
        return [*self.ctl, "start"]


class OursEmbedded(OursKept):
    """Kept, with the embedded Gateway instead of the C child."""

    name = "ours, kept, embedded"
    kind = "embedded"


_SUPERVISORD = """\
[unix_http_server]
file={folder}/sock
[supervisord]
logfile={folder}/log
pidfile={folder}/pid
childlogdir={folder}
{user}
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
[supervisorctl]
serverurl=unix://{folder}/sock
[program:child]
command={child}
{stop_wait}
"""


class Supervisord(Peer):
    """supervisord as its documentation has it; it goes into the background by itself."""

    name = "supervisord"

    def prepare(self) -> None:
        config = self.folder / "conf"
        delay = self.order.kill_delay
        config.write_text(
            _SUPERVISORD.format(
                folder=self.folder,
                child=self.lab.child,
                user="user=root" if os.geteuid() == 0 else "",
                stop_wait="" if delay is None else f"stopwaitsecs={delay}",
            )
        )
        self.daemon = [tool("supervisord"), "-c", str(config)]
        self.ctl = [tool("supervisorctl"), "-c", str(config)]
        self.status = [*self.ctl, "status"]
        self.start_one, self.stop_one = [*self.ctl, "start", "child"], [*self.ctl, "stop", "child"]

    def bring_up(self) -> list[str]:
        return self.daemon

    def bring_down(self) -> None:
        self.run([*self.ctl, "shutdown"])


class Runit(Peer):
    """runsvdir and runsv; ./run is the child itself."""

    name = "runit"
    in_foreground = True

    def prepare(self) -> None:
        service = self.folder / "services" / "child"
        service.mkdir(parents=True)
        (service / "run").symlink_to(self.lab.child)
        self.daemon = [tool("runsvdir"), str(service.parent)]
        sv = tool("sv")
        wait = [] if self.order.kill_delay is None else ["-w", str(self.order.kill_delay)]
        self.status = [sv, "status", str(service)]
        self.start_one = [sv, "start", str(service)]
        self.stop_one = [sv, *wait, "stop" if self.order.kill_delay is None else "force-stop", str(service)]

    def bring_up(self) -> list[str]:
        return self.daemon

    def bring_down(self) -> None:
        for process in self.foreground:
            process.send_signal(signal.SIGHUP)  # "TERM to each runsv, then exit"


class S6(Peer):
    """s6-svscan and s6-supervise; ./run is the child itself."""

    name = "s6"
    in_foreground = True

    def prepare(self) -> None:
        service = self.folder / "services" / "child"
        service.mkdir(parents=True)
        (service / "run").symlink_to(self.lab.child)
        if self.order.kill_delay is not None:
            (service / "timeout-kill").write_text(f"{self.order.kill_delay * 1000}\n")
        self.scan = str(service.parent)
        self.daemon = [tool("s6-svscan"), self.scan]
        self.status = [tool("s6-svstat"), str(service)]
        self.start_one = [tool("s6-svc"), "-wu", "-u", str(service)]
        self.stop_one = [tool("s6-svc"), "-wD", "-d", str(service)]

    def bring_up(self) -> list[str]:
        return self.daemon

    def bring_down(self) -> None:
        self.run([tool("s6-svscanctl"), "-t", self.scan])


class Pm2(Peer):
    """pm2 with the child as a program without interpreter."""

    name = "pm2"

    def prepare(self) -> None:
        app: dict[str, object] = {"name": "child", "script": self.lab.child, "interpreter": "none"}
        if self.order.kill_delay is not None:
            app["kill_timeout"] = self.order.kill_delay * 1000
        file = self.folder / "apps.json"
        file.write_text(json.dumps({"apps": [app]}))
        pm2 = tool("pm2")
        self.env |= {"PM2_HOME": str(self.folder / "home"), "PM2_DISABLE_VERSION_CHECK": "true"}
        self.daemon = [pm2, "start", str(file)]
        self.status = [pm2, "jlist"]
        self.start_one, self.stop_one = [pm2, "start", "child"], [pm2, "stop", "child"]
        self.end = [pm2, "kill"]

    def bring_up(self) -> list[str]:
        return self.daemon

    def bring_down(self) -> None:
        self.run(self.end)


OTHERS: tuple[type[Peer], ...] = (Supervisord, Runit, S6, Pm2)


def versions() -> dict[str, str]:
    """What is installed of each peer, in words; "not installed" where it is missing."""
    import importlib.metadata

    found = {}
    for peer, command, package in (
        ("supervisord", "supervisord", ""),
        ("runit", "runsvdir", "runit"),
        ("s6", "s6-svscan", "s6"),
        ("pm2", "pm2", ""),
    ):
        try:
            path = tool(command)
        except MissingError:
            found[peer] = "not installed"
            continue
        found[peer] = "installed"
        if peer == "supervisord":
            found[peer] = importlib.metadata.version("supervisor")
        elif peer == "pm2":
            manifest = Path(path).resolve().parent.parent / "package.json"
            found[peer] = str(json.loads(manifest.read_text())["version"]) if manifest.exists() else "installed"
        elif shutil.which("dpkg-query"):
            argv = ["dpkg-query", "-W", "-f", "${Version}", package]
            said = subprocess.run(argv, capture_output=True, text=True).stdout
            found[peer] = said or "installed"
    return found
