"""Verbs that look: status, health, logs, version. They never start, signal or write anything.

Invariants: `status` answers within 2 s in every broken state and, with a living daemon, imports neither asyncio nor
psutil nor filelock.
"""

from __future__ import annotations

import os
import time

from tdai_supervisor import __version__, client
from tdai_supervisor.cli import envelope
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.decide import paths

TYPE_CHECKING = False  # typing itself costs 3 of the 50 ms that `status` may take
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from tdai_supervisor.decide.settings import GatewaySettings, Settings

PATIENCE = 1.5  # s for the daemon's answer, of the 2 s that `status` may take


def status(root: str, name: str | None) -> Result:
    """The state of every Gateway (or of one); see the exit codes of the contract."""
    errors: list[dict[str, Any]] = []
    try:
        data = client.request(root, "status", PATIENCE)["data"]
        answered = True
    except client.NotRunningError:
        data, answered = offline(root), True
    except (client.NoAnswerError, ValueError) as error:
        data, answered = offline(root), False
        errors.append(_silent(data, error))
    except PermissionError:
        message = f"cannot ask the daemon of {root}: it belongs to another user"
        return failure("status", "not-permitted", message, "try as that user", envelope.NOT_PERMITTED)
    if name is not None:
        chosen = [g for g in data["gateways"] if g["name"] == name]
        if not chosen:
            known = ", ".join(g["name"] for g in data["gateways"])
            message = f"cannot find a Gateway named {name!r}: configured are {known}"
            return failure("status", "unknown-name", message, None, envelope.UNKNOWN)
        data["gateways"] = chosen
    return Result("status", data, status_code(data, answered), errors)


def status_code(data: dict[str, Any], answered: bool) -> int:
    """0 every wanted Gateway READY, 1 one is not (or is wanted without a daemon), 3 none wanted, 4 no answer."""
    if not answered:
        return envelope.UNKNOWN
    wanted = [g for g in data["gateways"] if g["want"] == "up"]
    if not wanted:
        return envelope.STOPPED
    ready = data["daemon"]["running"] and all(g["state"] == "READY" for g in wanted)
    return envelope.OK if ready else envelope.FAILED


def _silent(data: dict[str, Any], error: Exception) -> dict[str, Any]:
    pid, state = data["daemon"]["pid"], data["daemon"].get("state")
    what = "is stopped by a signal" if state in ("T", "t") else "does not answer"
    message = f"cannot ask the daemon{f' pid {pid}' if pid else ''}: it {what} ({error})"
    hint = f"kill -CONT {pid}" if state == "T" else "memory-tencentdb-ctl stop && memory-tencentdb-ctl start"
    return {"code": "no-answer", "message": message, "hint": f"try `{hint}`"}


def offline(root: str) -> dict[str, Any]:
    """status data where no daemon answers: from the settings, the wants and the records it left."""
    about = client.daemon_process(root)
    daemon = {
        "running": about is not None,
        "pid": about["pid"] if about else None,
        "version": about.get("version") if about else None,
        "keeper": about.get("keeper", "none") if about else "none",
        "started_at": about.get("started_at") if about else None,
        "state": about.get("state") if about else None,
        "trouble": None,
        "failed_writes": 0,
    }
    found, daemon["trouble"] = configured(root)
    now = {"node": _package_version(found.install_dir), "embedded": __version__}
    return {
        "daemon": daemon,
        "root": root,
        "gateways": [_from_record(root, g, about is not None, now) for g in found.gateways.values()],
        "attachments": client.attachments(root),
        "spools": None,  # only the daemon keeps a view of them; `spool list` looks for itself
    }


def configured(root: str) -> tuple[Settings, str | None]:
    """The settings, see client.configured, and what is wrong with supervisor.toml, if anything."""
    from tdai_supervisor.decide import checks, settings

    try:
        return client.configured(root), None
    except checks.SettingsError as error:
        return settings.load(root, "", {}), str(error)


def _package_version(install_dir: str) -> str | None:
    """The version of the npm package in a directory, or None."""
    places = (os.path.join(install_dir, p, "package.json") for p in ("", "MemoryCore"))
    return next((about.get("version") for about in map(client.read_object, places) if about), None)


def _from_record(
    root: str, settings: GatewaySettings, daemon_alive: bool, installed: dict[str, str | None]
) -> dict[str, Any]:
    name = settings.name
    record = client.read_object(paths.record(root, name)) or {}
    alive = client.record_process_lives(record)
    state, cause = record.get("state"), record.get("cause")
    if not alive:
        state, cause = "STOPPED", "no daemon, no process"
    elif not daemon_alive:
        cause = "no daemon: the Gateway runs without an owner until `memory-tencentdb-ctl start`"
    port = settings.port or record.get("port")
    host = record.get("host") or settings.host
    kind = record.get("kind") or settings.kind
    return {
        "name": name,
        "want": client.read_text(paths.want(root, name)) or "down",
        "state": state or "STOPPED",
        "origin": record.get("origin") if alive else None,
        "kind": kind,
        "kind_cause": None,
        "version": {"running": record.get("version") if alive else None, "installed": installed.get(kind)},
        "pid": record.get("pid") if alive else None,
        "host": host,
        "port": record.get("port") if alive else port,
        "url": record.get("url") if alive else client.url(host, port),
        "data_dir": settings.data_dir,
        "config_file": settings.config_file,
        "since": record.get("since"),
        "cause": cause,
        "restarts": record.get("restarts") or 0,
        "last_exit": None,
        "backoff_s": None,
        "health": {
            "status": None,
            "latency_ms": None,
            "generation": record.get("generation") if alive else None,
            "slow": False,
            "failure": None,
        },
        "hold": record.get("hold") if alive else None,
        "drift": [],
        "memory_bytes": None,
        "profiles": [],
        "guards": None,
        "logs": {s: os.path.join(settings.log_dir, f"gateway.{s}.log") for s in ("stdout", "stderr")},
    }


def health(root: str, name: str | None) -> Result:
    """Whether every wanted Gateway (or one) may receive: 0 ok, 1 not ok, 7 not running."""
    seen = status(root, name)
    if seen.data is None or seen.exit_code == envelope.UNKNOWN:
        return seen.but(command="health", exit_code=envelope.FAILED)
    gateways = seen.data["gateways"]
    wanted = [g for g in gateways if g["want"] == "up" or name is not None]
    running = [g for g in wanted if g["pid"] is not None]
    errors = list(seen.errors)
    for g in wanted:
        if g["state"] != "READY":
            message = f"Gateway {g['name']} is {g['state']}: {g['cause']}"
            errors.append({"code": str(g["state"]).lower(), "message": message, "hint": None})
    if not running:
        return Result("health", {"gateways": gateways}, envelope.NOT_RUNNING, errors)
    for g in running:
        started = time.monotonic()
        problem = client.probe(g["host"], g["port"], PATIENCE)
        g["health"]["latency_ms"] = round((time.monotonic() - started) * 1000, 1)
        if problem and g["state"] == "READY":
            message = f"Gateway {g['name']} does not answer at {g['url']}: {problem}"
            errors.append({"code": "no-answer", "message": message, "hint": "try `memory-tencentdb-ctl status`"})
    data = {"gateways": gateways, "warnings": _without_llm(root, running)}
    return Result("health", data, envelope.FAILED if errors else envelope.OK, errors)


def _without_llm(root: str, gateways: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A warning for each Gateway that has no language model: it receives and finds, but extracts no memories."""
    from tdai_supervisor import gwconfig
    from tdai_supervisor.cli import config
    from tdai_supervisor.decide import checks

    found, env = [], client.running_environment(root)
    for g in (g for g in gateways if g["kind"] != "command"):
        path = gwconfig.find(g["config_file"])
        try:
            values = gwconfig.parse(path, client.read_text_whole(path) or "")
        except checks.SettingsError as error:
            found.append({"code": "config", "message": f"Gateway {g['name']}: {error}", "hint": None})
            continue
        if "TDAI_LLM_BASE_URL" not in config.language_model(root, env, values):
            message = f"Gateway {g['name']}: LLM not configured: no memories are extracted from conversations"
            found.append({"code": "llm", "message": message, "hint": "try `memory-tencentdb-ctl config llm`"})
    return found


def log_files(root: str, name: str, which: str) -> list[str]:
    """The log files of a Gateway: "out", "err" or "all". Raises SettingsError for a name that is not configured."""
    try:
        data = client.request(root, "status", PATIENCE)["data"]
    except (client.NotRunningError, client.NoAnswerError, ValueError, PermissionError):
        data = offline(root)
    logs = {g["name"]: g["logs"] for g in data["gateways"]}
    if name not in logs:
        from tdai_supervisor.decide import checks

        raise checks.SettingsError(f"cannot find a Gateway named {name!r}: configured are {', '.join(logs)}")
    return [logs[name][s] for s in ("stdout", "stderr") if which in ("all", s, s[3:])]


def logs(root: str, name: str, which: str, lines: int) -> Result:
    """The last lines of a Gateway's logs."""
    files = log_files(root, name, which)
    data = {path: last_lines(path, lines) for path in files}
    return Result("logs", data)


def last_lines(path: str, lines: int) -> list[str]:
    """The last lines of a file, reading no more than it must; empty where there is none."""
    try:
        with open(path, "rb") as file:
            size, block = file.seek(0, os.SEEK_END), b""
            while size > 0 and block.count(b"\n") <= lines:
                step = min(size, 64 * 1024)
                size -= step
                file.seek(size)
                block = file.read(step) + block
    except OSError:
        return []
    return block.decode("utf-8", "replace").splitlines()[-lines:] if lines > 0 else []


def follow(files: list[str], poll: float = 0.25) -> Iterator[str]:
    """New lines of these files for ever; survives cuts, rotation, removal and restarts."""
    at: dict[str, tuple[int, int]] = {}
    for path in files:
        about = _stat(path)
        at[path] = (about.st_ino, about.st_size) if about else (0, 0)
    rest = dict.fromkeys(files, b"")
    while True:
        for path in files:
            about = _stat(path)
            if about is None:
                continue
            inode, offset = at[path]
            if about.st_ino != inode or about.st_size < offset:
                offset = 0
            if about.st_size > offset:
                with open(path, "rb") as file:
                    file.seek(offset)
                    data = rest[path] + file.read()
                    offset = file.tell()
                *complete, rest[path] = data.split(b"\n")
                yield from (line.decode("utf-8", "replace") for line in complete)
            at[path] = (about.st_ino, offset)
        time.sleep(poll)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def version(root: str) -> Result:
    """The version of this command and of the living daemon."""
    try:
        daemon = client.request(root, "ping", PATIENCE)["data"]["version"]
    except (client.NotRunningError, client.NoAnswerError, ValueError, PermissionError):
        daemon = None
    skew = daemon is not None and daemon != __version__
    errors = []
    if skew:
        message = f"the daemon is {daemon}, this command is {__version__}"
        errors.append({"code": "skew", "message": message, "hint": "try `memory-tencentdb-ctl restart --daemon`"})
    return Result("version", {"ctl": __version__, "daemon": daemon}, envelope.OK, errors)
