"""What a long command says of itself meanwhile: one line that changes, on standard error, only on a terminal."""

from __future__ import annotations

import sys
import time


class Progress:
    """Shows the newest text at most once a second; `with` clears the line at the end."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()
        self._next = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._print("")

    def step(self, text: str) -> None:
        """A new part of the work: shown at once."""
        self._next = time.monotonic() + 1
        self._print(text)

    def count(self, text: str) -> None:
        """The same part goes on."""
        if time.monotonic() >= self._next:
            self.step(text)

    def _print(self, text: str) -> None:
        if self._shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
