"""`gateway ACTION`: the Gateways that supervisor.toml names.

Invariants: a Gateway is removed only after its process is gone; "default" always stays; data is deleted only when that
is asked for, only where nobody lives, and never a directory that holds a home or the root; what can be known to fail is
refused before anything is written.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from tdai_supervisor import client
from tdai_supervisor.cli import envelope, hermes, lifecycle, observe, provider, tables
from tdai_supervisor.cli.envelope import Result, failure, from_reply
from tdai_supervisor.decide import launch, paths, settings
from tdai_supervisor.decide.settings import GatewaySettings

FORGETS = 60.0  # s for the daemon to forget a Gateway that is stopped already


def run(root: str, a: Namespace) -> Result:
    """The verb `gateway ACTION`."""
    if a.action == "install":
        from tdai_supervisor.cli import package

        return package.install(root, a)
    if a.action == "use":
        from tdai_supervisor.cli import kinds

        return kinds.use(root, a)
    try:
        return _ACTIONS[a.action](root, a)
    except OSError as error:
        code = envelope.NOT_PERMITTED if isinstance(error, PermissionError) else envelope.FAILED
        words = f"cannot {a.action} a Gateway: {error.filename or root}: {error.strerror or error}"
        return failure("gateway", "io", words, None, code)


def users(root: str) -> dict[str, list[str]]:
    """Profiles of Hermes that have our plugin, by the name of the Gateway of this root that they use."""
    found: dict[str, list[str]] = {}
    profiles = [p for p in map(hermes.inspect, hermes.every()) if p.provider == hermes.NAME]
    seen = provider.ask("profiles", homes=[p.home for p in profiles])["profiles"] if profiles else []
    urls = {}
    for name in client.configured(root).gateways:
        if url := (client.read_object(paths.record(root, name)) or {}).get("url"):
            urls[url] = name
    for profile, about in zip(profiles, seen, strict=True):
        ours = about["gateway"] if os.path.realpath(about["root"]) == os.path.realpath(root) else None
        if (used := ours or urls.get(about["address"])) is not None:
            found.setdefault(used, []).append(profile.name)
    return found


def _listed(root: str, a: Namespace) -> Result:
    using = users(root)
    seen = observe.status(root, None)
    if seen.data is None:
        return seen.but(command="gateway")
    keys = ("name", "kind", "want", "state", "pid", "host", "port", "url", "data_dir", "since", "cause")
    shown = [{k: g[k] for k in keys} | {"profiles": using.get(g["name"], [])} for g in seen.data["gateways"]]
    return Result("gateway", {"gateways": shown, "changes": []}, errors=seen.errors)


# -- add ---------------------------------------------------------------------------------------------------------------


def _add(root: str, a: Namespace) -> Result:
    wanted = {"kind": a.kind, "port": a.port, "data_dir": a.data_dir and os.path.abspath(a.data_dir)}
    return add(root, a.name, {k: v for k, v in wanted.items() if v is not None}, dry_run=a.dry_run)


def add(root: str, name: str, wanted: dict[str, Any], *, dry_run: bool = False) -> Result:
    """Configure a Gateway with these keys and, where a daemon lives, have it run. Again with the same keys: no change.

    Raises SettingsError, OSError.
    """
    settings.check_name(name)
    present = client.configured(root).gateways
    if name in present and any(getattr(present[name], key) != value for key, value in wanted.items()):
        hint = f"try `memory-tencentdb-ctl gateway remove {name}` first, or edit {paths.settings(root)}"
        return failure("gateway", "exists", f"cannot add {name}: there is a Gateway of that name already", hint)
    changes = []
    if name not in present:
        why = _unusable(root, name, wanted, present)
        if why is not None:
            return failure("gateway", "taken", f"cannot add {name}: {why[0]}", why[1])
        tables.change(root, lambda d: tables.gateway(d, name).update(wanted), dry_run=dry_run)
        keys = ", ".join(f"{k} = {v}" for k, v in wanted.items())
        changes.append(f"add [gateway.{name}] to {paths.settings(root)}" + (f" with {keys}" if keys else ""))
    data: dict[str, Any] = {"gateways": [], "changes": changes, "dry_run": dry_run}
    if dry_run:
        return Result("gateway", data)
    if client.daemon_process(root) is None:
        data["changes"] = [*changes, f"no daemon lives: `memory-tencentdb-ctl start {name}` has it run"]
        return Result("gateway", data)
    started = lifecycle.start(root, name, wait=True, timeout=None, take_over=False)
    data["gateways"] = (started.data or {}).get("gateways", [])
    return Result("gateway", data, started.exit_code, started.errors)


def _unusable(
    root: str, name: str, wanted: Mapping[str, Any], present: Mapping[str, GatewaySettings]
) -> tuple[str, str] | None:
    """(why this port or data directory cannot be had, what to do), or None as far as can be known."""
    from tdai_supervisor.host import ports

    records = {n: client.read_object(paths.record(root, n)) or {} for n in present}
    if (port := wanted.get("port")) is not None:
        for other, record in records.items():
            if port in (present[other].port, record.get("port")):
                return f"port {port} is that of Gateway {other}", "give another --port, or none"
        if (holder := ports.holder(ports.on("127.0.0.1", port))) is not None:
            return f"port {port} is taken by pid {holder.pid} ({holder.command})", "give another --port, or none"
    data_dir = wanted.get("data_dir") or os.path.join(root, "gateways", name)
    for gateway in present.values():
        if _same(data_dir, gateway.data_dir):
            record = records[gateway.name]
            at = f" (pid {record['pid']}, port {record['port']})" if client.record_process_lives(record) else ""
            words = f"{data_dir} is the data directory of Gateway {gateway.name}{at}"
            return words, "give another --data-dir, or none"
    living = _resident(data_dir)
    if living is not None:
        words = f"{data_dir} is in use by pid {living[0]}" + (f", port {living[1]}" if living[1] else "")
        return words, "end that process, or give another --data-dir"
    return None


def _same(one: str, other: str) -> bool:
    """Whether two directories are the same, or one lies in the other."""
    a, b = (os.path.join(os.path.realpath(d), "") for d in (one, other))
    return a.startswith(b) or b.startswith(a)


def _resident(data_dir: str) -> tuple[int, int | None] | None:
    """(pid, port) of a Gateway that lives in a directory, whoever started it."""
    from tdai_supervisor.host import ports, tree

    if not os.path.isdir(data_dir):
        return None
    listening = ports.listeners()
    for seen in tree.scan():
        near = tree.variable(seen.environ, "TDAI_DATA_DIR") == data_dir or tree.holds_open(seen.pid, data_dir)
        near = near or tree.open_below(seen.pid, data_dir, os.path.join(data_dir, "logs"))
        own = ports.listened_by(seen.pid, listening) if near else []
        command = tree.command_line(seen.pid) or "" if near else ""
        if own or launch.SERVER in command or launch.EMBEDDED in command:
            return seen.pid, own[0].port if own else None
    return None


# -- remove ------------------------------------------------------------------------------------------------------------


def _remove(root: str, a: Namespace) -> Result:
    name, present = a.name, client.configured(root).gateways
    if name == "default":
        words = "cannot remove default: every profile that names no other Gateway uses it"
        return failure("gateway", "default", words, "try `memory-tencentdb-ctl stop default`")
    if name not in present:
        words = f"cannot remove {name}: configured are {', '.join(present)}"
        return failure("gateway", "unknown-name", words, None, envelope.NOT_CONFIGURED)
    using = users(root).get(name, [])
    if using and not a.force:
        words = f"cannot remove {name}: the profile{'s' * (len(using) > 1)} {', '.join(using)} would have no memory"
        return failure("gateway", "in-use", words, "try `profile use PROFILE shared` for each, or --force")
    where = present[name].data_dir
    if a.purge and (inside := _holds(root, where)) is not None:
        words = f"cannot purge {where}: {inside} lies in it"
        return failure("gateway", "unsafe", words, "remove it without --purge, and its data by hand")
    doomed = _doomed(root, present[name]) if a.purge else []
    changes = [f"stop {name}", f"remove [gateway.{name}] from {paths.settings(root)}"]
    changes += [f"delete {path}" for path in doomed] or [f"keep its data in {where}"]
    data = {"gateways": [], "changes": changes, "dry_run": a.dry_run}
    if a.dry_run:
        return Result("gateway", data)
    stopped = lifecycle.stop(root, name)
    if stopped.exit_code not in (envelope.OK, envelope.STOPPED):
        return stopped.but(command="gateway")
    if any(g["pid"] is not None for g in (stopped.data or {}).get("gateways", []) if g["name"] == name):
        return failure("gateway", "alive", f"cannot remove {name}: its process is not gone", "try again")
    tables.change(root, lambda d: _delete(d, name))
    if (errors := _forgotten(root, name)) is not None:
        return Result("gateway", data, envelope.FAILED, errors)
    for path in doomed:
        _unlink(path)
    return Result("gateway", data)


def _delete(document: Any, name: str) -> None:
    if name in document.get("gateway", {}):
        del document["gateway"][name]


def _forgotten(root: str, name: str) -> list[dict[str, Any]] | None:
    """Have a living daemon forget the name; what went wrong, or None."""
    try:
        reply = from_reply("gateway", client.request(root, "forget", FORGETS, name=name))
    except client.NotRunningError:
        return None
    except client.NoAnswerError as error:
        words = f"the daemon has not forgotten {name}: {error}"
        return [{"code": "no-answer", "message": words, "hint": "try `memory-tencentdb-ctl restart --daemon`"}]
    return reply.errors if reply.exit_code else None


def _holds(root: str, data_dir: str) -> str | None:
    """What lies in a data directory that must never be deleted with it, or None."""
    kept = (root, os.path.expanduser("~"), os.getcwd(), hermes.main_home())
    within = os.path.join(os.path.realpath(data_dir), "")
    return next((path for path in kept if os.path.join(os.path.realpath(path), "").startswith(within)), None)


def _doomed(root: str, gateway: GatewaySettings) -> list[str]:
    """What --purge deletes: the data directory and the snapshots."""
    folder = os.path.join(root, "snapshots")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    of_it = re.compile(re.escape(gateway.name) + r"-\d{8}T\d{6}Z\.tar\.gz")
    mine = [n for n in names if of_it.fullmatch(n)]
    data = [gateway.data_dir] if os.path.isdir(gateway.data_dir) else []
    return [*data, *(os.path.join(folder, n) for n in mine)]


def _unlink(path: str) -> None:
    import shutil

    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


_ACTIONS: dict[str, Callable[[str, Namespace], Result]] = {"add": _add, "remove": _remove, "list": _listed}
