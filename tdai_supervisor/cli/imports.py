"""`import hermes`: past sessions of Hermes, from its state database into the Gateway's L0.

Invariants: the database is only read; a turn that is there already is not sent again, so an interrupted import is
continued by running it again; every turn is counted as imported, already there, or failed.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

from tdai_supervisor import client
from tdai_supervisor.cli import envelope, hermes, observe
from tdai_supervisor.cli.envelope import Result, failure
from tdai_supervisor.cli.progress import Progress
from tdai_supervisor.decide import paths
from tdai_supervisor.decide.checks import SettingsError

NOT_THE_USER = ("cron", "subagent", "batch")  # sessions that no person had
SIDE_LIMIT = 200_000  # characters of one side; both stay below the Gateways' 1 MiB with room for UTF-8
PATIENCE = 10.0  # s for one request
NEEDLE = 60  # characters by which a turn is looked for
NOTHING = "the Gateway recorded nothing of it"
TRIES = 12  # the real Gateway drops about every third first turn of a session


@dataclass(frozen=True)
class Turn:
    """What a user said and was answered; at in seconds since the epoch."""

    session: str
    number: int
    at: float
    user: str
    assistant: str


@dataclass
class Count:
    """What became of the turns of one profile."""

    profile: str
    turns: int = 0
    imported: int = 0
    already: int = 0
    failed: int = 0
    trouble: str | None = None


def turns(database: str) -> Iterator[Turn]:
    """The turns of a state database, oldest session first. Raises sqlite3.Error."""
    connection = sqlite3.connect(f"file:{quote(os.path.abspath(database))}?mode=ro", uri=True, timeout=10)
    try:
        sessions = connection.execute("SELECT id, source FROM sessions ORDER BY started_at").fetchall()
        for session, source in sessions:
            if source in NOT_THE_USER:
                continue
            rows = connection.execute(
                "SELECT role, content, timestamp FROM messages WHERE session_id = ? AND active = 1 ORDER BY id",
                (session,),
            )
            yield from _pair(str(session), rows)
    finally:
        connection.close()


def _pair(session: str, rows: Any) -> Iterator[Turn]:
    """A user's words with the last words of the assistant before the next ones."""
    said: tuple[float, str] | None = None
    answer, number = "", 0
    for role, content, at in rows:
        words = content.strip() if isinstance(content, str) else ""
        if not words or words.startswith('[{"'):  # pictures and the like
            continue
        if role == "user":
            if said and answer:
                yield Turn(session, number, *said, answer)
                number += 1
            said, answer = (float(at), words[:SIDE_LIMIT]), ""
        elif role == "assistant" and said:
            answer = words[:SIDE_LIMIT]
    if said and answer:
        yield Turn(session, number, *said, answer)


class Importer:
    """Hands turns to one Gateway."""

    def __init__(self, root: str, gateway: dict[str, Any]) -> None:
        self._host, self._port = str(gateway["host"]), int(gateway["port"])
        self._key = client.read_text(paths.key(root, gateway["name"]))
        _, health = self._call("/health", None)
        self.seeds = "live-seed" in (health.get("capabilities") or [])
        self.generation = "embedded" if self.seeds else "B" if "services" in health else "A"

    def _call(self, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        return client.call(self._host, self._port, path, PATIENCE, body, self._key)

    def has(self, turn: Turn) -> bool:
        """Whether the Gateway holds it: then it was captured live, or imported before."""
        query = {"query": turn.user[: NEEDLE * 4], "session_key": turn.session, "limit": 20}
        status, answer = self._call("/search/conversations", query)
        return status == 200 and turn.user[:NEEDLE] in str(answer.get("results", ""))

    def send(self, turn: Turn) -> str | None:
        """Store it; what went wrong, or None. With its own time where the Gateway can."""
        if self.seeds:
            at = int(turn.at * 1000)
            pair = [("user", turn.user, at), ("assistant", turn.assistant, at + 1)]
            trouble = self.seed(turn.session, pair)
        else:
            body = {"user_content": turn.user, "assistant_content": turn.assistant, "session_key": turn.session}
            trouble = self.capture(body)
        return None if trouble == NOTHING and (self.seeds or turn.user.startswith("/")) else trouble

    def seed(self, session: str, messages: Iterable[tuple[str, str, int]]) -> str | None:
        """Store one turn of (role, text, its own time in ms). What went wrong, NOTHING where it was there, or None."""
        said = [{"role": role, "content": text, "timestamp": at} for role, text, at in messages]
        status, answer = self._call("/seed", {"data": {"sessions": [{"sessionKey": session, "conversations": [said]}]}})
        if status != 200:
            return f"HTTP {status}: {answer.get('error', '')}"
        return None if answer.get("l0_recorded") else NOTHING

    def capture(self, body: dict[str, Any], ahead: int = 0) -> str | None:
        """Store one turn as if it were said now, sent again until something of it is recorded.

        ahead: ms by which `messages` are stamped later than the clock, at each further try more; 0: not at all. All of
        them alike: then all are recorded, or none.
        """
        for attempt in range(TRIES):
            if ahead:
                at = time.time_ns() // 1_000_000 + ahead * (attempt + 1)
                body = body | {"messages": [m | {"timestamp": at} for m in body["messages"]]}
            status, answer = self._call("/capture", body)
            if status != 200:
                return f"HTTP {status}: {answer.get('error', '')}"
            if answer.get("l0_recorded"):
                return None
            time.sleep(random.random() * 0.01 * (attempt + 1))  # noqa: S311
        return NOTHING


def run(root: str, a: Namespace) -> Result:
    """The verb `import hermes`."""
    seen = observe.status(root, a.gateway)
    if seen.data is None:
        return seen.but(command="import")
    gateway = seen.data["gateways"][0]
    if gateway["state"] != "READY":
        message = f"cannot import: Gateway {a.gateway} is {gateway['state']}"
        return failure("import", "not-ready", message, "try `memory-tencentdb-ctl start`", envelope.NOT_RUNNING)
    try:
        profiles = hermes.chosen(a)
        importer = Importer(root, gateway)
    except SettingsError as error:
        return failure("import", "hermes", str(error))
    except (OSError, ValueError) as error:
        return failure("import", "no-answer", f"cannot import: {error}")
    counts = [_profile(importer, p, dry_run=a.dry_run) for p in profiles]
    errors = [
        {"code": "import", "message": f"profile {c.profile}: {c.trouble}", "hint": "run it again to go on"}
        for c in counts
        if c.trouble
    ]
    return Result("import", {"profiles": [asdict(c) for c in counts]}, envelope.FAILED if errors else 0, errors)


def _profile(importer: Importer, profile: hermes.Profile, *, dry_run: bool) -> Count:
    count = Count(profile.name)
    database = os.path.join(profile.home, "state.db")
    if not os.path.exists(database):
        return count
    try:
        with Progress(f"{profile.name}: reading") as progress:
            for turn in turns(database):
                count.turns += 1
                if importer.has(turn):
                    count.already += 1
                elif not dry_run:
                    trouble = importer.send(turn)
                    count.imported += trouble is None
                    count.failed += trouble is not None
                    count.trouble = trouble or count.trouble
                progress.count(f"{profile.name}: {count.turns} turns, {count.imported} imported")
    except (OSError, ValueError, sqlite3.Error) as error:
        count.trouble = f"stopped after {count.turns} turns: {error}"
    return count
