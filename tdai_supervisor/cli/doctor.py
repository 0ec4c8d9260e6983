"""Verbs that examine: doctor, health --deep, diagnose.

Invariants: `doctor` is read-only; each finding is a fact, why it matters and the exact command that mends it; a
diagnose archive holds no secret, and nothing a user said unless it is asked for.
"""

from __future__ import annotations

import io
import json
import os
import platform
import shlex
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from typing import Any

from tdai_supervisor import __version__, client, gwconfig
from tdai_supervisor.cli import config, envelope, markers, observe, service
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.decide import checks, launch, paths, settings

LOW_SPACE = 256 * 1024 * 1024
STALLED = 3600.0  # s without a new extracted memory while conversations grow
LOG_TAIL = 200
PACKAGE = "tdai-memory-openclaw-plugin"  # and what is kept beside it: ten thousands of files that are no secret
NO_LLM = "LLM not configured"


def _finding(fact: str, why: str, fix: str) -> dict[str, str]:
    return {"fact": fact, "why": why, "fix": fix}


def doctor(root: str) -> Result:
    """Everything that is wrong or will be; exit 0 where nothing is, else 1."""
    seen = observe.status(root, None)
    if seen.data is None:
        return seen.but(command="doctor")
    findings = [
        *_about_root(root),
        *_about_daemon(root, seen),
        *_about_units(root),
        *(f for g in seen.data["gateways"] for f in _about_gateway(g)),
        *(f for s in seen.data.get("spools") or [] for f in _about_spool(s)),
        *_about_config(root),
        *_about_node(root, seen.data["gateways"]),
        *_about_shell(root),
    ]
    return Result("doctor", {"findings": findings}, envelope.FAILED if findings else envelope.OK)


def _about_root(root: str) -> Iterator[dict[str, str]]:
    if not os.path.isdir(root):
        yield _finding(f"there is no {root}", "nothing has been started here yet", "memory-tencentdb-ctl start")
        return
    me = os.geteuid()
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in ("venv", "venvs") and not f.startswith(PACKAGE)]
        for name in files:
            path = os.path.join(folder, name)
            try:
                about = os.lstat(path)
            except OSError:
                continue
            if about.st_uid != me:
                fix = f"sudo chown -R {me} {root}"
                yield _finding(f"{path} belongs to uid {about.st_uid}", "it cannot be replaced or read by you", fix)
                return
            if about.st_mode & 0o077 and name.endswith((".json", ".key", ".want", ".sock", ".jsonl", ".db")):
                why = "it may hold keys or conversations"
                yield _finding(f"{path} can be read by others", why, f"chmod 600 {path}")
    space = shutil.disk_usage(root).free
    if space < LOW_SPACE:
        fact = f"{space // 1024**2} MiB are left on the disk of {root}"
        yield _finding(fact, "a full disk puts the Gateway on hold", f"df -h {root}")


def _about_daemon(root: str, seen: Result) -> Iterator[dict[str, str]]:
    daemon = seen.data["daemon"]
    wanted = [g for g in seen.data["gateways"] if g["want"] == "up"]
    for error in seen.errors:
        yield _finding(error["message"], "nobody looks after the Gateway meanwhile", str(error["hint"] or ""))
    if not daemon["running"] and wanted:
        fact = "a Gateway is wanted and no daemon runs"
        yield _finding(fact, "nobody restarts the Gateway when it dies", "memory-tencentdb-ctl start")
    if daemon.get("keeper_gone"):
        fact = "the daemon's keeper is gone"
        yield _finding(fact, "nobody restarts the daemon when it dies", "memory-tencentdb-ctl start")
    if daemon.get("trouble"):
        yield _finding(daemon["trouble"], "what the daemon knows may be lost with it", f"ls -la {paths.run(root)}")
    if daemon["running"] and daemon["version"] not in (None, __version__):
        fact = f"the daemon is version {daemon['version']}, this command is {__version__}"
        yield _finding(fact, "an upgrade is only half done", "memory-tencentdb-ctl restart --daemon")


def _about_units(root: str) -> Iterator[dict[str, str]]:
    for warning in service.warnings(root):
        fact, _, fix = warning.partition("; try `")
        yield _finding(fact, "the daemon may not be there when it is needed", fix.rstrip("`"))


def _about_gateway(g: dict[str, Any]) -> Iterator[dict[str, str]]:
    name = g["name"]
    if g["want"] == "up" and g["state"] not in ("READY", "STOPPED"):
        why = "turns wait in the spools of the sessions until it is READY"
        yield _finding(f"Gateway {name} is {g['state']}: {g['cause']}", why, f"memory-tencentdb-ctl why {name}")
    if g.get("drift"):
        fact = f"Gateway {name} runs with older settings: {', '.join(g['drift'])}"
        yield _finding(fact, "what you changed is not in force", f"memory-tencentdb-ctl restart {name}")
    version = g.get("version") or {}
    if version.get("running") and version["running"] != version["installed"]:
        fact = f"Gateway {name} is version {version['running']}, installed is {version['installed'] or 'none'}"
        yield _finding(fact, "an upgrade is only half done", f"memory-tencentdb-ctl restart {name}")
    guards = g.get("guards") or {}
    if guards.get("restart_storm"):
        fact = f"Gateway {name} died 5 times or more in 30 minutes"
        yield _finding(fact, "each death interrupts recall", f"memory-tencentdb-ctl logs {name}")
    if (guards.get("logs") or {}).get("storm"):
        fact = f"Gateway {name} writes more than 1 MiB of log a second"
        yield _finding(fact, "it is probably in a loop", f"memory-tencentdb-ctl logs {name}")


def _about_spool(s: dict[str, Any]) -> Iterator[dict[str, str]]:
    who = s["profile"] or s["path"]
    if s["gone"]:
        fact = f"the spool {s['path']} of profile {who} is gone"
        yield _finding(fact, "what waited in it is lost", f"memory-tencentdb-ctl spool drop {s['path']}")
    if s["dead_letters"]:
        fact = f"{s['dead_letters']} turns of profile {who} could not be delivered"
        yield _finding(fact, "they are kept and not remembered", f"memory-tencentdb-ctl spool show {who} --dead")


def _about_config(root: str) -> Iterator[dict[str, str]]:
    try:
        chosen = client.configured(root)
    except checks.SettingsError as error:
        yield _finding(str(error), "the daemon cannot start with it", f"edit {paths.settings(root)}")
        return
    for warning in chosen.warnings:
        yield _finding(warning, "another port than you meant may be used", "unset the variable, or correct it")
    for gateway in chosen.gateways.values():
        path = gwconfig.find(gateway.config_file)
        try:
            values = gwconfig.parse(path, client.read_text_whole(path) or "")
        except checks.SettingsError as error:
            yield _finding(str(error), "the Gateway would run without what it says", f"edit {path}")
            continue
        for fault in gwconfig.validate(values):
            why = "the Gateway ignores it silently"
            yield _finding(f"{path}: {fault}", why, "memory-tencentdb-ctl config validate")
        if "TDAI_LLM_BASE_URL" not in config.language_model(root, client.running_environment(root), values):
            why = "conversations are kept and found, but no memories are extracted from them"
            whose = "" if gateway.name == "default" else f" --gateway {gateway.name}"
            fix = f"memory-tencentdb-ctl config llm{whose} --base-url URL --model NAME --api-key -"
            yield _finding(f"Gateway {gateway.name}: LLM not configured", why, fix)


def _about_node(root: str, gateways: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Whether the package was put there for another Node than the one that runs it now."""
    chosen, trouble = observe.configured(root)
    place = os.path.realpath(chosen.install_dir)
    noted = client.read_object(os.path.join(place, launch.INSTALLED)) or {}
    then, source = noted.get("node"), noted.get("source") or {}
    kinds = {g["name"]: g["kind"] for g in gateways}
    wanted = next((g for g in chosen.gateways.values() if "node" in (g.kind, kinds.get(g.name))), None)
    if trouble or wanted is None or not isinstance(then, dict):
        return
    from tdai_supervisor.host import node

    try:
        now = node.find(wanted.node, os.environ)
    except node.NodeError as error:
        yield _finding(
            str(error), "the package cannot run without it", "memory-tencentdb-ctl gateway install --with-node"
        )
        return
    abi = node.abi(now.path)
    same = abi == then.get("abi") if abi and then.get("abi") else now.number == then.get("version")
    if not same:
        fact = f"Node is now {now} with ABI {abi}, and was {then.get('version')} with ABI {then.get('abi')}"
        why = "compiled parts of the package that was installed then may not load"
        given = shlex.quote(str(source.get("spec")))
        version = f" --version {noted.get('version')}" if source.get("kind") == "registry" else ""
        yield _finding(fact, why, f"memory-tencentdb-ctl gateway install --package {given}{version}")


def _about_shell(root: str) -> Iterator[dict[str, str]]:
    if changed := config.unknown_to_daemon(root):
        fact = f"set in this shell, unknown to the daemon: {', '.join(changed)}"
        why = "the daemon runs by what `start` saw when it started it"
        yield _finding(fact, why, "memory-tencentdb-ctl config import-env, or stop and start")
    if not shutil.which("memory-tencentdb-ctl"):
        why = "`memory-tencentdb-ctl` is not found by its name"
        yield _finding("the command is not on PATH", why, 'export PATH="$HOME/.local/bin:$PATH"')


def deep(root: str, name: str | None) -> Result:
    """health, and for each READY Gateway: a canary captured and found, disk, LLM, and whether extraction goes on."""
    base = observe.health(root, name)
    if base.data is None or base.exit_code == envelope.NOT_RUNNING:
        return base
    errors = list(base.errors)
    warnings: list[dict[str, Any]] = []
    for g in base.data["gateways"]:
        if g["state"] != "READY":
            continue
        g["deep"] = _deep(root, g)
        for what, said in g["deep"].items():
            told = {"code": what, "message": f"Gateway {g['name']}: {said}", "hint": None}
            # Without an LLM it receives and finds all the same: worth saying, not a failure.
            (warnings if said == NO_LLM else errors).extend([told] if said != "ok" else [])
    data = {**base.data, "warnings": warnings}
    return base.but(data=data, errors=errors, exit_code=envelope.FAILED if errors else envelope.OK)


def _deep(root: str, g: dict[str, Any]) -> dict[str, str]:
    guards = g.get("guards") or {}
    disk = (guards.get("disk") or {}).get("trouble") or "ok"
    return {"canary": _canary(root, g), "disk": disk, "llm": _llm(root), "extraction": _extraction(g["data_dir"])}


def _canary(root: str, g: dict[str, Any]) -> str:
    try:
        found = markers.finds(root, g, markers.plant(root, g, "health check"))
    except markers.UnprovenError as error:
        return f"canary: {error}"
    return "ok" if found else "a captured canary was not found again"


def _llm(root: str) -> str:
    from tdai_supervisor.host import outside

    chosen = client.configured(root)
    gateway = chosen.gateways["default"]
    path = gwconfig.find(gateway.config_file)
    file = gwconfig.parse(path, client.read_text_whole(path) or "")
    found = config.language_model(root, client.running_environment(root), file)
    return outside.llm_trouble({name: value for name, (value, _) in found.items()}) or "ok"


def _extraction(data_dir: str) -> str:
    """Compare the growth of L0 (conversations/) and L1 (records/) of the real Gateway; nothing to compare is ok."""
    newest = {}
    for layer in ("conversations", "records"):
        folder = os.path.join(data_dir, layer)
        try:
            newest[layer] = max((os.stat(os.path.join(folder, n)).st_mtime for n in os.listdir(folder)), default=0.0)
        except OSError:
            return "ok"
    behind = newest["conversations"] - max(newest["records"], os.stat(data_dir).st_ctime)
    if behind < STALLED:
        return "ok"
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(newest["records"]))
    return f"extraction failing since {since}: conversations grow, memories do not"


def diagnose(root: str, target: str | None, *, with_logs: bool) -> Result:
    """One redacted archive: versions, status, findings, settings, journal, the daemon's log; Gateway logs if asked."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = os.path.abspath(target or f"memory-tencentdb-diagnose-{stamp}.tar.gz")
    seen = observe.status(root, None)
    parts = {
        "about.json": {"ctl": __version__, "python": sys.version, "platform": platform.platform(), "at": stamp},
        "status.json": {"data": seen.data, "errors": seen.errors, "exit_code": seen.exit_code},
        "findings.json": doctor(root).data,
        "config.json": _redacted_config(root),
        "environment.json": sorted(n for n in os.environ if settings.ENVIRONMENT_NAMES.fullmatch(n)),
        "journal.jsonl": client.read_journal(paths.journal(root)) or "",
        "daemon.log": "\n".join(observe.last_lines(paths.daemon_log(root), LOG_TAIL)),
    }
    if with_logs:
        for g in (seen.data or {}).get("gateways", []):
            for stream, log in g["logs"].items():
                if log:
                    parts[f"{g['name']}.{stream}.log"] = "\n".join(observe.last_lines(log, LOG_TAIL))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        return failure("diagnose", "io", f"cannot write {path}: {error.strerror}", "give another file")
    with os.fdopen(fd, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in parts.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
            data = text.encode("utf-8", "surrogateescape")
            info = tarfile.TarInfo(f"memory-tencentdb/{name}")
            info.size, info.mode, info.mtime = len(data), 0o600, int(time.time())
            archive.addfile(info, io.BytesIO(data))
    return Result("diagnose", {"path": path, "files": sorted(parts)})


def _redacted_config(root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        for gateway in client.configured(root).gateways.values():
            path = gwconfig.find(gateway.config_file)
            found[path] = gwconfig.redact(gwconfig.parse(path, client.read_text_whole(path) or ""))
    except checks.SettingsError as error:
        found["error"] = str(error)
    return found
