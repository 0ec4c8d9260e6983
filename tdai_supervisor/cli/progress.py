"""A sign of life for whoever waits at a terminal.

Invariants: only on a terminal, only on standard error, only after a second; the line is gone when the work is done.
"""

from __future__ import annotations

import sys
import threading
import time

FIRST, EACH = 1.0, 0.5  # s


class Progress:
    """While the `with` block runs: what is being done, and for how long already."""

    def __init__(self, text: str) -> None:
        self._text, self._since = text, time.monotonic()
        self._done = threading.Event()
        self._teller = threading.Thread(target=self._tell, daemon=True) if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        if self._teller is not None:
            self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._teller is not None:
            self._teller.join()

    def step(self, text: str) -> None:
        """A new part of the work."""
        self._text, self._since = text, time.monotonic()

    def count(self, text: str) -> None:
        """The same part goes on."""
        self._text = text

    def _tell(self) -> None:
        pause = FIRST
        while not self._done.wait(pause):
            line = f"{self._text} ({time.monotonic() - self._since:.0f} s)"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            pause = EACH
        if pause != FIRST:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
