"""What is wrong with a profile's memory, why it matters, and the command that mends it. Looks only.

Invariants: every finding that is not good carries one thing to do; nothing here changes anything but replay(), which
only appends to the spool.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from .. import spool
from ..endpoint import Away
from ..settings import NAME, Settings
from ..spool import Record, Spool
from . import report
from .ledger import Ledger
from .letters import again, dead_letters, revive

__all__ = ["Finding", "dead_letters", "examine", "replay", "revive"]
LOW_SPACE = 100 * 1000 * 1000
_FIXES = {
    "config": "mend what is named here",
    "state": "memory-tencentdb-ctl start {gateway}",
    "down": "memory-tencentdb-ctl start {gateway}; memory-tencentdb-ctl status says why it stopped",
    "silent": "memory-tencentdb-ctl status {gateway}; memory-tencentdb-ctl logs {gateway}",
    "cut": "memory-tencentdb-ctl logs {gateway}",
    "hold": "memory-tencentdb-ctl status {gateway} names the cause; turns wait on disk until it is gone",
    "foreign": "end that process, or give the Gateway another port: memory-tencentdb-ctl config",
    "unproven": 'set "trust": true in {profile} if the process is yours',
    "auth": 'set "gateway_api_key" in {profile}, or remove a stale MEMORY_TENCENTDB_GATEWAY_API_KEY from .env',
    "busy": "wait",
}


class Finding:
    """One fact. ``level``: ok · note · bad; ``fix``: what to do, empty where there is nothing to."""

    def __init__(self, level: str, fact: str, fix: str = "") -> None:
        self.level, self.fact, self.fix = level, fact, fix

    def as_json(self) -> dict[str, str]:
        """For --json."""
        return {"level": self.level, "fact": self.fact, "fix": self.fix}


def examine(home: str) -> list[Finding]:
    """Everything there is to say about the profile at ``home``; takes at most 2 s. Never raises for what is broken."""
    seen = report.look(home)
    findings = [_gateway(seen), *_settings(seen.settings), *_spool(seen), *_neighbours(seen.settings)]
    return findings


def _gateway(seen: report.Look) -> Finding:
    if seen.trouble is None and seen.health is not None:
        return Finding("ok", f"the Gateway answers at {seen.address} (generation {seen.health.generation})")
    trouble = seen.trouble or Away("down", "no answer")
    fix = _FIXES.get(trouble.kind, "memory-tencentdb-ctl doctor")
    profile = os.path.join(seen.settings.home, f"{NAME}.json")
    return Finding("bad", trouble.reason, fix.format(gateway=seen.settings.gateway, profile=profile))


def _settings(settings: Settings) -> Iterator[Finding]:
    for warning in settings.warnings:
        yield Finding("bad", warning, "mend the value")
    path, entry = spool.registration(settings, "")
    if os.path.isdir(settings.spool) and spool.read_json(path).get("path") != entry["path"]:
        yield Finding("note", f"the daemon does not know of this spool ({path})", "the next session tells it")


def _spool(seen: report.Look) -> Iterator[Finding]:
    counts, path = seen.counts, seen.settings.spool
    if seen.spool_error:
        yield Finding("bad", seen.spool_error, f"ls -la {path}")
    if os.path.isdir(path) and stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        yield Finding("bad", f"others may look into {path}", f"chmod 700 {path}")
    free = report.free_bytes(path)
    if free < LOW_SPACE:
        yield Finding("bad", f"{free // 1000000} MB are free where turns are kept", f"free space at {path}")
    if seen.pending:
        yield Finding("note", f"{seen.pending} turns wait on disk", f"hermes {NAME} flush")
    if counts.letters:
        reasons = "; ".join(dict.fromkeys(str(letter["reason"]) for letter in list(dead_letters(path))[-3:]))
        yield Finding("bad", f"{counts.letters} dead letters ({reasons})", f"hermes {NAME} flush --dead")
    if counts.dropped:
        yield Finding("bad", f"{counts.dropped} turns were dropped because the spool was full", "keep the Gateway up")
    if counts.possible_duplicates:
        yield Finding("note", f"{counts.possible_duplicates} turns may be stored twice (a reply was lost)")
    if counts.torn:
        yield Finding("note", f"{counts.torn} torn writes were found and left out (a crash while writing)")


def _neighbours(settings: Settings) -> Iterator[Finding]:
    """Profiles that use the same Gateway share one memory: a Gateway does not tell users apart."""
    mine, shared = (settings.gateway, str(settings.address)), []
    directory = os.path.join(settings.root, "spools")
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        entry = spool.read_json(os.path.join(directory, name))
        path = str(entry.get("path") or "")
        bound = spool.read_json(os.path.join(path, "endpoint.json"))
        if path != settings.spool and (bound.get("gateway"), str(bound.get("address"))) == mine:
            shared.append(str(entry.get("profile") or path))
    if shared:
        yield Finding(
            "note", f"memory is shared with profile {', '.join(shared)}", 'give this profile a "gateway" of its own'
        )


def replay(target: Spool) -> int:
    """Append what was delivered in the last days to the spool again. Returns how many. Raises OSError.

    The Gateway is asked before each of them, or knows it by its key: what is there is not stored twice.
    """
    delivered = os.path.join(target.path, "delivered")
    pending = Ledger(target.path)
    pending.refresh()
    waiting = {entry.id for queue in pending.sessions.values() for entry in queue}
    paths = [spool.segment_path(target.directory, number) for number in spool.segments(target.directory)]
    if os.path.isdir(delivered):
        paths = [os.path.join(delivered, name) for name in sorted(os.listdir(delivered))] + paths
    latest: dict[str, Record] = {}
    for path in paths:
        with open(path, "rb") as file:
            data = file.read()
        for _, payload in spool.unframe(data):
            if payload is not None and (record := spool.decode_record(payload)).id not in waiting:
                latest[record.id] = record
    turns = [record for record in latest.values() if record.kind != "end"]
    for record in turns:
        target.append(again(record))
    return len(turns)
