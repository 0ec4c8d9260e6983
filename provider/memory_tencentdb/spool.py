"""The spool: turns on disk before anything else happens to them.

On disk, below $HERMES_HOME/memory_tencentdb/ (0700, files 0600):
    spool/NNNNNNNN.seg     records, one frame each; the highest number is appended to, by any process
    spool/NNNNNNNN.ack     what became of the records of that segment; written by the one drainer only (ledger.py)
    delivered/*.seg        segments without pending records, kept KEEP_SECONDS or KEEP_BYTES for replay
    dead.jsonl             dead letters: frames of {"record", "reason", "at"}
    drained.json, stats.json, endpoint.json, drain.lock

A frame is "\\n" crc32(json) in 8 hex digits, " ", json, "\\n".

Invariants:
* append() returns after fdatasync of the data, and of the directory when the segment is new: a SIGKILL or a power cut
  after that loses nothing.
* A frame is written by one write() to a file opened O_APPEND: writers of several processes never interleave, and no
  lock is held that a stopped process could keep. The leading newline ends whatever a torn write left before it.
* What fails its checksum is not a record; it is counted, never delivered and never reported saved.
* A record that the disk refuses waits in memory, behind everything that is on disk; it goes to disk as soon as that is
  possible again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from .settings import Settings, write_json

SEGMENT_BYTES = 256 * 1024
"""A drainer reads the newest segment when it begins: as much as is parsed in about 2 ms."""
PENDING_BYTES = 64 * 1024 * 1024
KEEP_BYTES = 50 * 1000 * 1000
KEEP_SECONDS = 7 * 86400.0
VOLATILE_BYTES = 16 * 1024 * 1024
SIDE_LIMIT = 1_000_000
"""Characters of one side of a turn that are kept; far above what a capture carries, so that a replay may carry more."""


class Record:
    """One thing to be delivered. ``id`` is its idempotency key; ``kind``: turn · memory · delegation · end."""

    FIELDS = ("id", "session_key", "user", "assistant", "kind", "at", "session_id", "who", "replay")
    __slots__ = FIELDS

    def __init__(
        self,
        id: str,
        session_key: str,
        user: str = "",
        assistant: str = "",
        kind: str = "turn",
        at: float = 0.0,
        session_id: str = "",
        who: Mapping[str, str] = MappingProxyType({}),
        replay: int = 0,
    ) -> None:
        self.id, self.session_key, self.session_id, self.who = id, session_key, session_id, who
        self.user, self.assistant, self.kind, self.at, self.replay = user, assistant, kind, at, replay

    def as_json(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return {**{name: getattr(self, name) for name in self.FIELDS}, "who": dict(self.who)}

    def encode(self) -> bytes:
        """The record as one line of JSON."""
        return json.dumps(self.as_json(), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def new_id() -> str:
    """A fresh idempotency key."""
    return os.urandom(16).hex()


def decode_record(payload: bytes) -> Record:
    """The record in a frame; unknown fields are ignored. Raises ValueError or TypeError when it is none."""
    raw = json.loads(payload)
    record = Record(**{key: value for key, value in raw.items() if key in Record.FIELDS})
    if not isinstance(record.id, str) or not isinstance(record.session_key, str):
        raise TypeError("no record")
    return record


def frame(payload: bytes) -> bytes:
    """The bytes of one frame."""
    return b"\n%08x %s\n" % (zlib.crc32(payload), payload)


def unframe(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """(end offset, payload) of every finished line in ``data``; payload None for a torn or damaged one.

    An unfinished last line is not yielded: it may still be being written.
    """
    at = 0
    while (end := data.find(b"\n", at)) >= 0:
        line, at = data[at:end], end + 1
        if line:
            yield at, line[9:] if line[8:9] == b" " and _crc(line) == zlib.crc32(line[9:]) else None


def _crc(line: bytes) -> int:
    try:
        return int(line[:8], 16)
    except ValueError:
        return -1


def append_frame(path: str, payload: bytes, *, sync: bool) -> tuple[int, int]:
    """Append one frame, durable on return where ``sync``. Returns (size before, inode). Raises OSError.

    A short write is a failure: what it left is ended by the next frame and fails its checksum.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(fd).st_size
        data = frame(payload)
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if sync:
            getattr(os, "fdatasync", os.fsync)(fd)
        if size == 0 and sync:
            sync_directory(os.path.dirname(path))
        return size, os.fstat(fd).st_ino
    finally:
        os.close(fd)


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def private_directory(path: str) -> None:
    """Make the directory durable, 0700 whatever the umask, and tighten one of ours that is looser. Raises OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        private_directory(os.path.dirname(path))
        os.mkdir(path, 0o700)
    except FileExistsError:
        if os.stat(path).st_mode & 0o077:
            os.chmod(path, 0o700)
        return
    sync_directory(os.path.dirname(path))


def segments(directory: str) -> list[int]:
    """The numbers of the segments there, ascending; empty where there is no directory."""
    try:
        return sorted(int(name[:8]) for name in os.listdir(directory) if name.endswith(".seg") and name[:8].isdigit())
    except FileNotFoundError:
        return []


def segment_path(directory: str, number: int, suffix: str = "seg") -> str:
    """The path of a segment or of its acknowledgements."""
    return os.path.join(directory, f"{number:08d}.{suffix}")


class Spool:
    """The spool of one profile, as its writers see it. Makes nothing before the first append, keeps nothing open."""

    def __init__(self, path: str, wall: Callable[[], float] = time.time) -> None:
        self.path = path
        self.directory = os.path.join(path, "spool")
        self.volatile: deque[Record] = deque()
        self.not_durable = 0
        self.forgotten = 0
        self.last_error = ""
        self._wall = wall
        self._made = False
        self._lock = threading.Lock()

    def append(self, record: Record) -> bool:
        """Take a record. True: it is on disk for good. False: the disk refused, it waits in memory (``last_error``)."""
        with self._lock:
            self._settle()
            if not self.volatile and self._write(record):
                return True
            self.not_durable += 1
            self.volatile.append(record)
            while len(self.volatile) > 1 and sum(map(_weight, self.volatile)) > VOLATILE_BYTES:
                self.volatile.popleft()
                self.forgotten += 1
            return False

    def settle(self) -> bool:
        """Bring what waits in memory to disk, oldest first. True when nothing waits any more."""
        with self._lock:
            self._settle()
            return not self.volatile

    def forget(self, record: Record) -> None:
        """Drop a record that was delivered from memory."""
        with self._lock:
            if record in self.volatile:
                self.volatile.remove(record)

    def _settle(self) -> None:
        while self.volatile and self._write(self.volatile[0]):
            self.volatile.popleft()

    def _write(self, record: Record) -> bool:
        for _ in range(2):  # once more when the directory was removed under us
            try:
                if not self._made:
                    private_directory(self.path)
                    private_directory(self.directory)
                    self._made = True
                self._append(record.encode())
            except FileNotFoundError as error:
                self._made, self.last_error = False, str(error)
            except OSError as error:
                self.last_error = str(error)
                return False
            else:
                self.last_error = ""
                return True
        return False

    def _append(self, payload: bytes) -> None:
        """The order: choose the newest segment, write, sync, and only then look whether it is still the one of that
        name; a segment that the drainer put away in the meantime is not read again, so the record is written anew."""
        while True:
            number = (segments(self.directory) or [1])[-1]
            path = segment_path(self.directory, number)
            if _size(path) >= SEGMENT_BYTES:
                path = segment_path(self.directory, number + 1)
            _, inode = append_frame(path, payload, sync=True)
            if _inode(path) == inode:
                return

    def idle(self) -> bool:
        """Whether nothing is pending, as far as a few stats can tell; True means so, False means: look."""
        if self.volatile:
            return False
        numbers = segments(self.directory)
        if not numbers:
            return True
        drained = read_json(os.path.join(self.path, "drained.json"))
        return len(numbers) == 1 and [numbers[0], _size(segment_path(self.directory, numbers[0]))] == drained.get(
            "until"
        )


def _weight(record: Record) -> int:
    return len(record.user) + len(record.assistant) + 200


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0


def read_json(path: str) -> dict[str, Any]:
    """The JSON object in a file of ours; {} where there is none or it cannot be read (it is only a note)."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def registration(settings: Settings, profile: str) -> tuple[str, dict[str, Any]]:
    """The file by which the daemon finds this spool, and its content (design: Files)."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(settings.spool))).hexdigest()[:16]
    path = os.path.join(settings.root, "spools", f"{digest}.json")
    return path, {"schema": 1, "path": settings.spool, "profile": profile}


def register(settings: Settings, profile: str) -> None:
    """Tell the supervisor root of this spool, and keep beside the spool where it is to be delivered. Raises OSError.

    The daemon delivers what a session leaves behind. It must not send it elsewhere than the session would have: an
    address that came from the session's environment is unknown to the daemon, so it is written down here. No key is.
    """
    path, entry = registration(settings, profile)
    bound = {
        "schema": 1,
        "address": None if settings.address is None else str(settings.address),
        "gateway": settings.gateway,
        "root": settings.root,
        "allow_http": settings.allow_http,
    }
    private_directory(settings.spool)
    beside = os.path.join(settings.spool, "endpoint.json")
    if read_json(beside) != bound:
        write_json(beside, bound)
    if read_json(path) != entry:
        private_directory(settings.root)
        private_directory(os.path.dirname(path))
        write_json(path, entry)
