"""hermes memory_tencentdb status | doctor | flush | start | stop, and what setup leaves behind."""

from __future__ import annotations

import argparse
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from memory_tencentdb import TencentDBMemoryProvider, cli, config_schema
from memory_tencentdb.aside import configure, doctor
from memory_tencentdb.spool import Record, Spool

from tests.support.fake_gateway import FakeGateway, http


@pytest.fixture(autouse=True)
def profile(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile that the host's command runs for."""
    monkeypatch.setenv("HERMES_HOME", str(home))
    monkeypatch.setenv("MEMORY_TENCENTDB_ROOT", str(root))


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """An embedded Gateway that the profile uses."""
    with FakeGateway() as one:
        monkeypatch.setenv("MEMORY_TENCENTDB_GATEWAY_PORT", str(one.port))
        yield one


def run(*argv: str) -> int:
    """Run one command the way the host does; its exit code."""
    parser = argparse.ArgumentParser(prog="hermes memory_tencentdb")
    cli.register_cli(parser)
    args = parser.parse_args(argv)
    try:
        args.func(args)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def leave(home: Path, *users: str) -> Spool:
    """Turns that an earlier session left behind."""
    spool = Spool(str(home / "memory_tencentdb"))
    for number, user in enumerate(users):
        assert spool.append(Record(f"id{number}", "s", user, "a", at=float(number)))
    return spool


def test_status(home: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """One look says which Gateway, whether it answers, and how many turns wait; no verb at all means status."""
    leave(home, "one", "two")
    assert run("status") == 0
    said = capsys.readouterr().out
    assert f"http://127.0.0.1:{gateway.port}" in said
    assert "available (generation embedded" in said
    assert "2 turns" in said
    assert run() == 0


def test_status_without_a_gateway(gateway: FakeGateway, capsys: pytest.CaptureFixture[str], home: Path) -> None:
    """A Gateway that is away is exit code 1, with errno, address, and where the address came from."""
    gateway.stop()
    assert run("status") == 1
    said = capsys.readouterr().out
    assert f"ECONNREFUSED 127.0.0.1:{gateway.port}" in said
    assert "MEMORY_TENCENTDB_GATEWAY_HOST/_PORT" in said
    assert str(home / "memory_tencentdb.json") in said
    assert not (home / "memory_tencentdb").exists()


def test_status_json(home: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """--json is one object, without the key."""
    (home / "memory_tencentdb.json").write_text('{"gateway_api_key": "secret-key"}')
    gateway.degraded = True
    assert run("status", "--json") == 1
    said = capsys.readouterr().out
    seen = json.loads(said)
    assert (seen["available"], seen["reason_kind"], seen["gateway"]["degraded"]) == (False, "hold", True)
    assert "secret-key" not in said


def test_status_of_a_broken_profile(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile file that cannot be read is named, and nothing else is tried."""
    (home / "memory_tencentdb.json").write_text("{broken")
    assert run("status") == 1
    assert f"cannot read {home / 'memory_tencentdb.json'}" in capsys.readouterr().out


def test_flush(home: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """What waits is delivered now; exit code 0 when nothing waits any more, 1 when something does."""
    leave(home, "one", "two")
    gateway.stop()
    assert run("flush", "--timeout", "0.3") == 1
    assert "2 turns" in capsys.readouterr().out
    gateway.start()
    assert run("flush", "--timeout", "10") == 0
    assert gateway.users() == ["one", "two"]
    assert run("flush") == 0


def test_flush_takes_up_dead_letters(home: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """What the Gateway refused once is sent again when the user says so."""
    leave(home, "one")
    gateway.script("/capture", http(400))
    assert run("flush") == 0
    assert gateway.users() == []
    assert run("flush", "--dead") == 0
    assert "1 records are taken up again" in capsys.readouterr().out
    assert gateway.users() == ["one"]


@pytest.mark.parametrize("generation", ["A", "embedded"])
def test_replay_stores_nothing_twice(home: Path, monkeypatch: pytest.MonkeyPatch, generation: str) -> None:
    """After a replay the Gateway has what it had lost, and what it still had only once."""
    with FakeGateway(generation) as gateway:
        monkeypatch.setenv("MEMORY_TENCENTDB_GATEWAY_PORT", str(gateway.port))
        leave(home, "the first turn", "the second turn")
        assert run("flush") == 0
        gateway.stored.pop(0)
        assert run("flush", "--replay") == 0
        assert sorted(gateway.users()) == ["the first turn", "the second turn"]


def test_doctor(home: Path, root: Path, gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing wrong is exit code 0; what is wrong comes with the command that mends it."""
    one = TencentDBMemoryProvider()
    one.initialize(session_id="s", hermes_home=str(home))
    one.sync_turn("x", "y")
    one.shutdown()
    assert run("doctor") == 0
    gateway.stop()
    (home / "memory_tencentdb").chmod(0o755)
    (home / "memory_tencentdb" / "stats.json").write_text(
        '{"dead": 2, "dropped": 1, "torn": 1, "possible_duplicates": 1}'
    )
    other = home.parent / "other" / "memory_tencentdb"
    other.mkdir(parents=True)
    (other / "endpoint.json").write_text((home / "memory_tencentdb" / "endpoint.json").read_text())
    (root / "spools" / "x.json").write_text(json.dumps({"schema": 1, "path": str(other), "profile": "coder"}))
    assert run("doctor") == 1
    said = capsys.readouterr().out
    for words in (
        "memory-tencentdb-ctl start default",
        f"chmod 700 {home / 'memory_tencentdb'}",
        "hermes memory_tencentdb flush --dead",
        "spool was full",
        "may be stored twice",
        "torn writes",
        "memory is shared with profile coder",
    ):
        assert words in said
    assert run("doctor", "--json") == 1
    assert {finding["level"] for finding in json.loads(capsys.readouterr().out)} == {"bad", "note"}


def test_doctor_changes_nothing(home: Path, gateway: FakeGateway) -> None:
    """Looking makes no file."""
    run("doctor")
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("verb", ["start", "stop"])
def test_start_and_stop_are_handed_over(
    home: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The supervisor's command does it, for this profile's Gateway and root; its exit code is the answer."""
    (home / "memory_tencentdb.json").write_text('{"gateway": "work"}')
    ctl = tmp_path / "bin" / "memory-tencentdb-ctl"
    ctl.parent.mkdir()
    ctl.write_text("#!/bin/sh\n")
    ctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(ctl.parent))
    handed: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: handed.append((path, argv)))
    run(verb)
    assert handed == [(str(ctl), [str(ctl), "--root", str(root), verb, "work"])]


def test_start_without_the_supervisor(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where memory-tencentdb-ctl is not installed the user is told how to get it; exit code 5."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert run("start") == 5
    assert "pipx install tdai-supervisor" in capsys.readouterr().err


def test_status_lines_for_the_host(home: Path, gateway: FakeGateway) -> None:
    """`hermes memory status` shows the same look."""
    lines = TencentDBMemoryProvider().get_status_config({})
    assert lines["profile_file"] == str(home / "memory_tencentdb.json")
    assert "available" in lines["state"]


def test_backup_paths(root: Path) -> None:
    """Without initialize and network: the supervisor's settings, and never a live database."""
    assert TencentDBMemoryProvider().backup_paths() == [str(root / "supervisor.toml")]


class Config:
    """The host's config module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: list[dict[str, Any]] = []
        module = types.ModuleType("hermes_cli.config")
        module.save_config = self.saved.append  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "hermes_cli", types.ModuleType("hermes_cli"))
        monkeypatch.setitem(sys.modules, "hermes_cli.config", module)


def test_setup_without_a_terminal(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Setup activates the provider, asks nothing, writes nothing, and says what is true now."""
    config = Config(monkeypatch)
    TencentDBMemoryProvider().post_setup(str(home), {"memory": "odd", "model": {}})
    assert config.saved == [{"memory": {"provider": "memory_tencentdb"}, "model": {}}]
    assert "gateway: default" in capsys.readouterr().out
    assert list(home.iterdir()) == []


def test_setup_on_a_terminal(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers land in the profile file; one that cannot be used is asked for again; Enter keeps what is set."""
    config = Config(monkeypatch)
    (home / "memory_tencentdb.json").write_text('{"mine": 1}')
    answers = {"Name of": ["work"], "Port of": ["x", "8421"]}

    def read(prompt: str, *, secret: bool) -> str:
        if secret:
            return secrets.pop(0) if secrets else ""
        waiting = next((each for words, each in answers.items() if words in prompt), [])
        return waiting.pop(0) if waiting else ""

    secrets = ["***", "the-key"]
    monkeypatch.setattr(configure, "_read", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    TencentDBMemoryProvider().post_setup(str(home), {})
    path = home / "memory_tencentdb.json"
    kept = json.loads(path.read_text())
    assert kept == {"mine": 1, "gateway": "work", "gateway_port": 8421, "gateway_api_key": "the-key"}
    assert path.stat().st_mode & 0o777 == 0o600
    said = capsys.readouterr().out
    assert "must be 1..65535" in said
    assert "looks masked" in said
    assert "the-key" not in said
    assert config.saved[0]["memory"]["provider"] == "memory_tencentdb"


def test_dashboard_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a host there is no schema and no error; in one it is made of the host's own types."""
    assert config_schema.CONFIG_SCHEMA is None
    module = types.ModuleType("plugins.memory.config_schema")
    module.ProviderField = lambda **fields: fields  # type: ignore[attr-defined]
    module.ProviderConfigSchema = lambda **fields: fields  # type: ignore[attr-defined]
    for name in ("plugins", "plugins.memory"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "plugins.memory.config_schema", module)
    schema = config_schema._schema()
    assert schema["name"] == "memory_tencentdb"
    assert {field["key"] for field in schema["fields"]} == {"gateway_url", "gateway", "gateway_api_key"}


def test_dead_letters_of_nothing(home: Path) -> None:
    """A spool without dead letters has none, whatever else is missing."""
    assert list(doctor.dead_letters(str(home / "none"))) == []
    assert doctor.revive(Spool(str(home / "none"))) == 0
