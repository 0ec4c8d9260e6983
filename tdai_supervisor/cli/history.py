"""Verbs about what happened: events, why, metrics. They read the journal, so they work without a daemon too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from tdai_supervisor import client
from tdai_supervisor.cli import envelope, observe
from tdai_supervisor.cli.envelope import Result, failure, from_reply
from tdai_supervisor.decide import paths

_AGO = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
SENTENCES = 10  # that `why` tells


def journal(root: str) -> list[dict[str, Any]]:
    """Every kept transition, oldest first; a torn last line is left out."""
    lines: list[str] = []
    for path in (paths.journal(root) + ".1", paths.journal(root)):
        lines += (client.read_journal(path) or "").splitlines()
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries


def since(text: str, now: datetime) -> datetime:
    """The moment that "10m", "2h" or an RFC 3339 time means. Raises ValueError."""
    if match := _AGO.fullmatch(text.strip()):
        return now - timedelta(**{_UNITS[match[2]]: int(match[1])})
    moment = datetime.fromisoformat(text.strip())
    return moment if moment.tzinfo else moment.astimezone()


def events(root: str, name: str | None, from_: str | None, lines: int) -> Result:
    """The last transitions, of one Gateway or of all."""
    found = [e for e in journal(root) if name is None or e.get("gateway") == name]
    if from_ is not None:
        try:
            start = since(from_, datetime.now(UTC))
        except (ValueError, OverflowError):
            message = f"cannot understand --since {from_!r}: it is neither like 10m, 2h, 3d nor an RFC 3339 time"
            return failure("events", "usage", message, None, envelope.USAGE)
        found = [e for e in found if datetime.fromisoformat(e["at"]) >= start]
    return Result("events", {"events": found[-lines:] if lines > 0 else []})


def follow(root: str, name: str | None, *, as_json: bool) -> Iterator[str]:
    """New transitions for ever, one line each; survives rotation and restarts of the daemon."""
    from tdai_supervisor.cli import render

    for line in observe.follow([paths.journal(root)]):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if name is None or entry.get("gateway") == name:
            yield line if as_json else render.event(entry)


def why(root: str, name: str | None) -> Result:
    """The last transitions as sentences, and what holds now."""
    seen = observe.status(root, name)
    if seen.data is None:
        return seen.but(command="why")
    told = {}
    for gateway in seen.data["gateways"]:
        past = [e for e in journal(root) if e.get("gateway") == gateway["name"]][-SENTENCES:]
        sentences = [sentence(e) for e in past]
        now = f"Now it is {gateway['state']} (want {gateway['want']}) since {gateway['since']}: {gateway['cause']}."
        if gateway.get("backoff_s") is not None:
            now += f" The next try comes in {gateway['backoff_s']} s."
        told[gateway["name"]] = [*sentences, now]
    return Result("why", told, envelope.OK, seen.errors)


def sentence(entry: dict[str, Any]) -> str:
    """One transition as a sentence."""
    before, after = entry.get("from"), entry.get("to")
    what = f"stayed {after}" if before == after else f"went from {before} to {after}"
    return f"At {entry.get('at')} it {what} because: {entry.get('cause')}."


def metrics(root: str) -> Result:
    """OpenMetrics text from the living daemon."""
    try:
        return from_reply("metrics", client.request(root, "metrics", observe.PATIENCE))
    except client.NotRunningError:
        message = "cannot read metrics: no daemon is running"
        return failure("metrics", "not-running", message, "try `memory-tencentdb-ctl start`", envelope.NOT_RUNNING)
    except (client.NoAnswerError, ValueError) as error:
        return failure("metrics", "no-answer", f"cannot read metrics: {error}")
