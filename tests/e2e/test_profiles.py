"""Three profiles of a real Hermes: one daemon for all, and a Gateway of its own for one while the others talk."""

from __future__ import annotations

import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tdai_supervisor import client
from tests.support.command import Ctl
from tests.support.fake_llm import FakeLLM
from tests.support.hermes import Hermes
from tests.support.processes import of_root, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
PROFILES = ("default", "ann", "bob")


def command(ctl: Ctl, home: Path) -> None:
    """memory-tencentdb-ctl where a session finds it."""
    path = home / ".local" / "bin" / "memory-tencentdb-ctl"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join(ctl.argv)} "$@"\n')
    path.chmod(0o700)


def found(ctl: Ctl, name: str, words: list[str]) -> list[str]:
    """Which of these words a Gateway finds in its conversations."""
    record = ctl.record(name)
    key = client.read_text(record["api_key_file"])
    hits = []
    for word in words:
        body = {"query": word, "limit": 20}
        _, answer = client.call("127.0.0.1", record["port"], "/search/conversations", 5, body, key)
        hits += [word] if word in str(answer.get("results")) else []
    return hits


def test_three_profiles_one_daemon_then_one_apart(ctl: Ctl, hermes: Hermes, llm: FakeLLM, home: Path) -> None:
    """Cold, by autostart: one daemon, one Gateway, three attachments. Then ann's own: no turn lost or mixed."""
    ctl.env.pop("MEMORY_TENCENTDB_GATEWAY_PORT")
    ctl.settings('[gateway.default]\nkind = "embedded"\n')
    command(ctl, home)
    people = {"default": hermes, "ann": hermes.profile("ann"), "bob": hermes.profile("bob")}
    for person in people.values():
        (person.directory / "memory_tencentdb.json").write_text('{"autostart": true}')

    def say(who: str, word: str) -> None:
        people[who].ask(f"My word is {word}.")

    llm.gate.clear()
    with ThreadPoolExecutor(len(people)) as pool:
        first = [pool.submit(say, who, f"first{who}") for who in PROFILES]
        wait_for(lambda: ctl("status").code == 0, 40, "the daemon that the sessions started")
        wait_for(lambda: len(ctl.status()["attachments"]) == 3, 40, "three attachments")
        seen = ctl.status()
        llm.gate.set()
        for done in first:
            done.result()
    assert sorted(a["profile"] for a in seen["attachments"]) == sorted(PROFILES)
    assert len([p for p in of_root(ctl.root) if "tdai_supervisor.embedded" in p.command]) == 1
    assert len([p for p in of_root(ctl.root) if p.command.endswith("--keeper supervisord")]) == 1
    words = [f"first{who}" for who in PROFILES]
    wait_for(lambda: found(ctl, "default", words) == words, 30, "all three turns")
    wait_for(lambda: ctl.status()["attachments"] == [], 10, "they are gone")

    with ThreadPoolExecutor(2) as pool:
        talk = pool.submit(lambda: [say("bob", f"bobs{n}") for n in range(3)])
        done = ctl("profile", "use", "ann", "own", "--json")
        assert done.code == 0, done
        assert done.data["proof"]["apart"]
        say("ann", "annsown")
        talk.result()
    shared = [*words, *(f"bobs{n}" for n in range(3))]
    wait_for(lambda: found(ctl, "default", shared) == shared, 30, "every turn of the others")
    wait_for(lambda: found(ctl, "ann", ["annsown"]) == ["annsown"], 30, "ann's turn in ann's Gateway")
    assert found(ctl, "default", ["annsown"]) == []
    assert found(ctl, "ann", shared) == []
    profiles = {p["name"]: p for p in ctl("profile", "list", "--json").data["profiles"]}
    assert (profiles["ann"]["gateway"], profiles["ann"]["shared"]) == ("ann", False)
    assert profiles["bob"]["shared_with"] == ["default"]
    assert all(p["spool"]["waiting"] == 0 for p in profiles.values())
    assert json.loads((people["ann"].directory / "memory_tencentdb.json").read_text())["autostart"] is True
