"""What is true of a profile's memory now: one look, used by status, doctor, flush, setup and the host's status."""

from __future__ import annotations

import os
import time
from typing import Any

from ..endpoint import Away, Endpoint
from ..gateway import Client, Health
from ..settings import Settings, profile_environment, profile_path, read_settings
from ..text import clock
from .ledger import Counts, Ledger, read_counts


class Look:
    """One look. ``trouble`` is what a session would meet; ``pending`` counts turns."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.address = self.spool_error = ""
        self.health: Health | None = None
        self.latency = 0.0
        self.trouble: Away | None = None
        self.pending = 0
        self.oldest: float | None = None
        self.counts = Counts()

    def as_json(self) -> dict[str, Any]:
        """For --json; no key is in it."""
        return {
            "gateway": {
                "name": self.settings.gateway,
                "address": self.address,
                "origin": self.settings.origin,
                "key_origin": self.settings.key_origin,
                "generation": self.health.generation if self.health else None,
                "degraded": self.health.degraded if self.health else None,
                "latency_ms": round(self.latency * 1000, 1) if self.health else None,
            },
            "available": self.trouble is None,
            "reason": self.trouble.reason if self.trouble else None,
            "reason_kind": self.trouble.kind if self.trouble else None,
            "spool": {
                "path": self.settings.spool,
                "pending": self.pending,
                "oldest": self.oldest,
                **self.counts.as_json(),
            },
            "warnings": list(self.settings.warnings),
        }


def look(home: str) -> Look:
    """Look at Gateway and spool of the profile at ``home``; at most 2 s, never raises for what is broken there."""
    settings = read_settings(home, profile_environment(home))
    seen, endpoint, began = Look(settings), Endpoint(settings), time.monotonic()
    try:
        seen.address = str(endpoint.address())
        seen.health = Client(endpoint).health()
        if (held := endpoint.held()) is not None:
            raise held
        if seen.health.degraded:
            raise Away("hold", "the Gateway is degraded: what it takes now it would not keep")
    except Away as away:
        seen.trouble = away
    seen.latency = time.monotonic() - began
    ledger = Ledger(settings.spool)
    try:
        ledger.refresh()
    except OSError as failed:
        seen.spool_error = f"cannot read the spool: {failed}"
    seen.pending, seen.oldest, seen.counts = ledger.turns, ledger.oldest(), read_counts(settings.spool)
    return seen


def summary(seen: Look) -> dict[str, str]:
    """The look in a few lines for people."""
    counts = seen.counts
    state = "available" if seen.trouble is None else f"{seen.trouble.kind}: {seen.trouble.reason}"
    if seen.trouble is None and seen.health is not None:
        state += f" (generation {seen.health.generation}, {seen.latency * 1000:.1f} ms)"
    lines = {
        "gateway": f"{seen.settings.gateway} at {seen.address or 'nowhere'} (from {seen.settings.origin})",
        "state": state,
        "waiting": f"{seen.pending} turns" + (f", the oldest since {clock(seen.oldest)}" if seen.oldest else ""),
        "saved": f"{counts.delivered} turns"
        + (f", the last at {clock(counts.last_success)}" if counts.last_success else ""),
        "spool": seen.settings.spool,
        "profile file": profile_path(seen.settings.home),
    }
    lost = {
        "dead letters": counts.letters,
        "dropped (spool full)": counts.dropped,
        "removed by hand": counts.removed,
        "possible duplicates": counts.possible_duplicates,
        "torn writes": counts.torn,
        "refused by the disk": counts.not_durable,
        "lost (disk and memory full)": counts.forgotten,
    }
    lines.update({name: str(value) for name, value in lost.items() if value})
    if counts.holding and (seen.pending or seen.trouble):
        lines["delivery"] = f"waits since {clock(counts.holding_since)}: {counts.holding}"
    if seen.settings.warnings:
        lines["warnings"] = "; ".join(seen.settings.warnings)
    if seen.spool_error:
        lines["spool error"] = seen.spool_error
    return lines


def free_bytes(path: str) -> int:
    """Free space for this user where ``path`` is or will be."""
    while path and not os.path.exists(path):
        path = os.path.dirname(path)
    info = os.statvfs(path or "/")
    return info.f_bavail * info.f_frsize
