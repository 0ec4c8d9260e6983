"""Deliver a spool from outside a session: the daemon's child process, and the flush of the command line.

    python -m memory_tencentdb.drain --spool DIR [--root DIR] [--deadline S] [--patience S] [--ended SESSION]…

prints one JSON object and exits 0 (nothing is left), 1 (something is left, "holding" says why), 75 (another drainer
works on it) or 3 (the disk refused the end of a session that was given).

Invariants:
* It goes where the session would have gone, whatever the environment of this process says: the profile file, the
  profile's .env, and what the last session wrote down decide.
* It ends at its deadline, also in the middle of a call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .endpoint import Endpoint
from .gateway import Client
from .hooks import aside
from .settings import Settings, dotenv, read_settings
from .spool import Record, Spool, new_id, read_json

if TYPE_CHECKING:
    from .aside.drainer import Drainer


def settings_of(spool_path: str, root: str | None = None) -> Settings:
    """The settings under which a spool is delivered without its session: profile file, its .env, and what the session
    wrote down of its environment (spool.register), in this order."""
    home = os.path.dirname(os.path.abspath(spool_path))
    bound = read_json(os.path.join(spool_path, "endpoint.json"))
    return read_settings(home, dotenv(home).get, bound=bound, root=root)


UNSAVED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Deliver one spool within a deadline; the entry point of the daemon's child process."""
    import argparse  # noqa: PLC0415  the host executes this file at every session start

    parser = argparse.ArgumentParser(prog="memory_tencentdb.drain", description="Deliver the records of a spool")
    parser.add_argument("--spool", required=True, help="directory of the spool")
    parser.add_argument("--root", help="supervisor root (default: what the last session used)")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds of work at most (default 30)")
    parser.add_argument("--patience", type=float, help="seconds to wait for a Gateway that is away (default: deadline)")
    parser.add_argument("--ended", action="append", default=[], metavar="SESSION", help="a session that died: end it")
    options = parser.parse_args(argv)
    end = time.monotonic() + options.deadline
    spool = Spool(options.spool)
    drainer = drainer_until(end, settings_of(options.spool, options.root), spool)
    # Behind its turns: the end is delivered after them, by this drainer or the one that holds the lock.
    ends = [Record(new_id(), each, kind="end", at=time.time(), session_id=each) for each in options.ended]
    kept = [spool.append(record) for record in ends]
    code = deliver_until(drainer, end, options.patience)
    code = code if all(kept) else UNSAVED
    print(json.dumps({"schema": 1, "pending": drainer.ledger.pending, **drainer.counts.as_json()}, ensure_ascii=False))
    return code


def drainer_until(end: float, settings: Settings, spool: Spool) -> Drainer:
    """A drainer of that spool whose calls and pauses end at the moment ``end`` (monotonic)."""
    client = Client(Endpoint(settings), lambda: time.monotonic() >= end)
    drainer: Drainer = aside("drainer").Drainer(spool, client, lambda seconds: sleep_until(seconds, end))
    return drainer


def deliver_until(drainer: Drainer, end: float, patience: float | None = None) -> int:
    """Work until nothing is pending or the moment ``end``. 0: nothing is left, 1: something is, 75: another works.

    ``patience``: seconds after which a Gateway that takes nothing is given up for now; None: not before ``end``.
    """
    if not drainer.acquire():
        return 75
    away_since: float | None = None
    try:
        while (wait := drainer.step()) is not None:
            now = time.monotonic()
            away_since = None if drainer.trouble is None else away_since or now
            tired = patience is not None and away_since is not None and now - away_since >= patience
            if tired or now >= end or sleep_until(wait, end):
                return 1
        return 0
    finally:
        drainer.release()


def sleep_until(seconds: float, end: float) -> bool:
    """Sleep ``seconds``, but not past the moment ``end``. True when it has come."""
    time.sleep(max(0.0, min(seconds, end - time.monotonic())))
    return time.monotonic() >= end


if __name__ == "__main__":
    sys.exit(main())
