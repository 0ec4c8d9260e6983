"""Turns in the database: what is stored and how it is found again. Works on an open connection, inside a transaction
that its caller begins and commits.

Invariants:
- A turn, its messages, their index entries and its idempotency key are written together, so all are there or none is.
- A key is kept for as long as its turn: a repeated capture counts once however late it comes.
- Content is stored whole and unchanged; only the index sees it folded.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tdai_supervisor.embedded.text import Said, expression, index_text, query_terms

SCHEMA_VERSION = 1
CANDIDATES = 48
"""Messages looked at to choose the turns of a recall."""
COMMON = 2_000
"""A term in more messages than this, and than a tenth of all, is left out beside rarer ones: "the" says nothing about
what is meant and costs 3 us per message that holds it (a sentence over 100,000 messages: 950 ms with, 75 without,
measured)."""
RARE_TERMS = 16
"""The rarest terms that are looked for in a store of more than COMMON messages."""

SCHEMA = (
    """CREATE TABLE turn(
        id INTEGER PRIMARY KEY, session TEXT NOT NULL, session_id TEXT, user_id TEXT, at INTEGER NOT NULL,
        key BLOB UNIQUE)""",
    """CREATE TABLE message(
        id INTEGER PRIMARY KEY, turn INTEGER NOT NULL REFERENCES turn(id), role TEXT NOT NULL, at INTEGER NOT NULL,
        content TEXT NOT NULL)""",
    "CREATE INDEX message_turn ON message(turn)",
    "CREATE VIRTUAL TABLE message_text USING fts5(tokens, content='', tokenize='ascii')",
    "CREATE TABLE session_end(session TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_SAID = "SELECT m.id, m.role, m.content, m.at, t.session FROM message m JOIN turn t ON t.id = m.turn"
_MESSAGE = _SAID + " WHERE m.id = ?"
_TURN = _SAID + " WHERE m.turn = ? ORDER BY m.id"


class Message(NamedTuple):
    role: str
    content: str
    at: int


class Turn(NamedTuple):
    """What is stored at once; `at` in ms since the epoch, `key` 32 bytes or None."""

    session: str
    at: int
    messages: tuple[Message, ...]
    key: bytes | None = None
    session_id: str | None = None
    user_id: str | None = None


class Captured(NamedTuple):
    recorded: int
    duplicate: bool


def key_of(*parts: str) -> bytes:
    """The stored form of an idempotency key, of one size whatever the client sent."""
    return hashlib.sha256("\0".join(parts).encode()).digest()


def capture(con: sqlite3.Connection, turn: Turn) -> Captured:
    """Store a turn, or say what was stored the first time its key was seen (whatever the body is now)."""
    if turn.key is not None:
        known = con.execute("SELECT id FROM turn WHERE key = ?", (turn.key,)).fetchone()
        if known is not None:
            (count,) = con.execute("SELECT count(*) FROM message WHERE turn = ?", known).fetchone()
            return Captured(count, True)
    elif not turn.messages:
        return Captured(0, False)
    row = con.execute(
        "INSERT INTO turn(session, session_id, user_id, at, key) VALUES (?, ?, ?, ?, ?)",
        (turn.session, turn.session_id, turn.user_id, turn.at, turn.key),
    ).lastrowid
    for role, content, at in turn.messages:
        values = (row, role, at, content)
        number = con.execute("INSERT INTO message(turn, role, at, content) VALUES (?, ?, ?, ?)", values).lastrowid
        con.execute("INSERT INTO message_text(rowid, tokens) VALUES (?, ?)", (number, index_text(content)))
    return Captured(len(turn.messages), False)


def _matches(con: sqlite3.Connection, match: str, limit: int, session: str | None) -> list[tuple[int, float]]:
    """(message, rank) best first, the newer one first where equal."""
    if session is None:
        return con.execute(
            "SELECT rowid, rank FROM message_text WHERE message_text MATCH ? ORDER BY rank, rowid DESC LIMIT ?",
            (match, limit),
        ).fetchall()
    return con.execute(
        "SELECT f.rowid, f.rank FROM message_text f JOIN message m ON m.id = f.rowid JOIN turn t ON t.id = m.turn"
        " WHERE message_text MATCH ? AND t.session = ? ORDER BY f.rank, f.rowid DESC LIMIT ?",
        (match, session, limit),
    ).fetchall()


def _score(rank: float) -> float:
    return -rank / (1 - rank)  # bm25 is negative, the better the smaller; readers get 0..1


def _telling(con: sqlite3.Connection, terms: list[str]) -> list[str]:
    """The terms that tell messages apart, the rarest first; all of them in a small store."""
    (messages,) = con.execute("SELECT coalesce(max(id), 0) FROM message").fetchone()
    if messages <= COMMON:
        return terms
    counts: dict[str, int] = {}
    for term in terms:
        tokens = term.split(" ")
        rows = [con.execute("SELECT doc FROM message_term WHERE term = ?", (token,)).fetchone() for token in tokens]
        counts[term] = min(row[0] if row else 0 for row in rows)  # a phrase is at most as frequent as its rarest part
    known = sorted((term for term in terms if counts[term]), key=counts.__getitem__)
    return [term for term in known if counts[term] <= max(COMMON, messages // 10)][:RARE_TERMS] or known[:1]


def _attempts(con: sqlite3.Connection, query: str, modes: tuple[bool, ...]) -> Iterator[list[str]]:
    """What to look for, in this order, until something is found; nothing is worked out before it is needed."""
    for choose in (True, False):
        for loose in modes:
            terms = query_terms(query, loose=loose)
            yield _telling(con, terms) if choose else terms


def _best(
    con: sqlite3.Connection, attempts: Iterable[list[str]], limit: int, session: str | None = None
) -> list[tuple[int, float]]:
    """(message, rank) of the first attempt that finds something."""
    tried: set[str | None] = {None}
    for match in map(expression, attempts):
        found = [] if match is None or match in tried else _matches(con, match, limit, session)
        if found:
            return found
        tried.add(match)
    return []


def search(con: sqlite3.Connection, query: str, limit: int, session: str | None = None) -> list[Said]:
    """The best messages for a query. Runs of CJK text count as phrases; only if nothing matches, by pairs."""
    found = _best(con, _attempts(con, query, (False, True)), limit, session)
    return [Said(*con.execute(_MESSAGE, (number,)).fetchone())._replace(score=_score(rank)) for number, rank in found]


def recall(con: sqlite3.Connection, query: str, turns: int) -> list[list[Said]]:
    """The most relevant turns, each whole and in order. Turns that hold an answer come before those that do not."""
    ranks = dict(_best(con, _attempts(con, query, (True,)), CANDIDATES))
    score: dict[int, float] = {}
    for number, rank in ranks.items():
        (turn,) = con.execute("SELECT turn FROM message WHERE id = ?", (number,)).fetchone()
        score[turn] = score.get(turn, 0.0) - rank
    best = sorted(score, key=lambda turn: (-score[turn], -turn))[:turns]
    whole = [[Said(*row) for row in con.execute(_TURN, (turn,))] for turn in best]
    found = [[one._replace(score=_score(ranks.get(one.number, 0.0))) for one in said] for said in whole]
    return sorted(found, key=lambda said: not any(one.role == "assistant" for one in said))


def seed(con: sqlite3.Connection, turns: Iterable[Turn]) -> list[Captured]:
    """Store turns that have keys; those that are there already are left alone."""
    return [capture(con, turn) for turn in turns]


def end_session(con: sqlite3.Connection, session: str, at: int) -> None:
    """Remember that a session ended. Every capture was committed before it was answered: there is nothing to flush."""
    con.execute("INSERT OR REPLACE INTO session_end(session, at) VALUES (?, ?)", (session, at))
