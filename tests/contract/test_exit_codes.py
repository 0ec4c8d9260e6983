"""Exit codes: scripts rely on each of them."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support import processes
from tests.support.command import Ctl


def end_daemon_and_keeper(ctl: Ctl) -> None:
    """KILL keeper and daemon of a root; its Gateways live on."""
    keeper = int(ctl.file("run/supervisord.pid"))
    daemon = ctl.status()["daemon"]["pid"]
    # The keeper first: it would start another daemon.
    for pid in (keeper, daemon):
        os.kill(pid, signal.SIGKILL)
    processes.wait_for(lambda: not processes.alive(keeper) and not processes.alive(daemon), 5, "both dead")


def test_status_of_a_fresh_root(ctl: Ctl) -> None:
    """3: nothing is wanted, and no daemon lives."""
    assert ctl("status").code == 3


def test_status_ready(running: Ctl) -> None:
    """0: every wanted Gateway is READY; of one by name too."""
    assert running("status").code == 0
    assert running("status", "default").code == 0
    assert running("health").code == 0


def test_status_unknown_name(running: Ctl) -> None:
    """4: no such Gateway."""
    assert running("status", "nobody").code == 4


def test_stopped_by_name(ctl: Ctl) -> None:
    """3: the daemon lives, but nothing is wanted; health says not running (7)."""
    ctl.start()
    assert ctl("stop", "default").code == 0
    assert ctl.status()["daemon"]["running"] is True
    assert ctl("status").code == 3
    assert ctl("health").code == 7


def test_wanted_without_daemon(ctl: Ctl) -> None:
    """1: a Gateway is wanted and no daemon lives, even while the Gateway itself answers."""
    gateway = ctl.start()
    end_daemon_and_keeper(ctl)
    assert ctl("status").code == 1
    assert processes.alive(gateway["pid"])


def test_wanted_not_ready(ctl: Ctl) -> None:
    """1: wanted, but it cannot be had; status and health agree, start says why."""
    ctl.settings('[gateway.default]\ncommand = ["/nonexistent/program"]\n')
    started = ctl("start")
    assert started.code == 1
    assert "/nonexistent/program" in started.err
    assert ctl("status").code == 1
    assert ctl("health").code in (1, 7)


def test_health_of_a_stopped_process(ctl: Ctl) -> None:
    """1: it runs and does not answer."""
    gateway = ctl.start()
    os.kill(gateway["pid"], signal.SIGSTOP)
    try:
        assert ctl("health").code == 1
    finally:
        os.kill(gateway["pid"], signal.SIGCONT)


def test_health_without_anything(ctl: Ctl) -> None:
    """7: nothing runs."""
    assert ctl("health").code == 7


def test_idempotent(ctl: Ctl) -> None:
    """0: `start` on running changes no pid, `stop` on stopped does nothing."""
    assert ctl("stop").code == 0
    first = ctl.start()
    assert ctl.start()["pid"] == first["pid"]
    assert ctl("stop").code == 0
    assert ctl("stop").code == 0


@pytest.mark.parametrize("words", [[], ["no-such-verb"], ["status", "--no-such-option"], ["start", "--timeout", "x"]])
def test_usage(ctl: Ctl, words: list[str]) -> None:
    """2: a command line that cannot be read; one line says why, no traceback."""
    done = ctl(*words)
    assert done.code == 2
    assert done.err.strip()
    assert "Traceback" not in done.err


def test_second_daemon(running: Ctl) -> None:
    """75: another daemon holds the root; it gives up after 10 s and names the holder, in the envelope too."""
    done = running("daemon", "--json", timeout=15)
    assert done.code == 75
    assert done.json["exit_code"] == 75
    assert str(running.status()["daemon"]["pid"]) in done.json["errors"][0]["message"]


def test_restart_daemon_without_one(ctl: Ctl) -> None:
    """7: there is no daemon to restart."""
    assert ctl("restart", "--daemon").code == 7


def test_not_configured(ctl: Ctl) -> None:
    """6: supervisor.toml cannot be used."""
    ctl.settings("[gateway.default]\nport = 'x'\n")
    assert ctl("start").code == 6
