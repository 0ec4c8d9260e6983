"""Results for people: data on stdout, errors on stderr."""

from __future__ import annotations

import sys

from tdai_supervisor.cli.envelope import Result

TYPE_CHECKING = False  # typing itself costs 3 of the 50 ms that `status` may take
if TYPE_CHECKING:
    from typing import Any


def show(result: Result) -> None:
    """Print a Result for a person."""
    text = _TEXTS.get(result.command, _nothing)(result.data) if result.data is not None else ""
    if text:
        print(text)
    for warning in (result.data or {}).get("warnings", []) if isinstance(result.data, dict) else []:
        hint = f"; {warning['hint']}" if warning.get("hint") else ""
        print(f"warning: {warning['message']}{hint}", file=sys.stderr)
    for error in result.errors:
        print(error["message"] + (f"; {error['hint']}" if error.get("hint") else ""), file=sys.stderr)
        for line in error.get("log") or []:
            print(f"  | {line}", file=sys.stderr)


def _nothing(_: Any) -> str:
    return ""


def _status(data: dict[str, Any]) -> str:
    if "plan" in data:
        return str(data["plan"])
    daemon = data["daemon"]
    if daemon["running"]:
        lines = [f"daemon   pid {daemon['pid']}, version {daemon['version']}, kept by {daemon['keeper']}"]
    else:
        lines = ["daemon   not running"]
    lines.append(f"root     {data['root']}")
    if daemon.get("trouble"):
        lines.append(f"trouble  {daemon['trouble']}")
    if attached := data.get("attachments"):
        from tdai_supervisor.decide.attachments import by_profile

        counts = by_profile(attached)
        lines.append(f"sessions {sum(counts.values())} attached: {_by_profile(counts)}")
    if cut := (data.get("cut_off") or {}).get("sessions"):
        told = _by_profile(data["cut_off"]["profiles"])
        lines.append(f"sessions {cut} cut off: {told}; their turns wait on disk until the Gateway is back")
    for spool in data.get("spools") or []:
        lines += _spool_line(spool)
    lines += [_gateway(g) for g in data["gateways"]]
    return "\n".join(lines)


def _by_profile(counts: dict[str, int]) -> str:
    return ", ".join(f"{profile} {count}" for profile, count in counts.items())


def _spool_line(s: dict[str, Any]) -> list[str]:
    """A spool with a backlog or a loss in it; one that is empty is not worth a line."""
    words = ["it is gone"] if s["gone"] else []
    if s["waiting_bytes"]:
        count = "some" if s["waiting"] is None else s["waiting"]
        words.append(f"{count} turns wait" + (f", the oldest for {s['oldest_s']:g} s" if s["oldest_s"] else ""))
    words += [f"{s['dead_letters']} dead letters"] if s["dead_letters"] else []
    return [f"spool    {s['profile'] or s['path']}: {', '.join(words)}"] if words else []


_COLOURS = {
    "READY": "green",
    "STARTING": "cyan",
    "STOPPING": "cyan",
    "UNREADY": "yellow",
    "BACKOFF": "yellow",
    "BLOCKED": "red",
    "FATAL": "red",
}


def _state(state: str) -> str:
    """A state, eight columns wide, in its colour on a terminal that wants one."""
    padded = f"{state:<8}"
    if state not in _COLOURS or not sys.stdout.isatty():
        return padded
    from termcolor import colored

    return colored(padded, _COLOURS[state])


def _gateway(g: dict[str, Any]) -> str:
    head = f"{g['name']:<8} {_state(g['state'])}"
    if g["pid"] is not None:
        head += f" pid {g['pid']} {g['url']} ({g['kind']}, {g['origin']})"
    lines = [head, f"         want {g['want']}" + (f", since {g['since']}" if g["since"] else "") + f": {g['cause']}"]
    if profiles := g.get("profiles"):
        lines.append(f"         {'shared' if len(profiles) > 1 else 'used'} by {', '.join(profiles)}")
    if g.get("hold"):
        lines.append(f"         on hold: {g['hold']}")
    if g.get("drift"):
        lines.append(
            f"         changed since it was started: {', '.join(g['drift'])}; try `memory-tencentdb-ctl restart`"
        )
    version = g.get("version") or {}
    if version.get("running") and version["running"] != version["installed"]:
        now = version["installed"] or "none"
        lines.append(f"         running {version['running']}, installed {now}; try `memory-tencentdb-ctl restart`")
    if g.get("backoff_s") is not None:
        lines.append(f"         next try in {g['backoff_s']} s")
    if g.get("last_exit"):
        lines.append(
            f"         last exit: {g['last_exit']['cause']} at {g['last_exit']['at']}; {g['restarts']} restarts"
        )
    return "\n".join(lines)


def _health(data: dict[str, Any]) -> str:
    return "\n".join(
        f"{g['name']}: {g['state']}" + (f" in {g['health']['latency_ms']} ms" if g["health"]["latency_ms"] else "")
        for g in data["gateways"]
    )


def _logs(data: dict[str, list[str]]) -> str:
    several = len(data) > 1
    parts = []
    for path, lines in data.items():
        parts += ([f"==> {path} <=="] if several else []) + lines
    return "\n".join(parts)


def _version(data: dict[str, Any]) -> str:
    return f"memory-tencentdb-ctl {data['ctl']}\ndaemon {data['daemon'] or 'not running'}"


def event(entry: dict[str, Any]) -> str:
    """One transition as a line."""
    return f"{entry.get('at')} {entry.get('gateway')}: {entry.get('from')} -> {entry.get('to')}: {entry.get('cause')}"


def _events(data: dict[str, Any]) -> str:
    return "\n".join(event(e) for e in data["events"])


def _why(data: dict[str, list[str]]) -> str:
    return "\n".join(line for name, told in data.items() for line in (f"{name}:", *(f"  {s}" for s in told)))


def _metrics(data: dict[str, str]) -> str:
    return data["text"].rstrip("\n")


def _config(data: dict[str, Any]) -> str:
    if "values" in data:
        return "\n".join(_config_line(key, value) for key, value in data["values"].items())
    if "diff" in data:
        done = f"written to {data['path']}" if data["written"] else f"nothing written to {data['path']}"
        return "\n".join([*data["diff"], done])
    return str(data["path"])


def _config_line(key: str, value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"value", "origin"}:
        return f"{key} = {value['value']}    ({value['origin']})"
    return f"{key} = {value}"


def _doctor(data: dict[str, Any]) -> str:
    if not data["findings"]:
        return "nothing found: all is well"
    return "\n".join(f"* {f['fact']}\n    why  {f['why']}\n    fix  {f['fix']}" for f in data["findings"])


def _diagnose(data: dict[str, Any]) -> str:
    return f"{data['path']}: {', '.join(data['files'])}"


def _completion(data: dict[str, Any]) -> str:
    return str(data["script"]).rstrip("\n")


def _man(data: dict[str, Any]) -> str:
    return str(data["page"]).rstrip("\n")


def _hermes(data: dict[str, Any]) -> str:
    lines = [("would " if data.get("dry_run") else "") + change for change in data["changes"]]
    for p in data["profiles"]:
        enabled = "enabled" if p["enabled"] else "not enabled"
        lines.append(f"{p['name']:<12} {enabled}: plugin {p['plugin']}, memory.provider {p['provider']!r}, {p['home']}")
        lines += [f"             {note}" for note in p["notes"]]
    lines += [f"found {path}: it wins over every profile's plugin" for path in data["bundled"]]
    return "\n".join(lines)


def _backup(data: dict[str, Any]) -> str:
    return f"{data['path']}: {data['files']} files, {data['bytes']} bytes"


def _restore(data: dict[str, Any]) -> str:
    kept = f"; what was there is kept in {data['kept']}" if data["kept"] else ""
    return f"{data['files']} files restored to {data['data_dir']}{kept}"


def _import(data: dict[str, Any]) -> str:
    parts = ("turns", "imported", "already", "failed")
    return "\n".join(f"{c['profile']}: " + ", ".join(f"{c[p]} {p}" for p in parts) for c in data["profiles"])


def _migrate(data: dict[str, Any]) -> str:
    return "\n".join(_changes(data)) or "nothing to do"


def _service(data: dict[str, Any]) -> str:
    if "plan" in data:
        return "\n".join([data["plan"], *([data["text"].rstrip("\n")] if "text" in data else [])])
    where = f"pid {data['pid']}, kept by {data['keeper']}" if data["pid"] else "not running"
    lines = [*data["changes"], f"daemon   {where}", f"root     {data['root']}"]
    for u in data["units"]:
        enabled = {True: "enabled", False: "not enabled", None: "its systemd does not answer"}[u["enabled"]]
        lines.append(f"unit     {u['unit']}: {u['active'] or 'unknown'} ({u['state']}), {enabled}, {u['file']}")
    return "\n".join(lines)


def _changes(data: dict[str, Any]) -> list[str]:
    return [("would " if data.get("dry_run") else "") + change for change in data["changes"]]


def _gateways(data: dict[str, Any]) -> str:
    lines = _changes(data)
    for g in data.get("gateways", []):
        used = f"used by {', '.join(g['profiles'])}" if g.get("profiles") else "used by no profile"
        lines.append(f"{g['name']:<12} {_state(g['state'])} {g['kind']:<8} {g['url'] or 'no port yet'}, {used}")
        lines.append(f"{'':<12} {g['data_dir']}: {g['cause']}")
    return "\n".join(lines)


def _profiles(data: dict[str, Any]) -> str:
    lines = _changes(data)
    for p in data["profiles"]:
        shared = f"shared with {', '.join(p['shared_with'])}" if p["shared_with"] else "not shared"
        where = p["gateway"] or p["address"] or "no Gateway"
        lines.append(
            f"{p['name']:<12} {where} ({shared})" if p["enabled"] else f"{p['name']:<12} has no memory of ours"
        )
        s = p["spool"]
        last = f", last delivered {p['last_delivered']}" if p["last_delivered"] else ""
        dead = f", {s['dead_letters']} dead letters" if s["dead_letters"] else ""
        lines.append(f"{'':<12} {s['waiting']} turns wait, {s['delivered']} delivered{last}{dead}")
        lines += [f"{'':<12} {note}" for note in p["notes"]]
    return "\n".join([*lines, *data.get("words", [])])


def _spools(data: dict[str, Any]) -> str:
    lines = _changes(data) if "changes" in data else []
    for s in data.get("spools", []):
        lines.append(f"{s['profile'] or '(no name)':<12} {s['path']}" + ("  GONE" if s["gone"] else ""))
        lines.append("             " + ", ".join(_counted(s)))
    for r in data.get("records", []):
        error = f": {r['error']}" if r["error"] else ""
        lines.append(f"{r['id']}  {r['kind']:<10} {r['state']}, {r['age_s']} s old, {r['attempts']} tries{error}")
        lines += [f"    {side}: {r[side]}" for side in ("user", "assistant") if r.get(side)]
    return "\n".join(lines)


def _counted(s: dict[str, Any]) -> list[str]:
    words = {
        "dead_letters": "dead letters",
        "possible_duplicates": "possible duplicates",
        "dropped": "dropped (spool full)",
        "removed": "removed by hand",
        "unmarked": "outcomes not noted",
    }
    said = [f"{s['waiting']} wait" + (f" (the oldest for {s['oldest_s']:g} s)" if s["oldest_s"] else "")]
    said += [f"{s['delivered']} delivered", *(f"{s[key]} {word}" for key, word in words.items() if s[key])]
    return said + ([f"waits because {s['holding']}"] if s["holding"] and s["waiting"] else [])


_TEXTS = {
    "status": _status,
    "start": _status,
    "stop": _status,
    "restart": _status,
    "health": _health,
    "logs": _logs,
    "version": _version,
    "events": _events,
    "why": _why,
    "metrics": _metrics,
    "config": _config,
    "doctor": _doctor,
    "diagnose": _diagnose,
    "completion": _completion,
    "man": _man,
    "hermes": _hermes,
    "gateway": _gateways,
    "profile": _profiles,
    "spool": _spools,
    "enable-hermes-memory": _hermes,
    "migrate": _migrate,
    "backup": _backup,
    "import": _import,
    "restore": _restore,
    "service": _service,
}
