"""What a dead session left in its spool is delivered by the daemon, with the provider's own code."""

from __future__ import annotations

import json

from memory_tencentdb import spool
from memory_tencentdb.settings import read_settings

from tdai_supervisor import client
from tests.support.kept import Kept
from tests.support.processes import wait_for


def leave_behind(kept: Kept, words: list[str]) -> str:
    """A Hermes profile whose session died after these turns; the path of its spool."""
    home = kept.home / ".hermes"
    home.mkdir()
    env = {"MEMORY_TENCENTDB_ROOT": str(kept.root), "HOME": str(kept.home)}
    settings = read_settings(str(home), env.get)
    left = spool.Spool(settings.spool)
    for n, text in enumerate(words):
        assert left.append(spool.Record(spool.new_id(), "s1", text, "answer", at=1e9 + n, session_id="s1"))
    spool.register(settings, "default")
    return settings.spool


def test_a_registered_spool_is_delivered_in_order_and_once(kept: Kept) -> None:
    """Found by its registration, delivered in a child process; nothing is pending afterwards, the daemon lives on."""
    words = [f"turn number {n} zorblax{n}" for n in range(5)]
    path = leave_behind(kept, words)
    kept.write(f'[gateway.default]\nkind = "embedded"\nport = {kept.port}\n')
    kept.start()
    key = (kept.root / "run" / "default.key").read_text().strip()

    def found() -> list[str]:
        body = {"query": "zorblax0 zorblax1 zorblax2 zorblax3 zorblax4", "limit": 20}
        _, answer = client.call("127.0.0.1", kept.port, "/search/conversations", 5, body, key)
        return [w for w in words if str(answer.get("results")).count(w) == 1]

    wait_for(lambda: found() == words, 18, "the daemon delivers")
    wait_for(lambda: (stats := client.read_object(f"{path}/stats.json")) and stats["delivered"] == 5, 5)
    text = kept.ask("metrics")["data"]["text"]
    assert f'tdai_spool_records_total{{profile="default",path={json.dumps(path)},state="delivered"}} 5' in text
