"""The units under a real systemd, as process 1 of a machine in namespaces: what every verb and every death does."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import machine as machines
from tests.support.command import Done
from tests.support.machine import UID, USER, Machine
from tests.support.processes import wait_for

pytestmark = pytest.mark.timeout(90)
ROOT = f"/home/{USER}/ro ot, 100% 'é' \"$HOME\" \\n"
TERMS = f"/home/{USER}/terms"
SCRIPTED = Path(__file__).resolve().parents[1] / "support" / "scripted.py"
PYTHON = os.path.abspath(sys.executable)
# Where the two kinds differ in little, the system's is for the slow run.
USER_FIRST = ["user", pytest.param("system", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Iterator[Machine]:
    """A booted machine; this one is afterwards what it was before."""
    why = machines.why_not()
    if why is not None:
        pytest.skip(why)
    before = machines.fingerprint()
    made = Machine(tmp_path_factory.mktemp("machine"), machines.python_paths(checkout))
    try:
        made.boot()
        made.log_in_never()
        yield made
    finally:
        made.close()
    assert machines.changes(before) == []


class Service:
    """A root of the machine's user, and the unit that keeps its daemon. kind: "user" or "system"."""

    def __init__(self, machine: Machine, kind: str) -> None:
        self.machine, self.kind = machine, kind
        self.unit = "memory-tencentdb.service" if kind == "user" else f"memory-tencentdb@{USER}.service"
        where = f"/home/{USER}/.config/systemd/user" if kind == "user" else "/etc/systemd/system"
        self.file = f"{where}/{self.unit}"

    def sh(self, script: str, user: bool = True) -> Done:
        """Run a script of the shell, which must succeed."""
        done = self.machine("sh", "-c", script, user=user)
        assert done.code == 0, done
        return done

    def ctl(self, *words: str, user: bool = True, root: str = ROOT) -> Done:
        """Run the command, knowing nothing of the session."""
        return self.machine(PYTHON, "-I", "-m", "tdai_supervisor", "--root", root, *words, user=user)

    def service(self, *words: str) -> Done:
        """Run the verb `service`, as who may."""
        return self.ctl("service", *words, f"--{self.kind}", "--json", user=self.kind == "user")

    def systemctl(self, *words: str) -> Done:
        """Run systemctl on our systemd."""
        if self.kind == "system":
            return self.machine("systemctl", *words)
        runtime = {"XDG_RUNTIME_DIR": f"/run/user/{UID}"}
        return self.machine("systemctl", "--user", *words, user=True, env=runtime)

    def show(self, name: str) -> str:
        """One property of the unit."""
        return self.systemctl("show", self.unit, f"--property={name}", "--value").out.strip()

    def status(self) -> dict[str, Any]:
        """data of `status`."""
        return self.ctl("status", "--json").data

    def gateway(self, daemon: bool = True) -> dict[str, Any]:
        """The Gateway, once it is READY and owned by a living daemon (or just as it is now)."""

        def ready() -> dict[str, Any] | None:
            data = self.status()
            found = data["gateways"][0]
            return found if data["daemon"]["running"] and found["state"] == "READY" else None

        found = wait_for(ready, 20, "READY") if daemon else self.status()["gateways"][0]
        assert found is not None
        return found

    def main_pid(self, but: int = 0) -> int:
        """The unit's process, once it is active with another one than `but`."""

        def look() -> int:
            pid = int(self.show("MainPID") or 0)
            return pid if pid != but and self.show("ActiveState") == "active" else 0

        return wait_for(look, 20, "the unit is active")

    def kill(self, signal: str, pid: int) -> None:
        """Send a signal inside the machine."""
        assert self.machine("kill", f"-{signal}", str(pid)).code == 0

    def terms(self) -> list[int]:
        """The Gateways that were told to end, once for each time."""
        return [int(line) for line in self.machine("cat", TERMS).out.split()]

    def processes(self) -> list[str]:
        """Every process of the machine's user that is about the root."""
        done = self.machine("ps", "-u", USER, "-o", "pid=,args=")
        return [line for line in done.out.splitlines() if "scripted.py" in line or "supervisor" in line]

    def drop_in(self, text: str, name: str = "test") -> None:
        """Change a setting of the unit for this test."""
        directory = shlex.quote(f"{self.file}.d")
        self.sh(f"mkdir -p {directory} && printf '[Service]\\n{text}\\n' >{directory}/{name}.conf", self.kind == "user")
        assert self.systemctl("daemon-reload").code == 0

    def prepare(self) -> None:
        """An empty root with a scripted Gateway configured."""
        command = json.dumps([PYTHON, "-E", "-S", str(SCRIPTED)])
        env = f'{{ STUB_TERMS = "{TERMS}" }}'
        text = f'[gateway.default]\nkind = "command"\ncommand = {command}\nenv = {env}\nkill_delay = 2.0\n'
        root = shlex.quote(ROOT)
        script = f"umask 077; mkdir {root}; printf %s {shlex.quote(text)} >{root}/supervisor.toml; rm -f {TERMS}"
        self.sh(script)
        if self.kind == "system":
            # A checkout below /tmp is hidden by the unit's own /tmp; an installation never lies there.
            shown = " ".join(map(str, self.machine.shown))
            self.drop_in(f"BindReadOnlyPaths={shown}", "python")

    def clear(self) -> None:
        """Away with all of it."""
        self.ctl("stop")
        for kind in ("user", "system"):
            service = Service(self.machine, kind)
            if self.machine("test", "-e", service.file).code == 0:
                assert service.service("uninstall").code == 0
        self.sh(f"rm -rf {shlex.quote(ROOT)} {shlex.quote(self.file + '.d')}", user=False)
        assert wait_for(lambda: not self.processes(), 10, "nobody is left")


@pytest.fixture(params=["user", "system"])
def bare(request: pytest.FixtureRequest, machine: Machine) -> Iterator[Service]:
    """A root for which nothing is installed."""
    made = Service(machine, request.param)
    made.prepare()
    yield made
    made.clear()


@pytest.fixture
def service(bare: Service) -> Service:
    """A root with its unit installed, and the Gateway READY under it."""
    done = bare.service("install")
    assert done.code == 0, done
    assert bare.show("ActiveState") == "inactive", "install starts nothing"
    started = bare.ctl("start", "--json", user=bare.kind == "user")
    if bare.kind == "system":
        # Root's systemctl, the user's command: he has no right to start the unit, and is told who has.
        refused = bare.ctl("start", "--json")
        assert refused.code == 4, refused
        assert f"sudo systemctl start {bare.unit}" in refused.json["errors"][0]["hint"]
        assert bare.systemctl("start", bare.unit).code == 0
        started = bare.ctl("start", "--json")
    assert started.code == 0, started
    assert started.data["daemon"]["keeper"] == f"systemd-{bare.kind}"
    return bare


def test_crashes(service: Service) -> None:
    """Daemon killed: started again, the same Gateway adopted. Gateway killed: another one, the same daemon."""
    daemon, gateway = service.main_pid(), service.gateway()["pid"]
    service.kill("KILL", daemon)
    again = service.main_pid(but=daemon)
    found = service.gateway()
    assert (found["pid"], found["origin"]) == (gateway, "adopted")
    service.kill("KILL", gateway)
    wait_for(lambda: service.gateway()["pid"] != gateway, 10)
    assert service.main_pid() == again
    assert service.terms() == []


@pytest.mark.parametrize("bare", ["user"], indirect=True)
def test_a_stuck_daemon_is_replaced(service: Service) -> None:
    """SIGSTOP: the beat stops, systemd kills and starts it again, and the Gateway is the same."""
    service.drop_in("WatchdogSec=2")
    assert service.systemctl("restart", service.unit).code == 0
    daemon, gateway = service.main_pid(), service.gateway()["pid"]
    service.kill("STOP", daemon)
    service.main_pid(but=daemon)
    assert service.gateway()["pid"] == gateway
    assert service.show("NRestarts") == "1"


@pytest.mark.parametrize("bare", USER_FIRST, indirect=True)
def test_a_storm_ends_and_start_begins_anew(service: Service) -> None:
    """Two starts again, and no third: failed, the Gateway serves on; `start` (or the command it names) adopts it."""
    service.drop_in("RestartSec=100ms\\n[Unit]\\nStartLimitBurst=2")
    daemon, gateway = 0, service.gateway()["pid"]
    for _ in range(3):
        daemon = service.main_pid(but=daemon)
        service.kill("KILL", daemon)
    wait_for(lambda: service.show("ActiveState") == "failed", 10)
    started = service.ctl("start", "--json")
    if service.kind == "system":
        assert started.code == 4, started
        assert f"reset-failed {service.unit} && sudo systemctl start" in started.json["errors"][0]["hint"]
        assert service.systemctl("reset-failed", service.unit).code == 0
        assert service.systemctl("start", service.unit).code == 0
    assert service.gateway()["pid"] == gateway
    assert service.terms() == []


def test_reload_restart_stop(service: Service) -> None:
    """reload: same pids. restart: another daemon and Gateway. stop: one TERM, nobody left, what is wanted stays."""
    daemon, gateway = service.main_pid(), service.gateway()["pid"]
    before = service.status()["daemon"]["started_at"]
    assert service.systemctl("reload", service.unit).code == 0
    wait_for(lambda: service.status()["daemon"]["started_at"] not in (None, before), 10, "re-executed")
    assert (service.main_pid(), service.gateway()["pid"]) == (daemon, gateway)

    assert service.systemctl("restart", service.unit).code == 0
    second = service.gateway()["pid"]
    assert second != gateway
    assert service.terms() == [gateway]

    assert service.systemctl("stop", service.unit).code == 0
    assert service.show("ActiveState") == "inactive"
    assert service.show("Result") == "success"
    assert service.processes() == []
    assert service.terms() == [gateway, second]
    assert service.gateway(daemon=False)["want"] == "up"


def test_the_command_and_the_unit(service: Service) -> None:
    """`stop` leaves the unit inactive, for good; `start` starts the unit, and no second keeper."""
    assert service.ctl("stop").code == 0
    assert service.show("ActiveState") == "inactive"
    assert service.processes() == []
    if service.kind == "user":
        assert service.ctl("start").code == 0
    else:
        assert service.systemctl("start", service.unit).code == 0
        assert service.ctl("start").code == 0
    assert service.status()["daemon"]["pid"] == service.main_pid()
    assert not [line for line in service.processes() if "supervisor.supervisord" in line]


@pytest.mark.parametrize("bare", USER_FIRST, indirect=True)
def test_stop_of_a_stuck_daemon(service: Service) -> None:
    """SIGSTOP, then `stop`: the daemon is ended, not started again, and the Gateway is told once."""
    daemon, gateway = service.main_pid(), service.gateway()["pid"]
    service.kill("STOP", daemon)
    done = service.ctl("stop")
    if service.kind == "system":
        assert done.code == 4, done
        assert f"sudo systemctl stop {service.unit}" in done.err
        assert service.terms() == []
        assert service.systemctl("stop", service.unit).code == 0
    else:
        assert done.code == 0, done
    assert service.show("ActiveState") in ("inactive", "failed")
    assert service.processes() == []
    assert service.terms() == [gateway]


def test_a_daemon_that_does_not_stop(service: Service) -> None:
    """Its time to stop is up: it is killed, and its Gateway is told to end once, by the sweep."""
    service.drop_in("TimeoutStopSec=1\\nKillSignal=SIGURG")  # a signal that nobody hears
    gateway = service.gateway()["pid"]
    service.systemctl("stop", service.unit)
    assert service.processes() == []
    assert service.terms() == [gateway]
    assert service.gateway(daemon=False)["want"] == "up"


def test_moving_keepers(bare: Service) -> None:
    """supervisord, then `service install`, then `service uninstall`: the Gateway has noticed nothing."""
    assert bare.ctl("start").code == 0
    gateway = bare.gateway()["pid"]
    assert bare.status()["daemon"]["keeper"] == "supervisord"

    moved = bare.service("install")
    assert moved.code == 0, moved
    assert moved.data["keeper"] == f"systemd-{bare.kind}"
    assert moved.data["warnings"] == []
    assert bare.status()["daemon"]["pid"] == bare.main_pid()
    assert not [line for line in bare.processes() if "supervisor.supervisord" in line]
    assert bare.gateway()["pid"] == gateway
    assert bare.service("install").data["changes"][0].startswith("enabled")

    back = bare.service("uninstall")
    assert back.code == 0, back
    assert back.data["keeper"] == "supervisord"
    assert back.data["units"] == []
    assert bare.machine("test", "-e", bare.file).code == 1
    found = bare.gateway()
    assert (found["pid"], found["origin"]) == (gateway, "adopted")
    assert bare.terms() == []
    assert bare.show("ActiveState") == "inactive"
    assert bare.ctl("stop").code == 0
    assert bare.terms() == [gateway]


def test_moving_the_keeper_of_root(machine: Machine) -> None:
    """root's own: the sandboxed daemon, which has next to no privileges, still sees and adopts what root started."""
    command = [PYTHON, "-I", "-m", "tdai_supervisor"]
    unit = "memory-tencentdb@root.service"
    drop_in = f"/etc/systemd/system/{unit}.d"
    shown = " ".join(map(str, machine.shown))
    machine("sh", "-c", f"mkdir -p {drop_in} && printf '[Service]\\nBindReadOnlyPaths={shown}\\n' >{drop_in}/x.conf")
    try:
        assert machine(*command, "start").code == 0
        gateway = machine(*command, "status", "--json").data["gateways"][0]["pid"]
        for action, keeper in (("install", "systemd-system"), ("uninstall", "supervisord")):
            done = machine(*command, "service", action, "--json")
            assert done.code == 0, done
            assert done.data["keeper"] == keeper
            wait_for(lambda: machine(*command, "status").code == 0, 10, "READY")
            assert machine(*command, "status", "--json").data["gateways"][0]["pid"] == gateway
    finally:
        machine(*command, "service", "uninstall")
        machine(*command, "stop")
        machine("rm", "-rf", drop_in)


def test_reboot(service: Service) -> None:
    """Shut down in order and boot again: one TERM for the Gateway, and READY without anybody logging in."""
    gateway = service.gateway()["pid"]
    service.machine.off()
    service.machine.boot()
    assert service.terms() == [gateway]
    assert service.gateway()["state"] == "READY"
    assert service.status()["daemon"]["keeper"] == f"systemd-{service.kind}"


def test_without_lingering(bare: Service) -> None:
    """A user's own unit: the missing lingering is named with its command. The system's unit needs none."""
    assert bare.machine("loginctl", "disable-linger", USER).code == 0
    try:
        wait_for(lambda: bare.machine("systemctl", "is-active", f"user@{UID}").code != 0, 20, "nobody is logged in")
        done = bare.service("install")
        if bare.kind == "user":
            assert done.code == 5, done
            assert f"loginctl enable-linger {USER}" in done.json["errors"][0]["hint"]
            # A unit from better days, and a systemd that is not there: supervisord it is.
            bare.sh(f"mkdir -p {os.path.dirname(bare.file)}")
            assert bare.ctl("start", "--json").data["daemon"]["keeper"] == "supervisord"
        else:
            assert done.code == 0, done
    finally:
        bare.machine.log_in_never()


FOREIGN = "hermes.service"


@pytest.fixture
def plain(machine: Machine) -> Iterator[Service]:
    """A root for which nothing will be installed."""
    made = Service(machine, "user")
    made.prepare()
    yield made
    made.clear()


def run_in_service(machine: Machine, *words: str, manager: str) -> Done:
    """Run the command as the user inside a service that ends with everything in it; it goes on afterwards."""
    script = '"$@"; echo "code $?"; sleep 60'
    argv = ["systemd-run", f"--unit={FOREIGN}", "--quiet", "-p", f"StandardOutput=file:/home/{USER}/said"]
    argv += ["sh", "-c", script, "sh", PYTHON, "-I", "-m", "tdai_supervisor", "--root", ROOT, *words]
    if manager == "user":
        return machine(*argv[:1], "--user", *argv[1:], user=True, env={"XDG_RUNTIME_DIR": f"/run/user/{UID}"})
    return machine(*argv[:1], "-p", f"User={USER}", *argv[1:])


@pytest.mark.parametrize("manager", ["user", "system"])
def test_start_inside_another_service(plain: Service, manager: str) -> None:
    """Started from within Hermes' own service: when that ends with all that is in it, the Gateway lives on."""
    done = run_in_service(plain.machine, "start", "--json", manager=manager)
    assert done.code == 0, done
    said = wait_for(lambda: (t := plain.machine("cat", f"/home/{USER}/said").out).count("code ") and t, 20, "started")
    result = json.loads(str(said).splitlines()[0])
    assert result["ok"], result
    assert result["data"]["warnings"] == []
    gateway, daemon = plain.gateway()["pid"], plain.status()["daemon"]["pid"]
    stop = plain if manager == "user" else Service(plain.machine, "system")
    assert stop.systemctl("stop", FOREIGN).code == 0
    assert (plain.gateway()["pid"], plain.status()["daemon"]["pid"]) == (gateway, daemon)
    plain.sh(f"rm -f /home/{USER}/said", user=False)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("manager", ["user", "system"])
def test_from_a_clone_to_a_reboot(tmp_path: Path, checkout: Path, clone: Path, wheelhouse: Path, manager: str) -> None:
    """install.sh --user or --system, again, switched off and on: READY by the installed program; and taken away."""
    why = machines.why_not()
    if why is not None:
        pytest.skip(why)
    before = machines.fingerprint()
    machine = Machine(tmp_path / "machine", [*machines.python_paths(checkout), clone, wheelhouse])
    own = manager == "user"
    installer = ["sh", f"{clone}/install.sh", *([] if own else ["--for-user", USER])]
    env = {"PYTHON": os.path.realpath(sys.executable)}
    words = [*installer, "--start", f"--{manager}", "--wheelhouse", str(wheelhouse)]
    command = f"/home/{USER}/.local/bin/memory-tencentdb-ctl"
    unit = f"/home/{USER}/.config/systemd/user/memory-tencentdb.service"
    if not own:
        unit = f"/etc/systemd/system/memory-tencentdb@{USER}.service"
    try:
        machine.boot()
        machine.log_in_never()
        done = machine(*words, user=own, env=env, timeout=120)
        assert done.code == 0, done
        status = machine(command, "status", "--json", user=True).data
        assert status["daemon"]["keeper"] == f"systemd-{manager}"
        assert f'ExecStart=:"/home/{USER}/.memory-tencentdb/venv/bin/python" ' in machine("cat", unit).out
        again = machine(*words, user=own, env=env, timeout=120)
        assert again.code == 0, again
        after = machine(command, "status", "--json", user=True).data
        assert after["gateways"][0]["pid"] == status["gateways"][0]["pid"]
        foreign = machine("find", f"/home/{USER}", "!", "-user", USER)
        assert foreign.out == "", "everything in the home is its user's"

        machine.off()
        machine.boot()
        wait_for(lambda: machine(command, "status", user=True).code == 0, 20, "READY")
        assert machine(command, "status", "--json", user=True).data["daemon"]["keeper"] == f"systemd-{manager}"

        done = machine(*installer, "--uninstall", user=own, env=env)
        assert done.code == 0, done
        assert machine("test", "-e", unit).code == 1
        assert "tdai_supervisor" not in machine("ps", "-ef").out
    finally:
        machine.close()
    assert machines.changes(before) == []
