"""What the provider costs a Hermes session: python -m tests.bench.provider [--turns N] [--hermes VENV]

States of the Gateway: healthy · down (nobody listens) · hung (accepts, never answers) · slow (every answer 1 s late).
Per state: initialize(), prefetch() of the first and of later turns, sync_turn(), shutdown(); median and worst, in ms.
Beside them, in the same run: a bare http.client doing the same two requests on new connections, and before each turn
this disk's own open-append-fdatasync-close of a record of the same size. With --hermes (or HERMES_VENV) also the start
of a session as Hermes makes it: finding, loading, registering and initialising this plugin, less that of a bare one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from memory_tencentdb import TencentDBMemoryProvider
from memory_tencentdb.spool import Record, frame, new_id

from tests.support.fake_gateway import FakeGateway, silent

PLUGIN = Path(__file__).resolve().parents[2] / "provider" / "memory_tencentdb"
STATES = ("healthy", "down", "hung", "slow")
BARE = """
from agent.memory_provider import MemoryProvider
class Bare(MemoryProvider):
    name = "bare"
    def is_available(self): return True
    def initialize(self, session_id, **kwargs): pass
    def get_tool_schemas(self): return []
def register(ctx): ctx.register_memory_provider(Bare())
"""
START = """
import json, sys, time
import agent.secret_scope, asyncio, concurrent.futures, email.utils, hermes_constants, http.client, requests, yaml
from agent.memory_manager import MemoryManager
import plugins.memory
def start(name):
    began = time.perf_counter()
    manager = MemoryManager()
    one = plugins.memory.load_memory_provider(name)
    assert one.is_available()
    manager.add_provider(one)
    manager.initialize_all(session_id="s", platform="cli", agent_context="primary", agent_identity="default")
    return (time.perf_counter() - began) * 1000
print(json.dumps([start(name) for name in sys.argv[1:]]))
"""


def timed(do: Callable[[], object]) -> float:
    """Milliseconds that a call takes."""
    began = time.perf_counter()
    do()
    return (time.perf_counter() - began) * 1000


def told(values: list[float]) -> str:
    """Median and worst."""
    return f"{statistics.median(values):8.2f} {max(values):8.2f}" if values else " " * 17


def gateway_in(state: str) -> FakeGateway:
    """A Gateway in that state."""
    gateway = FakeGateway("A").start()
    if state == "down":
        gateway.stop()
    elif state == "hung":
        gateway.always("*", silent())
    elif state == "slow":
        gateway.delay = 1.0
    return gateway


def floor(gateway: FakeGateway, turns: int) -> list[float]:
    """The same two requests by http.client, one after the other."""

    def requests() -> None:
        for path in ("/recall", "/search/memories"):
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=5)
            body = json.dumps({"query": "what is my cat called?", "session_key": "s"})
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            connection.getresponse().read()
            connection.close()

    return [timed(requests) for _ in range(turns)]


def append(path: Path) -> None:
    """This disk's append + fdatasync of one record."""
    data = frame(Record(new_id(), "s", "what is my cat called? " * 20, "an answer " * 50).encode())
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, data)
    os.fdatasync(fd)
    os.close(fd)


def session(home: Path, turns: int, think: float) -> dict[str, list[float]]:
    """The costs of one session, in ms by what was done."""
    one = TencentDBMemoryProvider()
    costs: dict[str, list[float]] = {"first prefetch": [], "prefetch": [], "disk": [], "sync_turn": []}
    costs["initialize"] = [timed(lambda: one.initialize(session_id="s", hermes_home=str(home), platform="cli"))]
    for turn in range(turns):
        cost = timed(lambda: one.prefetch("what is my cat called?"))
        costs["prefetch" if turn else "first prefetch"].append(cost)
        question = f"turn {turn} what is my cat called? " * 20
        time.sleep(think)
        costs["disk"].append(timed(partial(append, home / "floor")))
        time.sleep(think)
        costs["sync_turn"].append(timed(partial(one.sync_turn, question, "an answer " * 50)))
    costs["shutdown"] = [timed(one.shutdown)]
    return costs


def start_in_hermes(venv: str, home: Path, rounds: int) -> list[float]:
    """What Hermes' session start takes longer with our plugin than with one of ten lines, each round in a process."""
    plugins = home / "plugins"
    (plugins / "bare").mkdir(parents=True)
    (plugins / "bare" / "__init__.py").write_text(BARE)
    shutil.copytree(PLUGIN, plugins / "memory_tencentdb", ignore=shutil.ignore_patterns("__pycache__"))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"HERMES_HOME": str(home), "HOME": str(home)}
    differences = []
    for turn in range(rounds + 1):
        command = [f"{venv}/bin/python", "-c", START, "bare", "memory_tencentdb"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        bare, ours = json.loads(done.stdout.splitlines()[-1])
        if turn:  # the first round compiles
            differences.append(ours - bare)
    return differences


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--hermes", default=os.environ.get("HERMES_VENV"), metavar="VENV")
    options = parser.parse_args()
    print(f"{'state':<9}{'what':<16}{'median':>8} {'worst':>8}   ms")
    with tempfile.TemporaryDirectory(prefix="provider-bench-", dir=os.environ.get("BENCH_DIR")) as scratch:
        for state in STATES:
            gateway, home = gateway_in(state), Path(scratch) / state
            home.mkdir()
            os.environ |= {"MEMORY_TENCENTDB_GATEWAY_PORT": str(gateway.port), "MEMORY_TENCENTDB_ROOT": f"{home}/root"}
            costs = session(home, options.turns if state != "slow" else min(options.turns, 4), 0.05)
            for what, values in costs.items():
                print(f"{state:<9}{what:<16}{told(values)}")
            ratio = statistics.median(costs["sync_turn"]) / statistics.median(costs["disk"])
            print(f"{state:<9}{'sync_turn':<16}{ratio:8.1f} x disk")
            if state == "healthy":
                print(f"{state:<9}{'http.client':<16}{told(floor(gateway, options.turns))}   the same two requests")
            if options.hermes:
                fresh = Path(scratch) / f"{state}-start"
                more = start_in_hermes(options.hermes, fresh, 9)
                print(f"{state:<9}{'Hermes start':<16}{told(more)}   more than a provider of ten lines")
            gateway.stop()


if __name__ == "__main__":
    main()
