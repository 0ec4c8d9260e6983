"""doctor, health --deep, diagnose, events, why, status --watch."""

from __future__ import annotations

import os
import signal
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest

from tests.support.command import Ctl
from tests.support.processes import wait_for

SECRET = "sk-very-secret-0123456789"


def test_health_deep_finds_its_canary(ctl: Ctl) -> None:
    """Captured and found again; without an LLM that is said, and is no failure."""
    ctl.start()
    done = ctl("health", "--deep", "--json")
    assert done.code == 0, done
    deep = done.data["gateways"][0]["deep"]
    assert (deep["canary"], deep["disk"], deep["extraction"]) == ("ok", "ok", "ok")
    assert "LLM not configured" in done.data["warnings"][0]["message"]
    assert "LLM not configured" in ctl("health").err
    other = ctl("health", "--deep", env={"TDAI_LLM_BASE_URL": "http://127.0.0.1:9/v1"})
    assert other.code == 0, "what only this shell sets is not what the daemon runs by"
    assert ctl("config", "set", "llm.baseUrl", "http://127.0.0.1:9/v1").code == 0
    assert ctl("health").err == ""
    down = ctl("health", "--deep")
    assert down.code == 1
    assert "LLM unreachable" in down.err
    assert ctl("stop").code == 0


def test_doctor_names_fact_reason_and_command(ctl: Ctl) -> None:
    """Loose modes, a dead daemon, drift, an unknown variable: each with its remedy; nothing is changed."""
    ctl.settings('[gateway.default]\nkind = "embedded"\n')
    ctl.start()
    assert ctl("config", "set", "llm.model", "new").code == 0
    (Path(ctl.root) / "run" / "default.key").chmod(0o644)
    said = ctl("doctor", env={"TDAI_LLM_API_KEY": SECRET})
    assert said.code == 1
    for part in ("chmod 600", "restart default", "TDAI_LLM_API_KEY", "LLM not configured"):
        assert part in said.out
    assert SECRET not in said.out + said.err
    assert (Path(ctl.root) / "run" / "default.key").stat().st_mode & 0o077
    os.kill(int(ctl.file("run/supervisord.pid")), signal.SIGKILL)
    wait_for(lambda: "keeper is gone" in ctl("doctor").out, 5)
    os.kill(ctl.status()["daemon"]["pid"], signal.SIGKILL)
    wait_for(lambda: "no daemon runs" in ctl("doctor").out, 5)
    assert ctl("stop").code == 0


def test_diagnose_is_redacted_and_complete(ctl: Ctl, tmp_path: Path) -> None:
    """One 0600 archive; no key in it, no user text unless asked for; an existing file is not overwritten."""
    ctl.settings('[gateway.default]\nkind = "embedded"\n')
    ctl.start(env={"TDAI_LLM_API_KEY": SECRET})
    assert ctl("config", "llm", "--api-key", SECRET, "--base-url", "http://x/v1", "--model", "m").code == 0
    target = tmp_path / "d.tar.gz"
    assert ctl("diagnose", str(target)).code == 0
    assert target.stat().st_mode & 0o077 == 0
    with tarfile.open(target) as archive:
        texts = {m.name: archive.extractfile(m).read().decode() for m in archive.getmembers()}
    assert {"memory-tencentdb/status.json", "memory-tencentdb/journal.jsonl"} <= set(texts)
    key = ctl.file("run/default.key").strip()
    assert all(SECRET not in text and key not in text for text in texts.values())
    assert ctl("diagnose", str(target)).code == 1
    assert ctl("stop").code == 0


def test_events_and_why_tell_what_happened_also_afterwards(ctl: Ctl) -> None:
    """Transitions with causes, by name and time, as lines, JSON and sentences; without a daemon too."""
    ctl.start()
    os.kill(ctl.gateway()["pid"], signal.SIGKILL)
    wait_for(lambda: ctl.gateway()["restarts"] == 1 and ctl.gateway()["state"] == "READY")
    events = ctl("events", "--json", "--since", "10m").data["events"]
    assert [e["to"] for e in events][-2:] == ["STARTING", "READY"]
    assert "killed by signal 9" in events[-2]["cause"]
    assert "went from READY to STARTING because" in ctl("why").out
    assert ctl("events", "--since", "2999-01-01T00:00:00Z", "--json").data["events"] == []
    assert ctl("events", "--since", "yesterday").code == 2
    assert ctl("stop").code == 0
    assert "STOPPED" in ctl("events", "-n", "1").out


@pytest.mark.timeout(60)
def test_following_survives_a_restart_and_ends_on_ctrl_c(ctl: Ctl) -> None:
    """events -f goes on over restarts, a stop and a start; Ctrl-C is exit 0, without a traceback."""
    ctl.start()
    lines: list[str] = []
    follow = subprocess.Popen([*ctl.argv, "events", "-f", "-n", "0"], env=ctl.env, stdout=-1, stderr=-1, text=True)
    reader = threading.Thread(target=lambda: lines.extend(iter(follow.stdout.readline, "")), daemon=True)
    reader.start()

    def restarted() -> bool:
        # Whatever was written before it began to follow is not told: again until it tells.
        ctl("restart")
        return "READY -> STOPPING" in "".join(lines)

    try:
        wait_for(restarted, 30)
        assert ctl("stop", "default").code == 0
        wait_for(lambda: "STOPPING -> STOPPED" in "".join(lines), 5)
        told = len(lines)
        ctl.start()
        wait_for(lambda: "STARTING -> READY" in "".join(lines[told:]), 5)
        follow.send_signal(signal.SIGINT)
        assert follow.wait(5) == 0
        assert follow.stderr.read() == ""
    finally:
        follow.kill()
        follow.wait()
        reader.join(5)
        follow.stdout.close()
        follow.stderr.close()
    assert ctl("stop").code == 0
