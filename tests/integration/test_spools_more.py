"""Spools of many profiles: each to its own Gateway, a silent one delays nobody, what is gone is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from memory_tencentdb import spool
from memory_tencentdb.settings import read_settings

from tdai_supervisor import client
from tests.support.kept import Kept
from tests.support.processes import wait_for

QUICK = (
    "import sys; from tdai_supervisor.engine import spools, daemon, entry;"
    "spools.LOOK_EVERY = 2; spools.PATIENCE = 0.5; daemon.TICK = 0.3; entry.main(sys.argv[1], 'none')"
)


def leave(kept: Kept, profile: str, words: str, gateway: str | None = None) -> Path:
    """A profile whose session died with one turn undelivered; its spool."""
    home = kept.home / profile
    home.mkdir()
    if gateway is not None:
        (home / "memory_tencentdb.json").write_text(json.dumps({"gateway": gateway}))
    settings = read_settings(str(home), {"MEMORY_TENCENTDB_ROOT": str(kept.root)}.get)
    assert spool.Spool(settings.spool).append(spool.Record(spool.new_id(), "s1", words, "answer", at=1e9))
    spool.register(settings, profile)
    return Path(settings.spool)


def found(kept: Kept, name: str, words: str) -> bool:
    """Whether a Gateway finds these words."""
    record, key = kept.record(name), (kept.root / "run" / f"{name}.key").read_text().strip()
    body = {"query": words, "limit": 20}
    _, answer = client.call("127.0.0.1", record["port"], "/search/conversations", 5, body, key)
    return words in str(answer.get("results"))


def test_each_spool_goes_to_the_gateway_of_its_profile(kept: Kept) -> None:
    """The own one gets its own turns, the shared one the others, and neither finds the other's."""
    leave(kept, "shared", "zorblax common")
    leave(kept, "work", "quuxified private", "work")
    kept.write(f'[gateway.default]\nkind = "embedded"\nport = {kept.port}\n[gateway.work]\nkind = "embedded"\n')
    kept.start_code(QUICK)
    kept.wait(name="work", state="READY")
    wait_for(lambda: all(s["delivered"] == 1 for s in kept.ask("status")["data"]["spools"]), 15, "both delivered")
    assert found(kept, "default", "zorblax") and found(kept, "work", "quuxified")
    assert not found(kept, "default", "quuxified") and not found(kept, "work", "zorblax")


def test_a_gateway_that_is_away_delays_only_its_own_spool(kept: Kept) -> None:
    """Its turn is kept and counted as waiting; the other's, which comes after it, is delivered meanwhile."""
    leave(kept, "a-work", "quuxified", "work")
    leave(kept, "b-shared", "zorblax")
    kept.write(f'[gateway.default]\nkind = "embedded"\nport = {kept.port}\n')
    kept.start_code(QUICK)

    def spools() -> dict[str, dict[str, object]]:
        return {s["profile"]: s for s in kept.ask("status")["data"]["spools"]}

    wait_for(lambda: spools()["b-shared"]["delivered"] == 1, 15, "the one with a Gateway is delivered")
    wait_for(lambda: spools()["a-work"]["waiting"] == 1, 10, "the other one is counted")
    waiting = spools()["a-work"]
    assert waiting["delivered"] == 0 and waiting["waiting_bytes"] and isinstance(waiting["oldest_s"], float)
    assert "no Gateway named work" in str(waiting["holding"])


def test_a_deleted_profile_is_shown_as_gone(kept: Kept) -> None:
    """Registered and not there: gone in status, said once in the log, and the others are delivered."""
    lost = leave(kept, "lost", "quuxified")
    leave(kept, "other", "zorblax")
    shutil.rmtree(lost.parent)
    kept.write(f'[gateway.default]\nkind = "embedded"\nport = {kept.port}\n')
    kept.start_code(QUICK)

    def spools() -> dict[str, dict[str, object]]:
        return {s["profile"]: s for s in kept.ask("status")["data"]["spools"]}

    wait_for(lambda: spools()["other"]["delivered"] == 1, 15)
    assert (spools()["lost"]["gone"], spools()["lost"]["waiting"]) == (True, 0)
    assert kept.said().count(f"the spool {lost} of profile lost is gone") == 1
    assert not lost.parent.exists(), "nothing is made where a profile was deleted"
