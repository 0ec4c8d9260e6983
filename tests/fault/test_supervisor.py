"""Faults of the daemon and around it; each test carries the number of its fault."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tdai_supervisor.decide import paths
from tdai_supervisor.decide.table import TABLE
from tdai_supervisor.host import process
from tests.support import processes
from tests.support.kept import SCRIPTED, Kept, alive, fds_and_threads
from tests.support.processes import wait_for


class Load:
    """About 50 requests a second against the Gateway until told to stop; failures are kept."""

    def __init__(self, port: int) -> None:
        self.port, self.done, self.failed = port, 0, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            try:
                with socket.create_connection(("127.0.0.1", self.port), 2) as connection:
                    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert connection.recv(100).startswith(b"HTTP/1.1 200")
                self.done += 1
            except (OSError, AssertionError) as error:
                self.failed.append(repr(error))


def test_f09_kill_of_the_daemon_under_load_loses_no_request(kept: Kept) -> None:
    """Same Gateway, no failed request, owned again within 2 s, and `stop` really stops it afterwards."""
    kept.settings()
    kept.start()
    pid = kept.gateway()["pid"]
    with Load(kept.port) as load:
        for _ in range(3):
            kept.kill()
            wait_for(lambda before=load.done: load.done > before + 5)
            began = time.monotonic()
            kept.start()
            assert time.monotonic() - began < 10
            assert (kept.gateway()["pid"], kept.gateway()["origin"]) == (pid, "adopted")
    assert load.failed == []
    kept.do("die:5")
    # The kernel tells once init has reaped it; where it keeps no exits the cause says so, and no code is invented.
    keeps = tuple(int(n) for n in os.uname().release.split(".")[:2]) >= (6, 15)
    if keeps:
        wait_for(
            lambda: (last := kept.gateway()["last_exit"]) and last["code"] == 5, 8, "the exit of an adopted Gateway"
        )
    else:
        assert "unknown (adopted)" in wait_for(lambda: kept.gateway()["last_exit"])["cause"]
    kept.wait(state="READY")
    assert kept.ask("stop")["ok"]
    assert processes.of_root(kept.root) == [processes.Found(kept.process.pid, processes.of_root(kept.root)[0].command)]


def test_f10_a_gateway_that_writes_a_line_a_request_survives_its_owner(kept: Kept) -> None:
    """No pipe to us: it logs on across the gap, and no line is lost or torn."""
    kept.settings(STUB_LINES="1")
    kept.start()
    log = Path(kept.gateway()["logs"]["stdout"])
    pid = kept.gateway()["pid"]
    kept.kill()
    with Load(kept.port) as load:
        wait_for(lambda: load.done > 60)
    assert load.failed == []
    assert alive(pid)
    numbers = [int(line.split()[1]) for line in log.read_text().splitlines()]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))


POINTS = [
    ("tdai_supervisor.engine.runfiles.RunFiles.write_want", "before"),
    ("tdai_supervisor.engine.runfiles.RunFiles.write_want", "after"),
    ("tdai_supervisor.engine.runfiles.RunFiles.key", "after"),
    ("tdai_supervisor.host.locks.Lease.take", "after"),
    ("tdai_supervisor.host.process.spawn", "before"),
    ("tdai_supervisor.host.process.spawn", "after"),
    ("tdai_supervisor.engine.runfiles.RunFiles.write_record", "before"),
    ("tdai_supervisor.engine.runfiles.RunFiles.write_record", "after"),
    ("os.replace", "before"),
    ("os.replace", "after"),
    ("tdai_supervisor.engine.daemon.listen", "after"),
]


@pytest.mark.parametrize(("point", "when"), POINTS, ids=lambda v: v.rpartition(".")[2])
def test_f11_a_crash_at_any_step_converges(kept: Kept, point: str, when: str) -> None:
    """Whatever step the daemon died at: the next one has exactly one READY Gateway."""
    kept.settings()
    kept.crash(point, when)
    kept.start()
    found = [p for p in processes.of_root(kept.root) if "scripted.py" in p.command]
    assert len(found) == 1
    assert kept.gateway()["pid"] == found[0].pid


@pytest.mark.parametrize(
    "broken", ["", "{", '{"pid": "x"}', "[]", "\x00\xff", '{"schema": 99, "port": -5, "pid": null}']
)
@pytest.mark.parametrize("file", ["default.json", "default.want", "supervisor.pid"])
def test_f12_broken_state_is_quarantined_and_the_gateway_adopted(kept: Kept, file: str, broken: str) -> None:
    """A live Gateway is found by lease and cookie, whatever the records say."""
    kept.settings()
    kept.start()
    pid = kept.gateway()["pid"]
    kept.kill()
    path = kept.root / "run" / file
    path.write_bytes(broken.encode("latin-1"))
    kept.start()
    assert (kept.gateway()["pid"], kept.gateway()["origin"]) == (pid, "adopted")


def test_f12_what_cannot_be_read_keeps_its_content_under_a_name(kept: Kept) -> None:
    """Quarantined, never overwritten."""
    kept.settings()
    kept.start()
    kept.kill()
    (kept.root / "run" / "default.json").write_text("not json")
    kept.start()
    kept_aside = list((kept.root / "run").glob("default.json.quarantine-*"))
    assert [p.read_text() for p in kept_aside] == ["not json"]


def forge(kept: Kept, pid: int, ticks: int, boot: str) -> None:
    record = {"schema": 1, "seq": 7, "name": "default", "state": "READY", "port": kept.port, "pid": pid}
    record |= {"start_ticks": ticks, "boot_id": boot, "pid_ns": process.pid_namespace(), "uid": os.geteuid()}
    (kept.root / "run").mkdir(mode=0o700, exist_ok=True)
    (kept.root / "run" / "default.json").write_text(json.dumps(record))
    (kept.root / "run" / "default.pid").write_text(f"{pid}\n")
    (kept.root / "run" / "supervisor.pid").write_text(json.dumps({"pid": pid, "start_ticks": ticks}))


@pytest.mark.parametrize("case", ["other ticks", "same ticks", "other boot", "zombie"])
def test_f13_a_recorded_pid_of_an_innocent_is_never_signalled(kept: Kept, case: str) -> None:
    """Reused pid, reboot with equal ticks, even a perfect forgery: no cookie, no signal."""
    kept.settings()
    with subprocess.Popen(["sleep", "99"]) as innocent:
        stat = process.read_stat(innocent.pid)
        assert stat is not None
        ticks = stat.ticks + (case == "other ticks")
        boot = "0" * 36 if case == "other boot" else process.boot_id()
        if case == "zombie":
            innocent.kill()
            wait_for(lambda: not alive(innocent.pid))
        forge(kept, innocent.pid, ticks, boot)
        kept.start()
        assert kept.gateway()["pid"] != innocent.pid
        assert kept.ask("stop")["ok"]
        if case != "zombie":
            assert innocent.poll() is None
        innocent.kill()


def test_d9_garbage_in_the_pidfile_does_not_mislead_stop(kept: Kept) -> None:
    """`stop` ends the right process and never the one a file names."""
    kept.settings()
    kept.start()
    pid = kept.gateway()["pid"]
    (kept.root / "run" / "default.pid").write_text("1\n")
    assert kept.ask("stop")["ok"]
    assert not alive(pid)


def test_f20_an_impostor_on_our_port_gets_nothing(kept: Kept) -> None:
    """A process that answers 200 ok but is not ours: BLOCKED, named, never signalled, exit 1."""
    kept.settings()
    env = {**os.environ, "TDAI_GATEWAY_HOST": "127.0.0.1", "TDAI_GATEWAY_PORT": str(kept.port), "STUB_LINES": "1"}
    with subprocess.Popen([sys.executable, str(SCRIPTED)], env=env, stdout=subprocess.PIPE) as impostor:
        wait_for(lambda: _connects(kept.port))
        kept.start(ready=False)
        assert str(impostor.pid) in kept.wait(state="BLOCKED")["cause"]
        assert kept.ask("stop")["ok"]
        assert impostor.poll() is None
        impostor.kill()


def _connects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def external(kept: Kept, data_dir: Path, port: int) -> subprocess.Popen[bytes]:
    """A Gateway that somebody else started on our data directory."""
    data_dir.mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ,
        "TDAI_GATEWAY_HOST": "127.0.0.1",
        "TDAI_GATEWAY_PORT": str(port),
        "TDAI_DATA_DIR": str(data_dir),
    }
    started = subprocess.Popen([sys.executable, str(SCRIPTED)], env=env, stdout=subprocess.DEVNULL)
    wait_for(lambda: _connects(port))
    return started


def test_an_external_gateway_is_attached_to_watched_and_replaced_when_gone(kept: Kept) -> None:
    """Started by somebody else on our data: READY and external, left alone by `stop`, ours once it is gone."""
    kept.settings()
    with external(kept, kept.root / "memory-tdai", kept.port) as other:
        kept.start()
        found = kept.gateway()
        assert (found["origin"], found["pid"]) == ("external", other.pid)
        assert kept.ask("stop")["ok"]
        assert other.poll() is None
        assert "left alone" in kept.gateway()["cause"]
        assert kept.ask("start")["ok"]
        assert kept.gateway()["origin"] == "external"
        other.kill()
        other.wait()
        ours = kept.wait(state="READY", origin="spawned")
        assert ours["pid"] != other.pid


def test_take_over_ends_an_external_gateway_and_runs_ours(kept: Kept) -> None:
    """`start --take-over`: proof, TERM, ours; found on another port than ours, too."""
    kept.settings()
    port = processes.free_port()
    with external(kept, kept.root / "memory-tdai", port) as other:
        kept.start()
        assert (kept.gateway()["origin"], kept.gateway()["port"]) == ("external", port)
        assert kept.ask("start", take_over=True)["ok"]
        other.wait(5)
        assert kept.wait(origin="spawned", state="READY")["pid"] != other.pid


def test_a_second_root_on_the_same_data_is_refused_with_the_pid(kept: Kept, tmp_path: Path) -> None:
    """Also while the first daemon is dead: the lease outlives it."""
    data = kept.root / "memory-tdai"
    kept.settings()
    kept.start()
    pid = kept.gateway()["pid"]
    other = Kept(tmp_path / "other", kept.home)
    try:
        other.settings(f"data_dir = {json.dumps(str(data))}\n")
        for dead in (False, True):
            if dead:
                kept.kill()
            other.start(ready=False)
            assert f"pid {pid}" in other.wait(state="BLOCKED")["cause"]
            assert not other.ask("start")["ok"]
            assert other.ask("stop")["ok"]
            assert alive(pid)
            assert other.end() == 0
            (other.root / "run" / "default.want").write_text("up\n")
    finally:
        other.close()


def test_f15_the_lock_is_free_when_its_holder_is_killed(kept: Kept) -> None:
    """Killed with its Gateway alive: the next daemon gets the lock at once."""
    kept.settings()
    kept.start()
    kept.kill()
    began = time.monotonic()
    kept.start()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(["supervisor.lock"], marks=pytest.mark.slow),
        ["control.sock", "supervisor.pid", "supervisor.lock", "default.json"],
    ],
)
def test_c4_removed_run_files_heal(kept: Kept, victims: list[str]) -> None:
    """Socket, pidfile and lock file come back by themselves; no second Gateway meanwhile."""
    kept.settings()
    kept.start()
    pid, daemon = kept.gateway()["pid"], kept.process.pid
    for name in victims:
        (kept.root / "run" / name).unlink()
    needed = [v for v in victims if v != "default.json"]
    wait_for(lambda: all((kept.root / "run" / v).exists() for v in needed), 12)
    wait_for(kept.answers, 5)
    assert (kept.gateway()["pid"], kept.ask("ping")["data"]["pid"]) == (pid, daemon)
    kept.kill()
    kept.start()
    assert kept.gateway()["pid"] == pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_f17_told_to_go_twice_it_tells_the_gateway_once(kept: Kept, number: int) -> None:
    """TERM, or an impatient Ctrl-C: exactly one TERM for the Gateway, exit code 0, nothing left, wanted as before."""
    terms = kept.root / "terms"
    kept.settings(STUB_TERMS=str(terms), STUB_IGNORE_TERM="1")
    kept.start()
    pid = kept.gateway()["pid"]
    os.kill(kept.process.pid, number)
    wait_for(terms.exists, 5, "the TERM")
    assert kept.end(number) == 0
    assert terms.read_text().count("\n") == 1
    assert not alive(pid)
    assert (kept.root / "run" / "default.want").read_text() == "up\n"


def test_a_lock_file_removed_just_before_a_reexec(kept: Kept) -> None:
    """The new program has a lock it cannot name any more: it locks anew, and the Gateway notices nothing."""
    kept.settings()
    kept.start()
    before, pid = kept.ask("ping")["data"]["started_at"], kept.gateway()["pid"]
    (kept.root / "run" / "supervisor.lock").unlink()
    kept.process.send_signal(signal.SIGHUP)
    wait_for(lambda: kept.answers() and kept.ask("ping")["data"]["started_at"] != before, 15)
    kept.wait(state="READY", pid=pid)
    assert (kept.root / "run" / "supervisor.lock").exists()


def test_f28_the_control_socket_takes_nonsense_in_its_stride(kept: Kept) -> None:
    """Huge, malformed, silent and cut requests cost their own connection; memory stays what it was."""
    kept.settings()
    daemon = kept.start()
    before = fds_and_threads(daemon)
    for data in (b"x" * 300_000, b"{]\n", b"[1]\n", b'{"verb": 3}\n', b'{"verb": "fly"}\n', b""):
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.connect(paths.socket(str(kept.root)))
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            said = connection.recv(65536)
            assert not said or json.loads(said)["ok"] is False
    assert kept.gateway()["state"] == "READY"
    wait_for(lambda: fds_and_threads(daemon)[0] <= before[0] + 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_f28_another_uid_is_refused_on_the_socket(kept: Kept) -> None:
    """Even where the modes were loosened by hand."""
    kept.settings()
    kept.start()
    for path in (kept.root.parent.parent, kept.root.parent, kept.root, kept.root / "run"):
        path.chmod(0o711)
    (kept.root / "run" / "control.sock").chmod(0o666)
    code = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        's.sendall(b\'{"verb":"status"}\\n\'); print(s.recv(100))'
    )
    argv = ["setpriv", "--reuid", "65533", "--regid", "65533", "--clear-groups", "/usr/bin/python3", "-c", code]
    done = subprocess.run(
        [*argv, paths.socket(str(kept.root))], capture_output=True, text=True, timeout=10, check=False
    )
    assert "READY" not in done.stdout
    assert done.stdout.strip() in ("b''", "") or "Error" in done.stderr


def test_subscribers_hear_of_transitions(kept: Kept) -> None:
    """One reply, then one line per transition."""
    kept.settings()
    kept.start()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(paths.socket(str(kept.root)))
        connection.sendall(b'{"verb": "subscribe"}\n')
        lines = connection.makefile()
        assert json.loads(lines.readline())["ok"]
        os.kill(kept.gateway()["pid"], signal.SIGKILL)
        assert [json.loads(lines.readline())["to"] for _ in range(2)] == ["STARTING", "READY"]


def test_b17_and_f13_random_kills_never_make_two(kept: Kept) -> None:
    """F01 in short: kills at random moments, sampled; never two Gateways of this root."""
    kept.settings(policy="backoff_initial = 0.01\nbackoff_max = 0.02\ndeath_budget = 1000\n")
    kept.start()
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    for _ in range(15):
        pid = wait_for(lambda: kept.gateway()["pid"])
        time.sleep(chance.random() * 0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        found = [p for p in processes.of_root(kept.root) if "scripted.py" in p.command]
        assert len(found) <= 1, seed
    kept.wait(state="READY")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_f30_a_thousand_restarts_with_random_faults(kept: Kept) -> None:
    """Kills, hangs, lost run files, re-execs, deaths of the daemon: READY in the end, nothing grew or was left."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    kept.settings(
        text="probe_interval = 0.1\nhang_after = 0.5\nkill_delay = 0.5\n",
        policy="backoff_initial = 0.001\nbackoff_max = 0.001\ndeath_budget = 100000\n",
    )
    kept.start()
    faults = {"kill": 900, "exit": 60, "stop": 15, "files": 15, "reload": 5, "daemon": 5}
    plan = [name for name, count in faults.items() for _ in range(count)]
    chance.shuffle(plan)
    # What is measured must have lived long enough to have reached its size, and must not be replaced.
    plan = sorted(plan[:500], key=lambda f: f != "daemon") + [f if f != "daemon" else "kill" for f in plan[500:]]
    before = rss = None
    for n, fault in enumerate(plan):
        pid = wait_for(lambda: kept.gateway()["pid"], what=f"a Gateway, seed {seed}, fault {n} {fault}")
        about = f"another Gateway, seed {seed}, fault {n} {fault}"
        if fault in ("exit", "stop"):  # one that is stopped before it is READY has startup_timeout
            pid = kept.wait(state="READY")["pid"]
        if fault == "exit":
            kept.do(f"die:{chance.randrange(1, 100)}")
        elif fault in ("kill", "stop"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        elif fault == "files":
            for name in chance.sample(["control.sock", "supervisor.pid", "supervisor.lock", "default.json"], 2):
                with contextlib.suppress(FileNotFoundError):
                    (kept.root / "run" / name).unlink()
            wait_for(kept.answers, 15, about)
            continue
        elif fault == "reload":
            started = kept.ask("ping")["data"]["started_at"]
            kept.process.send_signal(signal.SIGHUP)
            wait_for(lambda at=started: kept.answers() and kept.ask("ping")["data"]["started_at"] != at, 15, about)
            continue
        else:
            kept.kill()
            kept.start(ready=False)
            continue
        wait_for(lambda dead=pid: kept.gateway()["pid"] not in (None, dead), 15, about)
        if n == 520:
            before, rss = fds_and_threads(kept.process.pid), memory(kept.process.pid)
    kept.wait(state="READY")
    assert before is not None and rss is not None
    after = fds_and_threads(kept.process.pid)
    assert after[0] <= before[0] + 1, seed
    assert after[1] <= before[1], seed
    assert memory(kept.process.pid) < rss * 1.1 + 1_000_000, seed
    found = processes.of_root(kept.root)
    assert len([p for p in found if "scripted.py" in p.command]) == 1, seed
    known = {(str(state), str(cell.state)) for (state, _), cell in TABLE.items()}
    assert all((line["from"], line["to"]) in known and line["cause"] for line in kept.journal()), seed


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
