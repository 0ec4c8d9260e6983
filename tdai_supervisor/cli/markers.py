"""Markers: random words captured in a Gateway and looked for, to prove that it keeps, or that another one does not see.

Invariants: a marker says nothing of anybody; it is kept under a session of its own.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from tdai_supervisor import client
from tdai_supervisor.decide import paths

SESSION = "memory-tencentdb-health"
PATIENCE = 10.0  # s for one call
TRIES = 12  # the real Gateway drops about every third first turn of a session


class UnprovenError(Exception):
    """A Gateway did not do what was asked of it."""


def plant(root: str, g: dict[str, Any], what: str) -> str:
    """Capture a fresh marker in a Gateway of status data; the marker. Raises UnprovenError."""
    mark = f"canary{secrets.token_hex(8)}"
    turn = {"user_content": f"{what} {mark}", "assistant_content": "noted", "session_key": SESSION}
    for attempt in range(TRIES):
        answer = _post(root, g, "/capture", turn)
        if answer.get("l0_recorded"):
            return mark
        time.sleep(0.01 * attempt)
    raise UnprovenError("nothing of a captured canary was recorded")


def finds(root: str, g: dict[str, Any], mark: str) -> bool:
    """Whether a Gateway finds a marker in its conversations, memories or recall. Raises UnprovenError."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/search/conversations", {"query": mark, "limit": 20}),
        ("/search/memories", {"query": mark, "limit": 20}),
        ("/recall", {"query": mark, "session_key": SESSION}),
    ]
    return any(mark in str(_post(root, g, path, body)) for path, body in asked)


def _post(root: str, g: dict[str, Any], path: str, body: dict[str, Any]) -> dict[str, Any]:
    key = client.read_text(paths.key(root, g["name"]))
    try:
        status, answer = client.call(g["host"], g["port"], path, PATIENCE, body, key)
    except (OSError, ValueError) as error:
        raise UnprovenError(f"{path} failed: {error}") from None
    if status != 200:
        raise UnprovenError(f"{path} answered HTTP {status}: {answer.get('error', '')}")
    return answer
