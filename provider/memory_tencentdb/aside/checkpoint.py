"""The exact words of a conversation, kept on disk before the host compresses them away.

$HERMES_HOME/memory_tencentdb/checkpoints/HASH-OF-SESSION.jsonl: one frame per message, named by its digest.

Invariants:
* keep() returns after the last new message is durable, or raises: that is what contract version 2 promises to the host.
* The same messages kept again, or a list that has grown, add only what is new.
* Not delivered: the turns among them went to the Gateway when they were made, and would be there twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .. import spool
from ..text import plain, without_fenced

KEEP_BYTES = 50 * 1000 * 1000


class Checkpoint:
    """What one call kept. ``digest`` names the evidence; ``messages`` are in it, ``added`` of them were new."""

    def __init__(self, digest: str, messages: int, added: int) -> None:
        self.digest, self.messages, self.added = digest, messages, added

    def words(self) -> str:
        """For the summary that replaces the messages."""
        return (
            f"memory_tencentdb checkpoint {self.digest}: the exact wording of {self.messages} earlier messages is "
            "kept; memory_tencentdb_conversation_search finds it."
        )


def evidence(messages: Sequence[object]) -> list[tuple[str, str, str]]:
    """(digest, role, words) of what was said. The n-th equal message is one of its own, always the same."""
    seen: Counter[tuple[str, str]] = Counter()
    rows = []
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
            continue
        if message.get("_compressed_summary"):
            continue
        role, words = str(message["role"]), without_fenced(plain(message.get("content"))).strip()
        if words:
            seen[role, words] += 1
            rows.append((_digest(role, words, str(seen[role, words])), role, words))
    return rows


def keep(path: str, session: str, messages: Sequence[object], wall: float) -> Checkpoint | None:
    """Make the words of ``messages`` durable below the spool at ``path``; None when they hold none. Raises OSError."""
    rows = evidence(messages)
    if not rows:
        return None
    directory = os.path.join(path, "checkpoints")
    spool.private_directory(directory)
    file = os.path.join(directory, f"{_digest(session)}.jsonl")
    known = _known(file)
    new = [row for row in rows if row[0] not in known]
    for index, (digest, role, words) in enumerate(new):
        entry: dict[str, Any] = {"d": digest, "role": role, "content": words, "at": wall, "session": session}
        payload = json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace")
        spool.append_frame(file, payload, sync=index == len(new) - 1)
    if new:
        spool.sync_directory(directory)
        _prune(directory, keep_path=file)
    return Checkpoint(_digest(*(row[0] for row in rows)), len(rows), len(new))


def _known(file: str) -> set[str]:
    try:
        with open(file, "rb") as opened:
            data = opened.read()
    except FileNotFoundError:
        return set()
    return {json.loads(payload)["d"] for _, payload in spool.unframe(data) if payload is not None}


def _prune(directory: str, keep_path: str) -> None:
    total = 0
    files = [entry for entry in os.scandir(directory) if entry.name.endswith(".jsonl")]
    for entry in sorted(files, key=lambda each: each.stat().st_mtime, reverse=True):
        total += entry.stat().st_size
        if total > KEEP_BYTES and entry.path != keep_path:
            os.unlink(entry.path)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]
