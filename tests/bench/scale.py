"""One daemon, many Gateways, many sessions: python -m tests.bench.scale [--seconds S] [--gateways 1,5,20]

Per cell: that many embedded Gateways, each with a Hermes profile of its own; that many session processes with the real
plugin, at least one a profile, which keep --rate turns a second in each profile through their spools; in the middle one
Gateway is killed. Measured: CPU and memory (PSS) of the daemon, what a turn costs its session, `status`, and how long
after the kill -9 the daemon has written it down and has the Gateway READY again. Judged is only what must be true:
every turn is in the Gateway of its profile, once; one death counted, no other Gateway restarted, every session shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support import processes
from tests.support.command import Ctl, clean_environment
from tests.support.kept import Kept
from tests.support.processes import wait_for

CROWD = Path(__file__).with_name("crowd.py")
TICK = os.sysconf("SC_CLK_TCK")
COLUMNS = (
    "Gateways",
    "sessions",
    "turns",
    "sync_turn p50/p99 ms",
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


@contextlib.contextmanager
def crowd(kept: Kept, profiles: dict[str, Path], sessions: int, rate: float) -> Iterator[None]:
    """That many sessions (at least one a profile), which together keep rate turns a second in each profile."""
    each = max(1, sessions // len(profiles))
    env = clean_environment(kept.home, MEMORY_TENCENTDB_ROOT=str(kept.root))
    argv = [sys.executable, str(CROWD), f"{each / rate}", *(f"{home}:{each}" for home in profiles.values())]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"attached\n"
        yield
        process.stdin.close()
        process.wait(60)


def settle(kept: Kept, profiles: dict[str, Path]) -> tuple[list[float], int]:
    """(what each turn cost its session in ms, how many turns): every one is in its Gateway, once, within a minute."""
    costs, total = [], 0
    for name, home in profiles.items():
        said = [json.loads(path.read_text()) for path in home.glob("said-*.json")]
        kept_turns = sorted(turn for one in said for turn in one["turns"])
        costs += [ms for one in said for ms in one["ms"]]
        total += len(kept_turns)
        path = Path(kept.gateway(name)["data_dir"], "memory.db")

        def stored(path: Path = path) -> list[str]:
            with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
                rows = database.execute("SELECT content FROM message WHERE role = 'user'").fetchall()
            return sorted(content for (content,) in rows)

        wait_for(lambda stored=stored, wanted=kept_turns: len(stored()) >= len(wanted), 60, f"all turns of {name}")
        assert stored() == kept_turns, f"{name}: lost, doubled or of another"
    return costs, total


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
    profiles = {name: folder / "home" / name for name in names}
    for name, home in profiles.items():
        home.mkdir(mode=0o700)
        (home / "memory_tencentdb.json").write_text(json.dumps({"gateway": name}))
    try:
        pid = kept.start(ready=False)
        for name in names:
            kept.wait(name=name, state="READY", timeout=120)
        ctl = Ctl(kept.root, kept.home)
        with crowd(kept, profiles, sessions, rate):
            used, began = cpu_seconds(pid), time.monotonic()
            time.sleep(seconds / 2)
            share = (cpu_seconds(pid) - used) / (time.monotonic() - began) * 100
            memory, asked = pss_bytes(pid) / 1e6, []
            for _ in range(5):
                began = time.monotonic()
                seen: dict[str, Any] = ctl.status()
                asked.append((time.monotonic() - began) * 1000)
            attached = len(seen["attachments"])
            assert attached == max(1, sessions // gateways) * gateways, attached
            noticed, ready = notice(kept, names[-1])
            time.sleep(seconds / 2)
        costs, total = settle(kept, profiles)
        restarts = {name: kept.gateway(name)["restarts"] for name in names}
        assert restarts == {name: int(name == names[-1]) for name in names}, restarts
        costs.sort()
        return [
            f"{gateways}",
            f"{attached}",
            f"{total}",
            f"{costs[len(costs) // 2]:.1f}/{costs[len(costs) * 99 // 100]:.0f}",
            f"{share:.2f}",
            f"{memory:.1f}",
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
    parser.add_argument("--rate", type=float, default=5.0, help="turns a second in each profile (default 5)")
    a = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for gateways in a.gateways:
        for sessions in a.sessions:
            print("| " + " | ".join(cell(gateways, sessions, a.seconds, a.rate)) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
