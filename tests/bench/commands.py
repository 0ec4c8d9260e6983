"""What commands cost: cold start, status, stop, many at once; and what an idle owner costs."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time

from tests.bench.lab import Lab, answers, gone, timed, wait_end
from tests.bench.peers import PATIENCE, Order, Ours, OursEmbedded, OursKept, Peer, Supervisord
from tests.bench.report import Grid, Table
from tests.support.processes import wait_for

KILL_DELAY = 2  # s, set for all: what a stop takes beyond it is the supervisor's own
BARE = "python -c pass"


def lifecycles(lab: Lab, others: list[type[Peer]], rounds: int) -> list[Table]:
    """Each peer from nothing to a served request, one stop, one start, and the end of everything."""
    cold = Table("cold", "cold start → HTTP answers", "ms", "daemon alone ≤ 350 ms")
    said = Table(
        "said",
        "cold start → the owner says it runs",
        "ms",
        "embedded Gateway ≤ 1500 ms",
        note="Ours says READY after an answer of /health; supervisord says RUNNING after `startsecs` (1 s); the others "
        "say so as soon as there is a process.",
    )
    stop = Table("stop", "`stop NAME`, idle", "ms", "≤ 300 ms")
    start = Table("start", "`start NAME` with a living owner → HTTP answers and the command is back", "ms", "")
    end = Table("end", "`stop` of everything", "ms", "kept ≤ 1500 ms")
    for _ in range(rounds):
        classes: list[type[Peer]] = [Ours, OursKept, OursEmbedded, *others]
        for cls in random.sample(classes, len(classes)):
            peer = cls(lab)
            _start_cold(lab, peer, cold, said)
            begun = time.monotonic()
            pids = lab.processes(peer.who) if isinstance(peer, OursEmbedded) else [peer.child_pid()]
            peer.run(peer.stop_one)
            if not isinstance(peer, OursEmbedded):
                gone(pids, PATIENCE)
            stop.add(peer.name, (time.monotonic() - begun) * 1000)
            begun = time.monotonic()
            peer.run(peer.start_one)
            if not isinstance(peer, OursEmbedded):
                lab.board.wait(peer.who, "listen", begun, PATIENCE)
                answers(peer.port)
            start.add(peer.name, (time.monotonic() - begun) * 1000)
            end.add(peer.name, timed(peer.down))
            if left := lab.end(peer.who):
                lab.broken.append(f"{peer.name}: {len(left)} processes left after stop")
    return [cold, said, stop, start, end]


def _start_cold(lab: Lab, peer: Peer, cold: Table, said: Table) -> None:
    begun = time.monotonic()
    process = peer.launch()
    if not isinstance(peer, OursEmbedded):
        told = lab.board.wait(peer.who, "listen", begun, PATIENCE)
        cold.add(peer.name, (time.monotonic() - begun) * 1000 if told and answers(peer.port) else None)
    if isinstance(peer, Ours) and peer.in_foreground:
        while peer.record().get("state") != "READY":
            time.sleep(0.002)
    elif not peer.in_foreground:
        wait_end(process, PATIENCE)
        if isinstance(peer, Supervisord):
            while peer.run(peer.status):  # RUNNING is exit 0
                time.sleep(0.01)
    else:
        while peer.run(peer.status):
            time.sleep(0.002)
    said.add(peer.name, (time.monotonic() - begun) * 1000)


def statuses(lab: Lab, peers: list[Peer], rounds: int) -> Table:
    """The wall time of `status`, beside a bare Python."""
    table = Table("status", "`status` with a living owner", "ms", f"≤ 50 ms and ≤ 4.5x a bare `{BARE}`")
    peers = [p for p in peers if p.name != OursKept.name]
    for _ in range(rounds):
        for peer in random.sample([*peers, None], len(peers) + 1):
            if peer is None:
                bare = [sys.executable, "-c", "pass"]
                table.add(BARE, timed(lambda b=bare: subprocess.run(b, check=True)))  # type: ignore[misc]
            else:
                table.add(peer.name, timed(lambda p=peer: p.run(p.status)))  # type: ignore[misc]
    ours, bare_time = table.median(Ours.name), table.median(BARE)
    if ours and bare_time:
        table.note = f"Ours took {ours / bare_time:.1f}x a bare Python in this run."
    return table


def stubborn(lab: Lab, others: list[type[Peer]], rounds: int) -> Table:
    """`stop` of a child that ignores TERM, all at the same time; the delay before KILL is 2 s for everyone."""
    table = Table(
        "stubborn",
        f"`stop` of a child that ignores TERM, beyond the {KILL_DELAY} s before KILL",
        "ms",
        "≤ 500 ms",
    )

    def one(peer: Peer) -> None:
        child = peer.child_pid()
        begun = time.monotonic()
        peer.run(peer.stop_one)
        died = gone([child], PATIENCE)
        table.add(peer.name, (time.monotonic() - begun - KILL_DELAY) * 1000 if died else None)

    order = Order(env=(("BENCH_IGNORE_TERM", "1"),), kill_delay=KILL_DELAY)
    classes: list[type[Peer]] = [Ours, *others]
    for _ in range(rounds):
        peers = [cls(lab, order) for cls in classes]
        for peer in peers:
            peer.up()
        threads = [threading.Thread(target=one, args=(peer,)) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for peer in peers:
            peer.down()
    return table


def at_once(lab: Lab, others: list[type[Peer]], counts: list[int]) -> Grid:
    """The command that brings everything up from nothing, many times at once."""
    grid = Grid(
        "at_once",
        "the cold start command many times at once",
        ["commands", "children ever spawned", "failed binds", "owners afterwards", "exit codes", "wall"],
        goal="1 daemon, 1 Gateway, all exit 0",
    )
    plan: list[tuple[type[Peer], int]] = [*((OursKept, n) for n in counts), *((c, counts[0]) for c in others)]
    for cls, many in plan:
        _at_once(lab, cls(lab), many, grid)
    return grid


def _at_once(lab: Lab, peer: Peer, many: int, grid: Grid) -> None:
    begun = time.monotonic()
    started = [peer.launch() for _ in range(many)]
    # A command that is the owner itself never ends; one that waits for ever must be told from a slow one.
    deadline = begun + (4 if peer.in_foreground else PATIENCE)
    while any(p.poll() is None for p in started) and time.monotonic() < deadline:
        time.sleep(0.01)
    wall = time.monotonic() - begun
    codes = [p.poll() for p in started]
    told = ", ".join(f"{codes.count(c)} × {'still running' if c is None else c}" for c in dict.fromkeys(codes))
    mains, binds = lab.board.all(peer.who, "main"), lab.board.all(peer.who, "bind")
    daemons = len(lab.owners(peer.who))
    grid.add(peer.name, many, len(mains), len(binds), daemons, told, f"{wall:.1f} s")
    if isinstance(peer, Ours):
        if any(codes) or len(mains) != 1 or daemons != 2:
            lab.broken.append(f"{many} starts at once: {told}, {len(mains)} children, {daemons} owners")
        peer.down()
    else:
        for p in started:
            if p.poll() is None:
                p.kill()
                p.wait()
        lab.end(peer.who)


def idle(lab: Lab, peers: list[Peer], seconds: float) -> Grid:
    """What the owners cost while nothing happens, all at once."""
    grid = Grid(
        "idle",
        f"idle for {seconds:g} s with one healthy child, all side by side (the child not counted)",
        ["processes", "PSS MB", "RSS MB", "wakeups/min", "forced switches/min", "CPU ms/min"],
        goal="daemon: PSS ≤ 25 MB, ≤ 60 wakeups/min, ≤ 1.5 s CPU per hour (25 ms/min)",
        note="Wakeups are voluntary context switches of all threads. PSS flatters Pythons that share pages.",
    )
    time.sleep(3)
    owners = {peer.name: lab.owners(peer.who) for peer in peers}
    before = {name: _used(pids) for name, pids in owners.items()}
    time.sleep(seconds)
    for name, pids in owners.items():
        used, minute = _used(pids), 60 / seconds
        voluntary, forced, cpu = ((a - b) * minute for a, b in zip(used, before[name], strict=True))
        pss, rss = _memory(pids)
        grid.add(name, len(pids), round(pss, 1), round(rss, 1), round(voluntary), round(forced), round(cpu))
    return grid


def _used(pids: list[int]) -> tuple[int, int, float]:
    """Voluntary and forced context switches, and CPU milliseconds, of all threads of these processes so far."""
    voluntary = forced = nanoseconds = 0
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
            voluntary += int(fields["voluntary_ctxt_switches"])
            forced += int(fields["nonvoluntary_ctxt_switches"])
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                nanoseconds += int(file.read().split()[0])
    return voluntary, forced, nanoseconds / 1e6


def _memory(pids: list[int]) -> tuple[float, float]:
    """PSS and RSS in MB (10^6 bytes)."""
    totals = {"Pss": 0, "Rss": 0}
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in totals:
                    totals[name] += int(rest.split()[0]) * 1024
    return totals["Pss"] / 1e6, totals["Rss"] / 1e6


def wait_ready(peers: list[Peer]) -> None:
    """Return when every daemon of ours says READY."""
    for peer in peers:
        if isinstance(peer, Ours):
            wait_for(lambda p=peer: p.record().get("state") == "READY", 10, "READY")  # type: ignore[misc]
