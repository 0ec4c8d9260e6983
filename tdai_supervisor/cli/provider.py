"""The provider's own code, asked from the command: profile files and spools have their one reader and writer there.

Invariants: it runs as a child process of this interpreter (nothing of it is imported here), within a deadline.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tdai_supervisor.decide.checks import SettingsError

DEADLINE = 30.0  # s for one question; the longest waits 3 s for a lock
HELD = 75


class RefusedError(Exception):
    """The provider said why it does not do it; held: another process delivers that spool now."""

    def __init__(self, words: str, *, held: bool = False) -> None:
        super().__init__(words)
        self.held = held


def ask(do: str, **arguments: Any) -> dict[str, Any]:
    """What memory_tencentdb.aside.manage answers. Raises RefusedError, SettingsError where it cannot be run."""
    argv = [sys.executable, "-I", "-m", "memory_tencentdb.aside.manage"]
    question = json.dumps({"do": do, **arguments})
    done = subprocess.run(argv, input=question, capture_output=True, text=True, timeout=DEADLINE, check=False)
    try:
        reply: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        words = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise SettingsError(f"cannot run the provider of this installation: {words}; install it again") from None
    if done.returncode:
        raise RefusedError(str(reply.get("error")), held=done.returncode == HELD)
    return reply


def drain(path: str, root: str, seconds: float) -> tuple[int, dict[str, Any]]:
    """Deliver a spool now, for at most seconds: (0 nothing left, 1 something left, 75 another does it; the counts)."""
    argv = [sys.executable, "-I", "-m", "memory_tencentdb.drain", "--spool", path, "--root", root]
    argv += ["--deadline", f"{seconds:g}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + DEADLINE, check=False)
    try:
        reply: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        words = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise SettingsError(f"cannot deliver {path}: {words}; try `memory-tencentdb-ctl doctor`") from None
    return done.returncode, reply
