"""The conversations on disk: one SQLite file, one thread that touches it.

Invariants:
- What was answered is on disk: WAL with synchronous=FULL, and a commit counts only while the file it went to is still
  the one at its path. Neither SIGKILL nor a power cut nor a deleted file takes an acknowledged turn.
- An idempotency key is stored in the row of its turn, so both are there or neither is, for as long as the turn is.
- Nothing that cannot be read is overwritten: a broken database is renamed to `memory.db.corrupt-<UTC time>`, its WAL
  with it, and a fresh one takes its place. A connection to a file that is no longer ours is never closed, because
  closing writes its WAL back and unlinks the WAL at the path.
- The data directory is created once, at start. One that was removed or replaced later is a named failure: whoever
  holds the lease holds it on the old directory.
"""

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from tdai_supervisor.embedded.turns import SCHEMA, SCHEMA_VERSION

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

FILE = "memory.db"
BUSY_TIMEOUT = 2.0
"""Seconds to wait for another process that holds the write lock (clients give up after 3)."""
CHECKED_SIZE = 16 << 20
"""Bytes up to which the whole file is checked when it is opened (10 ms for 5 MB, measured); larger ones show damage
when the damaged page is read."""
ROOM = 1 << 20
"""Bytes that must fit before a store that failed counts as working again: the largest capture."""
CHECK_INTERVAL = 2.0
"""Seconds between two looks at whether the store can write."""
STALLED_AFTER = 10.0
"""Seconds one batch may take before the store counts as not working (a disk that hangs)."""
MAX_WAITING = 512
"""Requests that wait for the store; further ones are refused at once."""
MAX_BATCH = 64
"""Writes committed together."""

_BROKEN = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_AWAY = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_READONLY,
}


class Unusable(Exception):
    """The data directory or the database cannot be used, and waiting will not help."""


class StoreDown(Exception):
    """The store does not work now: nothing was stored, try again later."""


class Store:
    """The database file and whether it works. Used by one thread; `cause` and `quarantined` may be read by any."""

    def __init__(self, directory: str, log: Callable[[str], None]) -> None:
        self.directory = directory
        self.path = os.path.join(directory, FILE)
        self.cause: str | None = None
        self.quarantined: list[str] = []
        self._log = log
        self._con: sqlite3.Connection | None = None
        self._abandoned: list[sqlite3.Connection] = []
        self._directory_id = self._file_id = (0, 0)

    def open(self) -> None:
        """Create and open. A store that cannot be opened *now* (full, read-only) leaves its `cause` and no error.

        Raises Unusable: the directory cannot be made or entered, a newer release wrote the database, or this SQLite
        lacks FTS5.
        """
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            self._directory_id = _identity(self.directory)
        except OSError as exc:
            cause = exc.strerror
            raise Unusable(f"cannot use the data directory {self.directory}: {cause}; try another one") from exc
        try:
            self._attempt(lambda con: None)
        except StoreDown:
            return
        except sqlite3.Error as exc:
            raise Unusable(f"cannot use {self.path}: {exc}; try another data directory") from exc

    def close(self) -> None:
        """Write the WAL back and close. What was acknowledged is safe without it."""
        if self._con is not None and self._in_place():
            self._con.close()
            self._con = None

    def read(self, work: Work[T]) -> T:
        """Run `work`. Raises StoreDown, or what `work` raised."""
        return self._attempt(work)

    def write(self, works: Sequence[Work[Any]]) -> list[Any]:
        """Run `works` in one transaction, all or none. Raises StoreDown, or what a work raised."""

        def transaction(con: sqlite3.Connection) -> list[Any]:
            con.execute("BEGIN IMMEDIATE")
            try:
                results = [work(con) for work in works]
                con.execute("COMMIT")
            finally:
                if con.in_transaction:
                    con.execute("ROLLBACK")
            return results

        results = self._attempt(transaction)
        if self.cause is not None:
            self._log(f"the store works again: {self.path}")
            self.cause = None
        return results

    def check(self) -> None:
        """Find out whether writing works, where there is reason to doubt it. Raises StoreDown."""
        if self.cause is None and self._in_place() and not self._cramped():
            return
        # Committed twice: a transaction that is rolled back need not touch the disk.
        self.write([_fill])
        self.write([lambda con: con.execute("DROP TABLE room")])

    def _cramped(self) -> bool:
        try:
            space = os.statvfs(self.directory)
        except OSError:
            return True
        free = space.f_bavail if os.geteuid() else space.f_bfree
        return free * space.f_frsize < ROOM // 16 or bool(space.f_flag & os.ST_RDONLY)

    def _attempt(self, work: Work[T]) -> T:
        for _ in range(2):
            try:
                result = work(self._usable())
            except OSError as exc:
                raise self._down(f"cannot open the database: {exc.strerror}") from exc
            except sqlite3.Error as exc:
                self._judge(exc)
                continue  # the broken file is out of the way
            # After the work, not before: only then is it certain that the commit went into the file at the path.
            if self._in_place():
                return result
        raise self._down("the database file does not stay in its place")

    def _usable(self) -> sqlite3.Connection:
        if self._con is not None and not self._in_place():
            self._log(f"{self.path} was removed or replaced: going on with what is there now")
            self._abandon()
        if self._con is None:
            if _identity(self.directory) != self._directory_id:
                raise self._down("the data directory was replaced: restart the Gateway")
            _own(self.path, self.directory)
            con = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
            self._file_id = _identity(self.path)
            try:
                self._prepare(con)
            except (sqlite3.Error, Unusable) as exc:
                if isinstance(exc, sqlite3.Error) and _code(exc) not in _BROKEN:
                    con.close()
                else:
                    self._abandoned.append(con)
                raise
            self._con = con
            self.quarantined = _quarantined(self.directory)
        return self._con

    def _prepare(self, con: sqlite3.Connection) -> None:
        (version,) = con.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise Unusable(
                f"cannot use {self.path}: a newer release wrote it (schema {version}, this one knows {SCHEMA_VERSION})"
                "; try that release, or another data directory"
            )
        con.execute("PRAGMA journal_mode = WAL")
        con.execute("PRAGMA synchronous = FULL")
        con.execute("PRAGMA fullfsync = ON")  # macOS: fsync alone leaves the data in the drive's cache
        con.execute("PRAGMA journal_size_limit = 16777216")
        con.execute("PRAGMA temp_store = MEMORY")
        if version == 0:
            con.execute("BEGIN IMMEDIATE")
            # Asked again under the lock: two processes may be creating it.
            if con.execute("PRAGMA user_version").fetchone() == (0,):
                for statement in SCHEMA:
                    con.execute(statement)
            con.execute("COMMIT")
        con.execute("CREATE VIRTUAL TABLE temp.message_term USING fts5vocab(main, message_text, row)")
        if version and os.path.getsize(self.path) <= CHECKED_SIZE:
            (verdict,) = con.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                damage = sqlite3.DatabaseError(verdict)
                damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise damage

    def _judge(self, exc: sqlite3.Error) -> None:
        """Move a broken file away; raise StoreDown for a failure that may pass, and anything else as it is."""
        if _code(exc) in _BROKEN:
            try:
                name = self._quarantine()
            except OSError as why:
                raise self._down(f"the database is corrupt and cannot be moved away: {why.strerror}") from why
            self._log(f"{self.path} is corrupt ({exc}): kept as {name}, a fresh one takes its place")
        elif _code(exc) in _AWAY:
            raise self._down(f"cannot store: {exc}") from exc
        else:
            raise exc

    def _down(self, cause: str) -> StoreDown:
        if cause != self.cause:
            self._log(f"{cause} (data directory {self.directory})")
            self.cause = cause
        return StoreDown(cause)

    def _quarantine(self) -> str:
        self._abandon()
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        name, number = f"{FILE}.corrupt-{stamp}", 1
        while os.path.lexists(os.path.join(self.directory, name)):
            name, number = f"{FILE}.corrupt-{stamp}-{number}", number + 1
        # The database last: SQLite deletes a WAL whose database is missing.
        for suffix in ("-shm", "-wal", ""):
            with suppress(FileNotFoundError):
                os.rename(self.path + suffix, os.path.join(self.directory, name + suffix))
        return name

    def _abandon(self) -> None:
        if self._con is not None:
            self._abandoned.append(self._con)
            self._con = None

    def _in_place(self) -> bool:
        try:
            return _identity(self.path) == self._file_id
        except OSError:
            return False


def _code(exc: sqlite3.Error) -> int:
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF


def _fill(con: sqlite3.Connection) -> None:
    con.execute("CREATE TABLE IF NOT EXISTS room(pad BLOB)")
    con.execute("INSERT INTO room VALUES (zeroblob(?))", (ROOM,))


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _quarantined(directory: str) -> list[str]:
    names = sorted(name for name in os.listdir(directory) if name.startswith(f"{FILE}.corrupt-"))
    return [name for name in names if not name.endswith(("-wal", "-shm"))]


def _own(path: str, directory: str) -> None:
    """The database file, there and 0600 (SQLite gives its WAL the same mode), and its name on disk."""
    new = not os.path.exists(path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)
    for folder in (directory, os.path.dirname(directory)) if new else ():
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class _Job(NamedTuple):
    write: bool
    work: Work[Any]
    future: asyncio.Future[Any]


class Worker:
    """The one thread that runs a store, and the way to it from the event loop. Writes that wait are committed together.

    All methods are for the loop's thread. The thread is a daemon: a disk that hangs does not keep the process alive.
    """

    def __init__(self, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._checked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def read(self, work: Work[T]) -> asyncio.Future[T]:
        """The result of `work`. Raises StoreDown, or what `work` raised."""
        return self._submit(False, work)

    def write(self, work: Work[T]) -> asyncio.Future[T]:
        """Like read; done when it is on disk."""
        return self._submit(True, work)

    def cause(self) -> str | None:
        """Why the store does not work, or None. Never waits; begins a check when the last is CHECK_INTERVAL ago."""
        now = time.monotonic()
        since = self._busy_since
        if since is not None and now - since > STALLED_AFTER:
            return f"the disk has not answered for {now - since:.0f} s"
        if now - self._checked >= CHECK_INTERVAL:
            self._checked = now
            check = self._submit(False, lambda con: self._store.check())
            check.add_done_callback(asyncio.Future.exception)  # seen: the store keeps and logs its cause
        return self._store.cause

    def stop(self, timeout: float) -> None:
        """Finish what waits and close the store, within `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _submit(self, write: bool, work: Work[T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        if self._queue.qsize() < MAX_WAITING:
            self._queue.put(_Job(write, work, future))
        else:
            future.set_exception(StoreDown("too many requests wait for the disk"))
        return future

    def _run(self) -> None:
        waiting: list[_Job | None] = []
        while None not in waiting:
            waiting = [self._queue.get()]
            while len(waiting) < MAX_BATCH and not self._queue.empty():
                waiting.append(self._queue.get())
            self._busy_since = time.monotonic()
            for write, group in groupby(filter(None, waiting), key=lambda job: job.write):
                jobs = list(group)
                if write:
                    self._perform(jobs)
                else:
                    for job in jobs:
                        self._perform([job])
            self._busy_since = None
        self._store.close()

    def _perform(self, jobs: list[_Job]) -> None:
        results: list[Any] = []
        error: Exception | None = None
        try:
            works = [job.work for job in jobs]
            results = self._store.write(works) if jobs[0].write else [self._store.read(works[0])]
        except Exception as exc:  # noqa: BLE001 - raised again where the result is awaited
            error = exc
        if error is not None and len(jobs) > 1 and not isinstance(error, StoreDown):
            for job in jobs:  # all were rolled back: one of them must not fail the others
                self._perform([job])
            return
        self._loop.call_soon_threadsafe(_deliver, [job.future for job in jobs], results, error)


def _deliver(futures: list[asyncio.Future[Any]], results: list[Any], error: Exception | None) -> None:
    for number, future in enumerate(futures):
        if future.done():  # its request is gone
            continue
        if error is None:
            future.set_result(results[number])
        else:
            future.set_exception(error)
