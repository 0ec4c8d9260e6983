"""Many attached sessions in little memory: python crowd.py N HOME IDENTITY; they stay until standard input ends.

Each is a process of its own, forked from one that has the provider loaded: it initialises, says so, and waits.
"""

from __future__ import annotations

import os
import sys

from memory_tencentdb import TencentDBMemoryProvider


def main() -> None:
    count, home, identity = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    told_read, told_write = os.pipe()
    children = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            one = TencentDBMemoryProvider()
            one.initialize(session_id=f"s{number}", hermes_home=home, platform="cli", agent_identity=identity)
            os.write(told_write, b".")
            sys.stdin.buffer.raw.read()
            one.shutdown()
            os._exit(0)
        children.append(pid)
    left = count
    while left:
        left -= len(os.read(told_read, left))
    print("attached", flush=True)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
