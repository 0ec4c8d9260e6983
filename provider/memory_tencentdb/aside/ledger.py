"""What is still to be delivered: the records of the segments, less what their acknowledgements say.

Invariants:
* Only the holder of the drain lock writes here; whoever only looks calls ``Ledger(path)`` and never ``mark``.
* An acknowledgement names a record by its offset, so that a replayed copy of a record is a record of its own.
* An acknowledgement is not fsynced (one that must survive a power cut says ``sync``): losing it means sending again
  with the same idempotency key, or asking; never a lost turn.
* Within a session records keep their order of arrival; a segment is put away only when a newer one exists and nothing
  in it is pending.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from .. import spool
from ..settings import write_json
from ..spool import Record, decode_record

FINAL = ("done", "dead")
DEAD_BYTES = 16 * 1024 * 1024
"""Size at which the file of dead letters is put aside; one older file is kept."""


class Counts:
    """What a spool has seen, kept in stats.json. Times are wall seconds; ``holding`` says why nothing is sent now.

    ``not_durable``: turns that the disk refused at first; ``forgotten``: those of them that memory could not hold;
    ``letters``: dead letters that are kept now; ``removed``: records that the user dropped; ``unmarked``: outcomes that
    the disk refused to note; ``waiting`` and ``oldest``: what the last drainer saw pending when it saved.
    """

    delivered: int = 0
    skipped: int = 0
    dead: int = 0
    dropped: int = 0
    possible_duplicates: int = 0
    torn: int = 0
    not_durable: int = 0
    forgotten: int = 0
    letters: int = 0
    removed: int = 0
    unmarked: int = 0
    waiting: int = 0
    oldest: float = 0.0
    last_success: float = 0.0
    last_error: str = ""
    holding_kind: str = ""
    holding: str = ""
    holding_since: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Every count by its name."""
        return {name: getattr(self, name) for name in Counts.__annotations__}

    def save(self, path: str) -> None:
        """Keep them beside the spool. Raises OSError."""
        write_json(os.path.join(path, "stats.json"), self.as_json())


def read_counts(path: str) -> Counts:
    """The counts kept beside a spool; zeros where there are none."""
    kept = spool.read_json(os.path.join(path, "stats.json"))
    counts = Counts()
    for name, zero in counts.as_json().items():
        value = kept.get(name)
        if isinstance(value, str) == isinstance(zero, str) and isinstance(value, (str, int, float)):
            setattr(counts, name, value)
    if "letters" not in kept:  # written before letters were counted: then none had been taken up again
        counts.letters = counts.dead
    return counts


def keep_dead_letter(path: str, record: Record, reason: str, attempts: int, wall: float) -> None:
    """Append a dead letter, durable on return, to the file in the spool at ``path``. Raises OSError."""
    file = os.path.join(path, "dead.jsonl")
    if os.path.exists(file) and os.stat(file).st_size > DEAD_BYTES:
        os.replace(file, os.path.join(path, "dead.1.jsonl"))
    letter = {"record": record.as_json(), "reason": reason, "at": wall, "attempts": attempts}
    spool.append_frame(file, json.dumps(letter, ensure_ascii=False).encode("utf-8", "replace"), sync=True)


class Entry:
    """One pending record, without its text.

    ``attempts``: sends that failed; ``fails``: those between which other records were accepted; ``accepted``: how many
    others had been accepted at the last failure; ``maybe``: sent without an answer, so it may be stored; ``since``:
    wall time of the first attempt; ``memory``: the record itself where the disk has refused it.
    """

    def __init__(self, record: Record, segment: int = 0, start: int = 0, end: int = 0) -> None:
        self.segment, self.start, self.end = segment, start, end
        self.id, self.session, self.kind, self.at = record.id, record.session_key, record.kind, record.at
        self.memory: Record | None = None if segment else record
        self.attempts = self.fails = 0
        self.accepted = -1
        self.maybe = False
        self.since = self.not_before = 0.0


class _Segment:
    def __init__(self) -> None:
        self.read = self.pending = 0
        self.marks: dict[int, list[dict[str, Any]]] | None = None


class Ledger:
    """The pending records of one spool, by session, in order. refresh() reads only what is new."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.directory = os.path.join(path, "spool")
        self.sessions: dict[str, deque[Entry]] = {}
        self.torn = 0
        self.dropped = 0
        self.unmarked = 0
        self._segments: dict[int, _Segment] = {}
        self._seen: set[tuple[str, int]] = set()
        self._memory: dict[str, Entry] = {}
        self._done_in_memory: set[tuple[str, int]] = set()

    @property
    def pending(self) -> int:
        """Records to be delivered, session ends included."""
        return sum(len(queue) for queue in list(self.sessions.values()))

    @property
    def turns(self) -> int:
        """Pending records that hold words of the user. Another thread may ask."""
        return sum(entry.kind != "end" for queue in list(self.sessions.values()) for entry in list(queue))

    def oldest(self) -> float | None:
        """Wall time of the oldest pending record, or None."""
        return min((queue[0].at for queue in self.sessions.values() if queue), default=None)

    def refresh(self) -> None:
        """Take in what was appended since. Raises OSError when the spool cannot be read."""
        numbers = spool.segments(self.directory)
        for gone in set(self._segments) - set(numbers):
            self._forget(gone)
        for number in numbers:
            self._read(number)

    def _read(self, number: int) -> None:
        state = self._segments.setdefault(number, _Segment())
        path = spool.segment_path(self.directory, number)
        try:
            if os.stat(path).st_size <= state.read:
                return
            with open(path, "rb") as file:
                file.seek(state.read)
                data = file.read()
        except FileNotFoundError:
            return
        if state.marks is None:
            state.marks = self._read_marks(number)
        start = state.read
        for end, payload in spool.unframe(data):
            state.read = start + end
            self._take(number, state, start + end, payload)

    def _take(self, number: int, state: _Segment, end: int, payload: bytes | None) -> None:
        try:
            record = decode_record(payload) if payload is not None else None
        except (ValueError, TypeError):
            record = None
        if record is None or payload is None:
            self.torn += 1
            return
        marks = (state.marks or {}).get(end, [])
        if (record.id, record.replay) in self._seen or any(mark.get("e") in FINAL for mark in marks):
            return
        self._seen.add((record.id, record.replay))
        entry = Entry(record, number, end - len(payload) - 1, end)
        if record.replay:
            entry.maybe, entry.since = True, record.at
        for mark in marks:
            entry.attempts = int(mark.get("n", entry.attempts))
            entry.maybe = mark.get("e") == "try" or (entry.maybe and mark.get("e") == "lost")
            entry.since = entry.since or float(mark.get("at", 0.0))
        state.pending += 1
        self.sessions.setdefault(record.session_key, deque()).append(entry)
        if (record.id, record.replay) in self._done_in_memory:
            self.mark(entry, "done", record.at)

    def take_from_memory(self, waiting: Sequence[Record]) -> None:
        """Make the records that the disk refused the last ones of their sessions.

        Those that it took meanwhile are there twice: the copy on disk inherits what happened to the other.
        """
        if not waiting and not self._memory:
            return
        ids = {record.id for record in waiting}
        for entry in [each for each in self._memory.values() if each.id not in ids]:
            for twin in self.sessions[entry.session]:
                if twin.id == entry.id and twin is not entry:
                    twin.attempts, twin.maybe, twin.since = entry.attempts, entry.maybe, entry.since
            self._remove(entry)
        for record in waiting:
            if record.id not in self._memory:
                entry = Entry(record)
                self._memory[record.id] = entry
                self.sessions.setdefault(record.session_key, deque()).append(entry)
        for session in {entry.session for entry in self._memory.values()}:
            self.sessions[session] = deque(sorted(self.sessions[session], key=lambda entry: entry.memory is not None))

    def _read_marks(self, number: int) -> dict[int, list[dict[str, Any]]]:
        marks: dict[int, list[dict[str, Any]]] = {}
        try:
            with open(spool.segment_path(self.directory, number, "ack"), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return marks
        for _, payload in spool.unframe(data):
            if payload is not None:
                mark = json.loads(payload)
                marks.setdefault(int(mark["o"]), []).append(mark)
        return marks

    def load(self, entry: Entry) -> Record:
        """The record of an entry. Raises OSError or ValueError when the disk no longer gives it."""
        if entry.memory is not None:
            return entry.memory
        with open(spool.segment_path(self.directory, entry.segment), "rb") as file:
            file.seek(entry.start)
            return decode_record(file.read(entry.end - entry.start - 1))

    def mark(self, entry: Entry, event: str, wall: float, *, sync: bool = False) -> None:
        """Write down what happens to an entry: try · lost (no answer) · fail (answered) · back (unsent) · done · dead.

        A full disk is counted, not raised: delivery goes on, and after a crash the record is sent again under its key.
        """
        if event in FINAL:
            self._remove(entry)
            if entry.memory is not None:
                self._done_in_memory.add((entry.id, entry.memory.replay))
        if entry.memory is not None:
            return
        payload = json.dumps({"o": entry.end, "e": event, "n": entry.attempts, "at": round(wall, 3)}).encode()
        try:
            spool.append_frame(spool.segment_path(self.directory, entry.segment, "ack"), payload, sync=sync)
        except OSError:
            self.unmarked += 1

    def _remove(self, entry: Entry) -> None:
        queue = self.sessions.get(entry.session)
        if queue is None or entry not in queue:
            return
        queue.remove(entry)
        self._memory.pop(entry.id, None) if entry.memory is not None else None
        if not queue:
            del self.sessions[entry.session]
        if entry.memory is None and (state := self._segments.get(entry.segment)):
            state.pending -= 1

    def _forget(self, number: int) -> int:
        del self._segments[number]
        lost = [
            entry for queue in self.sessions.values() for entry in queue if entry.segment == number and not entry.memory
        ]
        for entry in lost:
            self._remove(entry)
        return len(lost)

    def tidy(self, wall: float) -> None:
        """Put away what is delivered, drop what is too old or too much. Raises OSError."""
        numbers = spool.segments(self.directory)
        for number in numbers[:-1]:
            state = self._segments.get(number)
            if state is None or state.pending:
                continue
            unread, torn = self._rest(number, state)
            if not unread:
                self.torn += torn
                self._put_away(number)
        self._prune_delivered(wall)
        while len(numbers := spool.segments(self.directory)) > 1 and self._bytes(numbers) > spool.PENDING_BYTES:
            self.dropped += self._forget(numbers[0]) if numbers[0] in self._segments else 0
            self._unlink(spool.segment_path(self.directory, numbers[0]))
            self._unlink(spool.segment_path(self.directory, numbers[0], "ack"))

    def behind(self) -> bool:
        """Whether something was appended that refresh() has not taken in yet."""
        known = self._segments
        return any(self._rest(number, known.get(number))[0] for number in spool.segments(self.directory))

    def _rest(self, number: int, state: _Segment | None) -> tuple[bool, bool]:
        """(whether unread records are left, whether the rest of a torn write is, which nobody will finish)."""
        read = state.read if state is not None else 0
        try:
            if self._size(number) <= read:
                return False, False
            with open(spool.segment_path(self.directory, number), "rb") as file:
                file.seek(read)
                rest = file.read()
        except FileNotFoundError:
            return False, False
        return any(True for _ in spool.unframe(rest)), bool(rest.strip())

    def drained(self) -> list[int] | None:
        """[number, size] of the only segment when all of it is delivered, as Spool.idle() compares it; else None."""
        numbers = spool.segments(self.directory)
        if self.pending or len(numbers) != 1 or numbers[0] not in self._segments:
            return None
        return [numbers[0], self._segments[numbers[0]].read]

    def _put_away(self, number: int) -> None:
        kept = os.path.join(self.path, "delivered")
        spool.private_directory(kept)
        target = spool.segment_path(kept, number)
        for copy in range(1, 1000):
            if not os.path.exists(target):
                break
            target = os.path.join(kept, f"{number:08d}-{copy}.seg")
        os.rename(spool.segment_path(self.directory, number), target)
        self._unlink(spool.segment_path(self.directory, number, "ack"))
        self._segments.pop(number, None)

    def _prune_delivered(self, wall: float) -> None:
        try:
            kept = [entry for entry in os.scandir(os.path.join(self.path, "delivered")) if entry.name.endswith(".seg")]
        except FileNotFoundError:
            return
        total = 0
        for entry in sorted(kept, key=lambda each: each.stat().st_mtime, reverse=True):
            total += entry.stat().st_size
            if total > spool.KEEP_BYTES or wall - entry.stat().st_mtime > spool.KEEP_SECONDS:
                self._unlink(entry.path)

    def _size(self, number: int) -> int:
        return os.stat(spool.segment_path(self.directory, number)).st_size

    def _bytes(self, numbers: list[int]) -> int:
        return sum(self._size(number) for number in numbers)

    def _unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
