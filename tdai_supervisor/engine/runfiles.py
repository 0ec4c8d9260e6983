"""The files under run/ and the journal, as the daemon writes them.

Invariants: only the holder of the supervisor lock writes here; wants are durable before anything is done about them;
records, pidfiles and journal lines are written after acting, in order, by one worker thread, and never awaited by a
restart; a file that cannot be read is quarantined and counted as absent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Container
from typing import Any

from tdai_supervisor.decide import paths, settings
from tdai_supervisor.decide.checks import SettingsError
from tdai_supervisor.decide.model import Want
from tdai_supervisor.decide.settings import GatewaySettings
from tdai_supervisor.host import disk

log = logging.getLogger("tdai_supervisor")
JOURNAL_BYTES = 1024 * 1024  # then journal.jsonl becomes journal.jsonl.1: at most two of these are kept


class RunFiles:
    """Reads at start, writes for ever. A file that cannot be written is a trouble until it can; it shows in status."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.failures = 0
        self._troubles: dict[str, str] = {}

    @property
    def trouble(self) -> str | None:
        """What cannot be written at present, in words, or None."""
        return next(iter(self._troubles.values()), None)

    def _readable(self, path: str) -> dict[str, Any] | None:
        try:
            return disk.read_object(path)
        except (OSError, ValueError) as error:
            self._set_aside(path, error)
            return None

    def _set_aside(self, path: str, error: Exception) -> None:
        try:
            log.warning("Quarantined %s as %s: %s", path, disk.quarantine(path), error)
        except OSError as failure:
            self.note_failure(path, f"cannot quarantine {path}: {failure}")

    def note_failure(self, path: str, what: str) -> None:
        """Count a failure around path; said once in the log, shown in status until path can be written again."""
        self.failures += 1
        if self._troubles.get(path) != what:
            log.error("%s", what)
        self._troubles[path] = what

    def _write(self, path: str, text: str, *, durable: bool = False) -> bool:
        try:
            disk.write(path, text, durable=durable)
        except OSError as error:
            self.note_failure(path, f"cannot write {path}: {error.strerror or error}")
            return False
        self._troubles.pop(path, None)
        return True

    def read_want(self, name: str) -> Want | None:
        """The persisted want, or None where there is none that can be read."""
        path = paths.want(self.root, name)
        try:
            text = disk.read(path)
            return None if text is None else Want(text.strip())
        except (OSError, ValueError) as error:
            self._set_aside(path, error)
            return None

    def write_want(self, name: str, want: Want) -> bool:
        """Make the want durable; whether that worked."""
        return self._write(paths.want(self.root, name), f"{want}\n", durable=True)

    def read_record(self, name: str) -> dict[str, Any] | None:
        """The endpoint record the last daemon left, or None."""
        return self._readable(paths.record(self.root, name))

    def left_behind(self, known: Container[str]) -> list[GatewaySettings]:
        """The Gateways of ours that may still run although nobody configures them any more, by their records."""
        found = []
        for name, record in recorded(self.root).items():
            if name in known or record.get("state") == "STOPPED" or record.get("origin") == "external":
                continue
            with contextlib.suppress(SettingsError):
                text = recorded_settings({name: record})
                found.append(settings.load(self.root, text, {}).gateways[name])
        return found

    def write_record(self, name: str, record: dict[str, Any]) -> None:
        """Replace the endpoint record, and the pidfile with it."""
        self._write(paths.record(self.root, name), json.dumps(record, ensure_ascii=False) + "\n")
        if record["pid"] is not None:
            self._write(paths.pid(self.root, name), f"{record['pid']}\n")
        else:
            with contextlib.suppress(OSError):  # a stale pidfile misleads nobody: identity decides
                os.unlink(paths.pid(self.root, name))

    def key(self, name: str, configured: str | None) -> str | None:
        """The API key for the next life of a Gateway, durable in run/NAME.key; None where it cannot be kept.

        The configured key, else the one kept from before, else a random one of 32 bytes.
        """
        path = paths.key(self.root, name)
        try:
            kept = (disk.read(path) or "").strip()
        except OSError as error:
            self.note_failure(path, f"cannot read {path}: {error}")
            kept = ""
        key = configured or kept or secrets.token_urlsafe(32)
        if key != kept and not self._write(path, key + "\n", durable=True):
            return None
        return key

    def journal(self, entry: dict[str, Any]) -> None:
        """Append one transition."""
        path = paths.journal(self.root)
        try:
            fd = disk.append_only(path)
            try:
                os.write(fd, (json.dumps(entry, ensure_ascii=False) + "\n").encode("utf-8", "surrogateescape"))
                if os.fstat(fd).st_size > JOURNAL_BYTES:
                    os.replace(path, path + ".1")
            finally:
                os.close(fd)
            self._troubles.pop(path, None)
        except OSError as error:
            self.note_failure(path, f"cannot write {path}: {error.strerror or error}")


def recorded(root: str) -> dict[str, dict[str, Any]]:
    """Every endpoint record of a root that can be read, by name."""
    found = {}
    for file in sorted(os.listdir(paths.run(root))):
        name, ending = os.path.splitext(file)
        try:
            record = disk.read_object(paths.record(root, name)) if ending == ".json" else None
        except (OSError, ValueError):
            continue
        if record and record.get("name") == name and isinstance(record.get("data_dir"), str):
            found[name] = record
    return found


def recorded_settings(records: dict[str, dict[str, Any]]) -> str:
    """supervisor.toml with nothing but the Gateways and data directories that these records name."""
    return "".join(f"[gateway.{n}]\ndata_dir = {json.dumps(r['data_dir'])}\n" for n, r in records.items())
