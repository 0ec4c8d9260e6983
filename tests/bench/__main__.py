"""Measure our supervisor beside supervisord, and beside runit, s6 and pm2 where these are installed.

    tests/bench/run            everything, less than 8 minutes; writes docs/benchmarks.md and docs/benchmarks.svg
    tests/bench/run --quick    fewer rounds, shorter waits, less than 90 s; only prints

(`python -m tests.bench` is the same.) It needs Linux, a C compiler and an environment with this project in it. Nothing
has to be configured: every supervisor runs in a scratch folder, on free ports, and is ended afterwards. A peer that is
not on PATH is left out, with a word. To have all: `apt-get install --no-install-recommends runit s6` (their services
are not used) and `npm install pm2` in any folder, with its node_modules/.bin on PATH.

Times are judged by nobody here: a shared machine is too noisy for that. Promises are: the exit code is 1 where two of
our children lived at once, a request failed when our owner was killed, one of many concurrent starts failed, or a
process was left over.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench import commands, lives
from tests.bench.lab import Lab, MissingError
from tests.bench.peers import OTHERS, Order, Ours, OursEmbedded, OursKept, Peer, tool, versions
from tests.bench.report import Grid, Table, svg

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- supervisor: begin -->", "<!-- supervisor: end -->"
ORDER = (Ours.name, OursKept.name, OursEmbedded.name, "ours, hang_after=2", "supervisord", "runit", "s6", "pm2")
PLOTTED = ("death", "healthy", "cold", "status", "stop", "end")


def measure(lab: Lab, others: list[type[Peer]], *, quick: bool) -> list[Table | Grid]:
    """The whole run, stage by stage."""
    found: list[Table | Grid] = []
    say("cold start, stop")
    found += commands.lifecycles(lab, others, 1 if quick else 5)
    say("deaths")
    order = Order(settings=lives.ALWAYS_FIRST)
    peers = lives.everyone(lab, order, others)
    for peer in peers:
        peer.up()
    commands.wait_ready(peers)
    deaths = lives.deaths(lab, peers, 3 if quick else 24)
    say("status")
    status = commands.statuses(lab, peers, 4 if quick else 20)
    say("idle")
    idle = commands.idle(lab, peers, 5 if quick else 60)
    for peer in peers:
        peer.down()
    say("hangs, and a child that dies every 1.5 s")
    loops: list[Grid] = []
    looping = threading.Thread(target=lambda: loops.append(lives.crash_loop(lab, others, 6 if quick else 60)))
    looping.start()
    hang = lives.hangs(lab, others, 5 if quick else lives.NEVER)
    looping.join()
    say("a child that ignores TERM")
    stubborn = commands.stubborn(lab, others, 1 if quick else 3)
    say("many starts at once")
    at_once = commands.at_once(lab, [] if quick else others, [20] if quick else [20, 50])
    say("owner killed")
    owner = lives.owner_killed(lab, [] if quick else others)
    return [*deaths, hang, *found[:2], status, *found[2:], stubborn, idle, at_once, owner, *loops]


def say(what: str) -> None:
    """Progress, on stderr."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def machine() -> str:
    """The machine, in words that name nobody."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{os.cpu_count()} cores ({model}), Linux {kernel}, Python {platform.python_version()}"


def text(found: Sequence[Table | Grid], facts: Sequence[str], broken: Sequence[str]) -> str:
    """The generated part of docs/benchmarks.md."""
    promises = [f"- broken: {b}" for b in broken] or ["No promise broke."]
    parts = ["\n".join(f"- {fact}" for fact in facts), *(t.markdown(ORDER) for t in found)]
    return "\n\n".join([*parts, "### Promises\n\n" + "\n".join(promises)])


def plot(found: Sequence[Table | Grid]) -> str:
    """The plot of the medians, and of the memory of the owners."""
    panels = []
    for table in found:
        if isinstance(table, Table) and table.key in PLOTTED:
            medians = {n: m for n in table.samples if (m := table.median(n)) is not None}
            panels.append((table.title, table.unit, medians))
        elif isinstance(table, Grid) and table.key == "idle":
            panels.append(("idle: PSS of the owner", "MB", {n: float(str(f[1])) for n, f in table.rows if f[1]}))
            panels.append(("idle: wakeups per minute", "", {n: float(str(f[3])) for n, f in table.rows if f[3]}))
    return svg(panels)


def write(generated: str, picture: str) -> None:
    """Replace the generated part of docs/benchmarks.md, and the picture."""
    page = DOCS / "benchmarks.md"
    fresh = f"{BEGIN}\n{generated}\n{END}"
    page.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: fresh, page.read_text(), flags=re.DOTALL))
    (DOCS / "benchmarks.svg").write_text(picture)


def main() -> int:
    """Run, print, write; the exit code."""
    parser = argparse.ArgumentParser(prog="tests/bench/run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, less than 90 s, only prints")
    quick = parser.parse_args().quick
    begun, load_before = time.monotonic(), os.getloadavg()[0]
    try:
        tool("memory-tencentdb-ctl")
        lab = Lab()
    except MissingError as error:
        hint = (
            "try tests/run once, which makes .venv, or PYTHON=DIR/bin/python of a virtual environment with the project"
        )
        print(f"cannot run the benchmark: {error} is not installed; {hint}", file=sys.stderr)
        return 5
    others = []
    for cls in OTHERS:
        try:
            cls(lab)
            others.append(cls)
        except MissingError as error:
            say(f"left out {cls.name}: {error} is not installed")
    try:
        found = measure(lab, others, quick=quick)
    finally:
        lab.close()
    broken = [*lab.broken, *(d for d in lab.board.doubles if d.partition(":")[0] in lab.ours)]
    facts = [
        machine(),
        "peers: " + ", ".join(f"{name} {version}" for name, version in versions().items()),
        f"load average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after; it took "
        f"{time.monotonic() - begun:.0f} s",
    ]
    generated = text(found, facts, broken)
    print(generated)
    if not quick:
        write(generated, plot(found))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
