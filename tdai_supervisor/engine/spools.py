"""The spools that providers registered: `spools/<hash>.json` under the root, {schema, path, profile}."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tdai_supervisor.host import disk


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


def sizes(root: str) -> list[tuple[dict[str, str], float]]:
    """Bytes in each registered spool, labelled by profile. Walks directories: not in the loop."""
    found = []
    for path, profile in registered(root):
        total = 0
        for folder, _, files in os.walk(path):
            total += sum(_size(os.path.join(folder, name)) for name in files)
        found.append(({"profile": profile, "path": path}, float(total)))
    return found


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0
