"""Delivery: what one drainer does with the records of a spool, until none is left or nothing more can be done.

Run by a session in a background thread (worker.py), by the daemon and by flush (drain.py).

Invariants:
* One drainer per spool over all processes: it holds the flock of drain.lock for as long as it has a Ledger. After it
  lets go it looks once more, so that whoever found the lock taken may rely on its holder.
* Within a session nothing overtakes: a record is sent after its predecessor was accepted or dead-lettered.
* A Gateway that is away, on hold, busy or refuses the key burns no attempt of any record.
* After a lost reply a Gateway that keeps idempotency keys gets the record again; any other is asked first.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable

from ..endpoint import Away
from ..gateway import RECALL_DEADLINE, Client, Health, Outcome, capture_body, classify, raise_away
from ..settings import write_json
from ..spool import Record, Spool
from . import pacing
from .ledger import Counts, Entry, Ledger, keep_dead_letter, read_counts
from .lock import Lock
from .pacing import Pause

TIDY_EVERY = 10.0
END_TRIES = 3


class Drainer:
    """Delivers one spool. Not for several threads at once. ``sleep(seconds)`` returns True when it should stop."""

    def __init__(
        self,
        spool: Spool,
        client: Client,
        sleep: Callable[[float], bool],
        *,
        told: Callable[[Away | None], None] = lambda trouble: None,
        settled: Callable[[str], None] = lambda record_id: None,
        awaited: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.counts = Counts()
        self.ledger = Ledger(spool.path)
        self.lock = Lock(spool.path)
        self._spool, self._client, self._sleep = spool, client, sleep
        self._told, self._settled, self._awaited = told, settled, awaited
        self._clock, self._wall, self._chance = clock, wall, chance
        self._health: tuple[Health, float] | None = None
        self._pause: Pause | None = None
        self._sent: dict[str, deque[float]] = {}
        self._witness: set[str] = set()
        self._accepted = 0
        self._refused = (0, 0)
        self._tidied = self._saved = float("-inf")

    def acquire(self) -> bool:
        """Become the drainer of this spool. False: another one is. Raises OSError where no lock can be had at all.

        A disk that takes no lock file takes no turn either: then those in memory, which are this process's own, are
        delivered without the lock, and none from disk.
        """
        if self.lock.held:
            return True
        try:
            if not self.lock.acquire():
                return False
        except OSError:
            if not self._spool.volatile:
                raise
        self.ledger, self.counts = Ledger(self._spool.path), read_counts(self._spool.path)
        return True

    def release(self) -> None:
        """Let another drainer go on. Records that are left stay what they are."""
        if self.lock.held:
            self._save(always=True)
        self.lock.release()

    def caught_up(self) -> bool:
        """After release(): whether nothing came in since the last look. Whoever found the lock taken relies on it."""
        return not self._spool.volatile and not self.ledger.pending and not self.ledger.behind()

    @property
    def trouble(self) -> Away | None:
        """Why nothing is sent now, or None. Another thread may ask."""
        pause = self._pause
        return pause.trouble if pause is not None else None

    @property
    def relies_on_others(self) -> bool:
        """Whether another drainer of this process can deliver all of it: nothing waits in the memory of this spool."""
        return not self._spool.volatile

    def resume(self) -> None:
        """The Gateway has just answered somebody else: look again at once, unless it asked to wait or is on hold."""
        pause = self._pause
        if pause is not None and pause.trouble.kind not in ("hold", "busy"):
            pause.until = self._clock()

    def step(self) -> float | None:
        """Do one thing. Returns the seconds until there may be more to do, or None when nothing is.

        With nothing pending the Gateway is still looked at while its return is ``awaited``, so that no turn has to wait
        to find out.
        Raises OSError when the spool cannot be read or the lock is gone.
        """
        if self.lock.removed():
            raise OSError("the lock file was removed")
        self._spool.settle()
        self.ledger.refresh()
        self.ledger.take_from_memory(tuple(self._spool.volatile))
        if not self.lock.held and not self._spool.volatile:
            return None
        now = self._clock()
        if now - self._tidied > TIDY_EVERY or not self.ledger.pending:
            self._tidied = now
            self._tidy()
        if not self.ledger.pending and not self._awaited():
            self._pause = None
            return None
        if (wait := self._paused(now)) > 0:
            return min(1.0, wait)
        try:
            health = self._gate(now)
            if not self.ledger.pending:
                self._probe()
                return None
            entry, wait = self._choose(health, now)
            if entry is None:
                return wait
            self._deliver(entry, health)
        except Away as trouble:
            self._hold(trouble)
            return min(1.0, self._paused(self._clock()))
        self._save()
        return 0.0

    def _paused(self, now: float) -> float:
        """Seconds for which nothing is sent; 0 as soon as the endpoint record or key has changed."""
        pause = self._pause
        if pause is None or self._client.endpoint.changes() != pause.changes:
            return 0.0
        return max(0.0, pause.until - now)

    def _tidy(self) -> None:
        """Put away and prune. That the disk refuses it is no reason not to deliver."""
        if not self.lock.held:
            return
        try:
            self.ledger.tidy(self._wall())
            if (until := self.ledger.drained()) is not None:
                write_json(os.path.join(self._spool.path, "drained.json"), {"until": until})
        except OSError as error:
            self.counts.last_error = f"cannot tidy the spool: {error}"

    def _gate(self, now: float) -> Health:
        """The health of a Gateway that may be delivered to. Raises Away where it must not be, or not now."""
        pause = self._pause
        self._client.endpoint.target()
        if (held := self._client.endpoint.held()) is not None:
            raise held
        if self._health is None or now - self._health[1] > pacing.HEALTH_AGE:
            kind, age = (pause.trouble.kind, now - pause.since) if pause is not None else ("", 0.0)
            self._health = (self._client.health(pacing.probe_deadline(kind, age)), now)
        health = self._health[0]
        if health.degraded:
            self._health = None
            raise Away("hold", "the Gateway is degraded: what it takes now it would not keep")
        return health

    def _hold(self, trouble: Away) -> None:
        """Stop sending for a while; trouble that goes on keeps its beginning."""
        now, changes = self._clock(), self._client.endpoint.changes()
        self._health = None
        if trouble.kind == "closing":
            return
        since = self._pause.since if self._pause is not None else now
        length = pacing.pause_length(trouble.kind, now - since, trouble.wait)
        self._pause = Pause(trouble, since, now + length, changes)
        if self.counts.holding_kind != trouble.kind:
            self.counts.holding_since = self._wall()
        self.counts.holding_kind, self.counts.holding = trouble.kind, trouble.reason
        self._told(trouble)
        self._save()

    def _probe(self) -> None:
        """Make a harmless POST: a Gateway whose /health answers may still leave requests unanswered. Raises Away."""
        self._client.search("/search/memories", {"query": "memory", "limit": 1}, RECALL_DEADLINE)
        self._flows()

    def _flows(self) -> None:
        self._pause = None
        self.counts.holding_kind = self.counts.holding = ""
        self._told(None)

    def _choose(self, health: Health, now: float) -> tuple[Entry | None, float]:
        """The next record that may be sent, oldest session head first; or None and the seconds until there is one."""
        waits = []
        for queue in sorted(self.ledger.sessions.values(), key=lambda each: (bool(each[0].memory), each[0].at)):
            entry = queue[0]
            if entry.memory is None and not self.lock.held:
                continue
            if entry.session in self._witness and len(queue) > 1:
                entry = queue[1]
            ready = entry.not_before
            if entry.kind != "end":
                ready = max(ready, pacing.burst_over(self._sent.get(entry.session), health.generation))
            if ready <= now:
                return entry, 0.0
            waits.append(ready - now)
        return None, min(waits, default=1.0)

    def _deliver(self, entry: Entry, health: Health) -> None:
        """Send one record and settle what became of it. Raises Away when that says nothing about the record."""
        try:
            record = self.ledger.load(entry)
        except (OSError, ValueError, TypeError) as error:
            self._bury(entry, Record(entry.id, entry.session), f"cannot be read back from disk: {error}")
            return
        if record.kind == "end":
            self._end(entry, health)
            return
        if entry.maybe and not health.keyed and self._is_stored(entry, record):
            self._accept(entry)
            return
        entry.since = entry.since or self._wall()
        self.ledger.mark(entry, "try", self._wall(), sync=not health.keyed)
        try:
            outcome = self._send(record, health.generation)
        except Away as trouble:
            entry.maybe = trouble.sent
            if trouble.sent and trouble.kind != "closing":
                self._failed(entry, record, trouble.reason, "lost")
            else:
                self.ledger.mark(entry, "lost" if trouble.sent else "back", self._wall())
            raise
        entry.maybe = False
        if outcome.verdict in ("accepted", "skipped"):
            self.counts.skipped += outcome.verdict == "skipped"
            self._accept(entry)
        elif outcome.verdict == "failed":
            self._failed(entry, record, outcome.reason, "fail")
        else:
            self._bury(entry, record, outcome.reason)

    def _send(self, record: Record, generation: str) -> Outcome:
        """The outcome of one record; one that the Gateway silently drops is sent again after a jittered moment."""
        body = capture_body(record, generation)
        for attempt in range(1, pacing.DROPPED_TRIES + 1):
            outcome = classify(self._client.capture(body, record.id), record.user, record.assistant)
            if outcome.verdict != "dropped":
                return outcome
            if attempt < pacing.DROPPED_TRIES and self._sleep(pacing.drop_delay(attempt, self._chance())):
                raise Away("closing", "this session is ending")
        return Outcome("dropped", f"{outcome.reason}, {pacing.DROPPED_TRIES} times")

    def _is_stored(self, entry: Entry, record: Record) -> bool:
        """Ask whether a record whose reply was lost is there. What cannot be asked counts as a possible duplicate."""
        stored = self._client.holds(record.user, record.assistant, record.session_key, entry.since)
        if stored is None:
            # Before it is sent: a kill between the two must not leave a duplicate that nobody counted.
            self.counts.possible_duplicates += 1
            self._save(always=True)
        return stored is True

    def _end(self, entry: Entry, health: Health) -> None:
        """Tell that a session ended, where that helps. It is a courtesy, given up after three tries."""
        if health.flushes and entry.attempts < END_TRIES:
            entry.attempts += 1
            entry.not_before = self._clock() + pacing.backoff(entry.attempts)
            reply = self._client.end_session(entry.session)
            raise_away(reply)
            if reply.error:
                return
        self.ledger.mark(entry, "done", self._wall())

    def _accept(self, entry: Entry) -> None:
        self.ledger.mark(entry, "done", self._wall())
        self._settled(entry.id)
        if entry.memory is not None:
            self._spool.forget(entry.memory)
        self._accepted += 1
        self.counts.delivered += 1
        self.counts.last_success = self._wall()
        self._sent.setdefault(entry.session, deque(maxlen=pacing.BURST)).append(self._clock())
        self._flows()
        if entry.session in self._witness:
            self._witness.discard(entry.session)
            stuck = self.ledger.sessions.get(entry.session, [entry])[0]
            if stuck is not entry and stuck.attempts >= pacing.FAILURES:
                self._bury(stuck, self.ledger.load(stuck), f"failed {stuck.attempts} times while others were accepted")

    def _failed(self, entry: Entry, record: Record, reason: str, event: str) -> None:
        """Keep a record for later, or give it up: after 12 failures, each after another record was accepted.

        Where it blocks its own session nothing else could be accepted; then the next record of the session is the
        witness: if the Gateway takes that one, it is this one that it cannot take.
        """
        self.counts.last_error = reason
        entry.attempts += 1
        entry.fails += entry.accepted != self._accepted
        entry.accepted = self._accepted
        entry.not_before = self._clock() + pacing.backoff(entry.attempts)
        self._witness.discard(entry.session)
        if entry.fails >= pacing.FAILURES:
            self._bury(entry, record, reason)
            return
        self.ledger.mark(entry, event, self._wall())
        if entry.attempts >= pacing.FAILURES and entry is self.ledger.sessions[entry.session][0]:
            self._witness.add(entry.session)

    def _bury(self, entry: Entry, record: Record, reason: str) -> None:
        """Make it a dead letter: on disk first, and only then no longer pending."""
        try:
            keep_dead_letter(self._spool.path, record, reason, entry.attempts, self._wall())
        except OSError as error:
            self.counts.last_error = f"cannot keep a dead letter: {error}"
            entry.not_before = self._clock() + pacing.BACKOFF_LAST
            return
        self.ledger.mark(entry, "dead", self._wall())
        self._settled(entry.id)
        if entry.memory is not None:
            self._spool.forget(entry.memory)
        self.counts.dead += 1
        self.counts.letters += 1
        self.counts.last_error = reason

    def _save(self, *, always: bool = False) -> None:
        """Keep the counts where status reads them; at most once a second, and a full disk costs only the note."""
        now = self._clock()
        if not self.lock.held or (not always and now - self._saved < 1.0):
            return
        self._saved = now
        self.counts.torn += self.ledger.torn
        self.counts.dropped += self.ledger.dropped
        self.counts.unmarked += self.ledger.unmarked
        self.ledger.torn = self.ledger.dropped = self.ledger.unmarked = 0
        self.counts.waiting, self.counts.oldest = self.ledger.turns, self.ledger.oldest() or 0.0
        refused, forgotten = self._spool.not_durable, self._spool.forgotten
        self.counts.not_durable += refused - self._refused[0]
        self.counts.forgotten += forgotten - self._refused[1]
        self._refused = refused, forgotten
        try:
            self.counts.save(self._spool.path)
        except OSError as error:
            self.counts.last_error = f"cannot write stats.json: {error}"
