"""Which Gateway a profile talks to, whether it may be talked to now, and with which key.

Invariants:
* Nothing leaves before the listener is proven: own uid or root by the socket table, looked at *after* the connection
  stands and compared with what listened before it; where a counting endpoint record names that host:port, its process
  owns the listener and its state is READY or UNREADY. Another user's process gets nothing, whatever the settings say.
* The key of an endpoint record goes to the address of that record only.
* An endpoint record is read again only when its file has changed, which costs one stat.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from . import proof
from .settings import DEFAULT_HOST, DEFAULT_PORT, Address, Settings, reachable

RECEIVING = ("READY", "UNREADY")
_FILE_LIMIT = 64 * 1024


class Away(Exception):
    """Nothing can be sent to the Gateway now.

    ``kind``: config (the user must mend something) · state (the record says it does not run) · hold (alive, but nothing
    is to be delivered) · down (nothing listens) · silent (no answer in time) · cut (the connection broke) · foreign
    (another process than ours) · unproven (cannot be told whose it is) · auth (the key is refused) · busy (it asks to
    wait) · failing (it answers, with errors) · closing (this side ends). ``sent``: the request had been handed over
    whole, so it may have been acted upon.
    ``wait``: seconds that the Gateway asks for, None where it does not say.
    """

    def __init__(self, kind: str, reason: str, *, sent: bool = False, wait: float | None = None) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.sent, self.wait = kind, reason, sent, wait


class Record:
    """What the daemon says of one Gateway (design: endpoint record). Missing is "" or 0; unknown fields are ignored.

    Raises ValueError or AttributeError for what is no record.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        if raw.get("schema") != 1:
            raise ValueError("an endpoint record of another schema")
        daemon = raw.get("daemon") or {}
        self.name, self.state = _string(raw, "name"), _string(raw, "state")
        self.host, self.port = reachable(_string(raw, "host")), _number(raw, "port")
        self.pid, self.start_ticks = _number(raw, "pid"), _number(raw, "start_ticks")
        self.boot_id, self.pid_ns = _string(raw, "boot_id"), _string(raw, "pid_ns")
        self.generation, self.cause, self.since = (_string(raw, key) for key in ("generation", "cause", "since"))
        self.hold = _string(raw, "hold") or ("on hold" if raw.get("hold") is True else "")
        self.api_key_file = _string(raw, "api_key_file")
        self.daemon_pid, self.daemon_ticks = _number(daemon, "pid"), _number(daemon, "start_ticks")


def parse_record(data: bytes) -> Record | None:
    """The endpoint record in ``data``; None when it is none (empty while it is being set up, or of another schema)."""
    try:
        return Record(json.loads(data))
    except (ValueError, AttributeError):
        return None


def _string(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def _number(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def counts(record: Record) -> bool:
    """Whether what a record says still holds.

    READY and UNREADY hold while the Gateway lives, anything else while the daemon lives. Another boot holds nothing; in
    another pid namespace life cannot be looked at, and the record stands.
    """
    if record.boot_id != proof.boot_id():
        return False
    if record.pid_ns != proof.pid_namespace():
        return True
    if record.state in RECEIVING and record.pid and proof.alive(record.pid, record.start_ticks):
        return True
    return bool(record.daemon_pid) and proof.alive(record.daemon_pid, record.daemon_ticks)


Stamp = tuple[int, int, int] | None


def read_private(path: str) -> tuple[bytes, Stamp]:
    """A small file of our uid or root, and its stamp; (b"", None) when there is none.

    Raises PermissionError for anything else: a link, a pipe, another user's file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return b"", None
    except OSError as error:
        raise PermissionError(f"cannot read {path}: {error.strerror}") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"cannot use {path}: it is not a file of this user or root")
        return os.read(fd, _FILE_LIMIT), (info.st_mtime_ns, info.st_size, info.st_ino)
    finally:
        os.close(fd)


def stamp(path: str) -> Stamp:
    """What changes when the file is written or replaced; None while it cannot be seen."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size, info.st_ino


class Target:
    """Where the next call goes, and the counting record that speaks for that address, if one does."""

    __slots__ = ("address", "record")

    def __init__(self, address: Address, record: Record | None) -> None:
        self.address, self.record = address, record


class Endpoint:
    """The Gateway of one profile. Threads may share it: it keeps nothing but what it last read."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._run = os.path.join(settings.root, "run")
        self._own = os.path.join(self._run, f"{settings.gateway}.json")
        self._read: dict[str, tuple[Stamp, Record | None]] = {}
        self._key_override: tuple[str, str] = ("", "")

    def describe(self) -> str:
        """Which Gateway this is and what said so, in a line; costs a look at a file, no network."""
        settings = self.settings
        try:
            where = str(self.address())
        except Away as away:
            return away.reason
        record = self.record()
        kept = f", {record.state} under the supervisor, pid {record.pid}" if record and counts(record) else ""
        return f"Gateway {settings.gateway} at {where} (from {settings.origin}{kept})"

    def record(self) -> Record | None:
        """The endpoint record that this profile's name points to, counting or not."""
        return self._load(self._own)

    def changes(self) -> tuple[Stamp, Stamp]:
        """What differs after the daemon wrote the record or the key: the end of every cooldown."""
        record = self.record()
        return stamp(self._own), stamp(record.api_key_file) if record and record.api_key_file else None

    def address(self) -> Address:
        """Where the Gateway is, by the order of the settings. Raises Away("config") where that cannot be said."""
        if self.settings.broken:
            raise Away("config", self.settings.broken)
        if self.settings.address is not None:
            return self.settings.address
        record = self.record()
        if record is not None and record.port:
            return Address("http", record.host, record.port)
        if self.settings.named:
            name = self.settings.gateway
            raise Away(
                "config", f"no Gateway named {name} is known in {self._run}; try memory-tencentdb-ctl start {name}"
            )
        return Address("http", DEFAULT_HOST, DEFAULT_PORT)

    def target(self) -> Target:
        """The address, if the record that names it lets it receive. Touches no network; raises Away(config | state)."""
        address = self.address()
        record = self._speaking_for(address)
        if record is not None and record.state not in RECEIVING:
            why = f": {record.cause}" if record.cause else ""
            raise Away("state", f"Gateway {record.name} is {record.state}{why}")
        if not address.local and address.scheme == "http":
            self._plain_http(address)
        return Target(address, record)

    def held(self) -> Away | None:
        """Trouble of kind hold where the record of a running Gateway says that nothing is to be delivered to it."""
        try:
            record = self.target().record
        except Away:
            return None
        return Away("hold", f"Gateway {record.name} is on hold: {record.hold}") if record and record.hold else None

    def _plain_http(self, address: Address) -> None:
        allowed = self.settings.allow_http
        if self.settings.key and not allowed:
            raise Away(
                "config", f"the key would cross the network unencrypted to {address}; set MEMORY_TENCENTDB_ALLOW_HTTP=1"
            )
        if not (allowed or self.settings.trust):
            raise Away(
                "unproven",
                f"cannot tell whose process answers at {address}; use https, or set trust to true in the profile file",
            )

    def identity(self, target: Target) -> tuple[int, ...]:
        """What listens at a local target now, as inodes of sockets that are ours. Raises Away(foreign | unproven)."""
        address, record = target.address, target.record
        table = proof.listeners(address.port)
        found = proof.deciding(table, address.host) if table is not None else []
        for listener in found:
            if listener.uid == proof.OVERFLOW_UID != os.geteuid():
                self._unproven(f"the listener at {address.netloc} belongs to a user of another namespace")
            elif listener.uid not in (os.geteuid(), 0):
                raise Away(
                    "foreign", f"{address.netloc} is held by a process of uid {listener.uid}; nothing is sent to it"
                )
        if table is None:
            self._unproven(f"cannot tell whose process listens at {address.netloc} (no socket table)")
        inodes = tuple(sorted(listener.inode for listener in found))
        if record is not None and inodes and record.state in RECEIVING:
            self._of_record(record, inodes, address)
        return inodes

    def _of_record(self, record: Record, inodes: tuple[int, ...], address: Address) -> None:
        if record.pid_ns != proof.pid_namespace() or not record.pid:
            return
        owned = [proof.family_owns(record.pid, inode) for inode in inodes]
        if not all(each is not False for each in owned):
            raise Away(
                "foreign",
                f"{address.netloc} is held by another process than Gateway {record.name} (pid {record.pid}); "
                "nothing is sent to it",
            )

    def _unproven(self, reason: str) -> None:
        if not self.settings.trust:
            raise Away("unproven", f"{reason}; if it is yours, set trust to true in the profile file")

    def prove(self, target: Target, before: tuple[int, ...]) -> bool:
        """Whether a connection made after ``before`` was looked at went to a proven listener.

        False: the listener changed in between, connect again. A listener that exists before and after the connection is
        the one that took it. Raises Away(foreign | unproven).
        """
        now = self.identity(target)
        if not now and not before:
            self._unproven(f"no process listens at {target.address.netloc} in this network namespace, yet it answers")
            return True
        return now == before

    def key(self, target: Target) -> str:
        """The bearer key for the target: of the profile file, the environment, or the file its record names; or ""."""
        used, replacement = self._key_override
        record = target.record or self.record()
        own = self.settings.key or self._file_key(record, target.address)
        return replacement if own == used and replacement else own

    def other_key(self, target: Target, refused: str) -> bool:
        """After a 401: read the record's key file again. True when it holds another key, which is used from now on."""
        record = target.record or self.record()
        fresh = self._file_key(record, target.address)
        if not fresh or fresh == refused:
            return False
        self._key_override = (self.settings.key, fresh) if self.settings.key else ("", "")
        return True

    def _file_key(self, record: Record | None, address: Address) -> str:
        if record is None or not record.api_key_file or (record.host, record.port) != (address.host, address.port):
            return ""
        try:
            return read_private(record.api_key_file)[0].decode("utf-8", "replace").strip()
        except PermissionError:
            return ""

    def _speaking_for(self, address: Address) -> Record | None:
        if not address.local:
            return None
        paths = [self._own]
        if self.settings.address is not None:
            try:
                paths += [entry.path for entry in os.scandir(self._run) if entry.name.endswith(".json")]
            except OSError:
                paths = [self._own]
        found = [record for path in paths if (record := self._load(path)) is not None]
        found = [r for r in found if (r.host, r.port) == (address.host, address.port) and counts(r)]
        # A Gateway that was removed leaves its record; another one may have got its port since.
        return next((r for r in found if r.state in RECEIVING), found[0] if found else None)

    def _load(self, path: str) -> Record | None:
        now = stamp(path)
        known = self._read.get(path)
        if known is not None and known[0] == now:
            return known[1]
        try:
            data, now = read_private(path)
        except PermissionError:
            data, now = b"", None
        record = parse_record(data)
        if record is None and known is not None and now is not None:
            return known[1]  # half a record never replaces a whole one; it is read again at its next change
        self._read[path] = (now, record)
        return record


class Cooldown:
    """After a failure, how long turns do not wait for the Gateway. Time is passed in, in seconds of a monotonic clock.

    5 s, doubling to 60 s; ended by a change of the endpoint record or key and by a success anywhere (a delivery in the
    background counts). Where failing costs next to nothing (nobody listens on loopback, or not us) a turn tries again
    once a second; where it costs no network at all (the record says STOPPED) or is answered promptly (failing) always.
    """

    FIRST, LONGEST, TRY_EVERY = 5.0, 60.0, 1.0
    CHEAP = ("down", "foreign", "unproven")
    FREE = ("state", "config", "failing")

    def __init__(self) -> None:
        self.trouble: Away | None = None
        self.since = 0.0
        self._changes: object = None
        self._length = self.FIRST
        self._until = 0.0
        self._tried = 0.0

    def failed(self, trouble: Away, changes: object, now: float, wall: float) -> None:
        """Begin or prolong. A failure within the cooldown prolongs it; one after its end doubles it first."""
        if self.trouble is None:
            self.since, self._length = wall, self.FIRST
        elif now >= self._until:
            self._length = min(self.LONGEST, self._length * 2)
        length = self._length if trouble.wait is None else min(trouble.wait, self.LONGEST)
        self.trouble, self._changes, self._until, self._tried = trouble, changes, now + length, now

    def succeeded(self) -> None:
        """The Gateway gave a complete answer."""
        self.trouble = None

    def refuses(self, endpoint: Endpoint, now: float, *, quiet: bool = False) -> Away | None:
        """The trouble that still stands, or None when a call may be tried; ``quiet``: not for a look that may fail."""
        trouble = self.trouble
        if trouble is None or trouble.kind in self.FREE or endpoint.changes() != self._changes:
            return None
        if now >= self._until:
            return None
        if quiet or trouble.kind not in self.CHEAP or now - self._tried < self.TRY_EVERY:
            return trouble
        self._tried = now
        return None
