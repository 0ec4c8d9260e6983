"""service install, uninstall, status: have systemd keep the daemon.

Invariants: only who keeps changes, never what runs: a daemon that lives is moved with its Gateways, and none is started
where none lived, but with --now; a unit of another root is never touched; with --dry-run nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from tdai_supervisor import client
from tdai_supervisor.cli import envelope
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.decide import paths, settings, units

if TYPE_CHECKING:
    import pwd

    from tdai_supervisor.host.systemd import Unit

HOMES = ("/home", "/root", "/run/user")  # what ProtectHome= is about; it wins over ReadWritePaths= for the same path
ASK = 2.0  # s for the daemon to say what is wanted
MOVE = 90.0  # s for the owner's process to move the daemon
_HAND_OVER = "import sys; from tdai_supervisor.cli import lifecycle; lifecycle.hand_over(sys.argv[1])"


def run(root: str, a: Namespace) -> Result:
    """The verb `service ACTION`."""
    verb = {"install": install, "uninstall": uninstall, "status": status}[a.action]
    try:
        return verb(root, a)
    except PermissionError as error:
        way = getattr(error, "command", None) or _as_root(root, a)
        message = f"cannot {a.action} the service: no permission for {error.filename or root}"
        return failure("service", "not-permitted", message, f"try `{way}`", envelope.NOT_PERMITTED)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        message = f"cannot {a.action} the service: {error}"
        return failure("service", "failed", message, "try `memory-tencentdb-ctl service status`")


def _as_root(root: str, a: Namespace) -> str:
    words = [sys.executable, "-I", "-m", "tdai_supervisor", "--root", root, "service", a.action, "--system"]
    return "sudo " + units.shell_words(words)


# -- install -----------------------------------------------------------------------------------------------------------


def install(root: str, a: Namespace) -> Result:
    """Write the unit, enable it, and have a daemon that lives move into it."""
    unit = _choose(root, a)
    if isinstance(unit, Result):
        return unit
    present = unit.text()
    if present is not None and not unit.is_installed():
        message = f"cannot install the service: {unit.file} is about another root"
        return failure("service", "other-root", message, "uninstall it with that --root first")
    text = unit_text(unit)
    if a.dry_run:
        return Result("service", {"plan": f"would write {unit.file} and enable {unit.unit}", "text": text})
    if unit.user is not None and os.geteuid() != 0:
        raise PermissionError(1, "not permitted", unit.file)
    changes = [] if present == text else [f"wrote {unit.file}"]
    _write(unit, text)
    unit.do("daemon-reload")
    unit.do("enable", unit.unit)
    about = unit.show("LoadState", "FragmentPath")
    if about.get("LoadState") != "loaded" or not _same_file(about.get("FragmentPath", ""), unit.file):
        message = f"cannot install the service: {unit.name} does not see {unit.file} ({about})"
        return failure("service", "not-seen", message, "try with the HOME that this systemd has")
    changes.append(f"enabled {unit.unit}: it starts with the {'machine' if unit.user else 'first login'}")
    try:
        _hand_over(root, unit)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _remove(unit)
        _hand_over(root, None)
        message = f"cannot move the daemon to {unit.unit}: {error}; it is as it was before"
        return failure(
            "service", "not-moved", message, f"try `journalctl {'' if unit.user else '--user '}-u {unit.unit}`"
        )
    if a.now and client.daemon_process(root) is None:
        unit.do("start", unit.unit, timeout=MOVE)
        changes.append(f"started {unit.unit}")
    return _described(root, changes)


def _choose(root: str, a: Namespace) -> Unit | Result:
    """The unit that is meant, or why there is none."""
    from tdai_supervisor.host import systemd

    own, system = systemd.Unit(root, None), systemd.Unit(root, systemd.owner_of(root))
    if a.system or (not a.user and os.geteuid() == 0 and not own.answers()):
        if system.answers():
            return system
    elif own.answers():
        return own
    elif system.answers():
        user = systemd.user_name()
        message = f"cannot install the service: the systemd of {user} does not answer"
        hint = f"try `sudo loginctl enable-linger {user}` and again, or `{_as_root(root, a)}`"
        return failure("service", "no-user-systemd", message, hint, envelope.NOT_INSTALLED)
    line = units.crontab_line([os.path.abspath(sys.executable), "-I", "-m", "tdai_supervisor", "--root", root, "start"])
    message = "cannot install the service: no systemd answers"
    hint = f"supervisord keeps the daemon; to have it after a reboot, add to `crontab -e`: {line}"
    return failure("service", "no-systemd", message, hint, envelope.NOT_INSTALLED)


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def unit_text(unit: Unit) -> str:
    """What is installed: the template with every path absolute. Raises SettingsError, OSError without a template."""
    words = {
        "ROOT": unit.root,
        "PYTHON": os.path.abspath(sys.executable),
        "PATH": os.environ.get("PATH") or units.DEFAULT_PATH,
        "USER": unit.user or "",
    }
    writable = [unit.root]
    if unit.user is not None:
        account = _account(unit.user)
        home = account.pw_dir
        words["CAPABILITIES"] = "" if account.pw_uid else "CAP_SYS_PTRACE"
        words["PROTECTHOME"] = "no" if os.path.normpath(home) in HOMES else "read-only"
        text = client.read_text_whole(paths.settings(unit.root)) or ""
        gateways = settings.load(unit.root, text, {"HOME": home}, os.path.exists).gateways.values()
        # systemd refuses to start a unit with a directory that is missing, unless it is told so.
        writable += [home, *(d for g in gateways for d in (g.data_dir, g.log_dir) if os.path.isdir(d))]
    return units.render(template(unit), words, writable)


def _account(name: str) -> pwd.struct_passwd:
    """Who that is. Raises OSError where nobody knows him."""
    import pwd

    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise OSError(f"there is no user {name} to run the daemon as") from None


def template(unit: Unit) -> str:
    """The template of a unit: in the installed package, or beside it in a checkout."""
    name = f"{units.NAME}.service" if unit.user is None else f"{units.NAME}@.service"
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for directory in (os.path.join(package, "units"), os.path.join(os.path.dirname(package), "systemd")):
        text = client.read_text_whole(os.path.join(directory, name))
        if text is not None:
            return text
    raise OSError(f"this installation lacks {name}; install it again")


def _write(unit: Unit, text: str) -> None:
    from tdai_supervisor.host import disk

    if unit.user is not None and not os.path.isdir(unit.root):
        # The unit's own process could not make it: all but what exists is read-only to it.
        owner = _account(unit.user)
        disk.private_dir(unit.root)
        os.chown(unit.root, owner.pw_uid, owner.pw_gid)
    os.makedirs(os.path.dirname(unit.file), mode=0o755, exist_ok=True)
    disk.write(unit.file, text, durable=True)
    os.chmod(unit.file, 0o644)


def _hand_over(root: str, unit: Unit | None) -> None:
    """Move a daemon that lives, as the user whose it is. unit: the one to move to, which only we may start."""
    from tdai_supervisor.cli import lifecycle
    from tdai_supervisor.host import systemd

    about = client.daemon_process(root)
    if about is None:
        return
    name = systemd.owner_of(root)
    if name == systemd.user_name():
        lifecycle.hand_over(root)
        return
    owner = _account(name)
    if unit is not None and about.get("keeper") not in ("none", unit.name):
        unit.bring_up({}, 0)
    done = subprocess.run(
        [sys.executable, "-I", "-c", _HAND_OVER, root],
        env={"HOME": owner.pw_dir, "USER": name, "LOGNAME": name, "PATH": os.environ.get("PATH", units.DEFAULT_PATH)},
        cwd="/",
        user=owner.pw_uid,
        group=owner.pw_gid,
        extra_groups=os.getgrouplist(name, owner.pw_gid),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MOVE,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])


# -- uninstall ---------------------------------------------------------------------------------------------------------


def uninstall(root: str, a: Namespace) -> Result:
    """Remove the unit; a daemon that lives and has something to do goes on under supervisord."""
    from tdai_supervisor.host import systemd

    found = [u for u in systemd.installed(root) if not (a.user and u.user) and not (a.system and u.user is None)]
    if a.dry_run:
        return Result("service", {"plan": "; ".join(f"would remove {u.file}" for u in found) or "nothing is installed"})
    for unit in found:
        if unit.user is not None and os.geteuid() != 0:
            raise PermissionError(1, "not permitted", unit.file)
        _remove(unit, last=_wanted(root))
    return _described(root, [f"removed {unit.file}" for unit in found])


def _wanted(root: str) -> bool:
    """Whether a daemon lives here that wants a Gateway up."""
    with contextlib.suppress(client.NotRunningError, client.NoAnswerError):
        return any(g["want"] == "up" for g in client.request(root, "status", ASK)["data"]["gateways"])
    return False


def _remove(unit: Unit, *, last: bool = False) -> None:
    """Disable the unit and remove its file; last: its daemon is moved to the next keeper before it is stopped."""
    answers = unit.answers()
    if answers:
        unit.ask("disable", unit.unit)
    for target in ("default.target", "multi-user.target"):  # where nobody answers who would disable it
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(os.path.dirname(unit.file), f"{target}.wants", unit.unit))
    os.unlink(unit.file)
    if last:
        _hand_over(unit.root, None)
    if answers:
        unit.end()
        unit.ask("reset-failed", unit.unit)
        unit.do("daemon-reload")


# -- status ------------------------------------------------------------------------------------------------------------


def status(root: str, a: Namespace) -> Result:
    """Who keeps the daemon, what is installed for it, and what is missing; exit code 5 where no unit is installed."""
    result = _described(root, [])
    if result.data["units"]:
        return result
    message = "no unit is installed for this root"
    hint = "try `memory-tencentdb-ctl service install`"
    return result.but(
        exit_code=envelope.NOT_INSTALLED, errors=[{"code": "not-installed", "message": message, "hint": hint}]
    )


def warnings(root: str) -> list[str]:
    """What is not as it should be with the units of this root, each with its way out; nothing where none is installed.

    Each reads "fact; try `command`".
    """
    return [warning["message"] for warning in _described(root, []).data["warnings"]]


def _described(root: str, changes: list[str]) -> Result:
    from tdai_supervisor.host import systemd

    about = client.daemon_process(root) or {}
    data: dict[str, Any] = {
        "keeper": about.get("keeper", "none"),
        "pid": about.get("pid"),
        "root": root,
        "units": [_unit(unit) for unit in systemd.installed(root)],
        "linger": systemd.lingers(systemd.owner_of(root)),
        "changes": changes,
    }
    data["warnings"] = [{"code": "service", "message": w, "hint": None} for w in _warnings(data, root)]
    return Result("service", data)


def _unit(unit: Unit) -> dict[str, Any]:
    names = ("ActiveState", "SubState", "UnitFileState", "MainPID", "NRestarts", "Result")
    seen = unit.show(*names)
    text, current = unit.text() or "", None
    with contextlib.suppress(OSError, KeyError, ValueError):
        current = unit_text(unit)
    return {
        "keeper": unit.name,
        "unit": unit.unit,
        "file": unit.file,
        "user": unit.user,
        "answers": bool(seen),
        "active": seen.get("ActiveState"),
        "state": seen.get("SubState"),
        "enabled": seen.get("UnitFileState") == "enabled" if seen else None,
        "pid": int(seen.get("MainPID") or 0) or None,
        "restarts": int(seen.get("NRestarts") or 0),
        "result": seen.get("Result"),
        "current": _without_path(text) == _without_path(current or ""),
    }


def _without_path(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith('Environment="PATH=')]


def _warnings(data: dict[str, Any], root: str) -> list[str]:
    from tdai_supervisor.host import systemd

    found, user = [], systemd.owner_of(root)
    for unit in data["units"]:
        if unit["user"] is None and not data["linger"]:
            found.append(
                f"{unit['unit']} ends when {user} logs out and does not start with the machine; "
                f"try `loginctl enable-linger {user}`"
            )
        if not unit["answers"]:
            found.append(f"the systemd that has {unit['unit']} does not answer; try `memory-tencentdb-ctl start`")
            continue
        if not unit["enabled"]:
            found.append(f"{unit['unit']} is not enabled; try `memory-tencentdb-ctl service install`")
        if unit["active"] == "failed":
            found.append(f"{unit['unit']} has failed ({unit['result']}); try `memory-tencentdb-ctl start`")
        if not unit["current"]:
            found.append(
                f"{unit['file']} is not what this version installs; try `memory-tencentdb-ctl service install`"
            )
        if data["pid"] is not None and data["keeper"] != unit["keeper"]:
            found.append(
                f"the daemon is kept by {data['keeper']}, not by {unit['unit']}; "
                "try `memory-tencentdb-ctl service install`"
            )
    return found
