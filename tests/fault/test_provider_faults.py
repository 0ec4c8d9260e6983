"""Crashes, full disks and lost replies: every turn reported saved is delivered, once where that can be."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from memory_tencentdb import TencentDBMemoryProvider
from memory_tencentdb.aside.ledger import Ledger
from memory_tencentdb.spool import Record, Spool

from tests.support.fake_gateway import FakeGateway, cut, http, late, silent

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def environment(home: Path, gateway: FakeGateway | None = None, **more: str) -> dict[str, str]:
    """The environment of a Hermes process with that home."""
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "HERMES_HOME": str(home), **more}
    env["MEMORY_TENCENTDB_ROOT"] = str(home / "root")
    if gateway is not None:
        env["MEMORY_TENCENTDB_GATEWAY_PORT"] = str(gateway.port)
    return env


def provider(home: Path, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, session: str = "s1") -> Any:
    """A session in this process."""
    for name, value in environment(home, gateway).items():
        if name != "PATH":
            monkeypatch.setenv(name, value)
    one = TencentDBMemoryProvider()
    one.initialize(session_id=session, hermes_home=str(home), platform="cli")
    return one


def pending(spool: Path) -> list[str]:
    """The user's side of what waits in a spool, in order."""
    one = Ledger(str(spool))
    one.refresh()
    return [one.load(entry).user for queue in one.sessions.values() for entry in queue if entry.kind != "end"]


def append_and_die(path: Path, turns: int, step: float) -> tuple[list[str], int, list[str]]:
    """(turns reported saved, steps taken or 0 when killed, what became durable) of one appending process."""
    command = [sys.executable, str(SUPPORT / "append_child.py"), str(path), str(turns), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    lines = done.stdout.splitlines()
    saved = [f"turn {line.split()[1]}" for line in lines if line.startswith("saved")]
    steps = next((int(line.split()[1]) for line in lines if line.startswith("steps")), 0)
    return saved, steps, [line for line in lines if line.startswith(("synced", "named"))]


def cut_power(spool: Path, durable: list[str]) -> None:
    """Take away what was never synced: data past the last sync of a file, names their directory was not synced for."""
    sizes = {line.split(" ", 2)[2]: int(line.split(" ", 2)[1]) for line in durable if line.startswith("synced")}
    named = [line.split(" ", 1)[1] for line in durable if line.startswith("named")]
    for path in [*spool.rglob("*.seg"), *spool.rglob("*.ack")]:
        if str(path) not in sizes or str(path.parent) not in named:
            path.unlink()
        else:
            os.truncate(path, sizes[str(path)])


@pytest.mark.parametrize("part", range(4))
def test_killed_at_each_step_of_append(tmp_path: Path, part: int) -> None:
    """F23: SIGKILL before and after every system call of two appends, alone or with the power cut as well.

    Every turn that append() returned for is there, in order; nothing torn is taken for a turn; the spool works on.
    """
    saved, steps, durable = append_and_die(tmp_path / "whole", 2, 0)
    assert saved == ["turn 0", "turn 1"]
    assert steps > 20
    cut_power(tmp_path / "whole", durable)
    assert pending(tmp_path / "whole") == saved
    moments = [step + half for step in range(1, steps + 1) for half in (0, 0.5)][part::4]

    def check(moment: float) -> None:
        path = tmp_path / f"at {moment}"
        reported, _, durable = append_and_die(path, 2, moment)
        there = pending(path)
        assert there[: len(reported)] == reported, moment
        assert there == [f"turn {number}" for number in range(len(there))], moment
        if path.exists():
            cut_power(path, durable)
            assert pending(path)[: len(reported)] == reported, moment
        assert Spool(str(path)).append(Record("x", "s", "after", "a"))
        assert pending(path)[-1] == "after"

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, moments))


def test_killed_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hermes that is killed right after its turns loses none of them: the next session delivers them first."""
    code = (
        "import sys\nfrom memory_tencentdb import TencentDBMemoryProvider\none = TencentDBMemoryProvider()\n"
        "one.initialize(session_id='killed', hermes_home=sys.argv[1], platform='cli')\n"
        "[one.sync_turn(f'turn {n}', 'a') for n in range(3)]\nprint('done', flush=True)\nimport time; time.sleep(60)"
    )
    with FakeGateway() as gateway:
        gateway.always("/capture", silent())
        env = environment(tmp_path, gateway)
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env, stdout=subprocess.PIPE) as hermes:
            assert hermes.stdout is not None
            assert hermes.stdout.readline() == b"done\n"
            hermes.kill()
        gateway.always("/capture", None)
        one = provider(tmp_path, gateway, monkeypatch, "next")
        one.sync_turn("mine", "a")
        gateway.wait(lambda: len(gateway.stored) == 4)
        one.shutdown()
        assert gateway.users() == ["turn 0", "turn 1", "turn 2", "mine"]


@pytest.mark.parametrize(
    ("generation", "asks", "stored", "duplicates"), [("embedded", 0, 1, 0), ("A", 1, 1, 0), ("B", 1, 1, 0)]
)
def test_reply_lost_after_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: str, asks: int, stored: int, duplicates: int
) -> None:
    """F24: a Gateway that stores and dies before it answers gets the turn again under its key, or is asked."""
    with FakeGateway(generation) as gateway:
        gateway.script("/capture", cut(after=True))
        one = provider(tmp_path, gateway, monkeypatch)
        one.sync_turn("a turn whose answer was lost", "hm")
        one.sync_turn("the next one", "yes")
        gateway.wait(lambda: gateway.users()[-1:] == ["the next one"])
        one.shutdown()
        assert gateway.users() == ["a turn whose answer was lost"] * stored + ["the next one"]
        assert len(gateway.asked("/search/conversations")) == asks
        assert one._worker.drainer.counts.possible_duplicates == duplicates


def test_reply_lost_and_nobody_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F24: where the Gateway cannot be asked the turn is sent again and counted as a possible duplicate."""
    with FakeGateway("A") as gateway:
        gateway.script("/capture", cut(after=True))
        gateway.always("/search/conversations", http(404))
        one = provider(tmp_path, gateway, monkeypatch)
        one.sync_turn("hello", "hi")
        gateway.wait(lambda: len(gateway.stored) == 2)
        one.shutdown()
        assert one._worker.drainer.counts.possible_duplicates == 1
        stats = json.loads((tmp_path / "memory_tencentdb" / "stats.json").read_text())
        assert stats["possible_duplicates"] == 1


def test_equal_turns_are_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F24: "yes" said before is no proof that this "yes" was stored."""
    with FakeGateway("A") as gateway:
        one = provider(tmp_path, gateway, monkeypatch)
        one.sync_turn("yes", "first")
        gateway.wait(lambda: len(gateway.stored) == 1)
        old = gateway.stored[0]
        gateway.stored[0] = old._replace(at=time.time() - 3600)
        gateway.script("/capture", cut())
        one.sync_turn("yes", "second")
        gateway.wait(lambda: len(gateway.stored) == 2)
        one.shutdown()
        assert [turn.assistant for turn in gateway.stored] == ["first", "second"]


def drain(spool: Path, env: dict[str, str], deadline: float = 15.0) -> subprocess.Popen[bytes]:
    """A drainer in a process of its own."""
    command = [sys.executable, "-m", "memory_tencentdb.drain", "--spool", str(spool), "--deadline", str(deadline)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_two_drainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F25: 20 sessions write while a drainer is killed in the middle; another takes over within 5 s.

    Per-session order is kept, all arrive, and no record is ever under way twice at the same time.
    """
    spool_path = tmp_path / "memory_tencentdb"
    under_way: dict[str, int] = defaultdict(int)
    worst: list[int] = []

    def watched(gateway: FakeGateway, connection: Any, request: Any) -> None:
        key = request.headers["idempotency-key"]
        under_way[key] += 1
        worst.append(under_way[key])
        late(0.004)(gateway, connection, request)
        under_way[key] -= 1

    with FakeGateway() as gateway:
        gateway.always("/capture", watched)
        (tmp_path / ".env").write_text(f"MEMORY_TENCENTDB_GATEWAY_PORT={gateway.port}\n")
        writers = [Spool(str(spool_path)) for _ in range(20)]

        def write(number: int) -> None:
            for turn in range(10):
                writers[number].append(
                    Record(f"{number}-{turn}", f"s{number}", f"{number}-{turn}", "a", at=time.time())
                )
                time.sleep(0.01)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        env = environment(tmp_path)
        first = drain(spool_path, env)
        gateway.wait(lambda: len(gateway.stored) >= 40)
        second = drain(spool_path, env)
        assert second.wait(5) == 75
        one = provider(tmp_path, gateway, monkeypatch, "taking over")
        first.kill()
        first.communicate()
        second.communicate()
        killed_at, before = time.monotonic(), len(gateway.stored)
        gateway.wait(lambda: len(gateway.stored) > before + 1, 5.0)
        assert time.monotonic() - killed_at < 5.0
        for thread in threads:
            thread.join()
        one._worker.kick()
        gateway.wait(lambda: len(gateway.stored) == 200)
        one.shutdown()
    orders: dict[str, list[int]] = defaultdict(list)
    for turn in gateway.stored:
        orders[turn.session].append(int(turn.user.split("-")[1]))
    assert all(order == list(range(10)) for order in orders.values())
    assert len(orders) == 20
    assert max(worst) == 1
    repeated = len(gateway.asked("/capture")) - 200
    assert repeated <= 1  # the one that was under way when its drainer was killed


@contextlib.contextmanager
def small_disk(path: Path, size: str = "256k") -> Iterator[Path]:
    """A file system of that size at ``path``; skips where it cannot be had."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs to mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to mount a file system")
@pytest.mark.parametrize("kind", ["full", "readonly"])
def test_disk_that_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """F26: with the disk full or read-only the host's call returns within 50 ms, the turn arrives from memory, and the
    user is told; when the disk takes it again everything is durable without anybody doing anything.
    """
    with small_disk(tmp_path / "disk") as disk, FakeGateway() as gateway:
        home = disk / "home"
        home.mkdir()
        one = provider(home, gateway, monkeypatch)
        warned: list[str] = []
        one._warn = warned.append
        one.sync_turn("turn 0", "a")
        gateway.wait(lambda: gateway.users() == ["turn 0"])
        if kind == "full":
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                for size in itertools.chain([4096] * 1000, [1] * 5000):
                    filler.write(b"x" * size)
        else:
            # The drainer may just be noting that turn 0 arrived: a disk with an open file stays writable.
            gateway.wait(lambda: subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=False).returncode == 0)
        gateway.stop()
        for number in range(1, 4):
            began = time.monotonic()
            one.sync_turn(f"turn {number} " + "x" * 9000, "a")
            assert time.monotonic() - began < 0.25  # 50 ms, and a loaded machine
        assert one.faults["not_durable"] == 3
        assert "not on disk" in warned[0]
        gateway.start()
        gateway.wait(lambda: not one._undelivered)
        if kind == "full":
            (disk / "filler").unlink()
        else:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        gateway.stop()
        one.sync_turn("turn 4", "a")
        assert one.faults["not_durable"] == 3
        one.shutdown()
        assert pending(home / "memory_tencentdb") == ["turn 4"]
        assert [words.split()[1] for words in gateway.users()] == ["0", "1", "2", "3"]


def test_no_descriptors_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F26: with no descriptor free the turn waits in memory and is kept as soon as one is."""
    import resource

    with FakeGateway() as gateway:
        one = provider(tmp_path, gateway, monkeypatch)
        one.sync_turn("turn 0", "a")
        gateway.wait(lambda: len(gateway.stored) == 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            began = time.monotonic()
            one.sync_turn("turn 1", "a")
            assert time.monotonic() - began < 0.25  # 50 ms, and a loaded machine
            assert one.faults["not_durable"] == 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)
        gateway.wait(lambda: gateway.users() == ["turn 0", "turn 1"])
        one.shutdown()


def test_key_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F27: with a refused key turns wait, nothing is burnt or dead-lettered, it is said; a key that fits ends it."""
    with FakeGateway("A", key="right") as gateway:
        (tmp_path / "memory_tencentdb.json").write_text('{"gateway_api_key": "wrong"}')
        one = provider(tmp_path, gateway, monkeypatch)
        words = one.prefetch("x")
        assert "refuses the key" in words
        for number in range(3):
            one.sync_turn(f"turn {number}", "a")
        gateway.wait(lambda: len(gateway.asked("/capture")) >= 1)
        one.shutdown()
        assert gateway.stored == []
        assert not (tmp_path / "memory_tencentdb" / "dead.jsonl").exists()
        (tmp_path / "memory_tencentdb.json").write_text('{"gateway_api_key": "right"}')
        after = provider(tmp_path, gateway, monkeypatch, "after")
        gateway.wait(lambda: gateway.users() == ["turn 0", "turn 1", "turn 2"])
        after.shutdown()


def test_poison_beside_good_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F27: a turn that the Gateway refuses for good goes to the dead letters with its reason; the others flow."""
    with FakeGateway() as gateway:
        gateway.script("/capture", http(413, {"error": "too large"}))
        one = provider(tmp_path, gateway, monkeypatch)
        for number in range(3):
            one.sync_turn(f"turn {number}", "a")
        gateway.wait(lambda: len(gateway.stored) == 2)
        one.shutdown()
        assert gateway.users() == ["turn 1", "turn 2"]
        letter = (tmp_path / "memory_tencentdb" / "dead.jsonl").read_text()
        assert "too large" in letter
        assert "turn 0" in letter


@pytest.mark.parametrize("batch", range(5))
def test_exits_with_a_slow_gateway(tmp_path: Path, batch: int) -> None:
    """B4: ten one-shot processes per batch whose main returns while recall and capture are under way.

    Exit code 0, nothing on stderr, soon after the end of main, and every turn is kept.
    """
    with FakeGateway() as gateway:
        gateway.delay = (0.0, 0.05, 0.5, 5.0, 3600.0)[batch]

        def leave(number: int) -> tuple[int, bytes, float]:
            home = tmp_path / str(number)
            home.mkdir()
            began = time.monotonic()
            command = [sys.executable, str(SUPPORT / "one_shot.py"), str(home)]
            done = subprocess.run(command, env=environment(home, gateway), capture_output=True, check=False, timeout=15)
            return done.returncode, done.stderr, time.monotonic() - began

        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(leave, range(10)))
        assert [(code, error) for code, error, _ in results] == [(0, b"")] * 10
        assert max(took for _, _, took in results) < 4.0
        kept = [words for number in range(10) for words in pending(tmp_path / str(number) / "memory_tencentdb")]
        gateway.delay = 0.0
        assert len(kept) + len({turn.key for turn in gateway.stored}) >= 10


def test_the_spool_survives_its_own_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who removes the spool under a running session loses what was in it, and nothing after it."""
    with FakeGateway() as gateway:
        one = provider(tmp_path, gateway, monkeypatch)
        one.sync_turn("turn 0", "a")
        gateway.wait(lambda: len(gateway.stored) == 1)
        while (tmp_path / "memory_tencentdb").exists():  # the drainer may be writing its last notes
            shutil.rmtree(tmp_path / "memory_tencentdb", ignore_errors=True)
        one.sync_turn("turn 1", "a")
        gateway.wait(lambda: gateway.users() == ["turn 0", "turn 1"])
        one.shutdown()
        assert one.faults == {}
