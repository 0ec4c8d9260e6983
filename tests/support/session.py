"""A light Hermes: python session.py HOME SESSION IDENTITY; then one order a line on standard input.

`turn WORDS` keeps a turn · `recall WORDS` prints what is recalled · `children` prints how many child processes there
are · the end of input ends the session as a host does.
"""

from __future__ import annotations

import os
import sys

from memory_tencentdb import TencentDBMemoryProvider


def main() -> None:
    one = TencentDBMemoryProvider()
    home, session, identity = sys.argv[1:4]
    one.initialize(session_id=session, hermes_home=home, platform="cli", agent_identity=identity)
    print("attached", flush=True)
    for line in sys.stdin:
        order, _, words = line.strip().partition(" ")
        if order == "turn":
            one.sync_turn(words, "noted")
            print("kept", flush=True)
        elif order == "recall":
            print(one.prefetch(words).replace("\n", " "), flush=True)
        elif order == "children":
            with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
                print(len(file.read().split()), flush=True)
    one.shutdown()


if __name__ == "__main__":
    main()
