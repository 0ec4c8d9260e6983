"""`service` and the choice of a keeper, with a systemctl that only acts like one; tests/e2e has a real systemd."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tdai_supervisor.cli import service
from tests.support import processes
from tests.support.command import PATH, Ctl
from tests.support.kept import SCRIPTED
from tests.support.processes import wait_for

pytestmark = pytest.mark.timeout(60)
FAKE = Path(__file__).resolve().parents[1] / "support" / "fake_systemctl.py"


@pytest.fixture
def systemd(ctl: Ctl, tmp_path: Path) -> Path:
    """The state of a user's systemd that answers `ctl`; a scripted Gateway is configured."""
    state, programs = tmp_path / "systemd", tmp_path / "bin"
    state.mkdir()
    programs.mkdir()
    program = programs / "systemctl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{FAKE}" "$@"\n')
    program.chmod(0o700)
    ctl.env |= {"PATH": f"{programs}:{PATH}", "FAKE_SYSTEMD": str(state)}
    ctl.settings(
        f'[gateway.default]\nkind = "command"\ncommand = ["{sys.executable}", "-E", "-S", "{SCRIPTED}"]\n'
        f"port = {processes.free_port()}\n"
    )
    return state


def unit_file(ctl: Ctl) -> Path:
    return Path(ctl.home, ".config/systemd/user/memory-tencentdb.service")


def keepers(ctl: Ctl) -> list[str]:
    """The supervisords of the root."""
    return [p.command for p in processes.of_root(ctl.root) if "supervisor.supervisord" in p.command]


def test_the_whole_way(ctl: Ctl, systemd: Path) -> None:
    """supervisord -> install -> stop -> start -> uninstall -> stop: one keeper at any time, one Gateway throughout."""
    gateway = ctl.start()["pid"]
    done = ctl("service", "install", "--json")
    assert done.code == 0, done
    assert done.data["keeper"] == "systemd-user"
    assert [u["unit"] for u in done.data["units"]] == ["memory-tencentdb.service"]
    assert "enable-linger" in done.data["warnings"][0]["message"]
    assert keepers(ctl) == []
    status = ctl.status()
    assert status["daemon"]["keeper"] == "systemd-user"
    assert status["gateways"][0]["pid"] == gateway
    assert unit_file(ctl).stat().st_mode & 0o022 == 0

    assert ctl("stop").code == 0
    assert ctl.start()["state"] == "READY"
    assert ctl.status()["daemon"]["keeper"] == "systemd-user"
    assert keepers(ctl) == []
    gateway = ctl.gateway()["pid"]

    back = ctl("service", "uninstall", "--json")
    assert back.code == 0, back
    assert not unit_file(ctl).exists()
    assert not (systemd / "enabled").exists()
    assert (back.data["keeper"], len(keepers(ctl))) == ("supervisord", 1)
    assert ctl.gateway()["pid"] == gateway
    assert ctl("stop").code == 0


def test_install_twice_changes_nothing(ctl: Ctl, systemd: Path) -> None:
    """The same unit is not written again, and nothing is started by installing."""
    assert ctl("service", "install").code == 0
    first = unit_file(ctl).read_bytes()
    again = ctl("service", "install", "--json")
    assert again.code == 0, again
    assert not [change for change in again.data["changes"] if change.startswith("wrote")]
    assert unit_file(ctl).read_bytes() == first
    assert ctl.status()["daemon"]["running"] is False
    assert "start" not in (systemd / "log").read_text().split()


def test_dry_run(ctl: Ctl, systemd: Path) -> None:
    """It prints the unit, and writes nothing."""
    done = ctl("service", "install", "--dry-run")
    assert done.code == 0, done
    assert "would write" in done.out
    assert "KillMode=process" in done.out
    assert str(ctl.root) in done.out
    assert not unit_file(ctl).exists()
    assert ctl("service", "install").code == 0
    assert ctl("service", "uninstall", "--dry-run").code == 0
    assert unit_file(ctl).exists()


def test_status(ctl: Ctl, systemd: Path) -> None:
    """Not installed is exit code 5; what is not as it should be is a warning with its way out."""
    assert ctl("service", "status").code == 5
    assert ctl("service", "install").code == 0
    assert ctl("service", "status").code == 0
    unit_file(ctl).write_text(unit_file(ctl).read_text() + "# changed\n")
    (systemd / "enabled").unlink()
    warnings = " ".join(w["message"] for w in ctl("service", "status", "--json").data["warnings"])
    assert "not enabled" in warnings
    assert "not what this version installs" in warnings
    assert "loginctl enable-linger" in warnings
    fixes = [f["fix"] for f in ctl("doctor", "--json").data["findings"]]
    assert "memory-tencentdb-ctl service install" in fixes
    assert any(fix.startswith("loginctl enable-linger ") for fix in fixes)


def test_no_systemd_answers(ctl: Ctl, systemd: Path) -> None:
    """Exit code 5 and the line for crontab; a unit of better days does not keep `start` from working."""
    assert ctl("service", "install").code == 0
    (systemd / "dead").touch()
    ctl.start()
    assert ctl.status()["daemon"]["keeper"] == "supervisord"
    told = ctl("service", "status", "--json")
    assert "does not answer" in " ".join(w["message"] for w in told.data["warnings"])
    assert ctl("service", "uninstall").code == 0
    assert not unit_file(ctl).exists()
    assert ctl("stop").code == 0
    refused = ctl("service", "install", "--json")
    assert refused.code == 5
    assert (
        f"@reboot {os.path.abspath(sys.executable)} -I -m tdai_supervisor --root {ctl.root} start"
        in refused.json["errors"][0]["hint"]
    )


def test_a_unit_of_another_root_is_left_alone(ctl: Ctl, systemd: Path, tmp_path: Path) -> None:
    """Its name is taken: install says so and touches nothing, and `start` here goes its own way."""
    other = Ctl(tmp_path / "other", ctl.home)
    other.env |= {k: ctl.env[k] for k in ("PATH", "FAKE_SYSTEMD")}
    assert other("service", "install").code == 0
    text = unit_file(ctl).read_text()
    done = ctl("service", "install", "--json")
    assert done.code == 1
    assert "another root" in done.json["errors"][0]["message"]
    assert ctl("service", "uninstall").code == 0
    assert unit_file(ctl).read_text() == text
    ctl.start()
    assert ctl.status()["daemon"]["keeper"] == "supervisord"
    assert ctl("stop").code == 0


def test_a_daemon_in_the_foreground_stays_there(ctl: Ctl, systemd: Path) -> None:
    """Somebody runs it himself: install moves nothing, and says who keeps it."""
    import subprocess

    with subprocess.Popen([*ctl.argv, "daemon"], env=ctl.env, stdin=-3, stdout=-3, stderr=-3) as daemon:
        wait_for(lambda: ctl.status()["daemon"]["running"], 10)
        done = ctl("service", "install", "--json")
        assert done.code == 0, done
        assert (done.data["keeper"], done.data["pid"]) == ("none", daemon.pid)
        assert any("kept by none" in w["message"] for w in done.data["warnings"])
        assert ctl("stop").code == 0
        daemon.wait(10)


def test_a_unit_that_cannot_start_leaves_all_as_it_was(ctl: Ctl, systemd: Path) -> None:
    """systemd refuses to start it: supervisord keeps the daemon as before, and the Gateway has noticed nothing."""
    gateway = ctl.start()["pid"]
    program = Path(ctl.env["PATH"].split(":")[0], "systemctl")
    program.write_text(
        program.read_text().replace("exec", 'case "$*" in *" start "*) echo no >&2; exit 1 ;; esac; exec', 1)
    )
    done = ctl("service", "install", "--json")
    assert done.code == 1, done
    assert "as it was" in done.json["errors"][0]["message"]
    assert not unit_file(ctl).exists()
    status = ctl.status()
    assert (status["daemon"]["keeper"], status["gateways"][0]["pid"]) == ("supervisord", gateway)
    assert ctl("stop").code == 0


def test_a_unit_that_does_not_come_up_leaves_all_as_it_was(ctl: Ctl, systemd: Path) -> None:
    """The old daemon has left for a copy that dies: another one under supervisord adopts the same Gateway."""
    gateway = ctl.start()["pid"]
    (systemd / "broken").touch()
    done = ctl("service", "install", "--json")
    assert done.code == 1, done
    assert "as it was" in done.json["errors"][0]["message"]
    assert not unit_file(ctl).exists()
    status = ctl.status()
    assert (status["daemon"]["keeper"], status["gateways"][0]["pid"]) == ("supervisord", gateway)
    assert len(keepers(ctl)) == 1
    assert ctl("stop").code == 0


INSIDE = """
from tdai_supervisor.decide import units
from tdai_supervisor.cli.main import main
units.foreign_unit = lambda _: "hermes.service"
raise SystemExit(main())
"""


def test_a_service_that_cannot_be_left_is_a_warning(ctl: Ctl) -> None:
    """Started from within a service where no systemd makes a scope: it runs, and the user is told how long."""
    argv, ctl.argv = ctl.argv, [sys.executable, "-I", "-c", INSIDE]
    done = ctl("start", "--json", env={"PATH": "/nonexistent"})
    assert done.code == 0, done
    assert "inside hermes.service" in done.data["warnings"][0]["message"]
    again = ctl("start", "--json", env={"PATH": "/nonexistent"})
    assert again.data["warnings"] == []
    ctl.argv = argv
    assert ctl("stop").code == 0


def test_without_privileges(monkeypatch: pytest.MonkeyPatch, ctl: Ctl, systemd: Path) -> None:
    """--system as a user is exit code 4, with the command for root; nothing is written."""
    program = Path(ctl.env["PATH"].split(":")[0], "systemctl")
    program.write_text('#!/bin/sh\ncase "$*" in *Version*) echo Version=252 ;; *) exit 1 ;; esac\n')
    monkeypatch.setenv("PATH", ctl.env["PATH"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    asked = Namespace(action="install", system=True, user=False, now=False, dry_run=False)
    result = service.run(ctl.root, asked)
    assert result.exit_code == 4
    hint = result.errors[0]["hint"]
    assert hint.startswith("try `sudo ")
    assert hint.endswith(f"--root {ctl.root} service install --system`")
    asked.dry_run = True
    assert service.run(ctl.root, asked).exit_code == 0
