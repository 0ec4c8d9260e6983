"""Disk, watchdog, Node, metrics: what surrounds a Gateway and its owner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tdai_supervisor.host import node
from tests.support.kept import SCRIPTED, Kept
from tests.support.processes import wait_for

STUCK_LOOP = """
import asyncio, os, sys, time
from tdai_supervisor.engine import daemon, entry
real = daemon.Daemon._check_intact
async def stuck(self):
    if os.path.exists(sys.argv[2]):
        while True: time.sleep(1)   # threads live, the loop does not
    await real(self)
daemon.Daemon._check_intact = stuck
entry.main(sys.argv[1], "none")
"""


def beats(listener: socket.socket, seconds: float) -> list[str]:
    """Datagrams that arrive within seconds."""
    seen, deadline = [], time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            seen.append(listener.recv(4096).decode())
        except TimeoutError:
            break
    return seen


def test_f16_a_stuck_loop_stops_beating(kept: Kept) -> None:
    """READY and STATUS come, WATCHDOG=1 comes from the loop that works, and ends when that loop is stuck."""
    kept.settings()
    address, flag = str(kept.root / "notify.sock"), kept.root / "stuck"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000", "HOME": str(kept.home), "PATH": "/usr/bin:/bin"}
        argv = [sys.executable, "-c", STUCK_LOOP, str(kept.root), str(flag)]
        with open(kept.root / "daemon.out", "ab") as out:
            kept.process = subprocess.Popen(argv, env=env, stdout=out, stderr=out)
        wait_for(kept.answers)
        seen = beats(listener, 3)
        assert any("READY=1" in s for s in seen)
        assert any(s.startswith("STATUS=") and "default" in s for s in seen)
        assert sum("WATCHDOG=1" in s for s in seen) >= 3
        flag.touch()
        wait_for(lambda: "WATCHDOG=1" not in "".join(beats(listener, 1.5)), 9, "the beat stops")


def test_systemd_is_asked_for_the_time_that_gateways_may_take(kept: Kept) -> None:
    """TERM: STOPPING=1 comes with more time than the longest kill_delay, in one message."""
    kept.settings("kill_delay = 47.0\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(kept.root / "notify.sock"))
        kept.start(NOTIFY_SOCKET=str(kept.root / "notify.sock"))
        assert kept.end() == 0
        said = next(s for s in beats(listener, 1) if "STOPPING=1" in s)
    granted = int(said.partition("EXTEND_TIMEOUT_USEC=")[2].splitlines()[0])
    assert 47e6 < granted < 120e6


def test_the_gateway_does_not_inherit_the_notify_socket(kept: Kept) -> None:
    """READY is ours to say."""
    kept.settings()
    kept.start(NOTIFY_SOCKET=str(kept.root / "nobody"), WATCHDOG_USEC="20000000")
    environment = Path(f"/proc/{kept.gateway()['pid']}/environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in environment
    assert b"WATCHDOG_USEC" not in environment


tmpfs = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0,
    reason="needs root and a mount namespace for a small disk",
)


@tmpfs
@pytest.mark.timeout(60)
def test_f26_and_c20_a_full_disk_is_a_hold_and_heals(kept: Kept) -> None:
    """A 20 MB disk filled up: alive, on hold, status works, no restart; space back: READY by itself; `stop` works."""
    small = kept.root / "disk"
    small.mkdir()
    kept.settings(f"data_dir = {json.dumps(str(small / 'data'))}\nprobe_interval = 0.2\n")
    mount = f'mount -t tmpfs -o size=20m,mode=700 none "{small}" && exec "$@"'
    daemon = kept.start(prefix=("unshare", "-m", "--propagation", "private", "sh", "-c", mount, "sh"))
    pid = kept.gateway()["pid"]
    inside = ["nsenter", "-t", str(daemon), "-m", "sh", "-c"]
    subprocess.run([*inside, f'dd if=/dev/zero of="{small}/fill" bs=1M 2>/dev/null || true'], check=True)
    held = kept.wait(timeout=25, state="UNREADY")
    assert "disk" in held["hold"]
    assert held["guards"]["disk"]["free_bytes"] is not None
    subprocess.run([*inside, f'rm "{small}/fill"'], check=True)
    ready = kept.wait(timeout=20, state="READY")
    assert (ready["pid"], ready["restarts"]) == (pid, 0)
    assert kept.ask("stop")["ok"]


def test_f26_records_that_cannot_be_written_do_not_stop_the_work(kept: Kept) -> None:
    """A death is still answered at once, the trouble shows in status, `stop` stops."""
    kept.settings("probe_interval = 0.2\n")
    run = kept.root / "run"
    kept.start()
    pid = kept.gateway()["pid"]
    (run / "default.json").unlink()
    (run / "default.json").mkdir()  # nothing can be written there any more
    os.kill(pid, signal.SIGKILL)
    again = wait_for(lambda: (g := kept.gateway()) and g["state"] == "READY" and g["pid"] != pid and g)
    assert again["restarts"] == 1
    wait_for(lambda: kept.ask("ping")["data"]["trouble"], 5)
    assert kept.ask("stop")["ok"]


def fake_node(folder: Path, version: str) -> Path:
    """A program that prints a version, and otherwise is the scripted Gateway."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "node"
    run = f"exec {sys.executable} -E -S {SCRIPTED}"
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit 0\n{run}\n')
    path.chmod(0o755)
    return path


def package(folder: Path) -> Path:
    """What an installed npm package looks like from outside."""
    (folder / "src" / "gateway").mkdir(parents=True)
    (folder / "src" / "gateway" / "server.ts").write_text("")
    (folder / "node_modules" / "tsx").mkdir(parents=True)
    return folder


def test_c31_a_node_too_old_is_fatal_with_found_and_needed(kept: Kept, tmp_path: Path) -> None:
    """Refused before anything runs, and not retried."""
    old = fake_node(tmp_path / "old", "v20.11.0")
    kept.write(f'[gateway.default]\nkind = "node"\nnode = "{old}"\nport = {kept.port}\n')
    kept.start(ready=False, TDAI_INSTALL_DIR=str(package(tmp_path / "pkg")))
    fatal = kept.wait(state="FATAL")
    assert "v20.11.0" in fatal["cause"]
    assert "22.16" in fatal["cause"]
    assert fatal["restarts"] == 0


def test_kind_auto_is_node_where_complete_and_says_so(kept: Kept, tmp_path: Path) -> None:
    """node with an absolute path, in the package's directory, with tsx and no shell between."""
    good = fake_node(tmp_path / "bin", "v22.16.0")
    install = package(tmp_path / "pkg")
    kept.write(f"[gateway.default]\nport = {kept.port}\n")
    kept.start(TDAI_INSTALL_DIR=str(install), PATH=f"{good.parent}:/usr/bin:/bin")
    found = kept.gateway()
    assert found["kind"] == "node"
    assert str(good) in found["kind_cause"]
    assert os.readlink(f"/proc/{found['pid']}/cwd") == str(install)
    record = kept.record()
    assert (record["kind"], record["generation"]) == ("node", "A")


@pytest.mark.parametrize("missing", ["package", "node"])
def test_kind_auto_is_embedded_where_something_is_missing(kept: Kept, tmp_path: Path, missing: str) -> None:
    """It runs all the same, and status says why it is not node."""
    bin_ = fake_node(tmp_path / "bin", "v22.16.0" if missing == "package" else "v18.0.0").parent
    install = tmp_path / "pkg" if missing == "package" else package(tmp_path / "pkg")
    # Asked for by name: a test environment may have a Node of its own.
    kept.write(f'[gateway.default]\nport = {kept.port}\nnode = "{bin_ / "node"}"\n')
    kept.start(TDAI_INSTALL_DIR=str(install))
    found = kept.gateway()
    assert found["kind"] == "embedded"
    assert ("v18.0.0" if missing == "node" else "server.ts") in found["kind_cause"]


def test_managers_are_searched_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvm, fnm, volta and asdf below HOME; the first that fits wins."""
    monkeypatch.setattr(node.importlib.util, "find_spec", lambda _: None)  # no Node in the test environment
    env = {"HOME": str(tmp_path), "PATH": "/nonexistent"}
    with pytest.raises(node.NodeError, match=r"needed Node >= 22\.16"):
        node.find(None, env)
    fake_node(tmp_path / ".volta/tools/image/node/22.20.0/bin", "v22.20.0")
    fake_node(tmp_path / ".nvm/versions/node/v9.0.0/bin", "v9.0.0")
    newest = fake_node(tmp_path / ".nvm/versions/node/v24.1.0/bin", "v24.1.0")
    assert node.find(None, env).path == str(newest)


def test_inherited_gateway_variables_are_dropped_and_ours_set(kept: Kept, tmp_path: Path) -> None:
    """Another Gateway's TDAI_GATEWAY_* in the shell never reach the child; `env` of the settings does."""
    kept.settings(STUB_HEALTH='{"status":"ok","stores":{},"services":{}}')
    kept.start(TDAI_GATEWAY_CORS="x", MEMORY_TENCENTDB_LLM_MODEL="m")
    raw = Path(f"/proc/{kept.gateway()['pid']}/environ").read_bytes().split(b"\0")
    env = dict(entry.decode().split("=", 1) for entry in raw if b"=" in entry)
    assert "TDAI_GATEWAY_CORS" not in env
    assert env["TDAI_GATEWAY_PORT"] == str(kept.port)
    assert env["TDAI_DATA_DIR"] == str(kept.root / "memory-tdai")
    assert env["TDAI_LLM_MODEL"] == "m"
    assert env["TDAI_GATEWAY_API_KEY"] == (kept.root / "run" / "default.key").read_text().strip()
    assert kept.gateway()["health"]["generation"] == "B"


def test_metrics_are_openmetrics(kept: Kept) -> None:
    """Every family has a type and samples end with EOF."""
    kept.settings()
    spool = kept.root / "profile" / "memory_tencentdb"
    (spool / "spool").mkdir(parents=True)
    (spool / "spool" / "00000001.seg").write_bytes(b"x" * 100)
    (spool / "stats.json").write_text('{"delivered": 7, "dead": 1, "last_error": "x"}')
    (kept.root / "spools").mkdir()
    (kept.root / "spools" / "a.json").write_text(json.dumps({"schema": 1, "path": str(spool), "profile": 'p"q'}))
    kept.start()
    text = kept.ask("metrics")["data"]["text"]
    assert text.endswith("# EOF\n")
    assert 'tdai_gateway_up{gateway="default"} 1' in text
    assert f'tdai_spool_pending_bytes{{profile="p\\"q",path="{spool}"}} 100' in text
    assert f'tdai_spool_records_total{{profile="p\\"q",path="{spool}",state="delivered"}} 7' in text
    assert 'tdai_gateway_starts_total{gateway="default",cause="first"} 1' in text
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    for line in text.splitlines():
        if not line.startswith("#"):
            assert line.split("{")[0].removesuffix("_total") in families


def test_c15_an_unwritable_log_directory_is_named(kept: Kept) -> None:
    """The log is a directory: BLOCKED with its path; removed logs come back at the next start."""
    kept.settings()
    logs = kept.root / "memory-tdai" / "logs"
    (logs / "gateway.stderr.log").mkdir(parents=True)
    kept.start(ready=False)
    assert "gateway.stderr.log" in kept.wait(state="BLOCKED")["cause"]
    (logs / "gateway.stderr.log").rmdir()
    assert kept.ask("start")["ok"]


LYING_CLOCK = """
import os, sys, time
real, flag = time.time, sys.argv[2]
time.time = lambda: real() + (float(open(flag).read()) if os.path.exists(flag) else 0)
from tdai_supervisor.engine import entry
entry.main(sys.argv[1], "none")
"""


@pytest.mark.parametrize("jump", ["-3600", "3600", "29000"])
def test_f22_and_c6_a_wall_clock_that_jumps_decides_nothing(kept: Kept, jump: str) -> None:
    """One hour back or forth, or a DST and a suspend worth: no restart, and a death is answered as ever."""
    kept.settings()
    flag = kept.root / "jump"
    with open(kept.root / "daemon.out", "ab") as out:
        argv = [sys.executable, "-c", LYING_CLOCK, str(kept.root), str(flag)]
        kept.process = subprocess.Popen(
            argv, env={"HOME": str(kept.home), "PATH": "/usr/bin:/bin"}, stdout=out, stderr=out
        )
    wait_for(kept.answers)
    pid = kept.wait(state="READY")["pid"]
    flag.write_text(jump)
    latency = kept.gateway()["health"]["latency_ms"]
    wait_for(lambda: kept.gateway()["health"]["latency_ms"] != latency, 5, "a probe after the jump")
    assert (kept.gateway()["pid"], kept.gateway()["restarts"]) == (pid, 0)
    os.kill(pid, signal.SIGKILL)
    again = wait_for(lambda: (g := kept.gateway()) and g["state"] == "READY" and g["pid"] != pid and g, 5)
    assert again["restarts"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_c9_another_users_listener_is_named_as_far_as_it_shows(kept: Kept) -> None:
    """As an ordinary user: the port is root's, its pid cannot be seen, its uid can; no traceback, no signal."""
    with socket.create_server(("127.0.0.1", 0)) as roots:
        kept.port = roots.getsockname()[1]
        kept.settings()
        for path in (kept.root, kept.home, *kept.root.iterdir()):
            os.chown(path, 65533, 65533)
        for path in list(kept.root.parents)[:3]:
            path.chmod(0o711)
        become = ("setpriv", "--reuid", "65533", "--regid", "65533", "--clear-groups")
        probe = subprocess.run(
            [*become, sys.executable, "-c", "import tdai_supervisor"], check=False, capture_output=True
        )
        if probe.returncode != 0:
            pytest.skip("another user cannot read this checkout or its Python")
        kept.start(ready=False, prefix=become)
        cause = kept.wait(state="BLOCKED")["cause"]
        assert "an unknown process, uid 0" in cause
        assert kept.ask("stop")["ok"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a pid namespace")
def test_d3_a_daemon_in_another_pid_namespace_is_refused(kept: Kept) -> None:
    """The lock is the kernel's: a second daemon in a namespace of its own exits 75 and says where the first is."""
    kept.settings()
    kept.start()
    argv = ["unshare", "-pf", "--mount-proc", sys.executable, "-I", "-m", "tdai_supervisor", "--root", str(kept.root)]
    env = {"HOME": str(kept.home), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*argv, "daemon", "--json"], capture_output=True, timeout=19, check=False, env=env)
    assert done.returncode == 75
    message = json.loads(done.stdout)["errors"][0]["message"]
    assert str(kept.process.pid) in message
    assert "another pid namespace" in message


def test_f07_a_killed_wrapper_leaves_its_gateway_adopted(kept: Kept) -> None:
    """kill -9 of the shell around it: the Gateway still holds lease and cookie; it is adopted, and `stop` ends it."""
    kept.settings()
    text = (kept.root / "supervisor.toml").read_text()
    line = f"{sys.executable} -E -S {SCRIPTED}; true"
    kept.write(text.replace(text.split("command = ")[1].split("\n")[0], json.dumps(["/bin/sh", "-c", line])))
    kept.start()
    listener = kept.gateway()["pid"]
    with open(f"/proc/{listener}/stat", "rb") as file:
        shell = int(file.read().rpartition(b")")[2].split()[1])
    os.kill(shell, signal.SIGKILL)
    adopted = kept.wait(state="READY", origin="adopted")
    assert adopted["pid"] == listener
    assert kept.ask("stop")["ok"]
    assert not os.path.exists(f"/proc/{listener}/fd/0")


def test_what_a_gateway_inherits(kept: Kept) -> None:
    """Its own session, umask 077, no core file, and no descriptor but its output and the lease."""
    kept.settings()
    kept.start()
    pid = kept.gateway()["pid"]
    status = Path(f"/proc/{pid}/status").read_text()
    assert "Umask:\t0077" in status
    assert os.getsid(pid) == pid
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert next(line for line in limits.splitlines() if line.startswith("Max core")).split()[4] == "0"
    targets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    known = {"/dev/null", kept.gateway()["data_dir"], *kept.gateway()["logs"].values()}
    assert {t for t in targets if not t.startswith("socket:")} == known


@pytest.mark.timeout(60)
@pytest.mark.slow
def test_hold_while_llm_down(kept: Kept) -> None:
    """Asked for: while the LLM does not answer, the Gateway is on hold; it is not restarted for it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    kept.settings("probe_interval = 0.2\nhold_while_llm_down = true\n")
    kept.start(TDAI_LLM_BASE_URL=f"http://127.0.0.1:{port}/v1", TDAI_LLM_API_KEY="sk-secret")
    held = kept.wait(timeout=15, state="UNREADY")
    assert "LLM unreachable" in held["hold"]
    assert "sk-secret" not in json.dumps(held)
    stub = [sys.executable, "-E", "-S", str(SCRIPTED)]
    env = {"TDAI_GATEWAY_HOST": "127.0.0.1", "TDAI_GATEWAY_PORT": str(port)}
    with subprocess.Popen(stub, env=env) as llm:
        assert kept.wait(timeout=20, state="READY")["restarts"] == 0
        llm.kill()
