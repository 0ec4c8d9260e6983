"""What `status` and the endpoint record say: key sets, types and nulls are frozen."""

from __future__ import annotations

import datetime
import os
import re
import stat
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.command import Ctl

DAEMON = {"running", "pid", "version", "keeper", "started_at"}
GATEWAY = {
    *("name", "want", "state", "origin", "kind", "pid", "host", "port", "url", "data_dir", "config_file", "since"),
    *("cause", "restarts", "last_exit", "backoff_s", "health", "hold", "drift", "memory_bytes", "logs"),
}
HEALTH = {"status", "latency_ms", "generation"}
LAST_EXIT = {"code", "signal", "cause", "at"}
LOGS = {"stdout", "stderr"}
RECORD = {
    *("schema", "seq", "name", "state", "host", "port", "url", "pid", "start_ticks", "boot_id", "pid_ns", "uid"),
    *("kind", "generation", "data_dir", "since", "cause", "hold", "api_key_file", "daemon"),
}
STATES = {"STOPPED", "STARTING", "READY", "UNREADY", "STOPPING", "BACKOFF", "BLOCKED", "FATAL"}
KEEPERS = {"systemd-user", "systemd-system", "supervisord", "none"}


def check_time(text: Any) -> None:
    """An RFC 3339 time in UTC, of about now."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", text)
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(text)
    assert abs(age.total_seconds()) < 3600


def check_status(data: dict[str, Any]) -> None:
    """The frozen shape of status data, of a daemon alive or not."""
    assert set(data) >= {"daemon", "root", "gateways"}
    daemon = data["daemon"]
    assert set(daemon) >= DAEMON
    assert isinstance(daemon["running"], bool)
    assert daemon["keeper"] in KEEPERS
    if daemon["running"]:
        check_time(daemon["started_at"])
    for gateway in data["gateways"]:
        assert set(gateway) >= GATEWAY
        assert gateway["want"] in ("up", "down")
        assert gateway["state"] in STATES
        assert gateway["cause"], "every state has a cause in words"
        assert set(gateway["health"]) >= HEALTH
        assert set(gateway["logs"]) == LOGS
        assert isinstance(gateway["drift"], list)
        assert isinstance(gateway["restarts"], int)
        if gateway["last_exit"] is not None:
            assert set(gateway["last_exit"]) >= LAST_EXIT
            check_time(gateway["last_exit"]["at"])
        if gateway["pid"] is None:
            assert gateway["origin"] is None
        if gateway["state"] != "BACKOFF":
            assert gateway["backoff_s"] is None


def test_status_of_a_running_root(running: Ctl) -> None:
    """A READY Gateway is described completely: pid is the listener, url can be used as it is."""
    data = running.status()
    check_status(data)
    assert data["root"] == running.root
    gateway = data["gateways"][0]
    check_time(gateway["since"])
    assert gateway["kind"] in ("node", "embedded", "command")
    assert gateway["origin"] in ("spawned", "adopted")
    assert gateway["url"] == f"http://127.0.0.1:{gateway['port']}"
    assert processes.alive(gateway["pid"])
    assert gateway["health"]["generation"] == "embedded"
    assert gateway["health"]["latency_ms"] >= 0
    assert Path(gateway["logs"]["stderr"]).is_file()
    assert Path(gateway["data_dir"]).is_dir()


def test_status_after_stop(ctl: Ctl) -> None:
    """Without a daemon the same keys are there; what does not apply is null."""
    ctl.start()
    ctl("stop")
    data = ctl.status()
    check_status(data)
    assert data["daemon"]["running"] is False
    assert data["daemon"]["pid"] is None
    gateway = data["gateways"][0]
    assert (gateway["state"], gateway["want"], gateway["pid"]) == ("STOPPED", "down", None)


def test_status_of_a_fresh_root(ctl: Ctl) -> None:
    """A root nobody ever used has one Gateway, default, STOPPED; looking at it creates nothing."""
    data = ctl.status()
    check_status(data)
    assert [g["name"] for g in data["gateways"]] == ["default"]
    assert not Path(ctl.root).exists()


def test_status_in_backoff(ctl: Ctl) -> None:
    """A Gateway that dies shows its last exit, and in BACKOFF the seconds to its next try."""
    ctl.settings(
        """
        [gateway.default]
        command = ["/bin/sh", "-c", "echo broken >&2; exit 3"]
        [policy]
        backoff_initial = 30
        """
    )
    assert ctl("start").code == 1
    data = ctl.status()
    check_status(data)
    gateway = data["gateways"][0]
    assert gateway["state"] == "BACKOFF"
    assert 0 < gateway["backoff_s"] <= 33
    assert gateway["last_exit"]["code"] == 3
    assert gateway["last_exit"]["signal"] is None


def test_endpoint_record(running: Ctl) -> None:
    """run/NAME.json names the READY Gateway beyond doubt and is private."""
    record, gateway = running.record(), running.gateway()
    assert set(record) >= RECORD
    assert record["schema"] == 1
    assert record["state"] == "READY"
    assert (record["name"], record["pid"], record["port"]) == ("default", gateway["pid"], gateway["port"])
    assert record["url"] == gateway["url"]
    assert record["start_ticks"] == processes.start_ticks(record["pid"])
    assert record["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert record["pid_ns"] == os.readlink("/proc/self/ns/pid")
    assert record["uid"] == os.geteuid()
    assert set(record["daemon"]) == {"pid", "start_ticks"}
    assert record["daemon"]["start_ticks"] == processes.start_ticks(record["daemon"]["pid"])
    assert len(Path(record["api_key_file"]).read_text().strip()) >= 32
    check_time(record["since"])


def test_record_stays_after_stop(ctl: Ctl) -> None:
    """The record is never deleted: it says STOPPED, and its seq only grows."""
    ctl.start()
    before = ctl.record()
    ctl("stop")
    after = ctl.record()
    assert after["state"] == "STOPPED"
    assert after["pid"] is None
    assert after["seq"] > before["seq"]


def test_files_of_the_root(running: Ctl) -> None:
    """The files of the contract are where they are promised, and nothing in the root can be read by others."""
    root = Path(running.root)
    for name in ("supervisor.lock", "supervisor.pid", "control.sock", "default.json", "default.pid", "default.key"):
        assert (root / "run" / name).exists(), name
    assert running.file("run/default.want") == "up\n"
    assert running.file("run/default.pid").strip() == str(running.gateway()["pid"])
    assert running.file("journal.jsonl").count("\n") > 0
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode & 0o077 == 0, f"{path} has mode {mode:o}"
