"""systemd as the keeper: our unit in a user's own systemd, or in the system's.

Invariants: a unit is ours for a root only if its file names that root; systemd is asked with what it needs to be found,
whatever the caller's shell lacks (XDG_RUNTIME_DIR, a session bus); no question waits for a password or for ever.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tdai_supervisor.decide import units

SYSTEM_UNITS = "/etc/systemd/system"
PATIENCE = 10.0  # s for an answer of systemctl
STOPPING = 45.0  # s for a unit to stop: TimeoutStopSec, KILL, and what ExecStopPost does then
NOTICED = 2.0  # s within which systemd has seen that a daemon exited
_DENIED = ("authentication", "access denied", "permission denied", "not permitted")


class PrivilegeError(PermissionError):
    """Only another user may do that; `command` is what he would run."""

    def __init__(self, unit: str, command: str) -> None:
        super().__init__(1, f"only root may change the unit {unit}", unit)
        self.command = command


@dataclass(frozen=True)
class Unit:
    """Our unit for one root. user: whose daemon the system's systemd keeps; None for that user's own systemd."""

    root: str
    user: str | None

    @property
    def name(self) -> str:
        """The keeper's name."""
        return "systemd-user" if self.user is None else "systemd-system"

    @property
    def unit(self) -> str:
        """The name of the unit."""
        return units.unit_name(self.user)

    @property
    def file(self) -> str:
        """Where the unit is installed."""
        directory = os.path.expanduser("~/.config/systemd/user") if self.user is None else SYSTEM_UNITS
        return os.path.join(directory, self.unit)

    def text(self) -> str | None:
        """The installed unit, or None where there is none."""
        try:
            with open(self.file, encoding="utf-8", errors="surrogateescape") as file:
                return file.read(1024 * 1024)
        except OSError:
            return None

    def is_installed(self) -> bool:
        """Whether the unit is there for this root."""
        text = self.text()
        return text is not None and units.names_root(text, self.root)

    def command(self, *words: str) -> list[str]:
        """systemctl, for the systemd that this unit is of."""
        return ["systemctl", *(["--user"] if self.user is None else []), "--no-ask-password", *words]

    def ask(self, *words: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Run systemctl to its end. Raises OSError where there is none, SubprocessError where it does not answer."""
        return subprocess.run(
            self.command(*words),
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )

    def do(self, *words: str, timeout: float = PATIENCE) -> None:
        """The same, for what must work. Raises PrivilegeError, or SubprocessError with what it said."""
        done = self.ask(*words, timeout=timeout)
        if done.returncode == 0:
            return
        said = done.stderr.strip() or "it said nothing"
        if self.user is not None and os.geteuid() != 0 and any(word in said.lower() for word in _DENIED):
            raise PrivilegeError(self.unit, f"sudo systemctl {' '.join(w for w in words if w[0] != '-')}")
        raise subprocess.SubprocessError(f"systemctl {' '.join(words)}: {said}")

    def answers(self) -> bool:
        """Whether the systemd of this unit is there."""
        try:
            return self.ask("show", "--property=Version").returncode == 0
        except (OSError, subprocess.SubprocessError):
            return False

    def show(self, *properties: str) -> dict[str, str]:
        """Properties of the unit; empty where systemd does not answer."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = self.ask("show", self.unit, "--property=" + ",".join(properties))
            return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        return {}

    def _state(self) -> str:
        """active, reloading, activating, deactivating, or idle: not running, and no job that would change that."""
        about = self.show("ActiveState", "Job")
        state = about.get("ActiveState", "")
        if state not in ("inactive", "failed", ""):
            return state
        return "idle" if about.get("Job", "0") in ("", "0") else "activating"

    def lives(self) -> bool:
        """Whether the unit runs, or systemd is about to start it: a job, or the pause after a crash."""
        return self._state() not in ("idle", "deactivating")

    def bring_up(self, env: Mapping[str, str], stop_wait: float) -> str | None:
        """Start the unit; a limit on its starts that it ran into is forgotten. It has an environment of its own."""
        if self.show("ActiveState").get("ActiveState") == "failed":
            try:
                self.do("reset-failed", self.unit)
            except PrivilegeError as error:
                error.command += f" && sudo systemctl start {self.unit}"
                raise
        # Not waited for: a copy that waits for the lock is READY only when the daemon that has it leaves.
        self.do("start", "--no-block", self.unit)
        return None

    def end(self, *, at_once: bool = False) -> bool:
        """Stop the unit; whether it is stopped. One whose daemon has just left needs no privilege to be seen gone."""
        if self.user is not None and os.geteuid() != 0:
            deadline = time.monotonic() + NOTICED
            while self._state() != "idle" and time.monotonic() < deadline:
                time.sleep(0.02)
        if self._state() == "idle":
            return True
        if at_once:
            # KILL first: TERM would wake a stopped daemon for long enough to begin what is then done again.
            self.ask("kill", "--signal=KILL", "--kill-who=main", self.unit)
        self.do("stop", self.unit, timeout=STOPPING)
        return self._state() == "idle"


def environment() -> dict[str, str]:
    """Ours, with what systemctl needs, whatever the shell says of it."""
    return {**os.environ, "LC_ALL": "C", **runtime()}


def runtime() -> dict[str, str]:
    """XDG_RUNTIME_DIR, by which our user's systemd is found; empty where it does not listen."""
    directory = f"/run/user/{os.geteuid()}"
    return {"XDG_RUNTIME_DIR": directory} if os.path.exists(f"{directory}/systemd/private") else {}


def user_name(uid: int | None = None) -> str:
    """The name of a user (ours by default), or his number where nobody knows him."""
    number = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def owner_of(root: str) -> str:
    """The user whose root it is: its owner, or the owner of where it will be made."""
    while not os.path.exists(root) and root != "/":
        root = os.path.dirname(root)
    return user_name(os.stat(root).st_uid)


def installed(root: str) -> list[Unit]:
    """Our units that are installed for this root, a user's own first."""
    return [unit for unit in (Unit(root, None), Unit(root, owner_of(root))) if unit.is_installed()]


def lingers(user: str) -> bool:
    """Whether a user's own systemd runs without a login."""
    return os.path.exists(f"/var/lib/systemd/linger/{user}")


def detachment() -> tuple[list[str], str | None]:
    """Words that start something outside the service we run in, and that service: both empty where we are in none.

    Where no systemd takes it, the words are empty and the service is named: what is started ends with it.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            service = units.foreign_unit(file.read())
    except OSError:
        service = None
    if service is None:
        return [], None
    scope = ["systemd-run", *([] if os.geteuid() == 0 else ["--user"]), "--scope", "--quiet", "--collect"]
    try:
        done = subprocess.run(
            [*scope, "true"], env=environment(), stdin=-3, stdout=-3, stderr=-3, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return [], service
    return (scope, None) if done.returncode == 0 else ([], service)
