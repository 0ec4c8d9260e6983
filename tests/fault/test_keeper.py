"""The command, supervisord as keeper, and the daemon under it, as a user meets them."""

from __future__ import annotations

import itertools
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.command import Ctl
from tests.support.kept import SCRIPTED, alive
from tests.support.processes import wait_for

pytestmark = pytest.mark.timeout(60)


CASES = list(itertools.product([False, True], repeat=4))


def scripted(ctl: Ctl, **stub: str) -> None:
    """supervisor.toml with the scripted Gateway."""
    env = ", ".join(f"{k} = {json.dumps(v)}" for k, v in stub.items())
    command = json.dumps([sys.executable, "-E", "-S", str(SCRIPTED)])
    ctl.settings(f'[gateway.default]\nkind = "command"\ncommand = {command}\nkill_delay = 1.0\nenv = {{ {env} }}\n')


def keeper_pid(ctl: Ctl) -> int:
    return int(ctl.file("run/supervisord.pid"))


def test_f14_fifty_cold_starts_make_one_of_each(ctl: Ctl) -> None:
    """One keeper, one daemon, one Gateway; every start exits 0."""
    scripted(ctl)
    with ThreadPoolExecutor(50) as pool:
        codes = list(pool.map(lambda _: ctl("start", timeout=55).code, range(50)))
    assert codes == [0] * 50
    commands = [p.command for p in processes.of_root(ctl.root)]
    kinds = ("supervisor.supervisord", "tdai_supervisor --root", "scripted.py")
    assert [sum(kind in c for c in commands) for kind in kinds] == [1, 1, 1]
    assert len(commands) == 3
    assert ctl("stop").code == 0


@pytest.mark.parametrize("victims", ["daemon", "keeper", "both", "keeper first", "all"])
def test_kills_in_any_order_then_start(ctl: Ctl, victims: str) -> None:
    """Daemon, keeper, both, in either order: `start` puts all of it back, and the Gateway never noticed."""
    scripted(ctl)
    pid = ctl.start()["pid"]
    daemon, keeper = ctl.status()["daemon"]["pid"], keeper_pid(ctl)
    order = {"daemon": [daemon], "keeper": [keeper], "both": [daemon, keeper], "keeper first": [keeper, daemon]}
    for victim in order.get(victims, [keeper, daemon, pid]):
        os.kill(victim, signal.SIGKILL)
    assert ctl("status").code == (0 if victims == "keeper" else ctl("status").code)
    again = ctl.start()
    assert (again["pid"] == pid) is (victims != "all")
    status = ctl.status()
    assert (status["daemon"]["keeper"], status["gateways"][0]["state"]) == ("supervisord", "READY")
    assert alive(keeper_pid(ctl))
    assert ctl("stop").code == 0


def test_the_daemon_is_restarted_when_it_dies_young_again_and_again(ctl: Ctl) -> None:
    """Five kills in a row: no keeper gives up."""
    scripted(ctl)
    pid = ctl.start()["pid"]
    for _ in range(5):
        old = wait_for(lambda: ctl.status()["daemon"]["pid"], 15)
        os.kill(old, signal.SIGKILL)
        wait_for(lambda dead=old: ctl.status()["daemon"]["pid"] not in (None, dead), 15)
    wait_for(lambda: ctl.gateway()["state"] == "READY", 10)
    assert ctl.gateway()["pid"] == pid
    assert ctl("stop").code == 0


def test_stop_works_with_nobody_alive_but_the_gateway(ctl: Ctl) -> None:
    """Keeper and daemon killed: `stop` ends the right tree, and starts nothing."""
    scripted(ctl)
    pid = ctl.start()["pid"]
    for victim in (keeper_pid(ctl), ctl.status()["daemon"]["pid"]):
        os.kill(victim, signal.SIGKILL)
    assert ctl("status").code == 1
    assert ctl("stop").code == 0
    assert not alive(pid)
    assert ctl("status").code == 3
    assert ctl("stop").code == 0


def test_d13_a_stopped_daemon_is_named_and_can_be_ended(ctl: Ctl) -> None:
    """SIGSTOP: `status` within 2 s, exit 4, says so; `stop` ends it by identity; `start` works again."""
    scripted(ctl)
    pid = ctl.start()["pid"]
    os.kill(ctl.status()["daemon"]["pid"], signal.SIGSTOP)
    began = time.monotonic()
    seen = ctl("status", "--json")
    assert time.monotonic() - began < 2.5
    assert seen.code == 4
    assert "stopped by a signal" in seen.json["errors"][0]["message"]
    assert ctl("stop").code == 0
    assert not alive(pid)
    ctl.start()
    assert ctl("stop").code == 0


@pytest.mark.parametrize("stale", CASES, ids=lambda s: "".join("01"[b] for b in s))
def test_d17_any_stale_file_lets_start_work(ctl: Ctl, stale: tuple[bool, ...]) -> None:
    """Every combination of stale lock, pidfile, socket and record: `start` works."""
    scripted(ctl)
    run = Path(ctl.root, "run")
    run.mkdir(mode=0o700)
    lock, pidfile, socket_, record = stale
    if lock:
        (run / "supervisor.lock").write_text("4242")
        (run / "keeper.lock").write_text("")
    if pidfile:
        (run / "supervisor.pid").write_text('{"pid": 1, "start_ticks": 1}')
        (run / "supervisord.pid").write_text("1\n")
    if socket_:
        for name in ("control.sock", "supervisord.sock"):
            (run / name).write_text("")
    if record:
        (run / "default.json").write_text('{"schema": 1, "state": "READY", "pid": 1, "start_ticks": 1, "seq": 3}')
    assert ctl.start()["state"] == "READY"
    assert ctl("stop").code == 0


# The first holds a bit of each of the others.
BAD_NAMES = ["记忆 data's %(x)s%b\"c;$HOME `id`", "x" * 180]
REST = ["记忆 data's", 'a%b%(x)s"c', "semi;colon $HOME `id`"]


@pytest.mark.parametrize("name", [*BAD_NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)])
def test_c30_roots_with_any_character_work(tmp_path: Path, home: Path, name: str) -> None:
    """Spaces, CJK, percent signs, quotes and length, in the C locale."""
    root = tmp_path / name
    ctl = Ctl(root, home)
    ctl.env |= {"LANG": "C", "LC_ALL": "C", "MEMORY_TENCENTDB_GATEWAY_PORT": str(processes.free_port())}
    try:
        scripted(ctl)
        pid = ctl.start()["pid"]
        daemon = ctl.status()["daemon"]["pid"]
        os.kill(daemon, signal.SIGKILL)
        wait_for(lambda: ctl.status()["daemon"]["pid"] not in (None, daemon), 15)
        assert ctl.gateway()["pid"] == pid
        assert ctl("stop").code == 0
    finally:
        processes.end_all(root)


def test_b30_proxies_and_b33_missing_session_variables(ctl: Ctl) -> None:
    """Dead proxies, no XDG_RUNTIME_DIR, another TMPDIR: start, status and health work; the Gateway keeps the proxy."""
    scripted(ctl)
    dead = "http://127.0.0.1:9"
    ctl.env |= dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"), dead)
    ctl.env |= {"TMPDIR": "/nonexistent", "XDG_RUNTIME_DIR": "/nonexistent"}
    pid = ctl.start()["pid"]
    assert ctl("health").code == 0
    assert f"HTTP_PROXY={dead}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    del ctl.env["TMPDIR"], ctl.env["XDG_RUNTIME_DIR"]
    assert ctl("status").code == 0
    assert ctl("stop").code == 0


SECRET = "a%2Bb%s\"c,d'e;$HOME 密"


def test_c17_and_f29_keys_reach_the_gateway_and_nothing_else(ctl: Ctl) -> None:
    """Byte-exact in its environment; in no file that is not 0600, no argv, no log, no output."""
    scripted(ctl)
    ctl.env |= {"MEMORY_TENCENTDB_LLM_API_KEY": SECRET, "MEMORY_TENCENTDB_GATEWAY_API_KEY": SECRET + "!"}
    pid = ctl.start()["pid"]
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert f"TDAI_LLM_API_KEY={SECRET}".encode() in environment
    assert f"TDAI_GATEWAY_API_KEY={SECRET}!".encode() in environment
    verbs = (("status",), ("status", "--json"), ("why",), ("events",), ("health", "--json"), ("metrics",))
    said = [ctl(*v) for v in verbs]
    assert all(SECRET not in d.out + d.err for d in said)
    assert all(SECRET not in p.command for p in processes.of_root(ctl.root))
    holding = set()
    for folder, _, names in os.walk(ctl.root):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and SECRET[:10].encode() in path.read_bytes():
                holding.add(name)
                assert path.stat().st_mode & 0o077 == 0
    assert holding <= {"default.key", "environment.json"}
    assert ctl("stop").code == 0


def test_b32_modes_hold_under_umask_000(ctl: Ctl) -> None:
    """No file or directory of the root has a bit for group or others."""
    scripted(ctl)
    ctl.argv = ["/bin/sh", "-c", 'umask 000; exec "$@"', "sh", *ctl.argv]
    ctl.start()
    os.kill(ctl.gateway()["pid"], signal.SIGKILL)
    wait_for(lambda: ctl.gateway()["state"] == "READY")
    for folder, folders, names in os.walk(ctl.root):
        for name in [*folders, *names]:
            mode = os.lstat(os.path.join(folder, name)).st_mode
            if name != "supervisor.toml":
                assert mode & 0o077 == 0, f"{folder}/{name} {mode:o}"
    assert ctl("stop").code == 0


def test_the_environment_that_started_the_daemon_stays_its_own(ctl: Ctl) -> None:
    """A later caller's variables change nothing; after a kill of the daemon the first ones still hold."""
    scripted(ctl)
    ctl.start(env={"TDAI_LLM_MODEL": "first"})
    daemon = ctl.status()["daemon"]["pid"]
    os.kill(daemon, signal.SIGKILL)
    wait_for(lambda: ctl.status()["daemon"]["pid"] not in (None, daemon), 15)
    again = ctl("restart", env={"TDAI_LLM_MODEL": "second", "TDAI_LLM_API_KEY": "not-to-be-shown"})
    assert again.code == 0
    assert "set in this shell, unknown to the daemon: TDAI_LLM_API_KEY, TDAI_LLM_MODEL" in again.err
    assert "not-to-be-shown" not in again.out + again.err
    assert b"TDAI_LLM_MODEL=first" in Path(f"/proc/{ctl.gateway()['pid']}/environ").read_bytes().split(b"\0")
    assert ctl("stop").code == 0


def test_restart_daemon_reexecs_in_place(ctl: Ctl) -> None:
    """`restart --daemon`: same daemon pid, same Gateway, after a self-test of the code."""
    scripted(ctl)
    pid, daemon = ctl.start()["pid"], ctl.status()["daemon"]["pid"]
    done = ctl("restart", "--daemon", "--json")
    assert done.code == 0, done
    assert done.data["daemon"]["pid"] == daemon
    assert ctl.gateway()["pid"] == pid
    assert ctl("stop").code == 0


def test_d5_a_client_killed_in_the_middle_leaves_no_lock(ctl: Ctl) -> None:
    """kill -9 of `start` and `restart` at several moments: the next command works at once."""
    scripted(ctl)
    for n in range(6):
        verb = ["start"] if n % 2 == 0 else ["restart"]
        with subprocess.Popen([*ctl.argv, *verb], env=ctl.env, stdout=-3, stderr=-3) as client:
            time.sleep(0.05 + 0.12 * n)
            client.kill()
    assert ctl.start()["state"] == "READY"
    assert ctl("stop").code == 0


def test_d4_stop_status_and_health_start_nothing(ctl: Ctl) -> None:
    """On a root where nothing runs, looking and stopping leave nothing running and exit as documented."""
    assert ctl("status").code == 3
    assert ctl("health").code == 7
    assert ctl("stop").code == 0
    assert ctl("logs").code == 0
    assert processes.of_root(ctl.root) == []


def test_c5_restarts_with_connected_clients(ctl: Ctl) -> None:
    """Ten restarts in a row with idle connections open: every one succeeds on the same port."""
    import socket

    scripted(ctl)
    port = ctl.start()["port"]
    held = []
    for _ in range(10):
        held += [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        assert ctl("restart").code == 0
        assert ctl.gateway()["port"] == port
    for connection in held:
        connection.close()
    assert ctl("stop").code == 0


def test_a_command_stopped_in_the_middle_does_not_block_others_for_ever(ctl: Ctl) -> None:
    """The keeper lock is waited for a bounded time, and then named; no traceback."""
    import fcntl

    run = Path(ctl.root, "run")
    run.mkdir(mode=0o700, parents=True)
    code = (
        "from tdai_supervisor.host import locks; locks.KEEPER_WAIT = 0.3; from tdai_supervisor.cli.main import main; "
    )
    with open(run / "keeper.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        argv = [
            sys.executable,
            "-c",
            code + "import sys; from tdai_supervisor.cli.main import main; sys.exit(main(['stop']))",
        ]
        done = subprocess.run(argv, env=ctl.env, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "keeper.lock" in done.stderr
    assert "Traceback" not in done.stderr


def test_stop_works_although_the_settings_were_broken_meanwhile(ctl: Ctl) -> None:
    """Keeper and daemon killed and supervisor.toml spoiled: what runs is still found by its record and ended."""
    scripted(ctl)
    pid = ctl.start()["pid"]
    for victim in (keeper_pid(ctl), ctl.status()["daemon"]["pid"]):
        os.kill(victim, signal.SIGKILL)
    ctl.settings("not toml [")
    assert ctl("stop").code == 0
    assert not alive(pid)
    assert ctl("start").code == 6


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be the wrong user")
def test_c29_root_leaves_nothing_in_a_users_root(ctl: Ctl, home: Path) -> None:
    """`sudo -E memory-tencentdb-ctl start`: refused with the owner and the right command, and nothing was made."""
    os.chown(home, 65534, 65534)
    root = home / ".memory-tencentdb"
    done = ctl("--root", str(root), "start", "--json")
    assert (done.code, done.json["errors"][0]["code"]) == (4, "not-permitted")
    name = pwd.getpwuid(65534).pw_name
    assert name in done.json["errors"][0]["message"]
    assert f"sudo -u {name}" in done.json["errors"][0]["hint"]
    assert not root.exists()
    assert ctl("--root", str(root), "status").code == 3


@pytest.mark.parametrize(
    "broken", ["daemon gone", "daemon stopped", "keeper gone", "gateway stopped", "socket deleted", "record spoiled"]
)
def test_status_answers_within_two_seconds(ctl: Ctl, broken: str) -> None:
    """In every broken state: an exit code of the contract, the envelope, and a cause."""
    scripted(ctl)
    pid = ctl.start()["pid"]
    about = json.loads((Path(ctl.root) / "run" / "supervisor.pid").read_text())
    if broken in ("daemon gone", "keeper gone"):
        os.kill(about["keeper_pid"], signal.SIGKILL)
    if broken == "daemon gone":
        os.kill(about["pid"], signal.SIGKILL)
    if broken == "daemon stopped":
        os.kill(about["pid"], signal.SIGSTOP)
    if broken == "gateway stopped":
        os.kill(pid, signal.SIGSTOP)
    if broken == "socket deleted":
        os.unlink(Path(ctl.root) / "run" / "control.sock")
    if broken == "record spoiled":
        os.kill(about["keeper_pid"], signal.SIGKILL)
        os.kill(about["pid"], signal.SIGKILL)
        for name in ("default.json", "default.want", "supervisor.pid"):
            (Path(ctl.root) / "run" / name).write_text("{spoiled")
    started = time.monotonic()
    done = ctl("status", "--json")
    assert time.monotonic() - started < 2.5  # 2 s, and an interpreter on a loaded machine
    expected = {"keeper gone": {0}, "gateway stopped": {0, 1}, "daemon gone": {1}, "record spoiled": {1, 3}}
    assert done.code in expected.get(broken, {0, 1, 4}), done
    if broken == "daemon stopped":
        os.kill(about["pid"], signal.SIGCONT)
    if broken == "gateway stopped":
        os.kill(pid, signal.SIGCONT)
    assert ctl("stop").code == 0


def test_a_sites_own_supervisord_keeps_the_daemon(ctl: Ctl, checkout: Path, tmp_path: Path) -> None:
    """It includes our program file: it is the keeper, before and after a crash, and no second one is started."""
    root = Path(ctl.home, ".memory-tencentdb")
    ctl.root = ctl.env["MEMORY_TENCENTDB_ROOT"] = str(root)
    scripted(ctl)
    (root / "venv").symlink_to(sys.prefix)
    port = ctl.env["MEMORY_TENCENTDB_GATEWAY_PORT"]
    config = tmp_path / "site.conf"
    config.write_text(
        f"[supervisord]\nnodaemon=true\nlogfile=site.log\npidfile=site.pid\nchildlogdir={tmp_path}\nuser=root\n"
        "[unix_http_server]\nfile=site.sock\n"
        "[rpcinterface:supervisor]\nsupervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface\n"
        f"[include]\nfiles = {checkout}/systemd/memory-tencentdb.conf\n"
    )
    if os.geteuid() != 0:
        config.write_text(config.read_text().replace("user=root\n", ""))
    argv = [sys.executable, "-I", "-m", "supervisor.supervisord", "-c", str(config)]
    env = {k: v for k, v in ctl.env.items() if k != "MEMORY_TENCENTDB_ROOT"} | {"TDAI_GATEWAY_PORT": port}
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdin=-3, stdout=-3, stderr=-3) as site:
        try:
            wait_for(lambda: ctl("status").code == 0, 15, "READY")
            status = ctl.status()
            daemon, gateway = status["daemon"]["pid"], status["gateways"][0]["pid"]
            assert status["daemon"]["keeper"] == "supervisord"
            os.kill(daemon, signal.SIGKILL)
            # At once, while the site's supervisord has not yet started another: it is waited for.
            assert ctl.start()["pid"] == gateway
            assert ctl.status()["daemon"]["pid"] != daemon
            found = [p for p in processes.of_root(root) if "supervisor.supervisord" in p.command]
            assert [p.pid for p in found] in ([], [site.pid])
            assert ctl("stop", "--json").data["daemon"]["running"] is False
            assert site.poll() is None, "a site's supervisord is not ours to end"
        finally:
            site.terminate()
            site.wait(10)
            processes.end_all(root)
