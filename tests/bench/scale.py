"""One daemon, many Gateways, many sessions: python -m tests.bench.scale [--seconds S] [--gateways 1,5,20]

Per cell: that many embedded Gateways with turns captured in each (--rate a second), that many attached session
processes; measured over S seconds: CPU and memory (PSS) of the daemon, latency of the turns, `status`, and how long
after a kill -9 of one Gateway the daemon has written it down and has it READY again. Nothing is judged but what must
be true: every turn answered 200 except at the Gateway that was killed, one death counted, no other Gateway restarted,
every session shown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tdai_supervisor import client
from tests.support import processes
from tests.support.command import Ctl, clean_environment
from tests.support.kept import Kept
from tests.support.processes import wait_for

CROWD = Path(__file__).with_name("crowd.py")
TICK = os.sysconf("SC_CLK_TCK")
COLUMNS = (
    "Gateways",
    "sessions",
    "turns/s",
    "turn p50/p99 ms",
    "CPU %",
    "PSS MB",
    "status ms",
    "noticed ms",
    "READY s",
)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        cells = file.read().rpartition(b")")[2].split()
    return (int(cells[11]) + int(cells[12])) / TICK


def pss_bytes(pid: int) -> int:
    """The proportional set size of a process."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


class Talk:
    """Turns captured in one Gateway at a steady rate, until told to stop."""

    def __init__(self, kept: Kept, name: str, rate: float) -> None:
        self.name, self.took, self.failed = name, list[float](), list[str]()
        self._stop, self._rate = threading.Event(), rate
        self._port, self._key = kept.gateway(name)["port"], client.read_text(f"{kept.root}/run/{name}.key")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number, due = 0, time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due, number = due + 1 / self._rate, number + 1
            turn = {"user_content": f"word{number}", "assistant_content": "noted", "session_key": f"s{number % 10}"}
            began = time.monotonic()
            try:
                status, _ = client.call("127.0.0.1", self._port, "/capture", 10, turn, self._key)
            except (OSError, ValueError) as error:
                status, words = 0, str(error)
            else:
                words = f"HTTP {status}"
            self.took.append((time.monotonic() - began) * 1000)
            self.failed += [] if status == 200 else [words]

    def end(self) -> None:
        """No more turns."""
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def crowd(kept: Kept, count: int) -> Iterator[None]:
    """That many attached sessions."""
    env = clean_environment(kept.home, MEMORY_TENCENTDB_ROOT=str(kept.root))
    argv = [sys.executable, str(CROWD), str(count), str(kept.home), "crowd"]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"attached\n"
        yield
        process.stdin.close()
        process.wait(30)


def notice(kept: Kept, name: str) -> tuple[float, float]:
    """(ms until the journal knows of a kill -9, s until that Gateway is READY again)."""
    path, before = kept.root / "journal.jsonl", kept.gateway(name)
    size, began = path.stat().st_size, time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    wait_for(lambda: path.stat().st_size > size, 30, "the journal knows")
    noticed = (time.monotonic() - began) * 1000

    def again() -> bool:
        now = kept.gateway(name)
        return bool(now["state"] == "READY" and now["pid"] != before["pid"])

    wait_for(again, 60, "READY again")
    return noticed, time.monotonic() - began


def cell(gateways: int, sessions: int, seconds: float, rate: float) -> list[str]:
    """One row of the table; AssertionError where something that must be true is not."""
    folder = Path(tempfile.mkdtemp(prefix="scale-"))
    (folder / "home").mkdir(mode=0o700)
    kept = Kept(folder / "root", folder / "home")
    names = ["default", *(f"g{n}" for n in range(1, gateways))]
    kept.write("".join(f'[gateway.{name}]\nkind = "embedded"\nport = {processes.free_port()}\n' for name in names))
    try:
        pid = kept.start(ready=False)
        for name in names:
            kept.wait(name=name, state="READY", timeout=120)
        ctl = Ctl(kept.root, kept.home)
        with crowd(kept, sessions):
            talks = [Talk(kept, name, rate) for name in names]
            time.sleep(1)
            used, began = cpu_seconds(pid), time.monotonic()
            time.sleep(seconds)
            share = (cpu_seconds(pid) - used) / (time.monotonic() - began) * 100
            memory, asked = pss_bytes(pid) / 1e6, []
            for _ in range(5):
                began = time.monotonic()
                seen: dict[str, Any] = ctl.status()
                asked.append((time.monotonic() - began) * 1000)
            assert len(seen["attachments"]) == sessions, len(seen["attachments"])
            noticed, ready = notice(kept, names[-1])
            for talk in talks:
                talk.end()
        took = sorted(each for talk in talks for each in talk.took)
        for talk in talks:
            assert not talk.failed or talk.name == names[-1], (talk.name, talk.failed[:3])
        restarts = {name: kept.gateway(name)["restarts"] for name in names}
        assert restarts == {name: int(name == names[-1]) for name in names}, restarts
        p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
        speeds = [f"{gateways * rate:g}", f"{p50:.1f}/{p99:.0f}", f"{share:.2f}", f"{memory:.1f}"]
        return [
            f"{gateways}",
            f"{sessions}",
            *speeds,
            f"{statistics.median(asked):.0f}",
            f"{noticed:.1f}",
            f"{ready:.2f}",
        ]
    finally:
        kept.close()
        shutil.rmtree(folder, ignore_errors=True)


def numbers(text: str) -> list[int]:
    """1,5,20 as a list."""
    return [int(word) for word in text.split(",")]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="tests.bench.scale", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each cell (default 60)")
    parser.add_argument("--gateways", type=numbers, default=[1, 5, 20])
    parser.add_argument("--sessions", type=numbers, default=[1, 50, 200])
    parser.add_argument("--rate", type=float, default=5.0, help="turns a second in each Gateway (default 5)")
    a = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for gateways in a.gateways:
        for sessions in a.sessions:
            print("| " + " | ".join(cell(gateways, sessions, a.seconds, a.rate)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
