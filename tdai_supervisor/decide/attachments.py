"""Attachments: which sessions are there, told from the names of their files and a few facts.

Invariants: pure; a name holds enough to say that its session is dead, so that no file of a dead one has to be opened.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False  # typing itself costs 3 of the 50 ms that `status` may take
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

SHOWN = ("pid", "profile", "session", "gateway", "since")
_NAME = re.compile(r"([1-9][0-9]{0,9})-([0-9]{1,20})-[0-9]{1,20}\.json")


def identity(name: str) -> tuple[int, int] | None:
    """(pid, start ticks) in the name of an attachment, None where it is none."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What status says of a living attachment; null for what its file does not say."""
    return {key: entry.get(key) for key in SHOWN}


def by_profile(attachments: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many sessions each profile has attached. A host may make many providers for one session: that is one."""
    sessions = {(str(each.get("profile") or "unknown"), each.get("pid"), each.get("session")) for each in attachments}
    counts: dict[str, int] = {}
    for profile, *_ in sessions:
        counts[profile] = counts.get(profile, 0) + 1
    return dict(sorted(counts.items()))
