"""Sessions that attach, die, are ended and start a daemon: the real provider, without all of Hermes."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from memory_tencentdb import TencentDBMemoryProvider
from memory_tencentdb.aside import autostart

from tests.support.attached import Child
from tests.support.command import Ctl
from tests.support.kept import Kept
from tests.support.processes import of_root, wait_for


def provider(home: Path, session: str = "s1", **kwargs: Any) -> TencentDBMemoryProvider:
    """A session in this process."""
    one = TencentDBMemoryProvider()
    one.initialize(session_id=session, hermes_home=str(home), platform="cli", agent_identity=home.name, **kwargs)
    return one


def files(root: Path) -> list[dict[str, Any]]:
    """What lies under sessions/."""
    return [json.loads(p.read_text()) for p in sorted((root / "sessions").glob("*-*-*.json"))]


@pytest.fixture
def here(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root that is there, known to the sessions of this process."""
    monkeypatch.setenv("MEMORY_TENCENTDB_ROOT", str(root))
    monkeypatch.delenv("MEMORY_TENCENTDB_GATEWAY_PORT", raising=False)
    root.mkdir(mode=0o700)
    return root


def test_a_session_shows_itself_and_goes(here: Path, home: Path) -> None:
    """Who, where, since when; the session it switched to; which have turns; nothing after shutdown or collection."""
    one = provider(home, agent_context="primary")
    (about,) = files(here)
    assert {k: about[k] for k in ("schema", "pid", "profile", "session", "gateway", "open")} == {
        **{"schema": 1, "pid": os.getpid(), "profile": home.name, "session": "s1", "gateway": "default", "open": []}
    }
    path = next((here / "sessions").iterdir())
    assert path.name.startswith(f"{about['pid']}-{about['start_ticks']}-")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    one.sync_turn("hello", "hi")
    assert files(here)[0]["open"] == ["s1"]
    one.on_session_switch("s2", reset=True)
    assert (files(here)[0]["session"], files(here)[0]["open"]) == ("s2", [])
    one.shutdown()
    assert files(here) == []
    other = home / "other"  # where nothing waits: a thread that delivers keeps its provider
    other.mkdir()
    for n in range(5):
        provider(other, f"n{n}")
    gc.collect()
    assert files(here) == [], "an object that nobody keeps is no session"
    assert one.faults == {}


def test_what_cannot_be_written_costs_nothing(here: Path, home: Path) -> None:
    """Counted; the turn is kept all the same."""
    (here / "sessions").write_text("in the way")
    one = provider(home)
    one.sync_turn("hello", "hi")
    assert one.faults == {"attachment": 2}
    assert not one._spool.volatile
    one.shutdown()


def test_without_a_root_nothing_is_made(home: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that has nothing to say yet leaves no trace."""
    monkeypatch.setenv("MEMORY_TENCENTDB_ROOT", str(root))
    provider(home).shutdown()
    assert not root.exists()


def test_it_is_quick(here: Path, home: Path) -> None:
    """At most 1 ms, as the median of many: a shared machine is noisy."""
    one = provider(home)
    took = []
    for n in range(50):
        began = time.perf_counter()
        assert one._attachment is not None and one._attachment.show(f"s{n}", [])
        took.append(time.perf_counter() - began)
    one.shutdown()
    assert statistics.median(took) < 0.001


def test_status_and_stop_count_sessions(ctl: Ctl, home: Path) -> None:
    """Three sessions of two profiles: shown, then one killed and one ended; stop says whom it cuts off."""
    ctl.start()
    ctl.env.pop("MEMORY_TENCENTDB_GATEWAY_PORT")
    a, b, c = (Child(ctl.root, home, f"s{n}", who) for n, who in enumerate(("work", "work", "play")))
    seen = ctl.status()["attachments"]
    assert sorted((s["profile"], s["session"]) for s in seen) == [("play", "s2"), ("work", "s0"), ("work", "s1")]
    said = ctl("status").out
    assert "sessions 3 attached: play 1, work 2" in said
    assert "shared by play, work" in said
    assert ctl.gateway()["profiles"] == ["play", "work"]
    a.kill()
    assert b.end() == 0
    assert [s["session"] for s in ctl.status()["attachments"]] == ["s2"]
    wait_for(lambda: len(os.listdir(f"{ctl.root}/sessions")) == 1, 12, "the file of the killed one is removed")
    stopped = ctl("stop", "default", "--json").data
    assert stopped["cut_off"] == {"sessions": 1, "profiles": {"play": 1}}
    assert "1 cut off: play 1" not in ctl("stop", "default").out, "nothing runs any more"
    c.end()
    assert ctl("stop").code == 0
    assert ctl.status()["attachments"] == []


def test_a_killed_session_is_ended_after_its_turns(kept: Kept, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turns first, then /session/end, once; its file goes then."""
    kept.write(f'[gateway.default]\nkind = "embedded"\nport = {kept.port}\n')
    code = "import sys; from tdai_supervisor.engine import attachments, spools, daemon, entry;"
    code += "attachments.IDLE = 0.5; spools.LOOK_EVERY = 2; daemon.TICK = 0.3; entry.main(sys.argv[1], 'none')"
    kept.start_code(code)
    (home / "memory_tencentdb.json").write_text("{}")
    session = Child(kept.root, home, "s1", "default")
    assert session.tell("turn hello zorblax") == "kept"
    assert files(kept.root)[0]["open"] == ["s1"]
    session.kill()
    wait_for(lambda: files(kept.root) == [], 15, "the session is ended")
    stats = json.loads((home / "memory_tencentdb" / "stats.json").read_text())
    assert (stats["delivered"], stats["waiting"]) == (1, 0)
    segments = b"".join(p.read_bytes() for p in (home / "memory_tencentdb" / "spool").glob("*.seg"))
    assert segments.count(b'"kind":"end"') == 1
    (spool,) = kept.ask("status")["data"]["spools"]
    assert (spool["profile"], spool["delivered"], spool["waiting"], spool["gone"]) == ("default", 1, 0, False)


def test_autostart_is_opt_in_and_once(here: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent or false: nothing is ever spawned. True: one command per process, however many sessions."""
    ran: list[list[str]] = []

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, argv: list[str], **more: Any) -> None:
            ran.append(argv)
            super().__init__(["/bin/true"], **more)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("spawned")

    monkeypatch.setattr(subprocess, "Popen", Watched)
    for way in ("fork", "posix_spawn", "posix_spawnp", "system"):
        monkeypatch.setattr(os, way, never)
    monkeypatch.setattr(autostart, "find", lambda root: "/bin/ctl")
    monkeypatch.setattr(autostart, "_tried", set())
    for text in ("{}", '{"autostart": false}'):
        (home / "memory_tencentdb.json").write_text(text)
        provider(home).shutdown()
    assert ran == []
    (home / "memory_tencentdb.json").write_text('{"autostart": true}')
    for n in range(3):
        provider(home, f"s{n}").shutdown()
    (argv,) = ran
    assert argv[3:] == ["/bin/ctl", "--root", str(here), "start", "--no-wait"]


def test_autostart_leaves_a_living_daemon_alone(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its pidfile; and where the command is nowhere it is said, not raised."""
    monkeypatch.setattr(autostart, "_tried", set())
    monkeypatch.setattr(autostart, "find", lambda root: None)
    assert not autostart.start_once(str(kept.root), str(kept.home))
    monkeypatch.setattr(autostart, "_tried", set())
    kept.settings()
    kept.start()
    assert autostart.daemon_lives(str(kept.root))
    assert not autostart.start_once(str(kept.root), str(kept.home)) and autostart._tried == set()


def test_autostart_keeps_one_profiles_variables_to_itself(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The .env of a profile below profiles/ does not decide for the daemon of all; that of the default one may."""
    work = home / "profiles" / "work"
    work.mkdir(parents=True)
    for place in (home, work):
        (place / ".env").write_text("MEMORY_TENCENTDB_GATEWAY_PORT=9\n")
    monkeypatch.setenv("MEMORY_TENCENTDB_GATEWAY_PORT", "9")
    monkeypatch.setenv("HERMES_HOME", str(work))
    assert not {"MEMORY_TENCENTDB_GATEWAY_PORT", "HERMES_HOME"} & set(autostart.environment(str(work)))
    assert "PATH" in autostart.environment(str(work))
    assert autostart.environment(str(home))["MEMORY_TENCENTDB_GATEWAY_PORT"] == "9"


def test_many_sessions_at_once_start_one_daemon(ctl: Ctl, home: Path) -> None:
    """Each runs the command; one daemon and one Gateway come of it, nobody is left a zombie, no pipe is held."""
    ctl.settings('[gateway.default]\nkind = "embedded"\n')
    bin_ = home / ".local" / "bin"
    bin_.mkdir(parents=True)
    command = bin_ / "memory-tencentdb-ctl"
    port = ctl.env["MEMORY_TENCENTDB_GATEWAY_PORT"]
    words = " ".join(ctl.argv)
    command.write_text(f'#!/bin/sh\nMEMORY_TENCENTDB_GATEWAY_PORT={port} exec {words} "$@"\n')
    command.chmod(0o700)
    (home / "memory_tencentdb.json").write_text('{"autostart": true}')
    sessions = [Child(ctl.root, home, f"s{n}", "default") for n in range(8)]
    wait_for(lambda: ctl("status").code == 0, 19, "the daemon that a session started")
    daemons = [p for p in of_root(ctl.root) if p.command.endswith("daemon --keeper supervisord")]
    assert len(daemons) == 1
    assert len(ctl.status()["attachments"]) == 8
    for session in sessions:
        assert session.tell("children") == "0"
        session.end()
