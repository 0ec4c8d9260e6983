"""Dead letters, and what a user does by hand to the records of a spool.

Invariants: whoever changes anything holds the drain lock, so that no drainer works on the same records; a letter is in
the spool again before it is out of its file; a record keeps its idempotency key whatever happens to it; what is dropped
is named by its id and counted.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

from .. import spool
from ..spool import Record, Spool
from .ledger import Entry, Ledger, read_counts
from .lock import Lock

FILES = ("dead.1.jsonl", "dead.jsonl")
PATIENCE = 3.0  # s for a drainer that is at work to let go


class HeldError(Exception):
    """Another process delivers this spool now."""


@contextmanager
def alone(path: str) -> Iterator[None]:
    """Be the only one who works on the spool at path. Raises HeldError after PATIENCE, OSError."""
    lock, until = Lock(path), time.monotonic() + PATIENCE
    while not lock.acquire():
        if time.monotonic() > until:
            raise HeldError(f"pid {lock.holder() or 'unknown'} delivers this spool now")
        time.sleep(0.02)
    try:
        yield
    finally:
        lock.release()


def dead_letters(path: str) -> Iterator[dict[str, Any]]:
    """The dead letters of the spool at ``path``, oldest first."""
    for name in FILES:
        try:
            with open(os.path.join(path, name), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            continue
        for _, payload in spool.unframe(data):
            if payload is not None:
                yield json.loads(payload)


def revive(target: Spool, ids: Container[str] | None = None) -> int:
    """Append dead letters (these ids, or all) to the spool again, under their keys. Returns how many.

    Raises HeldError, OSError.
    """
    if not any(os.path.exists(os.path.join(target.path, name)) for name in FILES):
        return 0
    with alone(target.path):
        taken = [each for each in dead_letters(target.path) if ids is None or each["record"]["id"] in ids]
        for letter in taken:
            # Dead before at this replay number: only a higher one is a record of its own.
            if not target.append(again(spool.decode_record(json.dumps(letter["record"]).encode()))):
                # It waits in the memory of this process alone: its letter must stay.
                raise OSError(errno.EIO, f"cannot put it into the spool: {target.last_error}", target.path)
        if ids is None:  # their files stay beside the spool, as they were
            for name in FILES:
                if os.path.exists(os.path.join(target.path, name)):
                    os.replace(os.path.join(target.path, name), os.path.join(target.path, f"{name}.revived"))
        _keep_but(target.path, {letter["record"]["id"] for letter in taken})
    return len(taken)


def again(record: Record) -> Record:
    """A copy of a record that is delivered although it was settled before, under the same idempotency key."""
    raw = record.as_json()
    return Record(**{**raw, "replay": record.replay + 1})


def drop(path: str, ids: Container[str], wall: float) -> list[str]:
    """Remove the records and dead letters with these ids; those that were there. Raises HeldError, OSError."""
    with alone(path):
        ledger = Ledger(path)
        ledger.refresh()
        entries = [entry for queue in ledger.sessions.values() for entry in queue if entry.id in ids]
        letters = [each["record"]["id"] for each in dead_letters(path) if each["record"]["id"] in ids]
        for entry in entries:
            # "dead" and no word of our own: a provider of another version must not deliver it after all.
            ledger.mark(entry, "dead", wall, sync=True)
        _keep_but(path, set(letters), dropped=len(entries) + len(letters))
    return [*(entry.id for entry in entries), *letters]


def _keep_but(path: str, gone: set[str], *, dropped: int = 0) -> None:
    """Write the files of dead letters anew without these ids, and count."""
    every = list(dead_letters(path))
    kept = [each for each in every if each["record"]["id"] not in gone]
    if len(kept) < len(every):
        frames = b"".join(spool.frame(json.dumps(each, ensure_ascii=False).encode("utf-8", "replace")) for each in kept)
        temporary = os.path.join(path, f".dead.{os.urandom(6).hex()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(frames)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, os.path.join(path, FILES[1]))
        if os.path.exists(os.path.join(path, FILES[0])):
            os.unlink(os.path.join(path, FILES[0]))
    counts = read_counts(path)
    counts.letters, counts.removed = len(kept), counts.removed + dropped
    counts.save(path)


def shown(path: str, *, dead: bool, text: bool) -> list[dict[str, Any]]:
    """The waiting records, or the dead letters, in order: who they are and what happened to them; words only if asked.

    Changes nothing. Raises OSError.
    """
    if dead:
        return [
            _as_json(spool.decode_record(json.dumps(letter["record"]).encode()), text)
            | {"state": "dead", "attempts": letter["attempts"], "error": letter["reason"]}
            for letter in dead_letters(path)
        ]
    ledger = Ledger(path)
    ledger.refresh()
    entries = sorted((e for queue in ledger.sessions.values() for e in queue), key=lambda e: (e.segment, e.start))
    return [
        _as_json(ledger.load(entry), text) | {"state": _state(entry), "attempts": entry.attempts, "error": None}
        for entry in entries
    ]


def _state(entry: Entry) -> str:
    return "perhaps delivered" if entry.maybe else "failed" if entry.attempts else "waiting"


def _as_json(record: Record, text: bool) -> dict[str, Any]:
    about = {"id": record.id, "kind": record.kind, "session": record.session_key, "at": record.at}
    return about | ({"user": record.user, "assistant": record.assistant} if text else {})
