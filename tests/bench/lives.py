"""What happens to a child: its death, its silence, its loop of deaths, and the death of its owner."""

from __future__ import annotations

import os
import random
import signal
import time

from tests.bench.lab import Lab, answers, gone, load
from tests.bench.peers import Order, Ours, OursKept, Peer
from tests.bench.report import Grid, Table
from tests.support.processes import alive, wait_for

SETTLED = 1.2  # s a child lives before it is killed: past every peer's "started too fast"
ALWAYS_FIRST = "[policy]\nbackoff_reset = 0.001\ndeath_budget = 1000000"
NEVER = 20.0  # s after which a hang counts as never noticed
GATEWAYS = ("default", "b", "c", "d")  # of one daemon: four hangs at once, at four phases of the probe


def deaths(lab: Lab, peers: list[Peer], rounds: int) -> list[Table]:
    """SIGKILL to one child after the other, in a new order each round, until the next one runs, and serves."""
    note = "Each death of ours is a first one here (`backoff_reset = 0.001`): further ones wait by policy."
    reborn = Table("death", "SIGKILL of the child → a new process runs", "ms", "p50 ≤ 3 ms", note=note)
    healthy = Table("healthy", "SIGKILL of the child → HTTP answers again", "ms", "≤ 10 ms")
    for _ in range(rounds):
        for peer in random.sample(peers, len(peers)):
            last = lab.board.all(peer.who, "main")[-1]
            time.sleep(max(0.0, last.at + SETTLED - time.monotonic()))
            if isinstance(peer, Ours):
                wait_for(lambda p=peer: p.record().get("state") == "READY", 10, "READY before the next death")  # type: ignore[misc]
            killed = time.monotonic()
            os.kill(last.pid, signal.SIGKILL)
            main = lab.board.wait(peer.who, "main", killed, NEVER)
            listening = lab.board.wait(peer.who, "listen", killed, NEVER)
            served = main is not None and listening is not None and answers(peer.port)
            reborn.add(peer.name, (main.at - killed) * 1000 if main else None)
            healthy.add(peer.name, (time.monotonic() - killed) * 1000 if served else None)
    return [reborn, healthy]


def hangs(lab: Lab, others: list[type[Peer]], bound: float) -> Table:
    """SIGSTOP, or silence with the port kept, until the child is sent TERM."""
    table = Table("hang", "hang (SIGSTOP or silence) → TERM", "s", "10–16 s; ≤ 4 s with hang_after=2", bound=bound)
    frozen: list[tuple[str, str, float]] = []
    quick = [_many(lab, "ours, hang_after=2", "hang_after = 2")]
    slow = [_many(lab, "ours", "")] if bound >= NEVER else []
    peers = [cls(lab) for cls in others]
    for peer in (*quick, *slow, *peers):
        peer.up()
    for ours in (*quick, *slow):
        for name in GATEWAYS:
            wait_for(lambda o=ours, n=name: o.record(n).get("state") == "READY", 10, "READY before the hang")  # type: ignore[misc]
    for number, gateway in enumerate(GATEWAYS):
        for peer in (*quick, *slow, *(peers if number == 0 else ())):
            who = peer.who if gateway == "default" else f"{peer.who}-{gateway}"
            pid = lab.board.all(who, "main")[-1].pid
            frozen.append((peer.name, who, time.monotonic()))
            os.kill(pid, signal.SIGUSR1 if number % 2 else signal.SIGSTOP)
        time.sleep(1.25)
    for name, who, since in frozen:
        told = lab.board.wait(who, "term", since, since + bound - time.monotonic())
        table.add(name, told.at - since if told else None)
    for peer in peers:
        os.kill(peer.child_pid(), signal.SIGCONT)
    for peer in (*quick, *slow, *peers):
        peer.down()
    return table


def _many(lab: Lab, name: str, settings: str) -> Ours:
    """A daemon with four Gateways."""
    ours = Ours(lab)
    ours.name = name
    tables = [settings]
    for gateway in GATEWAYS[1:]:
        lab.ours.add(f"{ours.who}-{gateway}")
        env = f'env = {{ BENCH_WHO = "{ours.who}-{gateway}" }}'
        tables += [f"[gateway.{gateway}]", f'command = ["{lab.child}"]', env, settings]
    with open(ours.root / "supervisor.toml", "a") as file:
        file.write("\n".join([*tables, ""]))
    return ours


def crash_loop(lab: Lab, others: list[type[Peer]], seconds: float) -> Grid:
    """A child that dies every 1.5 s, under everyone's own policy."""
    dying = Order(env=(("BENCH_LIFE_MS", "1500"),))
    classes: list[type[Peer]] = [Ours, *others]
    peers = [cls(lab, dying) for cls in classes]
    grid = Grid("loop", f"a child that dies every 1.5 s: starts within {seconds:g} s", ["starts"], goal="7 in 60 s")
    for peer in peers:
        peer.up()
    for peer in peers:
        first = lab.board.all(peer.who, "main")[0].at
        time.sleep(max(0.0, first + seconds - time.monotonic()))
        starts = [t for t in lab.board.all(peer.who, "main") if t.at < first + seconds]
        grid.add(peer.name, len(starts))
    for peer in peers:
        peer.down()
    return grid


def owner_killed(lab: Lab, others: list[type[Peer]]) -> Grid:
    """kill -9 of the owner under 50 requests a second, then the same start command again."""
    grid = Grid(
        "owner",
        "owner killed -9 under 50 requests/s, then started again",
        ["requests", "failed", "same pid", "failed binds", "owned again", "`stop` ends it"],
        goal="0 failed, same pid, owned again ≤ 2 s, stoppable",
    )
    kept = OursKept(lab)
    kept.name = "ours, kept: only the daemon killed, nobody starts it"
    both = OursKept(lab)
    both.name = "ours, kept: keeper and daemon killed, `start`"
    for peer in (Ours(lab), both, kept, *(cls(lab) for cls in others)):
        _kill_owner(lab, peer, grid, again=peer is not kept)
    return grid


def _kill_owner(lab: Lab, peer: Peer, grid: Grid, *, again: bool) -> None:
    peer.up()
    child = peer.child_pid()
    owned, before = None, 0
    with load(peer.port) as seen:
        time.sleep(0.5)
        killed = time.monotonic()
        if isinstance(peer, Ours):
            wait_for(lambda: peer.record().get("state") == "READY", 10, "READY before the kill")
            before = peer.daemon_pid() or 0
            assert before
        if again or not isinstance(peer, Ours):
            peer.kill_owner()
            peer.launch()
        else:
            os.kill(before, signal.SIGKILL)
        if isinstance(peer, Ours):
            started = time.monotonic()
            wait_for(lambda: _owner(peer) not in (None, before), 10, "owned again")
            owned = time.monotonic() - (started if again else killed)
        time.sleep(max(0.0, killed + 3 - time.monotonic()))
    failed = sum(not ok for at, ok in seen if at >= killed)
    same = alive(child) and not lab.board.all(peer.who, "listen", killed)
    peer.run(peer.stop_one)
    stopped = gone([child], 1.0)
    grid.add(
        peer.name,
        sum(at >= killed for at, _ in seen),
        failed,
        same,
        len(lab.board.all(peer.who, "bind", killed)),
        f"{owned:.2f} s" if owned is not None else "never",
        stopped,
    )
    if isinstance(peer, Ours):
        if failed or not same or not stopped:
            lab.broken.append(f"{peer.name}: {failed} failed requests, same pid {same}, stopped {stopped}")
        peer.down()
    else:
        lab.end(peer.who)


def _owner(peer: Ours) -> object:
    """The daemon that the record names, once it says READY."""
    record = peer.record()
    daemon = record.get("daemon")
    return daemon.get("pid") if isinstance(daemon, dict) and record.get("state") == "READY" else None


def everyone(lab: Lab, order: Order, others: list[type[Peer]]) -> list[Peer]:
    """Ours, ours kept, and the others, all with this order."""
    classes: list[type[Peer]] = [Ours, OursKept, *others]
    return [cls(lab, order) for cls in classes]
