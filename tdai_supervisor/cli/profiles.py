"""`profile ACTION`: which Gateway each Hermes profile uses, and giving it another.

Invariants: a profile is given a Gateway of its own only after markers have shown that neither it nor the one before
finds what the other keeps; of a profile file only the keys in question change; a running session keeps its Gateway
until it ends; a shared Gateway is called shared.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
from argparse import Namespace
from typing import Any

from tdai_supervisor import client
from tdai_supervisor.cli import envelope, gateways, hermes, lifecycle, markers, observe, provider
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.cli.spools import stamp
from tdai_supervisor.decide import settings
from tdai_supervisor.decide.checks import SettingsError

SHARED = "default"
RUNNING = "sessions that run now keep their Gateway until they end"


def run(root: str, a: Namespace) -> Result:
    """The verb `profile ACTION`."""
    try:
        if not os.path.isdir(hermes.main_home()):
            raise SettingsError(f"cannot find Hermes: there is no {hermes.main_home()}; run hermes once")
        return Result("profile", {"profiles": look(), "changes": []}) if a.action == "list" else _use(root, a)
    except (provider.RefusedError, SettingsError) as error:
        words = str(error)
        words = words if words.startswith("cannot ") else f"cannot {a.action} profiles: {words}"
        return failure("profile", "profile", words)
    except markers.UnprovenError as error:
        words = f"cannot give {a.profile} {a.gateway}: {error}; its profile file was left as it was"
        return failure("profile", "unproven", words, "try `memory-tencentdb-ctl status`")
    except OSError as error:
        code = envelope.NOT_PERMITTED if isinstance(error, PermissionError) else envelope.FAILED
        return failure("profile", "io", f"cannot use {error.filename}: {error.strerror}", None, code)


def look() -> list[dict[str, Any]]:
    """Every profile of Hermes, as `profile list` shows it. Raises SettingsError."""
    profiles = [hermes.inspect(p) for p in hermes.every()]
    seen = provider.ask("profiles", homes=[p.home for p in profiles])["profiles"]
    return described(profiles, seen)


def described(profiles: list[hermes.Profile], seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Profiles and what the provider says of them, put together: who shares a Gateway with whom."""
    source = os.path.realpath(hermes.source())
    found = []
    for profile, about in zip(profiles, seen, strict=True):
        last = stamp(about["spool"]["last_delivered"])
        current = _same(os.path.realpath(profile.plugin_path), source)
        if not current and profile.plugin in ("linked", "copied"):
            profile.notes.append("its plugin is not that of this installation; try `hermes enable --profile NAME`")
        more = {
            "last_delivered": last,
            "current": current,
            "notes": profile.notes + ([about["trouble"]] if about["trouble"] else []),
            "spool": about["spool"] | {"last_delivered": last},
        }
        found.append({**profile.as_json(), **{k: v for k, v in about.items() if k != "trouble"}, **more})
    for one in found:
        same = [p["name"] for p in found if p is not one and p["enabled"] and _uses(p) == _uses(one)]
        one["shared_with"] = same if one["enabled"] else []
        one["shared"] = bool(one["shared_with"])
    return found


def _same(plugin: str, source: str) -> bool:
    """Whether a plugin directory is that of this installation, or a copy of it as it is now."""
    if plugin == source or not os.path.isdir(plugin):
        return plugin == source
    names = [n for n in os.listdir(source) if n.endswith(".py")]
    return not any(filecmp.cmpfiles(source, plugin, names, shallow=False)[1:])


def _uses(profile: dict[str, Any]) -> tuple[str, ...]:
    """What two profiles with one memory have in common: the address, or a name in one root where that has none yet."""
    if profile["address"] is not None:
        return (profile["address"],)
    return os.path.realpath(profile["root"]), str(profile["gateway"])


def own_name(profile: str) -> str:
    """The name of the Gateway that is a profile's own: the profile's where that is one, else one made from it.

    Two profiles never get the same: what had to be changed carries a digest of the whole.
    """
    try:
        if settings.check_name(profile) == profile and profile != SHARED:
            return profile
    except SettingsError:
        pass
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", profile).strip("-_")[:40]
    return f"profile-{plain}-{hashlib.sha256(profile.encode()).hexdigest()[:6]}"


def _use(root: str, a: Namespace) -> Result:
    found = [p for p in look() if p["name"] == a.profile]
    if not found:
        raise SettingsError(f"cannot find the profile {a.profile!r}: there are {', '.join(p['name'] for p in look())}")
    profile = found[0]
    name = own_name(a.profile) if a.gateway == "own" else None if a.gateway == "shared" else a.gateway
    present = client.configured(root).gateways
    if name is not None and a.gateway != "own" and name not in present:
        raise SettingsError(f"cannot find a Gateway named {name!r}: configured are {', '.join(present)}")
    changes, proof = [], None
    if a.gateway == "own":
        assert name is not None
        if others := [u for u in gateways.users(root).get(name, []) if u != a.profile]:
            raise SettingsError(f"cannot give {a.profile} the Gateway {name}: {', '.join(others)} uses it")
        added = _have(root, name, a.dry_run)
        if added.exit_code:
            return added.but(command="profile")
        changes += added.data["changes"]
        changes.append(f"prove that {name} and {SHARED} do not see each other's memories")
        proof = None if a.dry_run else prove_apart(root, name, SHARED)
    given = root if name is not None and profile["root"] != root else None
    done = provider.ask("use", home=profile["home"], gateway=name, root=given, dry_run=a.dry_run)
    changes += [
        f"set {key} to {value!r} in {done['path']}" if value else f"remove {key} from {done['path']}"
        for key, value in done["changes"].items()
    ]
    after = [p for p in look() if p["name"] == a.profile]
    data = {"profiles": after, "changes": changes, "proof": proof, "dry_run": a.dry_run, "words": []}
    if done["changes"]:
        waiting = profile["spool"]["waiting"]
        kept = [f"{waiting} turns that wait go to {name or SHARED}"] if waiting else []
        data["words"] = [*kept, RUNNING]
    return Result("profile", data)


def _have(root: str, name: str, dry_run: bool) -> Result:
    """A Gateway of that name, configured and READY."""
    if name not in client.configured(root).gateways:
        added = gateways.add(root, name, {}, dry_run=dry_run)
        if added.exit_code or dry_run:
            return added
    else:
        added = Result("gateway", {"changes": []})
    started = lifecycle.start(root, name, wait=True, timeout=None, take_over=False) if not dry_run else added
    return added if started.exit_code == envelope.OK else started


def prove_apart(root: str, one: str, other: str) -> dict[str, Any]:
    """Show by a marker in each of two READY Gateways that each finds its own and not the other's.

    Raises UnprovenError, also where one of them cannot be asked: what is not shown is not claimed.
    """
    seen = {g["name"]: g for g in (observe.status(root, None).data or {}).get("gateways", [])}
    for name in (one, other):
        if name not in seen or seen[name]["state"] != "READY":
            state = seen[name]["state"] if name in seen else "not configured"
            raise markers.UnprovenError(f"cannot prove it: Gateway {name} is {state}; `start {name}` first")
    if os.path.realpath(seen[one]["data_dir"]) == os.path.realpath(seen[other]["data_dir"]):
        raise markers.UnprovenError(f"{one} and {other} have the same data directory")
    for here, there in ((one, other), (other, one)):
        mark = markers.plant(root, seen[here], "proof of separation")
        if not markers.finds(root, seen[here], mark):
            raise markers.UnprovenError(f"Gateway {here} does not find what it was just told")
        if markers.finds(root, seen[there], mark):
            raise markers.UnprovenError(f"Gateway {there} finds what only {here} was told")
    return {"gateways": [one, other], "apart": True}
