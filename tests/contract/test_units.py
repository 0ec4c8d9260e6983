"""What systemd itself says of the units that are installed: no complaint, and how much a break-in would find."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tdai_supervisor.cli import service
from tdai_supervisor.decide import units
from tdai_supervisor.host.systemd import Unit
from tests.support.command import clean_environment

ROOTS = ["/var/lib/memory", "/srv/ro ot, 100% 'é' \"$HOME\" \\n", "/srv/" + "x" * 200]


@pytest.fixture
def analyze(tmp_path: Path) -> Mapping[str, str]:
    """An environment in which systemd-analyze finds nothing but what it is given."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    return clean_environment(tmp_path, XDG_RUNTIME_DIR=str(tmp_path))


def write(directory: Path, root: str, user: str | None) -> Path:
    """The unit as it would be installed."""
    unit = Unit(root, user)
    path = directory / unit.unit
    path.write_text(service.unit_text(unit), encoding="utf-8")
    return path


@pytest.mark.parametrize("root", ROOTS, ids=["plain", "bad", "long"])
@pytest.mark.parametrize("user", [None, "daemon"], ids=["user", "system"])
def test_systemd_has_nothing_to_say(analyze: Mapping[str, str], tmp_path: Path, root: str, user: str | None) -> None:
    """`systemd-analyze verify` of the installed text prints nothing."""
    path = write(tmp_path, root, user)
    words = ["systemd-analyze", "--user" if user is None else "--system", "--man=no", "verify", str(path)]
    done = subprocess.run(words, env=analyze, capture_output=True, text=True, timeout=15, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if path.name in line or str(tmp_path) in line]
    assert (said, done.returncode) == ([], 0), done


def test_verify_can_complain(analyze: Mapping[str, str], tmp_path: Path) -> None:
    """A setting that systemd does not know is found."""
    path = write(tmp_path, ROOTS[0], "daemon")
    path.write_text(path.read_text().replace("KillMode=process", "KillMode=nonsense\nKilMode=process"))
    words = ["systemd-analyze", "--man=no", "verify", str(path)]
    done = subprocess.run(words, env=analyze, capture_output=True, text=True, timeout=15, check=False)
    assert "kill mode" in done.stderr.lower()
    assert "KilMode" in done.stderr


def test_exposure(analyze: Mapping[str, str], tmp_path: Path) -> None:
    """`systemd-analyze security` gives the system's unit 2.0 or less."""
    path = write(tmp_path, ROOTS[0], "daemon")
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(path)]
    done = subprocess.run(words, env=analyze, capture_output=True, text=True, timeout=15, check=False)
    found = re.search(r"exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert found is not None, done
    assert float(found[1]) <= 2.0, done.stdout
    assert done.returncode == 0, done


@pytest.mark.parametrize("user", [None, "daemon"], ids=["user", "system"])
def test_what_the_unit_promises(user: str | None) -> None:
    """The settings that decide whether a Gateway survives its daemon are the ones that were meant."""
    lines = set(service.unit_text(Unit("/srv/root", user)).splitlines())
    wanted = {
        "Type=notify",
        "NotifyAccess=main",
        "KillMode=process",
        "Restart=always",
        "RestartPreventExitStatus=0 75",
        "OOMPolicy=continue",
        "UMask=0077",
        "TimeoutStopSec=30",
    }
    assert wanted <= lines
    assert not any(line.startswith("MemoryDenyWriteExecute") for line in lines)
    if user:
        assert "User=daemon" in lines


def test_a_home_that_protection_would_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """/root as the home stays writable, which `ProtectHome=read-only` would not let it."""
    account = service._account("daemon")
    homes = {"/root": "no", "/home/daemon": "read-only", "/var/lib/daemon": "read-only"}
    for home, protection in homes.items():
        changed = type(account)([*account[:5], home, account[6]])
        monkeypatch.setattr(service, "_account", lambda _, a=changed: a)
        lines = service.unit_text(Unit(f"{home}/.memory-tencentdb", "daemon")).splitlines()
        assert f"ProtectHome={protection}" in lines
        assert f'ReadWritePaths="{home}"' in lines


def test_paths_do_not_follow_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The unit names absolute paths, whatever profile, directory and home the shell is in."""
    before = service.unit_text(Unit("/srv/root", None))
    monkeypatch.setenv("HERMES_HOME", str(tmp_path / "profile"))
    monkeypatch.setenv("MEMORY_TENCENTDB_ROOT", "/elsewhere")
    monkeypatch.chdir(tmp_path)
    assert service.unit_text(Unit("/srv/root", None)) == before
    assert os.path.isabs(re.findall(r'ExecStart=:"([^"]+)"', before)[0])
    assert units.names_root(before, "/srv/root")
