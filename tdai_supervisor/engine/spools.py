"""The spools that providers registered: `spools/<hash>.json` under the root, {schema, path, profile}."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from tdai_supervisor.host import disk

COUNTED = ("delivered", "dead", "dropped", "possible_duplicates", "torn")  # of the provider's stats.json


def registered(root: str) -> Iterator[tuple[str, str]]:
    """(path, profile) of each registered spool; an entry that cannot be read is left out (its writer renews it)."""
    folder = os.path.join(root, "spools")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if name.endswith(".json"):
            try:
                entry = disk.read_object(os.path.join(folder, name)) or {}
            except (OSError, ValueError):
                continue
            if isinstance(entry.get("path"), str):
                yield entry["path"], str(entry.get("profile") or "")


@dataclass(frozen=True)
class Spool:
    """One registered spool: bytes of its pending segments, and what its drainers counted, by state."""

    path: str
    profile: str
    pending_bytes: int
    counts: dict[str, int]


def look(root: str) -> list[Spool]:
    """Every registered spool as it is now. Reads directories: not in the loop."""
    found = []
    for path, profile in registered(root):
        segments = os.path.join(path, "spool")
        try:
            names = [n for n in os.listdir(segments) if n.endswith(".seg")]
        except OSError:
            names = []
        pending = sum(_size(os.path.join(segments, n)) for n in names)
        try:
            stats = disk.read_object(os.path.join(path, "stats.json")) or {}
        except (OSError, ValueError):
            stats = {}
        counts = {state: int(stats[state]) for state in COUNTED if isinstance(stats.get(state), int)}
        found.append(Spool(path, profile, pending, counts))
    return found


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
