"""Many light sessions in little memory: python crowd.py PERIOD HOME:N... ; they talk until standard input ends.

Each is a process of its own, forked from one that has the provider loaded: it initialises with the home of its profile,
says so, and then keeps a turn every PERIOD seconds. At the end each says what it kept, one JSON object a line:
{"home", "turns": [...], "ms": [...]}: every turn it was told, and what sync_turn cost.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time

from memory_tencentdb import TencentDBMemoryProvider


def session(home: str, number: int, period: float, told: int) -> None:
    """One session, from attaching until standard input ends."""
    one = TencentDBMemoryProvider()
    one.initialize(session_id=f"s{number}", hermes_home=home, platform="cli", agent_identity=os.path.basename(home))
    os.write(told, b".")
    turns, took = [], []
    due = time.monotonic() + random.random() * period
    while not select.select([0], [], [], max(0.0, due - time.monotonic()))[0]:
        turn = f"turn{number}x{len(turns)}"
        began = time.monotonic()
        one.sync_turn(turn, "noted")
        took.append((time.monotonic() - began) * 1000)
        turns.append(turn)
        due += period
    one.shutdown()
    with open(os.path.join(home, f"said-{number}.json"), "w", encoding="utf-8") as file:
        json.dump({"home": home, "turns": turns, "ms": took}, file)


def main() -> None:
    period = float(sys.argv[1])
    homes = [home for home, _, count in (word.rpartition(":") for word in sys.argv[2:]) for _ in range(int(count))]
    told_read, told_write = os.pipe()
    children = []
    for number, home in enumerate(homes):
        pid = os.fork()
        if pid == 0:
            session(home, number, period, told_write)
            os._exit(0)
        children.append(pid)
    left = len(homes)
    while left:
        left -= len(os.read(told_read, left))
    print("attached", flush=True)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
