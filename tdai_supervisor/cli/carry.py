"""Conversations (L0) from the store of one kind of Gateway into that of the other, in the same data directory.

Invariants: the store that is left is only read; what is written goes through the routes of the Gateway that owns the
other store; a turn has one identity in both stores, so what is there is not sent again, whatever was interrupted.

The embedded Gateway keeps turns in memory.db, with their own times, and its /seed takes a turn once. The npm package
appends messages to conversations/DATE.jsonl, each /capture in lines of one recordedAt, changes texts (code blocks and
metadata go) and sets its own time, but keeps the id that a message is given: there a carried message says which turn it
is. A store without such ids is covered by a list of what was sent (carried.jsonl).
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from tdai_supervisor.cli.imports import NOTHING, Importer
from tdai_supervisor.cli.progress import Progress

MARK = "carried-"  # begins the id of a message that was carried over; the turn's identity follows
AHEAD = 50  # ms; generation A drops what is not later than the request itself: at +20 ms none of 100 (measured)
_ODD = re.compile("[\ud800-\udfff\ufffd]")  # JSON of Node may hold half a character; a store may replace it
_WHOSE = re.compile(MARK + "([0-9a-f]{24})")


class Said(NamedTuple):
    """One message; at in ms since the epoch."""

    role: str
    content: str
    at: int


class Turn(NamedTuple):
    """What was stored at once; mark is the identity it was carried over under, where it was."""

    session: str
    said: tuple[Said, ...]
    mark: str | None

    @property
    def digest(self) -> str:
        """What tells it from other turns: session, roles and texts, but for what a store may change in passing."""
        words = [[s.role, _ODD.sub("", s.content).strip()] for s in self.said]
        return hashlib.sha256(json.dumps([self.session, words]).encode()).hexdigest()[:24]


@dataclass
class Count:
    """What became of the turns of the store that was left. left_out: the other store kept nothing of it."""

    turns: int = 0
    carried: int = 0
    already: int = 0
    left_out: int = 0
    failed: int = 0
    trouble: str | None = None


def turns(kind: str, data_dir: str) -> Iterator[Turn]:
    """The turns in the store of a kind, oldest first; none where there is no store. Raises OSError, sqlite3.Error."""
    return _embedded(data_dir) if kind == "embedded" else _node(data_dir)


def _embedded(data_dir: str) -> Iterator[Turn]:
    path = os.path.join(data_dir, "memory.db")
    if not os.path.exists(path):
        return
    database = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=10)
    try:
        rows = database.execute(
            "SELECT t.id, t.session, m.role, m.content, m.at FROM turn t JOIN message m ON m.turn = t.id"
            " ORDER BY t.id, m.id"
        )
        for (_, session), found in itertools.groupby(rows, key=lambda row: row[:2]):
            yield Turn(session, tuple(Said(*row[2:]) for row in found), None)
    finally:
        database.close()


def _node(data_dir: str) -> Iterator[Turn]:
    pattern = os.path.join(glob.escape(data_dir), "conversations", "????-??-??.jsonl")
    for path in sorted(glob.glob(pattern)):
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = filter(None, map(_line, file))
            for (session, _), found in itertools.groupby(lines, key=lambda line: line[:2]):
                messages = [line[2:] for line in found]
                mark = next((m[1] for _, _, _, id_ in messages if (m := _WHOSE.match(id_))), None)
                yield Turn(session, tuple(Said(role, text, at) for role, text, at, _ in messages), mark)


def _line(text: str) -> tuple[str, str, str, str, int, str] | None:
    """(session, recordedAt, role, content, ms, id) of a line; None for what is cut or of another shape."""
    try:
        line = json.loads(text)
        session, role, content = line["sessionKey"], line["role"], line["content"]
        at = int(line.get("timestamp") or 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if not all(isinstance(value, str) and value for value in (session, role, content)):
        return None
    return session, str(line.get("recordedAt")), role, content, at, str(line.get("id") or "")


class _There:
    """How often each turn is in the store that is filled."""

    def __init__(self, kind: str, data_dir: str) -> None:
        self._path = os.path.join(data_dir, "carried.jsonl")
        self._kind = kind
        self.counts: Counter[str] = Counter()
        marked = False
        for turn in turns(kind, data_dir):
            self.counts.update({turn.digest, turn.mark or turn.digest})
            marked = marked or turn.mark is not None
        if kind == "node" and not marked:  # a store that keeps ids tells better than a list
            self.counts |= Counter(self._listed())

    def _listed(self) -> Iterator[str]:
        try:
            with open(self._path, encoding="ascii", errors="replace") as file:
                yield from (line.strip() for line in file if len(line) == 25)
        except FileNotFoundError:
            return

    def note(self, identity: str) -> None:
        """A turn was sent."""
        if self._kind == "node":
            with open(
                os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="ascii"
            ) as file:
                file.write(identity + "\n")


def waiting(to: str, data_dir: str) -> Count:
    """How many turns are to be carried into the store of a kind, without doing it. Raises OSError, sqlite3.Error."""
    count = Count()
    for _ in _missing(_There(to, data_dir), to, data_dir, count):
        pass
    return count


def _missing(there: _There, to: str, data_dir: str, count: Count) -> Iterator[tuple[Turn, str]]:
    """Each turn to send with its identity; counted as it goes."""
    seen = Counter[str]()
    for turn in turns("node" if to == "embedded" else "embedded", data_dir):
        count.turns += 1
        # Where a carried turn came from knows it by what it was there, whatever became of its text here.
        identity = turn.mark if turn.mark and there.counts[turn.mark] else turn.digest
        seen[identity] += 1
        if there.counts[identity] >= seen[identity]:
            count.already += 1
        else:
            yield turn, identity


def carry(root: str, gateway: dict[str, Any], to: str, progress: Progress) -> Count:
    """Carry everything that is not there yet into a READY Gateway of kind `to`; gateway: its status data."""
    data_dir = gateway["data_dir"]
    count = Count()
    try:
        importer = Importer(root, gateway)
        there = _There(to, data_dir)
        for turn, identity in _missing(there, to, data_dir, count):
            trouble = _send(importer, turn, identity)
            if trouble is None:
                there.note(identity)
                count.carried += 1
            elif trouble == NOTHING:
                count.left_out += 1
            else:
                count.failed += 1
                count.trouble = trouble
            progress.count(f"carrying conversations over: {count.turns} seen, {count.carried} carried")
    except (OSError, ValueError, sqlite3.Error) as error:
        count.trouble = f"stopped after {count.turns} turns: {error}"
    return count


def _send(importer: Importer, turn: Turn, identity: str) -> str | None:
    if importer.seeds:
        return importer.seed(turn.session, turn.said)
    texts = {s.role: s.content for s in reversed(turn.said)}
    messages = [{"role": s.role, "content": s.content, "id": f"{MARK}{identity}-{n}"} for n, s in enumerate(turn.said)]
    # Both contents are demanded, but what is kept is in `messages`.
    body = {"user_content": texts.get("user") or "-", "assistant_content": texts.get("assistant") or "-"}
    ahead = AHEAD if importer.generation == "A" else 0
    return importer.capture({**body, "session_key": turn.session, "messages": messages}, ahead)
