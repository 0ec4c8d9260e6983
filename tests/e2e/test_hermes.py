"""Real Hermes turns against a Gateway that the daemon owns."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from typing import Any

import pytest

from tests.support import processes
from tests.support.command import Ctl
from tests.support.fake_llm import FakeLLM
from tests.support.hermes import Hermes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SECRET = "Quasimodo"


def search(ctl: Ctl, query: str) -> dict[str, Any]:
    """What the Gateway of a root finds in its conversations, asked over HTTP with the key of the record."""
    record = ctl.record()
    with open(record["api_key_file"], encoding="utf-8") as file:
        key = file.read().strip()
    request = urllib.request.Request(
        record["url"] + "/search/conversations",
        json.dumps({"query": query, "limit": 5}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=5) as answer:
        value = json.load(answer)
    assert isinstance(value, dict)
    return value


def kill_gateway(ctl: Ctl) -> None:
    """KILL the Gateway and wait until another one is READY."""
    before = ctl.gateway()
    os.kill(before["pid"], signal.SIGKILL)

    def again() -> bool:
        gateway = ctl.gateway()
        return bool(gateway["state"] == "READY" and gateway["pid"] != before["pid"])

    processes.wait_for(again, 10, "a new Gateway")


def test_a_turn_survives_the_gateway(ctl: Ctl, hermes: Hermes, llm: FakeLLM) -> None:
    """What one Hermes was told, the next ones recall and find by tool, although the Gateway was killed between."""
    ctl.start()
    assert hermes.ask(f"My cat is called {SECRET}. Remember that.").out.strip()
    assert SECRET in json.dumps(search(ctl, "cat called"))

    kill_gateway(ctl)
    llm.requests.clear()
    hermes.ask("What is my cat called?")
    recalled = llm.shown("user")
    assert "<memory-context>" in recalled
    assert SECRET in recalled
    assert {"memory_tencentdb_memory_search", "memory_tencentdb_conversation_search"} <= llm.tools()

    llm.requests.clear()
    hermes.ask('CALL memory_tencentdb_conversation_search {"query": "cat"}')
    assert SECRET in llm.shown("tool")


def test_a_turn_without_a_gateway_is_kept(ctl: Ctl, hermes: Hermes) -> None:
    """A turn told while nothing runs is in the Gateway once that runs and Hermes is used again."""
    hermes.ask(f"My parrot is called {SECRET}.")
    ctl.start()
    hermes.ask("Hello again.")
    processes.wait_for(lambda: SECRET in json.dumps(search(ctl, "parrot")), 10, "the kept turn")


def test_enable_makes_it_the_provider_once(ctl: Ctl, hermes: Hermes) -> None:
    """After `hermes enable`, Hermes itself lists the provider once and uses it; after `disable` no longer."""
    directory = hermes.directory
    (directory / "plugins" / "memory_tencentdb").unlink()
    config = directory / "config.yaml"
    config.write_text(config.read_text().replace("memory: {provider: memory_tencentdb}\n", ""))
    env = {"HERMES_HOME": str(directory)}
    assert ctl("hermes", "enable", env=env).code == 0

    shown = hermes.run("memory", "status").out
    assert shown.count("\u2022 memory_tencentdb") == 1, shown
    assert "Provider:  memory_tencentdb\n" in shown
    ctl.start()
    hermes.ask(f"My dog is called {SECRET}.")
    assert SECRET in json.dumps(search(ctl, "dog called"))
    assert ctl("hermes", "disable", env=env).code == 0
    assert "Provider:  memory_tencentdb" not in hermes.run("memory", "status").out
