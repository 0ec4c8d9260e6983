"""Several Gateways under one daemon: added and removed while it lives, each with its own fate."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tdai_supervisor import client
from tests.support import processes
from tests.support.kept import QUICK, SCRIPTED, Kept, alive, fds_and_threads
from tests.support.processes import wait_for


def scripted(name: str, port: int | None, more: str = "", **stub: str) -> str:
    """The table of a scripted Gateway."""
    command = json.dumps([sys.executable, "-E", "-S", str(SCRIPTED)])
    env = ", ".join(f"{k} = {json.dumps(v)}" for k, v in stub.items())
    asked = f"port = {port}\n" if port is not None else ""
    head = f'[gateway.{name}]\nkind = "command"\ncommand = {command}\n'
    return f"{head}{asked}env = {{ {env} }}\n{QUICK}{more}\n"


def test_a_new_name_starts_and_a_gone_one_is_ended_and_forgotten(kept: Kept) -> None:
    """`start NAME` knows a name that was just written; one that is gone is ended, its record says STOPPED."""
    one = scripted("default", kept.port)
    kept.write(one)
    kept.start()
    first = kept.gateway()["pid"]
    kept.write(one + scripted("work", None))
    assert kept.ask("start", name="work")["ok"]
    work = kept.gateway("work")
    assert work["state"] == "READY" and work["port"] != kept.port
    assert not kept.ask("forget", name="work")["ok"], "it is still configured"
    kept.write(one)
    assert kept.ask("forget", name="work")["ok"]
    assert not alive(work["pid"])
    assert [g["name"] for g in kept.ask("status")["data"]["gateways"]] == ["default"]
    record = kept.record("work")
    assert (record["state"], record["cause"]) == ("STOPPED", "no longer configured")
    assert kept.gateway()["pid"] == first and kept.gateway()["restarts"] == 0


def test_a_name_that_went_while_no_daemon_lived_is_ended(kept: Kept) -> None:
    """The next daemon ends what nobody configures any more; the other one is adopted."""
    one = scripted("default", kept.port)
    kept.write(one + scripted("work", None))
    kept.start()
    work = kept.wait(name="work", state="READY")["pid"]
    kept.kill()
    kept.write(one)
    kept.start()
    wait_for(lambda: not alive(work), 5, "the Gateway nobody configures is ended")
    wait_for(lambda: kept.record("work")["state"] == "STOPPED", 5)
    assert kept.gateway()["origin"] == "adopted"


def test_a_daemon_killed_while_it_ends_one_is_followed_by_one_that_does(kept: Kept) -> None:
    """The name is gone and its Gateway ignores TERM: kill -9 of the daemon in between leaves nothing behind."""
    one = scripted("default", kept.port)
    kept.write(one + scripted("work", None, STUB_IGNORE_TERM="1"))
    kept.start()
    work = kept.wait(name="work", state="READY")["pid"]
    kept.write(one)
    with pytest.raises(client.NoAnswerError):
        kept.ask("forget", 0.2, name="work")
    assert alive(work)
    kept.kill()
    kept.start()
    wait_for(lambda: not alive(work), 8, "the next daemon ends it")
    wait_for(lambda: kept.record("work")["state"] == "STOPPED", 5)


def test_reload_ends_what_is_no_longer_configured(kept: Kept) -> None:
    """HUP: same daemon pid, the other Gateway untouched, the gone one ended."""
    one = scripted("default", kept.port)
    kept.write(one + scripted("work", None))
    daemon = kept.start()
    first, work = kept.gateway()["pid"], kept.wait(name="work", state="READY")["pid"]
    kept.write(one)
    os.kill(daemon, signal.SIGHUP)
    wait_for(lambda: not alive(work), 8, "it is ended")
    again = kept.wait(state="READY")
    assert (again["pid"], again["origin"]) == (first, "adopted")


def test_adding_and_removing_leaves_nothing_behind(kept: Kept) -> None:
    """Descriptors, threads and the other Gateway are what they were after six rounds."""
    one = scripted("default", kept.port)
    kept.write(one)
    daemon = kept.start()

    def round_() -> tuple[int, int]:
        kept.write(one + scripted("work", None))
        assert kept.ask("start", name="work")["ok"]
        kept.write(one)
        assert kept.ask("forget", name="work")["ok"]
        return fds_and_threads(daemon)

    before = round_()
    for _ in range(5):
        round_()

    def settled() -> bool:
        """A probe or a look that is under way has descriptors too; what leaks stays."""
        now = fds_and_threads(daemon)
        return now[0] <= before[0] and now[1] <= before[1]

    wait_for(settled, 10, f"no more than {before} descriptors and threads")
    assert kept.gateway()["restarts"] == 0


def test_a_name_that_comes_back_is_the_same_gateway(kept: Kept) -> None:
    """Gone and back again: it runs, on the port it had."""
    one = scripted("default", kept.port)
    both = one + scripted("work", None)
    kept.write(both)
    kept.start()
    port = kept.wait(name="work", state="READY")["port"]
    kept.write(one)
    kept.ask("start", name="default")
    kept.write(both)
    assert kept.ask("start", name="work")["ok"]
    assert kept.gateway("work")["port"] == port


def test_ports_nobody_asked_for_stay_whatever_is_added(kept: Kept) -> None:
    """A name put before another in the file does not take the port the other has had."""
    kept.write(scripted("default", kept.port) + scripted("work", None))
    kept.start()
    port = kept.wait(name="work", state="READY")["port"]
    kept.end()
    kept.write(scripted("default", kept.port) + scripted("another", None) + scripted("work", None))
    kept.start()
    assert kept.wait(name="work", state="READY")["port"] == port
    assert kept.wait(name="another", state="READY")["port"] != port


def test_one_that_fails_does_not_touch_another(kept: Kept) -> None:
    """Beside one that dies at each start and one that hangs, the healthy one keeps its pid and its probes."""
    dying = scripted("dying", processes.free_port(), STUB_EXIT="3")
    hung = scripted("hung", processes.free_port(), "startup_timeout = 1.5", STUB_MODE="silent")
    kept.write(scripted("default", kept.port) + dying + hung)
    policy = "[policy]\nbackoff_initial = 0.05\nbackoff_max = 0.1\ndeath_budget = 5\n"
    kept.write((kept.root / "supervisor.toml").read_text() + policy)
    kept.start()
    pid = kept.gateway()["pid"]
    kept.wait(name="dying", state="FATAL")
    wait_for(lambda: kept.gateway("hung")["restarts"] >= 1, 10, "the hung one is ended")
    healthy = kept.gateway()
    assert (healthy["pid"], healthy["restarts"], healthy["state"]) == (pid, 0, "READY")
    assert healthy["health"]["latency_ms"] < 200
    assert {e["to"] for e in kept.journal() if e["gateway"] == "default"} == {"STARTING", "READY"}


def test_one_directory_has_one_owner(kept: Kept, tmp_path: Path) -> None:
    """By another name of the same directory too: BLOCKED, and the cause names Gateway, pid and port."""
    (tmp_path / "place").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "place")
    kept.write(
        scripted("default", kept.port, f'data_dir = "{tmp_path}/place/data"')
        + scripted("work", None, f'data_dir = "{tmp_path}/alias/data"')
    )
    kept.start(ready=False)
    names = ("default", "work")
    wait_for(lambda: {kept.gateway(n)["state"] for n in names} == {"READY", "BLOCKED"}, 10)
    first = next(g for g in map(kept.gateway, names) if g["state"] == "READY")
    second = next(n for n in names if n != first["name"])
    wanted = f"Gateway {first['name']} of {kept.root}, pid {first['pid']}, port {first['port']}"
    wait_for(lambda: wanted in kept.gateway(second)["cause"], 8, wanted)  # looked at again until it listens
