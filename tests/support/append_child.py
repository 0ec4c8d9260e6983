"""Append turns to a spool and die like kill -9 at one system call: python append_child.py SPOOL TURNS STEP.

STEP counts the calls of CALLS below from 1; an odd half (N.5) dies after the call instead of before it; 0 never dies.
What it says on stdout, one line each: "saved I" after append() returned True, "synced PATH SIZE" and "named PATH" after
data or names became durable, so that the parent can take away what a power cut would.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

CALLS = ("open", "write", "fdatasync", "fsync", "mkdir", "close", "stat", "fstat", "listdir")
real_write = os.write


def say(words: str) -> None:
    real_write(1, f"{words}\n".encode())


def main() -> None:
    path, turns, step = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    from memory_tencentdb.spool import Record, Spool

    spool = Spool(path)
    count = 0

    def wrap(name: str) -> None:
        real: Any = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if name in ("fdatasync", "fsync"):
                target = os.readlink(f"/proc/self/fd/{args[0]}")
                say(f"synced {os.path.getsize(target)} {target}" if os.path.isfile(target) else f"named {target}")
            if count + 0.5 == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)
    for number in range(turns):
        if spool.append(Record(f"id{number}", "s", f"turn {number}", "a" * 50)):
            say(f"saved {number}")
    say(f"steps {count}")


if __name__ == "__main__":
    main()
