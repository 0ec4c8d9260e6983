"""The daemon on a scripted Gateway: death, hang, hold, stop, guards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.kept import QUICK, Kept, alive, fds_and_threads
from tests.support.processes import wait_for

SLOW_BACKOFF = "backoff_initial = 60.0\nbackoff_max = 60.0\n"


def test_first_death_restarts_at_once_and_the_second_waits(kept: Kept) -> None:
    """kill -9 once: READY again with a new pid and a named cause; twice: BACKOFF with the time of the next try."""
    kept.settings(policy=SLOW_BACKOFF)
    kept.start()
    first = kept.gateway()["pid"]
    os.kill(first, signal.SIGKILL)
    again = wait_for(lambda: (g := kept.gateway()) and g["state"] == "READY" and g["pid"] != first and g)
    assert again["last_exit"]["signal"] == 9
    assert again["restarts"] == 1
    os.kill(again["pid"], signal.SIGKILL)
    waiting = kept.wait(state="BACKOFF")
    assert 55 < waiting["backoff_s"] <= 66
    assert waiting["pid"] is None
    assert waiting["origin"] is None
    kept.ask("start")
    assert kept.gateway()["state"] == "READY", "`start` clears the backoff"


def test_budget_ends_in_fatal_and_start_clears_it(kept: Kept) -> None:
    """death_budget deaths: FATAL with the count; `start` tries again at once."""
    kept.settings(policy="backoff_initial = 0.01\nbackoff_max = 0.02\ndeath_budget = 4\n", STUB_EXIT="3")
    kept.start(ready=False)
    fatal = kept.wait(state="FATAL")
    assert "4 deaths within 600 s" in fatal["cause"]
    assert fatal["last_exit"]["code"] == 3
    assert [e["to"] for e in kept.journal()].count("FATAL") == 1
    kept.settings()
    assert kept.ask("start")["ok"], "the settings are read again, and the deaths forgotten"


@pytest.mark.parametrize("code", ["126", "127"])
def test_cannot_exec_is_fatal_at_once(kept: Kept, code: str) -> None:
    """What no retry can help is not retried ten times."""
    kept.settings(STUB_EXIT=code)
    kept.start(ready=False)
    assert "cannot exec" in kept.wait(state="FATAL")["cause"]
    assert kept.gateway()["restarts"] == 1


def test_a_command_that_does_not_exist_is_fatal_and_named(kept: Kept) -> None:
    """The cause names the program."""
    kept.write(f'[gateway.default]\nkind = "command"\ncommand = ["/nonexistent/gateway"]\nport = {kept.port}\n')
    kept.start(ready=False)
    fatal = kept.wait(state="FATAL")
    assert "/nonexistent/gateway" in fatal["cause"]
    reply = kept.ask("start")
    assert not reply["ok"]
    assert "/nonexistent/gateway" in reply["errors"][0]["message"]


def test_a_failing_start_shows_the_log(kept: Kept) -> None:
    """The last lines of the Gateway's log come with the error, and the cause is read from them."""
    kept.settings(policy=SLOW_BACKOFF, STUB_EXIT="1", STUB_SAY="Error: listen EADDRINUSE: address already in use")
    kept.start(ready=False)
    reply = kept.ask("start")
    assert "EADDRINUSE" in "\n".join(reply["errors"][0]["log"])
    assert reply["exit_code"] == 1
    assert "EADDRINUSE" in kept.gateway()["last_exit"]["cause"]


def test_a_start_that_never_listens_is_ended_at_its_limit(kept: Kept) -> None:
    """No idle process without a listener is left: ended, counted, named."""
    kept.settings(QUICK + "startup_timeout = 0.5\n", SLOW_BACKOFF, STUB_NEVER="1")
    kept.start(ready=False)
    pid = wait_for(lambda: kept.gateway()["pid"])
    assert "startup_timeout" in kept.wait(state="BACKOFF", timeout=8)["cause"] or kept.gateway()["restarts"]
    assert not alive(pid)


@pytest.mark.parametrize("how", ["stop", "silent"])
def test_a_hang_is_ended_and_replaced(kept: Kept, how: str) -> None:
    """SIGSTOP or silence: TERM (and CONT), a new process, the cause says hung."""
    kept.settings()
    kept.start()
    first = kept.gateway()["pid"]
    if how == "stop":
        os.kill(first, signal.SIGSTOP)
    else:
        kept.do("silent")
    again = wait_for(lambda: (g := kept.gateway()) and g["state"] == "READY" and g["pid"] != first and g)
    assert "hung" in again["last_exit"]["cause"]
    assert not alive(first)


def test_a_slow_answer_is_shown_and_nothing_more(kept: Kept) -> None:
    """Past probe_deadline the state stays READY and health says slow."""
    kept.settings("probe_interval = 0.1\nprobe_deadline = 0.2\nhang_after = 30\n")
    kept.start()
    kept.do("slow:0.5")
    slow = wait_for(lambda: (g := kept.gateway()) and g["health"]["slow"] and g)
    assert slow["state"] == "READY"
    assert slow["restarts"] == 0


def test_busy_is_unready_and_not_ended(kept: Kept) -> None:
    """A Gateway that burns CPU and does not answer is UNREADY; it comes back by itself."""
    kept.settings("probe_interval = 0.1\nhang_after = 1.0\nbusy_limit = 60\n")
    kept.start()
    pid = kept.gateway()["pid"]
    kept.do("burn:4")
    assert "busy" in kept.wait(state="UNREADY")["cause"]
    assert kept.wait(state="READY", timeout=10)["pid"] == pid


@pytest.mark.parametrize(
    ("mode", "says"), [("degraded", "degraded"), ("http:503", "HTTP 503"), ("http:401", "HTTP 401")]
)
def test_degraded_is_a_hold_and_never_a_restart(kept: Kept, mode: str, says: str) -> None:
    """Alive, but nothing should be delivered: UNREADY with hold in status and record, then READY without."""
    kept.settings()
    kept.start()
    pid = kept.gateway()["pid"]
    kept.do(mode)
    held = kept.wait(state="UNREADY")
    assert says in held["hold"]
    wait_for(lambda: kept.record()["hold"], 5)
    kept.do("ok")
    ready = kept.wait(state="READY")
    assert (ready["pid"], ready["hold"]) == (pid, None)


def test_term_ends_the_gateway_and_keeps_the_want(kept: Kept) -> None:
    """SIGTERM to the daemon: exactly one TERM to the Gateway, exit 0, and the next daemon starts it again."""
    terms = kept.root / "terms"
    kept.settings(STUB_TERMS=str(terms))
    kept.start()
    pid = kept.gateway()["pid"]
    assert kept.end() == 0
    assert not alive(pid)
    assert terms.read_text().splitlines() == [str(pid)]
    assert (kept.root / "run" / "default.want").read_text().strip() == "up"
    kept.start()
    assert kept.gateway()["pid"] != pid


def test_stop_survives_a_restart_of_the_daemon(kept: Kept) -> None:
    """A want of down is kept: the next daemon starts nothing."""
    kept.settings()
    kept.start()
    assert kept.ask("stop")["ok"]
    kept.kill()
    kept.start(ready=False)
    assert kept.wait(state="STOPPED")["want"] == "down"


def test_a_gateway_that_ignores_term_is_killed_after_kill_delay(kept: Kept) -> None:
    """kill_delay, then KILL, and `stop` says so only when it is gone."""
    kept.settings(STUB_IGNORE_TERM="1")
    kept.start()
    pid = kept.gateway()["pid"]
    began = time.monotonic()
    assert kept.ask("stop")["ok"]
    assert 0.9 < time.monotonic() - began < 5
    assert not alive(pid)


@pytest.mark.parametrize("command", ["sh -c", "setsid"])
def test_wrapper_trees_leave_nothing(kept: Kept, command: str) -> None:
    """A shell that does not exec, and a grandchild in a session of its own that ignores TERM: all gone after `stop`."""
    kept.settings(STUB_FORK="setsid" if command == "setsid" else "")
    if command == "sh -c":
        text = (kept.root / "supervisor.toml").read_text()
        words = text.split("command = ")[1].split("\n")[0]
        line = " ".join(eval(words)) + "; true"
        kept.write(text.replace(words, f'["/bin/sh", "-c", {line!r}]'))
    kept.start()
    assert kept.ask("stop")["ok"]
    left = [p for p in os.listdir("/proc") if p.isdecimal() and _carries(int(p), str(kept.root))]
    assert left == []


def _carries(pid: int, root: str) -> bool:
    try:
        return alive(pid) and f"MEMORY_TENCENTDB_OWNER={root}:".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_stop_during_starting_and_start_during_stopping(kept: Kept) -> None:
    """The last want wins, whatever was under way."""
    kept.settings(STUB_BOOT="5")
    kept.start(ready=False)
    kept.wait(state="STARTING")
    assert kept.ask("stop")["ok"]
    kept.settings(STUB_IGNORE_TERM="1")
    assert kept.ask("start")["ok"]
    told: list[dict[str, Any]] = []
    stopping = threading.Thread(target=lambda: told.append(kept.ask("stop")))
    stopping.start()
    kept.wait(state="STOPPING")
    assert kept.ask("start")["ok"]
    stopping.join(5)
    assert told[0]["errors"][0]["code"] == "overtaken", "whoever stops is told at once, not after a timeout"
    assert kept.gateway()["state"] == "READY"


def test_blocked_names_the_holder_within_a_second_and_recovers(kept: Kept) -> None:
    """A foreign process on an asked-for port: BLOCKED with pid and command; flat fds; READY once it is gone."""
    kept.settings()
    code = f"import socket,time; s=socket.create_server(('127.0.0.1',{kept.port})); time.sleep(99)"
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as foreigner:
        wait_for(lambda: _listening(kept.port))
        daemon = kept.start(ready=False)
        began = time.monotonic()
        blocked = kept.wait(state="BLOCKED")
        assert time.monotonic() - began < 5
        assert f"pid {foreigner.pid}" in blocked["cause"]
        assert "uid" in blocked["cause"]
        reply = kept.ask("start")
        assert f"port {kept.port} is taken" in reply["errors"][0]["message"]
        before = fds_and_threads(daemon)
        for _ in range(20):
            kept.ask("start")
        wait_for(lambda: fds_and_threads(daemon) <= before, 5, "flat descriptors")
        assert len([e for e in kept.journal() if e["to"] == "BLOCKED"]) == 1
        foreigner.kill()
    assert kept.ask("start")["ok"]


def _listening(port: int) -> bool:
    from tdai_supervisor.host import ports

    return bool(ports.listeners(port))


def test_a_port_nobody_asked_for_moves_on_and_stays(kept: Kept) -> None:
    """With 8420 in somebody's hand the next free port is taken, and kept after a restart."""
    kept.settings()
    text = (kept.root / "supervisor.toml").read_text().replace(f"port = {kept.port}\n", "")
    kept.write(text)
    kept.start()
    port = kept.gateway()["port"]
    assert port >= 8420
    kept.ask("restart")
    assert kept.gateway()["port"] == port


def test_memory_limit_is_a_graceful_restart_with_its_cause(kept: Kept) -> None:
    """More than it may use: ended by TERM, counted, named."""
    terms = kept.root / "terms"
    kept.settings(QUICK + 'memory_limit = "1MiB"\n', SLOW_BACKOFF, STUB_TERMS=str(terms))
    kept.start()
    again = wait_for(lambda: (g := kept.gateway()) and g["restarts"] and g, 15)
    assert "memory limit" in again["last_exit"]["cause"]
    assert terms.read_text()


def test_logs_are_bounded_and_lost_bytes_counted(kept: Kept) -> None:
    """A storm of 30 MB against a cap of 1 MiB x (1 + 2): bounded, flagged, counted; the Gateway serves on."""
    kept.settings(QUICK + 'log_max_bytes = "1MiB"\nlog_backups = 2\n')
    kept.start()
    pid = kept.gateway()["pid"]
    kept.do("storm:30")
    logs = Path(kept.gateway()["logs"]["stdout"])
    lost = wait_for(lambda: kept.gateway()["guards"]["logs"]["lost_bytes"], 15)
    wait_for(lambda: logs.stat().st_size <= 1024 * 1024, 10)
    assert lost > 0
    backups = sorted(logs.parent.glob("gateway.stdout.log.*"))
    assert 1 <= len(backups) <= 2
    assert all(b.stat().st_size <= 1024 * 1024 + 65536 for b in backups)
    assert kept.gateway()["pid"] == pid


def test_a_deleted_log_is_found(kept: Kept) -> None:
    """What a Gateway writes into a deleted log is still bounded: the backup appears where the log was."""
    kept.settings(QUICK + 'log_max_bytes = "1MiB"\nlog_backups = 1\n')
    kept.start()
    log = Path(kept.gateway()["logs"]["stdout"])
    log.unlink()
    kept.do("storm:3")
    wait_for(lambda: Path(f"{log}.1").exists(), 10, "the deleted log is cut")
    assert kept.gateway()["state"] == "READY"


def test_reload_keeps_pids_and_owns_on(kept: Kept) -> None:
    """HUP: same daemon pid, same Gateway, adopted; the exit status of the child is still read afterwards."""
    kept.settings()
    daemon = kept.start()
    pid, began = kept.gateway()["pid"], kept.ask("ping")["data"]["started_at"]
    os.kill(daemon, signal.SIGHUP)
    wait_for(lambda: kept.answers() and kept.ask("ping")["data"]["started_at"] != began)
    adopted = kept.wait(state="READY")
    assert (adopted["pid"], adopted["origin"], kept.ask("ping")["data"]["pid"]) == (pid, "adopted", daemon)
    kept.do("die:7")
    assert wait_for(lambda: kept.gateway()["last_exit"])["code"] == 7


def test_named_gateways_do_not_disturb_each_other(kept: Kept) -> None:
    """Two Gateways under one daemon: one dies for good, the other never notices."""
    kept.settings(policy=SLOW_BACKOFF)
    text = (kept.root / "supervisor.toml").read_text()
    work = text.split("[policy]")[0].replace("[gateway.default]", "[gateway.work]").replace(f"port = {kept.port}\n", "")
    kept.write(text + work.replace("env = {  }", 'env = { STUB_EXIT = "1" }'))
    kept.start()
    kept.wait(name="work", state="BACKOFF")
    assert kept.gateway()["state"] == "READY"
    assert kept.gateway("work")["data_dir"].endswith("gateways/work")
    assert kept.ask("stop", name="work")["ok"]
    assert kept.gateway()["restarts"] == 0


def test_notify_tells_trouble_and_recovery(kept: Kept) -> None:
    """The command runs on a hold and on the recovery, with the cause in its environment."""
    told = kept.root / "told"
    kept.settings()
    script = f'echo "$MEMORY_TENCENTDB_EVENT $MEMORY_TENCENTDB_GATEWAY" >> "{told}"'
    kept.write(f"notify = ['/bin/sh', '-c', '{script}']\n" + (kept.root / "supervisor.toml").read_text())
    kept.start()
    kept.do("degraded")
    kept.wait(state="UNREADY")
    kept.do("ok")
    kept.wait(state="READY")
    wait_for(lambda: told.exists() and told.read_text().splitlines() == ["hold default", "recovery default"])
