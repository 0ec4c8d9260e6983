"""`spool ACTION`: what waits on disk to be delivered, what could not be, and what a user does about it.

Invariants: nothing a user said is shown unless --text asks for it; a record is removed only when it is named by its id;
one drainer works on a spool at a time, and a session that does has the right of way.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from tdai_supervisor import client
from tdai_supervisor.cli import envelope, hermes, provider
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.decide.checks import SettingsError


def run(root: str, a: Namespace) -> Result:
    """The verb `spool ACTION`."""
    try:
        return _ACTIONS[a.action](root, a)
    except provider.RefusedError as error:
        hint = "end that session, or wait until it is done" if error.held else None
        words = f"cannot {a.action} {getattr(a, 'spool', 'spools')}: {error}"
        return failure("spool", "held" if error.held else "refused", words, hint)
    except SettingsError as error:
        return failure("spool", "unknown-spool", str(error))


def known(root: str) -> list[tuple[str, str, str | None]]:
    """(path, profile, registration) of every spool: those that sessions registered, and those of Hermes' profiles."""
    folder = os.path.join(root, "spools")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    found: dict[str, tuple[str, str, str | None]] = {}
    for name in names:
        entry = client.read_object(os.path.join(folder, name)) or {}
        if name.endswith(".json") and isinstance(entry.get("path"), str):
            registration = os.path.join(folder, name)
            found[os.path.realpath(entry["path"])] = entry["path"], str(entry.get("profile") or ""), registration
    for profile in hermes.every():
        path = os.path.join(profile.home, hermes.NAME)
        if os.path.isdir(os.path.join(path, "spool")):
            found.setdefault(os.path.realpath(path), (path, profile.name, None))
    return list(found.values())


def look(spools: list[tuple[str, str, str | None]]) -> list[dict[str, Any]]:
    """What is true of these spools now."""
    seen = provider.ask("spools", paths=[path for path, _, _ in spools])["spools"] if spools else []
    return [
        {"profile": profile, **about, "last_delivered": stamp(about["last_delivered"])}
        for (_, profile, _), about in zip(spools, seen, strict=True)
    ]


def stamp(wall: float | None) -> str | None:
    """Seconds since the epoch as RFC 3339 UTC."""
    return None if wall is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wall))


def _chosen(root: str, given: str) -> tuple[str, str, str | None]:
    """The spool that a path or a profile names. Raises SettingsError."""
    spools = known(root)
    path = os.path.realpath(os.path.expanduser(given))
    found = [s for s in spools if s[1] == given] or [s for s in spools if os.path.realpath(s[0]) == path]
    if len(found) == 1:
        return found[0]
    if found:
        raise SettingsError(f"cannot tell which spool {given!r} is: give a path of {', '.join(s[0] for s in found)}")
    names = ", ".join(s[1] or s[0] for s in spools) or "none"
    raise SettingsError(f"cannot find a spool {given!r}: there are {names}; try `memory-tencentdb-ctl spool list`")


def _listed(root: str, a: Namespace) -> Result:
    return Result("spool", {"spools": look(known(root))})


def _show(root: str, a: Namespace) -> Result:
    spool = _chosen(root, a.spool)
    records = provider.ask("show", path=spool[0], dead=a.dead, text=a.text)["records"]
    now = time.time()
    for record in records:
        at = record.pop("at")
        record |= {"at": stamp(at), "age_s": round(max(0.0, now - at), 1)}
    return Result("spool", {"spools": look([spool]), "records": records})


def _retry(root: str, a: Namespace) -> Result:
    spool = _chosen(root, a.spool)
    if a.dry_run:
        return Result("spool", {"spools": look([spool]), "changes": [f"deliver {spool[0]}"], "dry_run": True})
    code, _ = provider.drain(spool[0], root, a.timeout)
    after = look([spool])
    data = {"spools": after, "changes": []}
    if code == provider.HELD:
        words = f"cannot retry {a.spool}: another process delivers this spool now"
        return Result("spool", data, envelope.FAILED, [{"code": "held", "message": words, "hint": "wait for it"}])
    if after[0]["waiting"]:
        why = after[0]["holding"] or after[0]["last_error"] or f"not all of it within {a.timeout:g} s"
        words = f"cannot deliver all of {a.spool}: {after[0]['waiting']} turns wait: {why}"
        hint = "try `memory-tencentdb-ctl status`"
        return Result("spool", data, envelope.FAILED, [{"code": "waiting", "message": words, "hint": hint}])
    return Result("spool", data)


def _replay(root: str, a: Namespace) -> Result:
    spool = _chosen(root, a.spool)
    if not a.ids and not a.all:
        words = "cannot replay: name dead letters by their ids, or give --all"
        return failure("spool", "usage", words, f"try `spool show {a.spool} --dead`", envelope.USAGE)
    ids = None if a.all else a.ids
    done = provider.ask("replay", path=spool[0], ids=ids, dry_run=a.dry_run)["ids"]
    changes = [f"put dead letter {each} into the spool again" for each in done]
    return Result("spool", {"spools": look([spool]), "changes": changes, "dry_run": a.dry_run})


def _drop(root: str, a: Namespace) -> Result:
    spool = _chosen(root, a.spool)
    path, _, registration = spool
    if a.ids:
        done = provider.ask("drop", path=path, ids=a.ids, dry_run=a.dry_run)["ids"]
        changes = [f"remove {each}" for each in done]
    elif not os.path.isdir(path) and registration is not None:
        changes = [f"forget the spool {path}, which is gone"]
        if not a.dry_run:
            os.unlink(registration)
    else:
        words = "cannot drop: name records or dead letters by their ids"
        return failure("spool", "usage", words, f"try `spool show {a.spool}`", envelope.USAGE)
    return Result("spool", {"spools": look([spool]), "changes": changes, "dry_run": a.dry_run})


_ACTIONS: dict[str, Callable[[str, Namespace], Result]] = {
    "list": _listed,
    "show": _show,
    "retry": _retry,
    "replay": _replay,
    "drop": _drop,
}
