"""Verbs that change what runs: start, stop, restart, daemon.

Invariants: one keeper and one daemon per root, however many call at once; a living keeper or daemon is used, never
doubled; `stop` starts nothing, and is done only when tree, lease and port are free.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from tdai_supervisor import client
from tdai_supervisor.cli import envelope
from tdai_supervisor.cli.envelope import Result, failure, from_reply
from tdai_supervisor.decide import checks, paths, settings

if TYPE_CHECKING:
    from tdai_supervisor.host.keepers import Keeper

DAEMON_WAIT = 20.0  # s for a daemon to answer once its keeper is up
STUCK = 5.0  # s of silence after which `stop` ends a daemon that holds the lock
LONG = 24 * 3600.0  # s: the daemon itself bounds how long a verb takes


def start(root: str, name: str | None, *, wait: bool, timeout: float | None, take_over: bool) -> Result:
    """Have the Gateway(s) run; returns when READY or with why not."""
    warned = None
    try:
        owner = _daemon(root)
        if owner is None or owner.get("keeper_gone"):
            warned = bring_up(root)
    except checks.SettingsError as error:
        return failure("start", "settings", str(error), "fix supervisor.toml in the root", envelope.NOT_CONFIGURED)
    except PermissionError as error:
        return _not_permitted("start", root, error)
    except (OSError, RuntimeError) as error:
        return failure(
            "start", "no-daemon", f"cannot start the daemon: {error}", f"try `tail {paths.daemon_log(root)}`"
        )
    arguments: dict[str, Any] = {"name": name, "wait": wait, "take_over": take_over}
    if timeout is not None:
        arguments["timeout"] = timeout
    result = _ask("start", root, "start", **arguments)
    if warned and isinstance(result.data, dict):
        result.data.setdefault("warnings", []).append({"code": "keeper", "message": warned, "hint": None})
    return _named_unknown(root, result)


def restart(root: str, name: str | None, *, daemon: bool, timeout: float | None) -> Result:
    """End and start the Gateway(s) in one request; with daemon=True re-exec the daemon instead."""
    try:
        running = _daemon(root)
    except PermissionError as error:
        return _not_permitted("restart", root, error)
    if running is None:
        if daemon:
            message = "cannot restart the daemon: none is running"
            return failure("restart", "not-running", message, "try `memory-tencentdb-ctl start`", envelope.NOT_RUNNING)
        return start(root, name, wait=True, timeout=timeout, take_over=False).but(command="restart")
    if daemon:
        return _restart_daemon(root)
    return _named_unknown(root, _ask("restart", root, "restart", name=name, timeout=timeout))


def _named_unknown(root: str, result: Result) -> Result:
    """The result, with a warning where this shell says what the daemon does not run by: it is never taken silently."""
    from tdai_supervisor.cli import config

    unknown = config.unknown_to_daemon(root)
    if result.data is not None and unknown:
        message = f"set in this shell, unknown to the daemon: {', '.join(unknown)}"
        hint = "try `memory-tencentdb-ctl config import-env`, or stop and start"
        result.data.setdefault("warnings", []).append({"code": "unknown-to-daemon", "message": message, "hint": hint})
    return result


def _restart_daemon(root: str) -> Result:
    tested = _self_test()
    if tested is not None:
        hint = "the running daemon was left alone"
        return failure("restart", "self-test", f"cannot restart the daemon: the new code failed: {tested}", hint)
    before = client.request(root, "ping", STUCK)["data"]
    result = _ask("restart", root, "reload")
    if result.exit_code:
        return result
    deadline = time.monotonic() + DAEMON_WAIT
    while time.monotonic() < deadline:
        with contextlib.suppress(client.NotRunningError, client.NoAnswerError):
            after = client.request(root, "ping", 1.0)["data"]
            if after["started_at"] != before["started_at"]:
                return Result("restart", client.request(root, "status", STUCK)["data"])
        time.sleep(0.02)
    return failure("restart", "no-daemon", f"cannot see the daemon again after {DAEMON_WAIT:g} s")


def _self_test() -> str | None:
    """Whether this installation can run the daemon at all; what it said if not."""
    import subprocess
    import sys

    test = [sys.executable, "-I", "-c", "import tdai_supervisor.engine.entry"]
    done = subprocess.run(test, capture_output=True, text=True, timeout=30, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


def _daemon(root: str) -> dict[str, Any] | None:
    """The living daemon's description, or None where nobody listens. A silent one is waited for."""
    try:
        found: dict[str, Any] = client.request(root, "ping", STUCK)["data"]
    except client.NotRunningError:
        return None
    except client.NoAnswerError as error:
        about = client.daemon_process(root)
        if about is None:
            return None  # it went away while we asked
        raise RuntimeError(
            f"the daemon pid {about['pid']} does not answer ({error}); try `memory-tencentdb-ctl stop`"
        ) from None
    return found


def bring_up(root: str) -> str | None:
    """Under the keeper lock: a keeper, and through it a daemon that answers. What the user should be warned of.

    Raises OSError or RuntimeError.
    """
    from tdai_supervisor.host import disk, keepers, locks

    disk.private_dir(root)
    with locks.keeper_lock(root):
        owner = _daemon(root)
        if owner is not None and not owner.get("keeper_gone"):
            return None  # somebody else was faster
        text = disk.read(paths.settings(root)) or ""
        chosen = settings.load(root, text, os.environ, os.path.exists)
        if owner is None:
            own = {k: v for k, v in os.environ.items() if settings.ENVIRONMENT_NAMES.fullmatch(k)}
            names = _fragments() | own
            disk.write(paths.environment(root), json.dumps(names) + "\n", durable=False)
        return _keep(root, keepers.of(root), owner, sum(g.kill_delay for g in chosen.gateways.values()) + 10)


def _keep(root: str, keeper: Keeper, owner: dict[str, Any] | None, stop_wait: float) -> str | None:
    """Have keeper keep the daemon; an owner that lives without it leaves. What the user should be warned of."""
    import subprocess

    warned = None
    others = {k: v for k, v in os.environ.items() if not settings.ENVIRONMENT_NAMES.fullmatch(k)}
    foreign = owner is not None and not owner["keeper_gone"] and owner["keeper"] != keeper.name
    if not keeper.lives():
        try:
            warned = keeper.bring_up(others, stop_wait)
        except subprocess.SubprocessError as error:
            raise RuntimeError(str(error)) from None
        foreign = owner is not None
    if foreign:
        # The kept copy waits for the lock; the unkept daemon leaves it to it, and no Gateway notices.
        client.request(root, "leave", STUCK)
    _wait_for_daemon(root, keeper, owner["pid"] if owner else None)
    return warned


def hand_over(root: str) -> str | None:
    """Have the daemon that lives kept by the keeper that is installed now; its name, or None where nothing moved.

    No Gateway notices. One that runs in the foreground is somebody's own and stays. Raises OSError or RuntimeError.
    """
    from tdai_supervisor.host import keepers, locks

    with locks.keeper_lock(root):
        owner, keeper = _daemon(root), keepers.of(root)
        if owner is None or owner["keeper"] == keeper.name or (owner["keeper"] == "none" and not owner["keeper_gone"]):
            return None
        chosen = client.configured(root)
        stop_wait = sum(g.kill_delay for g in chosen.gateways.values()) + 10
        try:
            _keep(root, keeper, owner, stop_wait)
        except (OSError, RuntimeError):
            _put_back(root, keeper, stop_wait)
            raise
        for other in keepers.every(root):
            if other.name != keeper.name:
                other.end()
    return keeper.name


FRAGMENTS = ("/etc/profile.d/memory-tencentdb-env.sh", "/etc/profile.d/hermes-env.sh")


def _fragments() -> dict[str, str]:
    """What the shell files of today's installer export: below what the caller's own environment says."""
    home = os.path.expanduser(os.environ.get("HERMES_HOME", "").strip() or "~/.hermes")
    files = [*FRAGMENTS, os.path.join(home, "env.d", "memory-tencentdb-llm.sh")]
    return {k: v for path in files for k, v in settings.shell_exports(client.read_text_whole(path) or "").items()}


def _put_back(root: str, failed: Keeper, stop_wait: float) -> None:
    """After a move that failed: who kept before keeps again, where the daemon has left already."""
    import subprocess

    from tdai_supervisor.host import keepers

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        failed.end(at_once=True)
    before = next((keeper for keeper in keepers.every(root) if keeper.name != failed.name), None)
    if before is not None and _daemon(root) is None:
        before.end()  # it counts the daemon that left as done
        _keep(root, before, None, stop_wait)


def _wait_for_daemon(root: str, keeper: Keeper, old: int | None) -> None:
    deadline = time.monotonic() + DAEMON_WAIT
    while time.monotonic() < deadline:
        with contextlib.suppress(client.NotRunningError, client.NoAnswerError):
            if client.request(root, "ping", 1.0)["data"]["pid"] != old:
                return
        if not keeper.lives():
            raise RuntimeError(f"its keeper, {keeper.name}, went away")
        time.sleep(0.01)
    raise RuntimeError(f"it does not answer within {DAEMON_WAIT:g} s")


def stop(root: str, name: str | None) -> Result:
    """End one Gateway, or all of them and then daemon and keeper. Starts nothing."""
    import subprocess

    if not os.path.isdir(paths.run(root)):
        return _nothing_to_stop(root, name)
    try:
        return _stop(root, name)
    except PermissionError as error:
        return _not_permitted("stop", root, error)
    except subprocess.SubprocessError as error:
        return failure("stop", "keeper", f"cannot end the keeper: {error}", "try `memory-tencentdb-ctl service status`")


def _stop(root: str, name: str | None) -> Result:
    try:
        _daemon(root)
        about = client.daemon_process(root)
        result = _ask("stop", root, "stop", name=name, leave=name is None)
        if name is not None or result.exit_code:
            return result
        return _end_keeper(root, about, result)
    except RuntimeError:
        return _stop_without_daemon(root, name, stuck=True)
    except _GoneError:
        return _stop_without_daemon(root, name, stuck=False)


def _nothing_to_stop(root: str, name: str | None) -> Result:
    from tdai_supervisor.cli import observe

    seen = observe.status(root, name)
    if seen.data is None:
        return seen.but(command="stop")
    return Result("stop", seen.data)


def _end_keeper(root: str, about: dict[str, Any] | None, result: Result) -> Result:
    """After the daemon has been told to go: the keeper goes too, then both are gone."""
    from tdai_supervisor.host import keepers, locks

    with locks.keeper_lock(root):
        # The daemon leaves by itself (exit 0); a keeper told earlier would TERM it once more.
        deadline = time.monotonic() + STUCK
        while about is not None and _lives(about) and time.monotonic() < deadline:
            time.sleep(0.005)
        stuck = [keeper.name for keeper in keepers.every(root) if not keeper.end()]
        if stuck:
            return failure("stop", "keeper", f"cannot end the keeper: {', '.join(stuck)} does not go")
    data = {**result.data, "daemon": {**result.data["daemon"], "running": False, "pid": None, "keeper": "none"}}
    return result.but(data=data)


def _lives(about: dict[str, Any]) -> bool:
    """Whether the daemon that this pidfile named still runs; it takes the file away before it exits."""
    return client.process_state(about["pid"], about["start_ticks"]) not in (None, "Z", "X")


def _end_stuck_daemon(root: str) -> None:
    """A daemon that holds the lock and has not answered for 5 s is ended, by identity, before anything else."""
    from tdai_supervisor.host.process import Process

    about = client.daemon_process(root)
    held = Process.open(about["pid"]) if about else None
    if held is None or about is None or held.identity.ticks != about["start_ticks"]:
        return
    held.signal(signal.SIGKILL)
    deadline = time.monotonic() + STUCK
    while held.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    held.close()


def _stop_without_daemon(root: str, name: str | None, *, stuck: bool) -> Result:
    """No daemon answers: the keeper first (it would bring one back), then the same engine once, under the lock."""
    from tdai_supervisor.host import keepers, locks

    if name is None or stuck:
        with locks.keeper_lock(root):
            for keeper in keepers.every(root):
                keeper.end(at_once=stuck)
    if stuck:
        _end_stuck_daemon(root)
    from tdai_supervisor.engine import entry

    try:
        done = entry.stop_once(root, name, entry.environment(root, "none"), STUCK)
    except checks.SettingsError as error:
        return failure("stop", "settings", str(error), None, envelope.NOT_CONFIGURED)
    if isinstance(done, int):
        message = "cannot stop: another daemon took over meanwhile"
        return failure("stop", "held", message, "try again", envelope.HELD)
    result = from_reply("stop", done)
    if result.data:
        result.data["daemon"] |= {"running": False, "pid": None}
    return result


class _GoneError(Exception):
    """The daemon is not there (any more)."""


def _ask(command: str, root: str, verb: str, **arguments: Any) -> Result:
    try:
        return from_reply(command, client.request(root, verb, LONG, **arguments))
    except client.NotRunningError:
        if verb == "stop":
            raise _GoneError from None
        return failure(command, "not-running", f"cannot {command}: the daemon went away", "try again", envelope.FAILED)
    except client.NoAnswerError as error:
        if verb == "stop":
            raise _GoneError from None
        return failure(command, "no-answer", f"cannot {command}: {error}", "try `memory-tencentdb-ctl status`")


def _not_permitted(command: str, root: str, error: PermissionError) -> Result:
    message = f"cannot {command}: no permission for {error.filename or root} ({error.strerror or error})"
    way = getattr(error, "command", None)
    hint = f"try `{way}`" if way else "try as the user who owns it"
    return failure(command, "not-permitted", message, hint, envelope.NOT_PERMITTED)


def sweep(root: str) -> Result:
    """End the Gateways that a daemon left when it was killed instead of stopping; what is wanted stays wanted.

    Run by the keeper, whose next daemon starts them again. One that owns the root meanwhile is left alone.
    """
    from tdai_supervisor.engine import entry

    done = entry.stop_once(root, None, entry.environment(root, "systemd-user"), 0.0, keep_want=True)
    if isinstance(done, int):
        return Result("daemon", None, envelope.OK if done == envelope.HELD else done)
    return from_reply("daemon", done)


def daemon(root: str, keeper: str) -> Result:
    """Run the daemon in this process, until it is told to go."""
    from tdai_supervisor.engine import entry

    try:
        code, why = entry.main(root, keeper)
    except PermissionError as error:
        return _not_permitted("run the daemon", root, error).but(command="daemon")
    except OSError as error:
        message = f"cannot run the daemon: {error.filename or root}: {error.strerror or error}"
        return failure("daemon", "no-root", message, "try another --root")
    if code:
        return failure("daemon", "held" if code == envelope.HELD else "failed", why or "", None, code)
    return Result("daemon")
