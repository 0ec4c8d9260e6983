"""A session in a process of its own, for tests that kill it, end it or tell it what to say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SESSION = Path(__file__).with_name("session.py")


class Child:
    """A session in a process of its own, which does what it is told line by line."""

    def __init__(self, root: str | os.PathLike[str], home: Path, session: str, identity: str) -> None:
        env = {"HOME": str(home), "PATH": os.environ["PATH"], "MEMORY_TENCENTDB_ROOT": os.fspath(root)}
        argv = [sys.executable, str(SESSION), str(home), session, identity]
        self.process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "attached\n"

    def tell(self, line: str) -> str:
        """One order, its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.communicate()

    def end(self) -> int:
        """Let it end by itself."""
        self.process.communicate("", timeout=10)
        return self.process.returncode
