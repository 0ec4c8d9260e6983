"""A sign of life for whoever waits at a terminal.

Invariants: only on a terminal, only on stderr, only after a second; the line is gone when the work is done.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

FIRST, EACH = 1.0, 0.5  # s


@contextlib.contextmanager
def shown(text: str) -> Iterator[None]:
    """While the block runs, say text and for how long already, once that is over a second."""
    if not sys.stderr.isatty():
        yield
        return
    started, done = time.monotonic(), threading.Event()

    def tell() -> None:
        pause, width = FIRST, 0
        while not done.wait(pause):
            line = f"{text} ({time.monotonic() - started:.0f} s)"
            width = max(width, len(line))
            print(f"\r{line:<{width}}", end="", file=sys.stderr, flush=True)
            pause = EACH
        if width:
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
