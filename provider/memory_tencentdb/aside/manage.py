"""What memory-tencentdb-ctl asks of the provider: one JSON object on standard input, one on standard output.

    python -m memory_tencentdb.aside.manage

{"do": "profiles", "homes": [...]} · {"do": "use", "home", "gateway", "root"} · {"do": "spools", "paths": [...]} ·
{"do": "show", "path", "dead", "text"} · {"do": "replay", "path", "ids"} · {"do": "drop", "path", "ids"}

Invariants: profile files and spools have one reader and writer, this package, and the command reaches them through here
alone; no network; a failure is {"error": words} and exit code 1 (75: another process delivers that spool now).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from .. import spool
from ..endpoint import Away, Endpoint
from ..settings import Settings, dotenv, profile_path, read_profile, read_settings, save_profile
from . import letters
from .ledger import Ledger, read_counts

HELD = 75


def main() -> int:
    """Answer one request."""
    request = json.load(sys.stdin)
    code = 0
    try:
        reply = _ACTIONS[request["do"]](request)
    except letters.HeldError as error:
        reply, code = {"error": str(error)}, HELD
    except OSError as error:
        reply, code = {"error": f"{error.filename or ''}: {error.strerror or error}".strip(": ")}, 1
    except ValueError as error:
        reply, code = {"error": str(error)}, 1
    print(json.dumps(reply))
    return code


def settings_of(home: str) -> Settings:
    """What a session of the profile at home would use if it were started from here: its .env beats our environment."""
    own = dotenv(home)
    return read_settings(home, lambda name: own.get(name) or os.environ.get(name))


def _profiles(request: dict[str, Any]) -> dict[str, Any]:
    return {"profiles": [_profile(str(home)) for home in request["homes"]]}


def _profile(home: str) -> dict[str, Any]:
    settings = settings_of(home)
    endpoint = Endpoint(settings)
    try:
        address, trouble = str(endpoint.address()), None
    except Away as away:
        address, trouble = None, away.reason
    try:
        autostart = read_profile(home).get("autostart") is True
    except ValueError:
        autostart = False
    return {
        "home": home,
        "gateway": settings.gateway if settings.address is None else None,
        "address": address,
        "origin": settings.origin,
        "root": settings.root,
        "trouble": trouble,
        "autostart": autostart,
        "spool": _spool(settings.spool),
    }


def _use(request: dict[str, Any]) -> dict[str, Any]:
    """Write the key `gateway` of a profile file (None removes it), and `root` where one is given."""
    home = str(request["home"])
    before = settings_of(home)
    if before.broken:
        raise ValueError(before.broken)
    if before.address is not None and before.origin == "profile file":
        words = "it names an address (gateway_url, gateway_host or gateway_port), which would win; remove that first"
        raise ValueError(f"{profile_path(home)}: {words}")
    wanted = {"gateway": request["gateway"]} | ({"root": request["root"]} if request.get("root") else {})
    present = read_profile(home)
    changes = {key: value for key, value in wanted.items() if present.get(key) != value}
    if changes and not request.get("dry_run"):
        save_profile(home, changes)
    return {"path": profile_path(home), "changes": changes, "before": before.gateway}


def _spools(request: dict[str, Any]) -> dict[str, Any]:
    return {"spools": [_spool(str(path)) for path in request["paths"]]}


def _spool(path: str) -> dict[str, Any]:
    """What is true of one spool now. Durations in seconds, last_delivered in wall seconds; null where unknown."""
    counts, ledger, error = read_counts(path), Ledger(path), None
    try:
        ledger.refresh()
    except OSError as failed:
        error = f"cannot read it: {failed.strerror}"
    oldest = ledger.oldest()
    return {
        "path": path,
        "gone": not os.path.isdir(path),
        "waiting": ledger.turns,
        "delivered": counts.delivered,
        "possible_duplicates": counts.possible_duplicates,
        "dead_letters": sum(1 for _ in letters.dead_letters(path)),
        "dropped": counts.dropped,
        "removed": counts.removed,
        "torn": counts.torn,
        "unmarked": counts.unmarked,
        "oldest_s": None if oldest is None else round(max(0.0, time.time() - oldest), 1),
        "last_delivered": counts.last_success or None,
        "holding": counts.holding or None,
        "last_error": error or counts.last_error or None,
    }


def _show(request: dict[str, Any]) -> dict[str, Any]:
    path = str(request["path"])
    return {"records": letters.shown(path, dead=bool(request.get("dead")), text=bool(request.get("text")))}


def _replay(request: dict[str, Any]) -> dict[str, Any]:
    path, ids = str(request["path"]), request.get("ids")
    kept = [letter["record"]["id"] for letter in letters.dead_letters(path)]
    chosen = [each for each in kept if ids is None or each in ids]
    _all_there(ids or [], chosen, "dead letter")
    if chosen and not request.get("dry_run"):
        letters.revive(spool.Spool(path), None if ids is None else set(chosen))
    return {"ids": chosen}


def _drop(request: dict[str, Any]) -> dict[str, Any]:
    path, ids = str(request["path"]), list(request["ids"])
    there = [each["id"] for dead in (False, True) for each in letters.shown(path, dead=dead, text=False)]
    _all_there(ids, there, "record or dead letter")
    if not request.get("dry_run"):
        letters.drop(path, set(ids), time.time())
    return {"ids": ids}


def _all_there(ids: list[str], there: list[str], what: str) -> None:
    """Raises ValueError for an id that names nothing: then nothing at all is done."""
    if unknown := [each for each in ids if each not in there]:
        raise ValueError(f"there is no {what} with the id {', '.join(unknown)}")


_ACTIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "profiles": _profiles,
    "use": _use,
    "spools": _spools,
    "show": _show,
    "replay": _replay,
    "drop": _drop,
}

if __name__ == "__main__":
    sys.exit(main())
